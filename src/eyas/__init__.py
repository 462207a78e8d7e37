"""Eyas: an LLM serving engine built around EAGLE-3 speculative decoding.

``eyas.LLM`` and ``eyas.SamplingParams`` are loaded when they are first used, so that
``import eyas`` and the command line stay quick: neither reads torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]

# Where each name of the public interface lives.
_HOMES = {"LLM": "eyas.engine.llm", "SamplingParams": "eyas.types"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'eyas' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
