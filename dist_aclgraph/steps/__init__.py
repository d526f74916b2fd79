"""A step as a value: the messages between engine and workers, and the padding of lengths."""
