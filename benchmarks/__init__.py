"""The benches that ``make bench-*`` runs. A bench measures and prints times. It does not fail if a
time is long.
"""
