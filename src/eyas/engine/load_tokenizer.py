"""A target's tokenizer, before the weights: a folder without one is not worth the wait."""

from __future__ import annotations

from pathlib import Path

from eyas.config import EngineConfig
from eyas.engine.check import run_check
from eyas.engine.tokenizer import Tokenizer
from eyas.types import EyasError


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer of a target in a local folder.

    Raises CheckError with all findings if the check finds errors too, else EyasError.
    """
    try:
        return Tokenizer(Path(config.model))
    except EyasError:
        run_check(config).raise_on_errors()
        raise
