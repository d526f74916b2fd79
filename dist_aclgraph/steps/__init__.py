"""A step as a value: what crosses between engine and workers, and how its lengths are padded."""
