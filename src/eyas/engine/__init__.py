"""The engine: the check before weights, the worker, the loop, and `LLM` for offline use."""
