"""From settings to a running engine: resolve, check, load, build (design D5).

The check comes first and reads no weights, so that everything wrong is known in seconds.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from eyas.config import EngineConfig
from eyas.contract.target import Target
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.engine.device import resolve_device, resolve_draft_dtype, resolve_dtype
from eyas.engine.engine import Engine
from eyas.engine.rank_leader import RankProcesses
from eyas.engine.ranks import Followers, LeadingWorker
from eyas.engine.stages import StageClock
from eyas.engine.worker import Worker, WorkerShape
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.draft_names import canonical_name
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.embedded import Progress, resolve_model
from eyas.models.images import largest_tokens
from eyas.models.linear import optimize_for_cpu
from eyas.models.linear_plan import optimize_for_gpu
from eyas.models.loader import LoadProgress, load_weights
from eyas.models.random_weights import fill_random
from eyas.models.registry import target_class
from eyas.models.sharding import WHOLE, Parallel
from eyas.types import EyasError

logger = logging.getLogger(__name__)


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


@dataclasses.dataclass(frozen=True)
class Models:
    """Target and draft with their weights (draft: None for plain decoding), ready to be built
    into an engine."""

    target: nn.Module
    draft: Eagle3Draft | None
    dtype: torch.dtype
    draft_dtype: torch.dtype
    device: torch.device


def load_engine(config: EngineConfig, *, progress: Progress | None = None) -> LoadedEngine:
    """Check, then load. Raises CheckError with all findings before any weight is read, and
    EyasError for a model that cannot be found."""
    clock = StageClock()
    config = resolve_folders(config, progress=progress)
    clock.lap("resolve")
    report = run_check(config)
    report.raise_on_errors()
    clock.lap("check")
    followers = RankProcesses(config, report) if config.tensor_parallel_size > 1 else None
    try:
        parallel = WHOLE
        if followers is not None:
            parallel = Parallel(followers.join(), config.expert_parallel)
            progress = followers.checked(progress)
        models = load_models(config, report, parallel=parallel, progress=progress)
        clock.lap("load")
        engine = build_engine(config, report, models, followers=followers)
        if followers is not None:
            followers.wait_ready(engine.worker.backends)
    except BaseException:
        if followers is not None:
            followers.stop()
        raise
    clock.lap("build")
    return LoadedEngine(engine, report, Path(config.model), clock.seconds)


def load_models(
    config: EngineConfig,
    report: CheckReport,
    *,
    parallel: Parallel = WHOLE,
    progress: Progress | None = None,
) -> Models:
    """Both models with the weights of their folders, a rank's part of them. report: of the same
    settings, without errors."""
    assert report.target is not None and report.plan is not None
    checkpoint = Checkpoint.open(config.model)
    dtype = resolve_dtype(config, report.target, checkpoint)
    draft_dtype = resolve_draft_dtype(config, dtype)
    device = torch.device(resolve_device(config.device))
    max_model_len = report.plan.max_model_len
    target = load_target(
        report.target,
        checkpoint,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        parallel=parallel,
        progress=progress,
    )
    draft = None
    if report.draft is not None and config.draft is not None:
        draft = load_draft(
            report.draft,
            config.draft,
            target,
            dtype=draft_dtype,
            device=device,
            max_model_len=max_model_len,
            parallel=parallel,
            progress=progress,
        )
    return Models(target, draft, dtype, draft_dtype, device)


def random_models(
    config: EngineConfig, report: CheckReport, *, parallel: Parallel = WHOLE, seed: int = 0
) -> Models:
    """Both models with random weights, made on the device. The folders of `config` need hold no
    weights. Raises EyasError for a quantized target, whose packed weights cannot be drawn."""
    assert report.target is not None and report.plan is not None
    if report.target.quantization is not None:
        raise EyasError(
            f"random weights need a plain model, this one is {report.target.quantization}: take "
            "quantization_config out of its config.json"
        )
    dtype = resolve_dtype(config, report.target)
    draft_dtype = resolve_draft_dtype(config, dtype)
    device = torch.device(resolve_device(config.device))
    max_model_len = report.plan.max_model_len
    target: nn.Module = target_class(report.target.architecture)(
        report.target, dtype=dtype, device=device, max_model_len=max_model_len, parallel=parallel
    )
    fill_random(target, num_layers=report.target.num_layers, seed=seed)
    draft = None
    if report.draft is not None:
        draft = Eagle3Draft(
            report.draft,
            dtype=draft_dtype,
            device=device,
            max_model_len=max_model_len,
            parallel=parallel,
        )
        fill_random(draft, num_layers=1, seed=seed + 1)
        draft.share_with_target(cast(Target, target))
    return Models(target, draft, dtype, draft_dtype, device)


def build_engine(
    config: EngineConfig,
    report: CheckReport,
    models: Models,
    *,
    followers: Followers | None = None,
) -> Engine:
    """Pools, slots and the loop around loaded models. One target may serve several engines, one
    after the other: each build sets the boundaries that it captures. followers: the other ranks,
    where models are divided."""
    assert report.target is not None
    return Engine(
        build_worker(config, report, models, followers=followers),
        eos_token_ids=report.target.eos_token_ids,
        vocab_size=report.target.vocab_size,
        chunk_tokens=config.prefill_chunk_tokens,
        run_ahead=config.run_ahead,
        prefix_caching=config.prefix_caching,
        vision=report.target.vision,
    )


def build_worker(
    config: EngineConfig,
    report: CheckReport,
    models: Models,
    *,
    followers: Followers | None = None,
) -> Worker:
    """Pools and slots of one rank around its models; with followers, the rank that leads them."""
    assert report.target is not None and report.plan is not None
    plan, vision = report.plan, report.target.vision
    if models.draft is None:
        cast(Target, models.target).set_eagle3_layers_to_capture(())
    shape = WorkerShape(
        num_slots=config.max_batch_size,
        num_pages=plan.num_pages,
        page_size=config.page_size,
        max_model_len=plan.max_model_len,
        tree=config.tree_shape(),
    )
    choose_layouts(models.target, models.draft, shape)
    make = Worker if followers is None else partial(LeadingWorker, followers=followers)
    return make(
        cast(Target, models.target),
        models.draft,
        shape=shape,
        dtype=models.dtype,
        draft_dtype=models.draft_dtype,
        device=models.device,
        simulate_acceptance=config.acceptance_rates(),
        cuda_graphs=config.cuda_graphs,
        attention=config.attention_backend,
        max_image_tokens=largest_tokens(vision) if vision is not None else 0,
    )


def load_target(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    parallel: Parallel = WHOLE,
    progress: Progress | None = None,
) -> nn.Module:
    """The target with its weights."""
    model: nn.Module = target_class(config.architecture)(
        config, dtype=dtype, device=device, max_model_len=max_model_len, parallel=parallel
    )
    step = "loading target"
    _log_rate(step, load_weights(model, checkpoint, progress=_bytes_progress(step, progress)))
    return model


def load_draft(
    config: DraftConfig,
    folder: str,
    target: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    parallel: Parallel = WHOLE,
    progress: Progress | None = None,
) -> Eagle3Draft:
    """The draft with its weights, sharing the target's embedding and head where it has none."""
    draft = Eagle3Draft(
        config, dtype=dtype, device=device, max_model_len=max_model_len, parallel=parallel
    )
    step = "loading draft"
    total = load_weights(
        draft,
        Checkpoint.open(folder),
        rename=canonical_name,
        progress=_bytes_progress(step, progress),
    )
    _log_rate(step, total)
    draft.share_with_target(cast(Target, target))
    return draft


def choose_layouts(target: nn.Module, draft: nn.Module | None, shape: WorkerShape) -> None:
    """Pack the linears on a CPU unless that is slower at the rows of a round of one request, and
    have a small draft's step done by one call; on a GPU, choose how they run the rows of the
    rounds to come."""
    models = [target] if draft is None else [target, draft]
    optimize_for_gpu(models, shape.num_slots * shape.tree.num_nodes)
    optimize_for_cpu(target, shape.tree.num_nodes)
    if draft is not None:
        if isinstance(draft, Eagle3Draft):
            draft.fuse()
        optimize_for_cpu(draft, shape.tree.topk)


def _log_rate(step: str, total: LoadProgress) -> None:
    gigabytes, rate = total.loaded_bytes / 1e9, total.bytes_per_second / 1e9
    logger.info("%s: %.2f GB in %.2f s, %.2f GB/s", step, gigabytes, total.seconds, rate)


def _bytes_progress(stage: str, progress: Progress | None) -> Callable[..., None] | None:
    if progress is None:
        return None
    return lambda state: progress(stage, state.loaded_bytes, state.total_bytes)
