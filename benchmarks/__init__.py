"""The benches behind ``make bench-*``. A bench prints times and asserts none."""
