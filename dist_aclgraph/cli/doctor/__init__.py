"""``dist-aclgraph doctor``: what a machine has and lacks, part by part, with remedies."""
