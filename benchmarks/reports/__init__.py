"""Tables and figures of single benches."""
