"""On a machine with few cores, one fork server imports torch_npu for all processes."""
