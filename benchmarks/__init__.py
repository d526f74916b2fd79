"""The benches that ``make bench-*`` runs. A bench prints times; it does not fail if they are
slow."""
