"""The benches that ``make bench-*`` runs. A bench prints times, and does not fail if the times are
long.
"""
