"""Training a draft for a target: from prompts to a folder that serves."""
