"""Measures the lease queue against what a user would pick instead: `python -m benchmarks --help`."""
