"""The fork server imports torch_npu once, on machines with fewer cores than processes."""
