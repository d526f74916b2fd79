"""HCCL groups of the parallel layout, and collectives with documented shapes."""
