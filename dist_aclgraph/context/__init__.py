"""Context parallelism as arithmetic: who keeps which token, and who computes which."""
