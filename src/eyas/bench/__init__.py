"""Benchmarks: contenders run in turns on the same prompts, with their outputs compared."""
