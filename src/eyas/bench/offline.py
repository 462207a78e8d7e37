"""Offline speed: contenders take turns on the same prompts, and their outputs are compared.

A shared machine changes its speed by the minute, so that two figures taken one after the other
say little. Here every repeat runs each contender once, in an order that rotates, and a ratio is
the median of the ratios within the repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from eyas.bench.bandwidth import ReadBandwidth, ReadCost, read_cost
from eyas.bench.contenders import Contender, EyasContender, TransformersContender
from eyas.bench.prompts import built_in_prompts, file_prompts, random_prompts
from eyas.bench.results import (
    Acceptance,
    BatchResult,
    Ceiling,
    OfflineResult,
    OutputCheck,
    Result,
    Sample,
    Spread,
    compare_outputs,
    count_bigrams,
)
from eyas.config import ConfigError, EngineConfig
from eyas.engine.llm import LLM
from eyas.engine.load import resolve_folders
from eyas.engine.tokenizer import Tokenizer
from eyas.models.embedded import Progress
from eyas.models.target_config import read_target_config
from eyas.types import EyasError

DEFAULT_PROMPT_TOKENS = 128
_DRAFT_SETTINGS = (
    "draft",
    "draft_dtype",
    "num_speculative_tokens",
    "topk",
    "num_tree_nodes",
    "draft_boundaries",
    "draft_norm_output",
    "simulate_acceptance",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """What to run. Raises ConfigError on contradictions.

    engine: of the contenders; max_batch_size becomes the largest of `batch_sizes`,
    prefix_caching False and max_model_len, where it is None, what the prompts need.
    prompt_tokens: None keeps the prompts of a file as long as they are. num_prompts: a run takes
    that many, in batches; None: one batch. threads: None leaves torch's number.
    """

    engine: EngineConfig
    batch_sizes: tuple[int, ...] = (1,)
    prompt_tokens: int | None = None
    new_tokens: int = 128
    prompts_file: Path | None = None
    random_prompts: bool = False
    num_prompts: int | None = None
    against_transformers: bool = False
    repeats: int = 7
    threads: int | None = None

    def __post_init__(self) -> None:
        counts = {
            "batch": min(self.batch_sizes, default=0),
            "prompt-tokens": self.prompt_tokens,
            "num-prompts": self.num_prompts,
            "repeats": self.repeats,
            "threads": self.threads,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1")
        if self.new_tokens < 2:
            raise ConfigError("--new-tokens must be at least 2: the first comes from the prefill")
        if self.num_prompts is not None and any(self.num_prompts % b for b in self.batch_sizes):
            raise ConfigError(
                f"--num-prompts {self.num_prompts} must be a multiple of every --batch, so that "
                "all batches are full"
            )
        if self.random_prompts and self.prompts_file is not None:
            raise ConfigError("--random-prompts and --prompts exclude each other: leave one out")
        is_real = self.engine.simulate_acceptance is None
        if self.random_prompts and self.engine.draft_name is not None and is_real:
            raise ConfigError(
                "a draft's acceptance on --random-prompts says nothing: leave one of them out "
                "(--draft none), or set the acceptance with --simulate-acceptance"
            )

    def prompts_of(self, batch_size: int) -> int:
        """Prompts of one run at a batch size."""
        return self.num_prompts or batch_size

    def make_prompts(self, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
        """The prompts of the largest run; smaller ones take the first of them."""
        count = max(map(self.prompts_of, self.batch_sizes))
        if self.prompts_file is not None:
            return file_prompts(
                tokenizer, self.prompts_file, count=count, num_tokens=self.prompt_tokens
            )
        num_tokens = self.prompt_tokens or DEFAULT_PROMPT_TOKENS
        if self.random_prompts:
            return random_prompts(vocab_size, count=count, num_tokens=num_tokens)
        return built_in_prompts(tokenizer, count=count, num_tokens=num_tokens)


def run_offline(
    settings: OfflineSettings,
    *,
    progress: Progress | None = None,
    on_run: Callable[[int, int], None] | None = None,
) -> OfflineResult:
    """Load the contenders, compare their outputs, and time them in turns.

    progress: of loading. on_run: called with (runs done, runs in all).
    Raises EyasError for prompts that are not there or do not fit, and what LLM raises.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return _Bench(settings, progress, on_run or (lambda done, total: None)).run()


def without_draft(config: EngineConfig) -> EngineConfig:
    """The same settings for plain decoding."""
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    plain = {name: defaults[name] for name in _DRAFT_SETTINGS}
    return dataclasses.replace(config, **plain)  # type: ignore[arg-type]


class _Bench:
    """Contenders, loaded, and the prompts."""

    def __init__(
        self,
        settings: OfflineSettings,
        progress: Progress | None,
        on_run: Callable[[int, int], None],
    ) -> None:
        self.settings, self._on_run = settings, on_run
        config = resolve_folders(settings.engine, progress=progress)
        folder = Path(config.model)
        vocab_size = read_target_config(folder).vocab_size
        self.prompts = settings.make_prompts(Tokenizer(folder), vocab_size)
        needed = max(map(len, self.prompts)) + settings.new_tokens
        config = dataclasses.replace(
            config,
            max_batch_size=max(settings.batch_sizes),
            prefix_caching=False,  # each run is to compute its prompts
            max_model_len=config.max_model_len or needed,
        )
        plain = _load(without_draft(config), progress)
        self.contenders: list[Contender] = [EyasContender(plain, name="eyas", drafts=False)]
        if config.draft is not None:
            tree = config.tree_shape()
            shape = f"chain of {tree.depth}" if tree.is_chain else f"tree of {tree.num_nodes}"
            name = f"eyas + {shape}"
            self.contenders.append(EyasContender(_load(config, progress), name=name, drafts=True))
        pool = plain.engine.worker.target_pool
        self.dtype, self.device = pool.k_LRKD.dtype, pool.k_LRKD.device
        self.transformers: TransformersContender | None = None
        if settings.against_transformers:
            self.transformers = TransformersContender(folder, dtype=self.dtype, device=self.device)
            self.contenders.append(self.transformers)
        self.is_simulated = config.simulate_acceptance is not None
        self.baseline = self.transformers or self.contenders[0]
        assert plain.report.target is not None and plain.report.plan is not None
        self.cost: ReadCost = read_cost(
            plain.report.target,
            target_weight_bytes=plain.report.plan.target_weight_bytes,
            layout=pool.layout,
            dtype_bytes=self.dtype.itemsize,
        )
        self.bandwidth = ReadBandwidth(self.device)
        self.bandwidths: list[float] = []
        self._num_done = 0

    def run(self) -> OfflineResult:
        """All batch sizes, one after the other."""
        samples = {size: self._sample(size) for size in self.settings.batch_sizes}
        bandwidth = Spread.of(self.bandwidths)
        lengths = [len(prompt) for prompt in self.prompts]
        return OfflineResult(
            baseline=self.baseline.name,
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.device.type,
            threads=torch.get_num_threads(),
            prompt_tokens=(min(lengths), max(lengths)),
            new_tokens=self.settings.new_tokens,
            repeats=self.settings.repeats,
            bandwidth=bandwidth,
            batches=tuple(
                self._batch_result(size, found, bandwidth.median) for size, found in samples.items()
            ),
        )

    def _sample(self, batch_size: int) -> dict[str, list[Sample]]:
        """Samples by contender; the first of each warmed up and is for its outputs only."""
        samples: dict[str, list[Sample]] = {contender.name: [] for contender in self.contenders}
        for repeat in range(self.settings.repeats + 1):
            if repeat:
                self.bandwidths.append(self.bandwidth.measure())
            first = repeat % len(self.contenders)
            for contender in self.contenders[first:] + self.contenders[:first]:
                samples[contender.name].append(self._run(contender, batch_size))
        return samples

    def _run(self, contender: Contender, batch_size: int) -> Sample:
        prompts = self.prompts[: self.settings.prompts_of(batch_size)]
        batches = [
            contender.run(prompts[start : start + batch_size], self.settings.new_tokens)
            for start in range(0, len(prompts), batch_size)
        ]
        sample = Sample.joined(batches)
        self._num_done += 1
        num_rounds = len(self.settings.batch_sizes) * (self.settings.repeats + 1)
        self._on_run(self._num_done, num_rounds * len(self.contenders))
        return sample

    def _batch_result(
        self, batch_size: int, samples: dict[str, list[Sample]], bytes_per_second: float
    ) -> BatchResult:
        prompts = self.prompts[: self.settings.prompts_of(batch_size)]
        context = sum(map(len, prompts)) / len(prompts) + self.settings.new_tokens / 2
        ceiling = Ceiling(
            batch_size,
            self.cost.step_bytes(batch_size, context),
            self.cost.most_tokens_per_second(batch_size, context, bytes_per_second),
        )
        speeds = {name: _decode_speeds(found[1:]) for name, found in samples.items()}
        base = speeds[self.baseline.name]
        results = []
        for contender in self.contenders:
            timed = samples[contender.name][1:]
            decode = Spread.of(speeds[contender.name])
            is_baseline = contender is self.baseline
            results.append(
                Result(
                    contender=contender.name,
                    batch_size=batch_size,
                    decode=decode,
                    whole=Spread.of([s.rates.tokens_per_second for s in timed]),
                    first_token_seconds=Spread.of([s.rates.first_token_seconds for s in timed]),
                    ratio=None if is_baseline else Spread.of_ratios(speeds[contender.name], base),
                    ceiling_share=decode.median / ceiling.tokens_per_second,
                    acceptance=self._acceptance(contender, timed[-1]),
                )
            )
        outputs = {name: found[0].token_ids for name, found in samples.items()}
        return BatchResult(
            batch_size,
            tuple(results),
            tuple(self._compare(batch_size, outputs)),
            ceiling,
            count_bigrams(outputs[self.baseline.name]),
        )

    def _acceptance(self, contender: Contender, sample: Sample) -> Acceptance | None:
        if not contender.drafts:
            return None
        return Acceptance.of(sample, is_simulated=self.is_simulated)

    def _compare(self, batch_size: int, outputs: dict[str, list[list[int]]]) -> list[OutputCheck]:
        """Every contender against the baseline, and Eyas with a draft against itself without.

        Simulated acceptance emits drafts that the model did not choose: nothing to compare.
        """
        plain = self.contenders[0].name
        compared = [c for c in self.contenders if not (c.drafts and self.is_simulated)]
        pairs = [(c.name, self.baseline.name) for c in compared if c is not self.baseline]
        pairs += [(c.name, plain) for c in compared if c.drafts]
        return [
            compare_outputs(
                (name, outputs[name]),
                (reference, outputs[reference]),
                batch_size=batch_size,
                logit_gap=self._logit_gap if self.transformers else None,
            )
            for name, reference in dict.fromkeys(pairs)
        ]

    def _logit_gap(self, prompt: int, generated: list[int], first: int, second: int) -> float:
        assert self.transformers is not None
        return self.transformers.logit_gap(self.prompts[prompt] + generated, first, second)


def _load(config: EngineConfig, progress: Progress | None) -> LLM:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return LLM(**values, progress=progress)


def _decode_speeds(samples: list[Sample]) -> list[float]:
    speeds = [sample.rates.decode_tokens_per_second for sample in samples]
    if not all(speeds):
        raise EyasError(
            "--new-tokens is too low to time decoding: all tokens were there at the first look"
        )
    return [speed for speed in speeds if speed is not None]
