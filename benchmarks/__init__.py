"""The benches behind ``make bench-*``; they print times and assert none."""
