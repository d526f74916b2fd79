"""The benches that ``make bench-*`` runs. A bench measures and prints times. It never fails because
a time is long.
"""
