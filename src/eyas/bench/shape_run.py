"""Speed of a shape with random weights: what rounds cost beside the floor of the same run.

With the acceptance simulated, the cost of a round does not depend on what the weights say, so a
figure needs no checkpoint. Plain decoding comes first, then the rounds with a draft.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from eyas.bench.ceilings import Ceilings, Floor, RoundCost, measure_ceilings, round_cost
from eyas.bench.offline import without_draft
from eyas.bench.profile import MarkedParts, Recording
from eyas.bench.prompts import random_prompts
from eyas.bench.results import Spread
from eyas.bench.rounds import Batch, RoundSample
from eyas.bench.shapes import write_shape
from eyas.bench.trace import NUM_SKIPPED, TraceResult, analyse, read_trace
from eyas.config import ConfigError, EngineConfig, TreeShape
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.engine.engine import Engine
from eyas.engine.load import build_engine, random_models
from eyas.engine.stats import shape_name

NUM_PROFILED = NUM_SKIPPED + 101  # rounds; the last one ends the time of a hundred
_PROFILE_WARM_UP = 8
_MAX_CHUNK_TOKENS = 16384  # of all prompts together, which are to be prefilled at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeSettings:
    """What to run. Raises ConfigError on contradictions.

    engine: its model is the shape (shapes.SHAPES, or the path of a config.json), its draft
    "random" or none; max_batch_size, max_model_len, kv_cache_tokens and prefill_chunk_tokens
    follow from the rest. prompt_tokens: of the prompts in order, the last of all further ones.
    profile: whether rounds are also recorded for how a round's time is spent. trace: where to
    keep the recording of the first batch size (with the draft, if there is one).
    """

    engine: EngineConfig
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
    prompt_tokens: tuple[int, ...] = (512,)
    new_tokens: int = 256
    repeats: int = 3
    threads: int | None = None
    profile: bool = True
    trace: Path | None = None

    def __post_init__(self) -> None:
        counts = {
            "batch": min(self.batch_sizes, default=0),
            "prompt-tokens": min(self.prompt_tokens, default=0),
            "repeats": self.repeats,
            "threads": self.threads,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1")
        if self.engine.tensor_parallel_size > 1:
            raise ConfigError("--shape runs on one device: leave --tp out")
        least = 4 * (self.engine.tree_shape().depth + 1)
        if self.new_tokens < least:
            raise ConfigError(f"--new-tokens must be at least {least}, for a few full rounds")
        if self.trace is not None and not self.profile:
            raise ConfigError("--trace needs the profile: leave --no-profile out")

    @property
    def most_new_tokens(self) -> int:
        """Tokens of one request at most: those of a timed run, or those of a recorded one."""
        if not self.profile:
            return self.new_tokens
        rounds = NUM_PROFILED + _PROFILE_WARM_UP
        return max(self.new_tokens, rounds * (self.engine.tree_shape().depth + 1))

    def lengths(self, batch_size: int) -> list[int]:
        """Prompt lengths of a batch."""
        *first, last = self.prompt_tokens
        return (first + [last] * batch_size)[:batch_size]

    def engine_config(self) -> EngineConfig:
        """The engine's settings, sized for this run."""
        batch, page = max(self.batch_sizes), self.engine.page_size
        lengths = self.lengths(batch)
        chunk = min(sum(lengths), _MAX_CHUNK_TOKENS)
        # A page that is not full, and what the next rounds may need.
        spare = page + 4 * (self.engine.tree_shape().depth + 1)
        needed = sum(-(-(n + self.most_new_tokens + spare) // page) * page for n in lengths)
        return dataclasses.replace(
            self.engine,
            max_batch_size=batch,
            max_model_len=max(lengths) + self.most_new_tokens,
            kv_cache_tokens=self.engine.kv_cache_tokens or needed,
            prefill_chunk_tokens=max(chunk, self.engine.prefill_chunk_tokens),
            prefix_caching=False,
        )


@dataclasses.dataclass(frozen=True)
class ShapeTimes:
    """One batch size with one kind of round.

    Times are milliseconds, medians with their range over the repeats. token_ms: a round by the
    tokens that it gives a request. host_ms: of a round, in which the host did anything but wait
    for the device. part_ms: "draft", "verify" (on a GPU from the trace, spans on the device).
    bytes_per_second: the floor's bytes by the round's time. trace: None without a profile and on
    a CPU.
    """

    batch_size: int
    rounds: str
    round_ms: Spread
    token_ms: Spread
    tokens_per_second: Spread
    acceptance_length: float
    num_rounds: int
    host_ms: float
    part_ms: dict[str, float]
    floor: Floor
    bytes_per_second: float
    trace: TraceResult | None

    @property
    def floor_ratio(self) -> float:
        """A round's time by the least that it could take."""
        return self.round_ms.median / (1000 * self.floor.seconds)


@dataclasses.dataclass(frozen=True)
class ShapeResult:
    """All that was measured. floor figures use `ceilings`, which the same run measured."""

    shape: str
    dtype: str
    device: str
    threads: int
    prompt_tokens: tuple[int, ...]
    new_tokens: int
    repeats: int
    profiled: bool
    ceilings: Ceilings
    cost: RoundCost
    times: tuple[ShapeTimes, ...]


def run_shape(
    settings: ShapeSettings, *, on_run: Callable[[int, int], None] | None = None
) -> ShapeResult:
    """Make the models, measure the ceilings, then time rounds. on_run: called with (batches done,
    in all). Raises CheckError where the device does not hold it, EyasError for a shape that is
    not known."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as folder:
        config = write_shape(settings.engine_config(), Path(folder))
        return _ShapeBench(settings, config, Path(folder), on_run or (lambda done, of: None)).run()


class _ShapeBench:
    """Models that are shared by an engine without and one with the draft."""

    def __init__(
        self,
        settings: ShapeSettings,
        config: EngineConfig,
        folder: Path,
        on_run: Callable[[int, int], None],
    ) -> None:
        self.settings, self._folder, self._on_run = settings, folder, on_run
        self.configs = [without_draft(config)]
        if config.tree_shape().depth:
            self.configs.append(config)
        self.reports = [run_check(one) for one in self.configs]
        for report in self.reports:
            report.raise_on_errors()
        device = torch.device(self.reports[0].facts["device"].partition(",")[0])
        self.models = random_models(self.configs[-1], self.reports[-1])
        self.ceilings = measure_ceilings(device, self.models.dtype)
        self.cost = self._cost(self.reports[-1])
        vocab_size = self.models.target.vocab_size
        lengths = settings.lengths(max(settings.batch_sizes))
        prompts = random_prompts(
            int(vocab_size),  # type: ignore[arg-type]
            count=len(lengths),
            num_tokens=max(lengths),
        )
        self.prompts = [p[:length] for p, length in zip(prompts, lengths, strict=True)]
        self._num_done = 0

    def run(self) -> ShapeResult:
        """Every batch size, plain and then with the draft."""
        times: list[ShapeTimes] = []
        for config, report in zip(self.configs, self.reports, strict=True):
            times += self._time(config, report)
        if self.settings.profile:
            profiled = [
                one
                for pair in zip(self.configs, self.reports, strict=True)
                for one in self._profile(*pair)
            ]
            times = [_with_trace(a, b) for a, b in zip(times, profiled, strict=True)]
        return ShapeResult(
            shape=self.settings.engine.model,
            dtype=str(self.models.dtype).removeprefix("torch."),
            device=self.models.device.type,
            threads=torch.get_num_threads(),
            prompt_tokens=self.settings.prompt_tokens,
            new_tokens=self.settings.new_tokens,
            repeats=self.settings.repeats,
            profiled=self.settings.profile,
            ceilings=self.ceilings,
            cost=self.cost,
            times=tuple(times),
        )

    def _cost(self, report: CheckReport) -> RoundCost:
        assert report.target is not None and report.plan is not None
        draft = self.models.draft
        return round_cost(
            report.target,
            report.draft,
            weight_bytes=(report.plan.target_weight_bytes, report.plan.draft_weight_bytes),
            layouts=(self.models.target.kv_layout, draft.kv_layout if draft else None),  # type: ignore[arg-type]
            dtypes=(self.models.dtype, self.models.draft_dtype),
        )

    def _engine(self, config: EngineConfig, report: CheckReport) -> Engine:
        """An engine, for which the memory of the last one is free again."""
        models = self.models
        gc.collect()
        if models.device.type == "cuda":
            torch.cuda.empty_cache()
        if config.draft is None:
            models = dataclasses.replace(models, draft=None)
        engine = build_engine(config, report, models)
        if models.device.type == "cpu":
            engine.stats.watch_parts(engine.worker.runner)
        return engine

    def _time(self, config: EngineConfig, report: CheckReport) -> Iterator[ShapeTimes]:
        engine = self._engine(config, report)
        for batch_size in self.settings.batch_sizes:
            samples = []
            for _ in range(self.settings.repeats + 1):
                with self._batch(engine, batch_size, self.settings.new_tokens) as batch:
                    samples.append(batch.run())
            self._count()
            # The first warmed up, and captured graphs.
            yield self._times(samples[1:], config.tree_shape())

    def _profile(self, config: EngineConfig, report: CheckReport) -> Iterator[TraceResult | None]:
        engine = self._engine(config, report)
        MarkedParts(engine.worker)
        for number, batch_size in enumerate(self.settings.batch_sizes):
            path = self._folder / "trace.json"
            if self.settings.trace and not number and config is self.configs[-1]:
                path = self.settings.trace
            for records in (False, True):  # the first run captures graphs
                with self._batch(engine, batch_size, self.settings.most_new_tokens) as batch:
                    recording = Recording(engine.worker, path)
                    with recording if records else contextlib.nullcontext():
                        batch.run(NUM_PROFILED)
            self._count()
            yield analyse(read_trace(path))

    def _batch(self, engine: Engine, batch_size: int, new_tokens: int) -> Batch:
        return Batch(engine, self.prompts[:batch_size], new_tokens)

    def _count(self) -> None:
        self._num_done += 1
        runs = 2 if self.settings.profile else 1
        self._on_run(self._num_done, runs * len(self.configs) * len(self.settings.batch_sizes))

    def _times(self, samples: list[RoundSample], tree: TreeShape) -> ShapeTimes:
        batch_size = samples[0].batch_size
        rounds = sum(sample.num_rounds for sample in samples)
        accepted = sum(s.acceptance_length * s.num_rounds for s in samples) / rounds
        made = sum(sample.num_tokens for sample in samples) / len(samples) / batch_size
        floor = self.cost.floor(
            tree,
            batch_size=batch_size,
            context_tokens=sum(self.settings.lengths(batch_size)) / batch_size + made / 2,
            ceilings=self.ceilings,
        )
        round_ms = Spread.of([1000 * sample.round_seconds for sample in samples])
        parts = {part for sample in samples for part in sample.part_seconds}
        return ShapeTimes(
            batch_size=batch_size,
            rounds=shape_name(tree),
            round_ms=round_ms,
            token_ms=Spread.of([1000 * s.round_seconds / s.acceptance_length for s in samples]),
            tokens_per_second=Spread.of([s.tokens_per_second for s in samples]),
            acceptance_length=accepted,
            num_rounds=rounds // len(samples),
            host_ms=1000 * sum(s.host_seconds for s in samples) / rounds,
            part_ms={
                part: 1000 * sum(s.part_seconds[part] for s in samples) / rounds
                for part in sorted(parts - {"host", "round"})
            },
            floor=floor,
            bytes_per_second=1000 * floor.num_bytes / round_ms.median,
            trace=None,
        )


def _with_trace(times: ShapeTimes, trace: TraceResult | None) -> ShapeTimes:
    """A GPU's parts come from the trace."""
    if trace is None:
        return times
    return dataclasses.replace(times, trace=trace, part_ms=times.part_ms or trace.part_ms)
