"""What libraries have to say goes the way of all log lines."""

from __future__ import annotations

import logging

_NAMES = ("transformers", "huggingface_hub")


def adopt_library_logs() -> None:
    """Take their own handlers from the libraries, which write to stderr past the log's format."""
    import transformers  # the handlers come with it

    _ = transformers.AutoTokenizer
    logging.captureWarnings(True)
    for name in _NAMES:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
