"""The public names of the package, and what importing it costs."""

import subprocess
import sys

import pytest

import eyas
from eyas.types import SamplingParams


def test_importing_the_package_reads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, eyas; eyas.SamplingParams; print({'torch', 'transformers'} & {*sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize("name", eyas.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(eyas, name) is not None
    assert name in dir(eyas)


def test_lazy_names_are_those_of_their_modules() -> None:
    assert eyas.SamplingParams is SamplingParams


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = eyas.Nothing
