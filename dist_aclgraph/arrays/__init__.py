"""Arrays of integers and floats that several folders pass to each other."""
