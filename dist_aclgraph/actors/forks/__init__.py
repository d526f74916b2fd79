"""The fork server: loads torch_npu once, for machines with fewer cores than processes."""
