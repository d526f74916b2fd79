"""On machines with fewer cores than processes, one fork server imports torch_npu for all processes."""
