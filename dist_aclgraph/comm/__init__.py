"""HCCL groups from the layout, and collectives with shape contracts."""
