"""The fork server, which loads torch_npu once if a machine has fewer cores than processes."""
