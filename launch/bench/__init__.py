"""Benchmarks behind `lumen-bench`."""
