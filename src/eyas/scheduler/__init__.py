"""Who runs next: queues, token budgets, pages. Pure Python on the host, no tensors."""
