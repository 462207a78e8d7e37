"""Typed interfaces between the engine, models, drafts and attention (interfaces only, D4)."""
