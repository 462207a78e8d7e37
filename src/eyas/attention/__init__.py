"""Attention backends with one interface: `torch_backend` is the reference on every device."""
