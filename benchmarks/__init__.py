"""Benchmarks: ``python -m benchmarks.<name>`` prints a table and writes JSON with the machine and the versions."""
