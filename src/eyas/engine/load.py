"""From settings to a running engine: resolve, check, load, build (design D5).

The check comes first and reads no weights, so that everything wrong is known in seconds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn

from eyas.config import EngineConfig
from eyas.contract.target import Target
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.engine.device import resolve_device, resolve_dtype
from eyas.engine.engine import Engine
from eyas.engine.memory_plan import MemoryPlan
from eyas.engine.worker import Worker, WorkerShape
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.draft_names import canonical_name
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.embedded import Progress, resolve_model
from eyas.models.linear import optimize_for_cpu
from eyas.models.loader import load_weights
from eyas.models.registry import target_class


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """A ready engine. seconds: by stage (resolve, check, load, build), in order; folder: the
    target's."""

    engine: Engine
    report: CheckReport
    folder: Path
    seconds: dict[str, float]


def resolve_folders(
    config: EngineConfig, *, weights: bool = True, progress: Progress | None = None
) -> EngineConfig:
    """The same settings with model and draft as local folders, fetched where needed.

    Raises EyasError for a name that cannot be found.
    """
    model = resolve_model(config.model, weights=weights, progress=progress)
    draft = config.draft_name
    if draft is not None:
        draft = str(resolve_model(draft, weights=weights, progress=progress))
    return dataclasses.replace(config, model=str(model), draft=draft)


def load_engine(config: EngineConfig, *, progress: Progress | None = None) -> LoadedEngine:
    """Check, then load. Raises CheckError with all findings before any weight is read, and
    EyasError for a model that cannot be found."""
    clock = _Clock()
    config = resolve_folders(config, progress=progress)
    clock.lap("resolve")
    report = run_check(config)
    report.raise_on_errors()
    clock.lap("check")
    assert report.target is not None and report.plan is not None
    device = torch.device(resolve_device(config.device))
    checkpoint = Checkpoint.open(config.model)
    dtype = resolve_dtype(config, report.target, checkpoint)
    max_model_len = report.plan.max_model_len
    target = load_target(
        report.target,
        checkpoint,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        progress=progress,
    )
    draft = None
    if report.draft is not None and config.draft is not None:
        draft = load_draft(
            report.draft,
            config.draft,
            target,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            progress=progress,
        )
    clock.lap("load")
    worker = _build_worker(config, report.plan, target, draft, dtype=dtype, device=device)
    clock.lap("build")
    engine = Engine(
        worker,
        eos_token_ids=report.target.eos_token_ids,
        vocab_size=report.target.vocab_size,
        chunk_tokens=config.prefill_chunk_tokens,
        run_ahead=config.run_ahead,
        prefix_caching=config.prefix_caching,
    )
    return LoadedEngine(engine, report, Path(config.model), clock.seconds)


def _build_worker(
    config: EngineConfig,
    plan: MemoryPlan,
    target: nn.Module,
    draft: Eagle3Draft | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Worker:
    shape = WorkerShape(
        num_slots=config.max_batch_size,
        num_pages=plan.num_pages,
        page_size=config.page_size,
        max_model_len=plan.max_model_len,
        tree=config.tree_shape(),
    )
    choose_layouts(target, draft, shape)
    return Worker(
        cast(Target, target),
        draft,
        shape=shape,
        dtype=dtype,
        draft_dtype=dtype,
        device=device,
        simulate_acceptance=config.acceptance_rates(),
        cuda_graphs=config.cuda_graphs,
    )


def load_target(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Progress | None = None,
) -> nn.Module:
    """The target with its weights."""
    model: nn.Module = target_class(config.architecture)(
        config, dtype=dtype, device=device, max_model_len=max_model_len
    )
    load_weights(model, checkpoint, progress=_bytes_progress("loading target", progress))
    return model


def load_draft(
    config: DraftConfig,
    folder: str,
    target: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Progress | None = None,
) -> Eagle3Draft:
    """The draft with its weights, sharing the target's embedding and head where it has none."""
    draft = Eagle3Draft(config, dtype=dtype, device=device, max_model_len=max_model_len)
    load_weights(
        draft,
        Checkpoint.open(folder),
        rename=canonical_name,
        progress=_bytes_progress("loading draft", progress),
    )
    draft.share_with_target(cast(Target, target))
    return draft


def choose_layouts(target: nn.Module, draft: nn.Module | None, shape: WorkerShape) -> None:
    """Pack the linears on a CPU unless that is slower at the rows of a round of one request."""
    optimize_for_cpu(target, shape.tree.num_nodes)
    if draft is not None:
        optimize_for_cpu(draft, shape.tree.topk)


def _bytes_progress(stage: str, progress: Progress | None) -> Callable[..., None] | None:
    if progress is None:
        return None
    return lambda state: progress(stage, state.loaded_bytes, state.total_bytes)


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now
