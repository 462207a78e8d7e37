"""Paged key/value storage: the tensors (`pool`) and the page allocator (`pages`)."""
