"""A log in JSON holds nothing else: libraries write to it as we do."""

import logging
import warnings
from collections.abc import Iterator

import pytest
import transformers

from eyas.engine.library_logs import adopt_library_logs


@pytest.fixture
def as_they_come() -> Iterator[None]:
    """The libraries' own handlers, which come back afterwards."""
    logger = logging.getLogger("transformers")
    before, propagate = list(logger.handlers), logger.propagate
    logger.addHandler(logging.StreamHandler())
    yield
    logger.handlers, logger.propagate = before, propagate
    logging.captureWarnings(False)


@pytest.mark.usefixtures("as_they_come")
def test_libraries_have_no_handlers_of_their_own(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    adopt_library_logs()
    transformers.utils.logging.get_logger("transformers.x").error("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # pytest put its own in between
        logging.captureWarnings(True)
        warnings.warn("deprecated", stacklevel=1)
    assert [r.getMessage() for r in caplog.records if r.name == "transformers.x"] == ["too long"]
    assert any("deprecated" in record.getMessage() for record in caplog.records)
    assert not capfd.readouterr().err
