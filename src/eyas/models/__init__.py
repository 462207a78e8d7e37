"""Target and draft models: registry, layers, weight loading, and one file a model family."""
