"""A target and a draft that every command can take."""

from pathlib import Path

import pytest
from fixtures.tiny_pair import write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))
