"""The fork server, which loads torch_npu once where a machine has fewer cores than processes."""
