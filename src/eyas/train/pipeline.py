"""`eyas train`: from prompts to a draft that serves, in stages that run and resume alone.

Everything is in one folder, and a stage reads only what the ones before it left there:

    prompts.jsonl.gz      the prompts to train on, those that the target wrote among them
    validation.jsonl.gz   prompts set aside to choose the best checkpoint by
    data/                 conversations with the target's answers, and a report (regenerate)
    vocabulary.json       the draft's tokens (vocabulary)
    training/             log, curves and checkpoints, each a draft that serves (train)
    settings.json         what each stage ran with
    validation.json       acceptance length of each checkpoint, by which the best is chosen
    evaluation.json, .md  acceptance of the best one on the evaluation prompts (evaluate)
    draft/                the best checkpoint, with a card (export)
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from eyas.config import EngineConfig
from eyas.contract.target import Target
from eyas.engine.device import resolve_device, resolve_dtype
from eyas.engine.load import load_target
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig
from eyas.models.target_config import position_limit, read_target_config
from eyas.train.dataset import read_rows, read_shard
from eyas.train.draft import design_draft
from eyas.train.engines import BatchEngine, open_engine, target_folder
from eyas.train.evaluate import Evaluation, evaluate, to_dict, to_markdown
from eyas.train.finish import export_best
from eyas.train.journal import TrainProgress
from eyas.train.masks import ChatTemplate
from eyas.train.pipeline_settings import STAGES, PipelineSettings, Stage
from eyas.train.plot import plot_curves
from eyas.train.processes import join_launcher
from eyas.train.prompts import (
    Prompt,
    normalised_turns,
    read_prompts,
    refuse_contained,
    refuse_overlap,
    select,
)
from eyas.train.regenerate import Regeneration, foreign_shards
from eyas.train.self_prompts import save_prompts, write_self_prompts
from eyas.train.settings import TrainSettings
from eyas.train.state import find_checkpoints
from eyas.train.trainer import train
from eyas.train.vocabulary import choose_vocabulary, count_tokens
from eyas.train.workspace import Reporter, Silent, Workspace
from eyas.types import EyasError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What to train. prompts: files for regenerate. eval_prompts: files that are never trained on;
    without them the evaluation uses the prompts set aside. stop_at: on the clock of
    time.monotonic; regenerate ends then, to go on later."""

    target: str
    out: Path
    prompts: Sequence[Path] = ()
    eval_prompts: Sequence[Path] = ()
    settings: PipelineSettings = dataclasses.field(default_factory=PipelineSettings)
    training: TrainSettings = dataclasses.field(default_factory=TrainSettings)
    stop_at: float | None = None


class Pipeline:
    """Runs the stages of a task. Raises EyasError on what the user can mend."""

    def __init__(self, task: Task, reporter: Reporter) -> None:
        self.task, self.reporter, self._is_first = task, reporter, True
        self.files = Workspace(task.out)
        self.folder = target_folder(task.target, progress=self._megabytes)
        self.config: ModelConfig = read_target_config(self.folder)
        self.max_model_len = position_limit(self.config)

    def run(self, stages: Sequence[Stage]) -> None:
        """Run stages in their order."""
        self._join_launcher(stages)
        for stage in STAGES:
            if stage in stages:
                started = time.monotonic()
                getattr(self, stage)()
                self.reporter.say(f"{stage}: {time.monotonic() - started:.1f} s")

    def _join_launcher(self, stages: Sequence[Stage]) -> None:
        processes = join_launcher(resolve_device(self.task.settings.device))
        if processes.count > 1 and list(stages) != ["train"]:
            raise EyasError(
                "only the stage train runs in several processes: start the others without a "
                "launcher, and this one with --stage train"
            )
        if not processes.is_first:
            self.reporter = Silent()
        self._is_first = processes.is_first

    def _megabytes(self, step: str, done: int, total: int) -> None:
        self.reporter.update(f"{step} (MiB)", done >> 20, total >> 20)

    def regenerate(self) -> None:
        """Stage 1: prompts, and the target's answers to them."""
        settings, files = self.task.settings, self.files
        opened: BatchEngine | None = None
        given = read_prompts(self.task.prompts)
        evaluation = read_prompts(self.task.eval_prompts)
        refuse_overlap(given, evaluation)
        identity = settings.selection(given)
        if not files.prompts.exists():
            if settings.self_prompts:
                opened = self._open(max(settings.self_prompts, len(given)))
                given += self._write_prompts(opened, evaluation)
            if not given:
                raise EyasError("there are no prompts: give --prompts FILE, or --self-prompts N")
            chosen, validation = select(
                given,
                seed=settings.seed,
                num_prompts=settings.num_prompts,
                num_validation=settings.num_validation,
            )
            save_prompts(files.validation_prompts, validation)
            files.write_json(files.selection, identity)
            save_prompts(files.prompts, chosen)
        elif files.read_json(files.selection, stage="regenerate") != identity:
            raise EyasError(
                f"{files.folder} was begun with other prompts or another choice of them: give the "
                "same ones to go on, or another --out"
            )
        self._refuse_evaluated()
        prompts = read_prompts([files.prompts])
        work = Regeneration(
            prompts, files.data, settings.regenerate(), target=Path(self.task.target).name
        )
        if not work.is_complete:
            opened = opened or self._open(len(prompts))
            work.run(
                opened.engine,
                opened.tokenizer,
                opened.template,
                window=opened.window,
                stop_at=self.task.stop_at,
                **self._counters("answering prompts"),
            )
        used = dataclasses.asdict(settings.regenerate())
        files.record("regenerate", {**used, "self_prompts": settings.self_prompts})
        self.reporter.say(work.report().line())

    def _refuse_evaluated(self) -> None:
        """Raises EyasError when what is trained on is in the evaluation file of this call."""
        evaluation = read_prompts(self.task.eval_prompts)
        if not evaluation:
            return
        if self.files.prompts.exists():
            refuse_overlap(read_prompts([self.files.prompts]), evaluation)
        foreign = foreign_shards(self.files.data)
        if foreign:
            template = ChatTemplate.open(self.folder)
            texts = (template.decode(row.input_ids) for p in foreign for row in read_shard(p))
            refuse_contained(texts, evaluation)

    def _open(self, num_requests: int) -> BatchEngine:
        settings = self.task.settings
        longest = settings.max_prompt_tokens + settings.max_new_tokens
        if longest > self.max_model_len:
            raise EyasError(
                f"the target takes {self.max_model_len} tokens, fewer than --max-prompt-tokens "
                f"{settings.max_prompt_tokens} and --max-new-tokens {settings.max_new_tokens} "
                "together: lower one of them"
            )
        return open_engine(
            str(self.folder),
            placement=settings.placement(),
            max_model_len=longest,
            num_requests=num_requests,
        )

    def _write_prompts(self, opened: BatchEngine, evaluation: Sequence[Prompt]) -> list[Prompt]:
        if self.files.self_prompts.exists():
            return read_prompts([self.files.self_prompts])
        written = write_self_prompts(
            opened.engine,
            opened.tokenizer,
            opened.template,
            self.task.settings.write_prompts(),
            held_out=normalised_turns(evaluation),
            window=opened.window,
            **self._counters("writing prompts"),
        )
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(written.dropped.items()))
        self.reporter.say(f"the target wrote {len(written.prompts)} prompts (dropped: {dropped})")
        if written.prompts:
            save_prompts(self.files.self_prompts, written.prompts)
        return written.prompts

    def _counters(self, step: str) -> dict[str, Callable[..., None]]:
        """on_done and on_tokens that show answers and tokens/s."""
        started, num_tokens = time.monotonic(), 0

        def on_tokens(count: int) -> None:
            nonlocal num_tokens
            num_tokens += count

        def on_done(done: int, total: int) -> None:
            rate = num_tokens / max(time.monotonic() - started, 1e-9)
            self.reporter.update(step, done, total, f"{rate:.0f} tok/s")

        return {"on_done": on_done, "on_tokens": on_tokens}

    def vocabulary(self) -> None:
        """Stage 2: the tokens that the draft can propose."""
        self.files.require(self.files.data, stage="regenerate")
        counts = count_tokens(read_rows(self.files.data), self.config.vocab_size)
        special = {*ChatTemplate.open(self.folder).added_ids(), *self.config.eos_token_ids}
        chosen = choose_vocabulary(
            counts,
            self.task.settings.vocabulary_size(self.config.vocab_size),
            required_ids=sorted(t for t in special if t < self.config.vocab_size),
        )
        kept = chosen.kept_D.tolist()
        summary = {
            "coverage": chosen.coverage,
            "num_seen": chosen.num_seen,
            "num_filled": chosen.num_filled,
        }
        self.files.write_json(self.files.vocabulary, {**summary, "kept_ids": kept})
        self.reporter.say(
            f"vocabulary of {len(kept)} tokens covers {chosen.coverage:.2%} of the answers' tokens "
            f"({chosen.num_seen} distinct; {chosen.num_filled} kept that none has)"
        )

    def train(self) -> None:
        """Stage 3: checkpoints, each a draft that serves."""
        self._refuse_evaluated()
        vocabulary = self.files.read_json(self.files.vocabulary, stage="vocabulary")
        kept_ids = torch.tensor(vocabulary["kept_ids"])
        settings = self.task.settings
        checkpoint = Checkpoint.open(self.folder)
        asked = EngineConfig(model=str(self.folder), dtype=settings.dtype)
        target = load_target(
            self.config,
            checkpoint,
            dtype=resolve_dtype(asked, self.config, checkpoint),
            device=torch.device(resolve_device(settings.device)),
            max_model_len=min(self.task.training.max_length, self.max_model_len),
        )
        target.requires_grad_(False)
        result = train(
            cast(Target, target),
            design_draft(
                self.config,
                len(kept_ids),
                boundaries=settings.boundaries,
                intermediate_size=settings.draft_intermediate_size,
            ),
            kept_ids=kept_ids,
            records=read_rows(self.files.data),
            settings=self.task.training,
            out_dir=self.files.training,
            progress=self._training_line,
        )
        if self._is_first:
            self.files.record("train", dataclasses.asdict(self.task.training))
        self.reporter.say(f"trained {result.step} steps: {result.checkpoint}")
        if importlib.util.find_spec("matplotlib") is None:
            self.reporter.say("no picture of the curves: pip install 'eyas[train]' draws one")
        elif self._is_first:
            plot_curves(self.files.training, self.files.training / "curves.png")

    def _training_line(self, line: TrainProgress) -> None:
        accuracy = " ".join(f"{value:.2f}" for value in line.accuracy_by_step)
        self.reporter.update(
            "training",
            line.step,
            line.num_steps,
            f"loss {line.loss:.3f}, accuracy {accuracy}, {line.tokens_per_second:.0f} tok/s",
        )

    def evaluate(self) -> None:
        """Stage 4: the best checkpoint by acceptance length, then all about it."""
        checkpoints = {path.name: path for path in find_checkpoints(self.files.training).values()}
        if not checkpoints:
            raise EyasError(f"{self.files.training} has no checkpoints: run --stage train first")
        self._refuse_evaluated()
        evaluation = read_prompts(self.task.eval_prompts)
        if self.files.validation_prompts.exists():
            validation = read_prompts([self.files.validation_prompts])
        else:  # the conversations were given, not regenerated
            validation = evaluation
        if not validation:
            raise EyasError("there are no prompts to evaluate on: give --eval-prompts FILE")
        lengths = self._validate(checkpoints, validation)
        best = max(lengths, key=lambda name: (lengths[name] > 0, lengths[name]))  # NaN is least
        held_out = evaluation or validation
        result = self._evaluate(checkpoints[best], held_out, "evaluating")
        self.files.write_json(self.files.evaluation, {"checkpoint": best, **to_dict(result)})
        self.files.record("evaluate", dataclasses.asdict(self.task.settings.evaluate()))
        self.files.write(self.files.evaluation_table, to_markdown(result))
        self.reporter.say(f"best checkpoint by acceptance length: {best}")
        self.reporter.say(to_markdown(result))

    def _validate(
        self, checkpoints: dict[str, Path], validation: Sequence[Prompt]
    ) -> dict[str, float]:
        """Acceptance length of each checkpoint (chain at the first temperature); what was measured
        with the same settings before is not measured again."""
        key = {"settings": str(self.task.settings.evaluate()), "prompts": len(validation)}
        stored: dict[str, Any] = {"key": key, "lengths": {}, "weights": {}}
        if self.files.validation.exists():
            found = self.files.read_json(self.files.validation, stage="evaluate")
            stored = found if found["key"] == key else stored
        lengths: dict[str, float] = {}
        for name, path in checkpoints.items():
            with (path / "model.safetensors").open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if stored["weights"].get(name) != digest:
                result = self._evaluate(path, validation, f"validating {name}", only_first=True)
                stored["lengths"][name], stored["weights"][name] = result.length(), digest
                self.files.write_json(self.files.validation, stored)
                self.reporter.say(f"{name}: {result.length():.3f} tokens a round")
            lengths[name] = stored["lengths"][name]
        return lengths

    def _evaluate(
        self, draft: Path, prompts: Sequence[Prompt], step: str, *, only_first: bool = False
    ) -> Evaluation:
        settings = self.task.settings.evaluate()
        return evaluate(
            str(self.folder),
            str(draft),
            prompts,
            settings,
            placement=self.task.settings.placement(),
            max_model_len=self.max_model_len,
            modes=settings.modes()[:1] if only_first else None,
            on_done=lambda done, total: self.reporter.update(step, done, total),
        )

    def export(self) -> None:
        """Stage 5: the best checkpoint as a draft of its own, with a card."""
        export_best(
            self.files,
            target=self.task.target,
            target_folder=self.folder,
            target_config=self.config,
            format=self.task.settings.format,
        )
        self.reporter.say(
            f"draft: {self.files.draft}\n"
            f"serve it with: eyas serve {self.task.target} --draft {self.files.draft}"
        )
