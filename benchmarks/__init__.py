"""Benchmarks: `python -m benchmarks [NAME] [--json]`.

A speed is told as a ratio to something with a name, measured in the same run, in rounds that take turns.
"""
