"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.byte_tokenizers import write_byte_level
from fixtures.http_server import Server

from eyas.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def make_server(tokenizer: Tokenizer) -> Callable[..., Server]:
    """Make a server over a fake engine."""
    return lambda engine, **settings: Server(engine, tokenizer, **settings)
