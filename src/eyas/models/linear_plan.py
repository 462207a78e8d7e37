"""How each linear layer runs few rows on a GPU, chosen by timing on the loaded weights.

For every form, shape and bucket of rows the plain way (the library's product with the small kernels
around it) competes with configurations of kernels.triton_linear, in CUDA graphs over enough
weights that none is still in the L2 cache when it comes again. What won is kept on disk, so that
a second start times nothing.

Shape suffixes: T rows, I in features, O out features.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas import kernels
from eyas.kernels.linear_config import (
    MAX_ROWS,
    ROW_BUCKETS,
    Form,
    LinearConfig,
    LinearPlan,
    row_bucket,
    search_space,
)
from eyas.models.embedded import cache_folder
from eyas.models.linear import Linear

_DTYPES = (torch.bfloat16, torch.float16)
_MIN_GAIN = 0.98  # of the plain way's time, from which another is taken
_MAX_ERROR = 0.02  # norm of the difference from the plain way over the norm of its result
_CACHES = 4  # sizes of the L2 cache that a timing reads at least
_MAX_SAMPLE_BYTES = 512 << 20
_NUM_REPLAYS = 5
_MAX_THREADS = 8

Timer = Callable[[Sequence[Callable[[], Tensor]]], float]
Choices = dict[str, LinearConfig | None]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a timing depends on, besides the number of rows."""

    form: Form
    num_out: int
    num_in: int
    has_bias: bool
    dtype: torch.dtype

    def key(self, rows: int) -> str:
        """Its name on disk."""
        bias = "+bias" if self.has_bias else ""
        return f"{self.form}{bias} {self.num_out}x{self.num_in} {self.dtype} rows {rows}"

    def candidates(self, rows: int) -> list[LinearConfig]:
        """Configurations that may serve this shape."""
        return [
            config
            for config in search_space(self.form, rows=rows)
            if config.fits(self.form, num_out=self.num_out, num_in=self.num_in)
        ]


def optimize_for_gpu(models: Iterable[nn.Module], max_rows: int) -> dict[str, LinearConfig | None]:
    """Give the CUDA linears of loaded models a plan for up to max_rows rows; all that was chosen.

    Call it when embeddings and heads have been shared out. Does nothing (and returns nothing)
    where there is no GPU, no Triton, or no layer in bf16 or fp16.
    """
    groups = _group(models)
    last = row_bucket(min(max_rows, MAX_ROWS))
    buckets = [rows for rows in ROW_BUCKETS if last is not None and rows <= last]
    if not groups or not kernels.has_triton(next(iter(groups.values()))[0].weight.device):
        return {}
    path = _cache_file()
    known = read_choices(path)
    wanted = {(work, rows) for work in groups for rows in buckets}
    missing = [(work, rows) for work, rows in wanted if work.key(rows) not in known]
    with torch.inference_mode():
        missing.sort(key=lambda pair: pair[0].key(pair[1]))
        compile_ahead(
            (work, groups[work][0].weight, config)
            for work, rows in missing
            for config in work.candidates(rows)
        )
        for work, rows in missing:
            known[work.key(rows)] = choose(work, groups[work], rows, timer=time_in_graph)
    if missing:
        torch.cuda.empty_cache()  # graphs and copies of weights
        write_choices(path, known)
    for work, linears in groups.items():
        plan = LinearPlan({(work.form, rows): known[work.key(rows)] for rows in buckets})
        for linear in linears:
            linear.plan = plan
    return {work.key(rows): known[work.key(rows)] for work, rows in wanted}


def _group(models: Iterable[nn.Module]) -> dict[Work, list[Linear]]:
    groups: dict[Work, list[Linear]] = {}
    for model in models:
        for linear in model.modules():
            if not isinstance(linear, Linear) or not linear.weight.is_cuda:
                continue
            weight = linear.weight
            if weight.dtype in _DTYPES and weight.is_contiguous():
                num_out, num_in = weight.shape
                work = Work(linear.form, num_out, num_in, linear.bias is not None, weight.dtype)
                groups.setdefault(work, []).append(linear)
    return groups


@dataclasses.dataclass(frozen=True)
class Operands:
    """Random inputs of a form, and what runs it on them."""

    x_TI: Tensor
    norm: tuple[Tensor, float] | None
    residual_TO: Tensor | None

    @classmethod
    def of(cls, work: Work, rows: int, device: torch.device) -> Operands:
        """Of a shape, the same at each call."""

        def randn(*shape: int) -> Tensor:
            generator = torch.Generator(device).manual_seed(0)
            return torch.randn(*shape, generator=generator, device=device).to(work.dtype)

        has_norm = work.form in ("norm", "gated")
        return cls(
            randn(rows, work.num_in),
            (randn(work.num_in), 1e-5) if has_norm else None,
            randn(rows, work.num_out) if work.form == "add" else None,
        )

    def run_plain(self, form: Form, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The form as models run it without a plan."""
        x_TI = self.x_TI if self.norm is None else kernels.rms_norm(self.x_TI, *self.norm)
        y_TO = F.linear(x_TI, weight_OI, bias_O)
        if form == "gated":
            return kernels.silu_mul(y_TO)
        return y_TO if self.residual_TO is None else y_TO + self.residual_TO

    def run(
        self, form: Form, weight_OI: Tensor, bias_O: Tensor | None, config: LinearConfig | None
    ) -> Tensor:
        """The form by a configuration, None: plain."""
        if config is None:
            return self.run_plain(form, weight_OI, bias_O)
        return kernels.few_row_linear(
            self.x_TI,
            weight_OI,
            bias_O,
            config=config,
            norm=self.norm,
            residual_TO=self.residual_TO,
            is_gated=form == "gated",
        )


def choose(
    work: Work, linears: Sequence[Linear], rows: int, *, timer: Timer
) -> LinearConfig | None:
    """The fastest configuration for `rows` rows that computes the same as the plain way, None
    where that one is as fast. A candidate that the device cannot run is passed over."""
    inputs = Operands.of(work, rows, linears[0].weight.device)
    sample = _sample(linears)
    weight_OI, bias_O = sample[0]
    expected = inputs.run_plain(work.form, weight_OI, bias_O).float()

    def seconds(config: LinearConfig | None) -> float:
        return timer([partial(inputs.run, work.form, *pair, config) for pair in sample])

    best, best_seconds = None, seconds(None) * _MIN_GAIN
    for config in work.candidates(rows):
        try:
            found = inputs.run(work.form, weight_OI, bias_O, config).float()
            if not (found - expected).norm() <= _MAX_ERROR * expected.norm():
                continue
            taken = seconds(config)
        except Exception:  # too much shared memory, no such instruction: Triton has many errors
            continue
        if taken < best_seconds:
            best, best_seconds = config, taken
    return best


def _sample(linears: Sequence[Linear]) -> list[tuple[Tensor, Tensor | None]]:
    """Weights and biases to go through, several L2 caches of them: copies where a model has too
    few."""
    first = linears[0].weight
    size = first.nbytes
    properties = torch.cuda.get_device_properties(first.device) if first.is_cuda else None
    wanted = _CACHES * (properties.L2_cache_size if properties is not None else 0)
    distinct = {linear.weight.data_ptr(): linear for linear in linears}
    most = max(max(wanted, _MAX_SAMPLE_BYTES) // size, 1)
    sample: list[tuple[Tensor, Tensor | None]] = [
        (linear.weight.detach(), linear.bias) for linear in list(distinct.values())[:most]
    ]
    while len(sample) * size < wanted:
        sample.append((first.detach().clone(), linears[0].bias))
    return sample


def time_in_graph(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Seconds of one round of calls on the GPU: the least of a few replays of their graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    milliseconds: list[float] = [start.elapsed_time(end) for start, end in pairs]
    return min(milliseconds) / 1e3


def compile_ahead(jobs: Iterable[tuple[Work, Tensor, LinearConfig]]) -> None:
    """Compile configurations, each for a shape's weight [O, I], on several threads, where this
    Triton can."""
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    from eyas.kernels import triton_linear

    threads = max(min(os.cpu_count() or 1, _MAX_THREADS), 1)
    with ThreadPoolExecutor(threads) as pool, mode(pool, ignore_errors=True):
        for work, weight_OI, config in jobs:
            operands = Operands.of(work, config.rows, weight_OI.device)
            with contextlib.suppress(Exception):  # found out, and passed over, when it is timed
                triton_linear.linear(
                    operands.x_TI,
                    weight_OI,
                    weight_OI[:, 0].contiguous() if work.has_bias else None,
                    config=config,
                    norm=operands.norm,
                    residual_TO=operands.residual_TO,
                    is_gated=work.form == "gated",
                    only_compile=True,
                )


def _cache_file() -> Path:
    """Where choices of this device, with this software, are kept."""
    import triton

    from eyas.kernels import linear_config, triton_launch, triton_linear, triton_norm

    device = torch.cuda.get_device_name()
    digest = hashlib.sha256()
    parts = [device, torch.__version__, triton.__version__, str(triton_launch.launch_options())]
    for module in (linear_config, triton_launch, triton_linear, triton_norm):
        assert module.__file__ is not None
        parts.append(Path(module.__file__).read_text())
    digest.update("\0".join(parts).encode())
    slug = re.sub(r"\W+", "-", device).strip("-").lower()
    return cache_folder() / "linears" / f"{slug}-{digest.hexdigest()[:16]}.json"


def read_choices(path: Path) -> Choices:
    """What a file holds; nothing of a file that is missing or makes no sense."""
    try:
        stored: dict[str, dict[str, Any] | None] = json.loads(path.read_text())
        return {
            key: None if fields is None else LinearConfig(**fields)
            for key, fields in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_choices(path: Path, choices: Choices) -> None:
    """Keep choices, with those that another process has stored in the meantime. Best effort: a
    folder that cannot be written costs the time of choosing again."""
    merged = read_choices(path) | choices
    stored = {
        key: None if config is None else dataclasses.asdict(config)
        for key, config in sorted(merged.items())
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(stored, indent=1))
        part.replace(path)
