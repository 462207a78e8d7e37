"""Engines for throughput: as many requests at once as asked for, or as the device holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from eyas.config import NO_DRAFT, EngineConfig
from eyas.engine.check import run_check
from eyas.engine.device import resolve_device
from eyas.engine.engine import Engine
from eyas.engine.load import load_engine, resolve_folders
from eyas.engine.load_tokenizer import load_tokenizer
from eyas.engine.tokenizer import Tokenizer
from eyas.models.embedded import Progress
from eyas.train.masks import ChatTemplate
from eyas.train.stage_settings import Placement
from eyas.types import CheckError, Severity

# A GPU is only busy with many rows; a CPU soon is, and its memory is the host's.
DEFAULT_BATCH = {"cuda": 1024, "cpu": 32}
_PREFILL_TOKENS = {"cuda": 4096, "cpu": 512}


@dataclasses.dataclass(frozen=True)
class BatchEngine:
    """A ready engine. batch_size: requests that run at once."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    batch_size: int

    @property
    def window(self) -> int:
        """Requests to hand over at once, so that a slot that becomes free is filled at once."""
        return self.batch_size + self.batch_size // 8 + 1


def open_engine(
    target: str,
    *,
    placement: Placement,
    max_model_len: int,
    num_requests: int,
    progress: Progress | None = None,
    **draft_settings: Any,
) -> BatchEngine:
    """Load a target, with a draft if draft_settings (of EngineConfig) name one.

    num_requests: no larger batch is of use. Raises CheckError when they do not fit together.
    """
    device = resolve_device(placement.device)
    batch_size = min(placement.batch_size or DEFAULT_BATCH[device], num_requests)
    config = EngineConfig(
        model=target,
        device=placement.device,
        dtype=placement.dtype,
        max_batch_size=batch_size,
        max_model_len=max_model_len,
        prefill_chunk_tokens=_PREFILL_TOKENS[device],
        **{"draft": NO_DRAFT, **draft_settings},
    )
    config = resolve_folders(config, progress=progress)
    if placement.batch_size is None:
        config = _that_fits(config)
    tokenizer = load_tokenizer(config)
    loaded = load_engine(config, progress=progress)
    loaded.engine.tokenizer = tokenizer
    template = ChatTemplate.open(loaded.folder, placement.template_settings)
    return BatchEngine(loaded.engine, tokenizer, template, config.max_batch_size)


def _that_fits(config: EngineConfig) -> EngineConfig:
    """The same with a batch that the device's memory holds. Raises CheckError on other errors."""
    report = run_check(config)
    errors = report.of(Severity.ERROR)
    largest = report.plan.largest_batch if report.plan else None
    if not errors or largest is None:
        report.raise_on_errors()
        return config
    if any(error.code != "memory" for error in errors):
        raise CheckError(report.findings)
    return dataclasses.replace(config, max_batch_size=largest)


def target_folder(target: str, *, progress: Progress | None = None) -> Path:
    """Where a target lies, fetched if need be."""
    return Path(resolve_folders(EngineConfig(model=target), progress=progress).model)
