"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fixtures.byte_tokenizers import write_byte_level
from fixtures.http_server import Server

from eyas.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def make_server(tokenizer: Tokenizer) -> Callable[..., Server]:
    """Make a server over a fake engine."""
    return lambda engine, **settings: Server(engine, tokenizer, **settings)
