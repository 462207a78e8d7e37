"""Training an EAGLE-3 draft by training-time test, on the fly: the target runs in the loop.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test" (2025). Nothing in a step waits for the device: shapes and counts are known on the host, and
numbers to report are summed on the device until a log line is due.

Shape suffixes: T rows of a batch, S draft steps, H draft hidden, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from eyas.contract.target import Target
from eyas.models.config import DraftConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.train.attention import TrainingAttention
from eyas.train.capture import capture
from eyas.train.draft import HEAD, MasterWeights, build_draft
from eyas.train.export import draft_config_json, export_draft
from eyas.train.journal import TrainProgress, append_line, cut_log
from eyas.train.loss import LossOutput, Teacher, distillation_loss
from eyas.train.metrics import Metrics
from eyas.train.packing import Batch, Corpus, Record, count_batches, make_batch, plan_batches
from eyas.train.processes import Processes
from eyas.train.schedule import learning_rate
from eyas.train.settings import TrainSettings
from eyas.train.state import (
    STATE_FILE,
    RunIdentity,
    begin_checkpoint,
    find_checkpoints,
    finish_checkpoint,
    load_state,
    save_state,
)
from eyas.types import EyasError

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.0


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """draft: as trained, its head still deferred (load the checkpoint to serve it). checkpoint:
    the folder of the last one, ready to serve. last: the last log line, None when no step ran."""

    draft: Eagle3Draft
    checkpoint: Path
    step: int
    last: TrainProgress | None


def draft_states(
    draft: Eagle3Draft, batch: Batch, features_TF: Tensor, num_steps: int
) -> list[Tensor]:
    """Final-normed states [T, H] of each step of training-time test (the head is deferred).

    Step k reads the text's own token t + 1 + k at index t, the state that step k - 1 left there,
    and rotates by t + k: what a chain of k drafts after the pair t would see in serving.
    """
    attention = TrainingAttention(batch.documents)
    hidden_TH = draft.combine(features_TF)
    states = []
    for step in range(num_steps):
        output = draft.forward(
            batch.shifted(step), hidden_TH, batch.position_T + step, batch.position_T, attention
        )
        states.append(output.logits_TV)
        hidden_TH = output.hidden_TH
    return states


class Trainer:
    """One process's models and optimizer, and the steps that it takes."""

    def __init__(
        self,
        target: Target,
        draft: Eagle3Draft,
        corpus: Corpus,
        *,
        settings: TrainSettings,
        processes: Processes | None = None,
    ) -> None:
        self.target, self.draft, self.corpus, self.settings = target, draft, corpus, settings
        self.processes = processes or Processes()
        if settings.batches_per_step % self.processes.count:
            raise EyasError(
                f"tokens_per_step / tokens_per_batch is {settings.batches_per_step} batches, which "
                f"{self.processes.count} processes cannot share evenly: lower tokens_per_batch"
            )
        self.master = MasterWeights(draft)
        self.master.publish()
        flat = self.master.flat
        self.optimizer = torch.optim.AdamW(
            [flat], betas=BETAS, weight_decay=WEIGHT_DECAY, fused=flat.is_cuda
        )
        self._require_draft_only()
        self.num_steps = settings.num_steps or self._steps_of_epochs()
        self._counts = corpus.loss_counts(settings.num_draft_steps)
        self.metrics = Metrics(settings.num_draft_steps, flat)

    def _require_draft_only(self) -> None:
        """Nothing of the target is trained or even could be."""
        shared = {t.data_ptr() for t in self.target.get_embed_and_head()}
        assert shared.isdisjoint(p.data_ptr() for p in self.master.parameters.values())
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        assert len(trained) == 1 and trained[0] is self.master.flat
        if isinstance(self.target, torch.nn.Module):
            assert not any(p.requires_grad for p in self.target.parameters())

    def _steps_of_epochs(self) -> int:
        settings = self.settings
        num_batches = count_batches(
            self.corpus.lengths,
            tokens_per_batch=settings.tokens_per_batch,
            seed=settings.seed,
            num_epochs=settings.num_epochs,
        )
        return math.ceil(num_batches / settings.batches_per_step)

    def plans(self, after_step: int) -> Iterator[tuple[int, list[list[int]]]]:
        """(epoch, members of each batch) of the steps that come after `after_step`, for ever."""
        settings = self.settings
        batches = plan_batches(
            self.corpus.lengths, tokens_per_batch=settings.tokens_per_batch, seed=settings.seed
        )
        size = settings.batches_per_step
        batches = itertools.islice(batches, after_step * size, None)
        while True:
            step = list(itertools.islice(batches, size))
            yield step[-1][0], [members for _, members in step]

    def run_step(self, step: int, plan: list[list[int]]) -> None:
        """Optimizer step number `step` (from 1) over these batches, of which each process takes
        its share."""
        settings, processes = self.settings, self.processes
        normalizer_S = self._counts[list(itertools.chain(*plan))].sum(0).tolist()
        for members in plan[processes.rank :: processes.count]:
            batch = make_batch(
                self.corpus,
                members,
                num_steps=settings.num_draft_steps,
                device=self.master.flat.device,
            )
            output = self._backward(batch, normalizer_S)
            self.metrics.add(output)
        flat = self.master.flat
        assert flat.grad is not None
        processes.sum_(flat.grad)
        norm = torch.linalg.vector_norm(flat.grad)
        flat.grad.mul_((settings.clip_norm / (norm + 1e-6)).clamp_(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        self.master.publish()
        flat.grad.zero_()
        num_tokens = int(self.corpus.lengths[list(itertools.chain(*plan))].sum())
        self.metrics.end_step(normalizer_S, norm, num_tokens)

    def _backward(self, batch: Batch, normalizer_S: list[int]) -> LossOutput:
        """Gradients of one batch, added to the master's."""
        settings, draft = self.settings, self.draft
        captured = capture(self.target, batch, draft.boundaries)
        assert captured.features_TF is not None and draft.lm_head is not None
        states = draft_states(draft, batch, captured.features_TF, settings.num_draft_steps)
        teacher = Teacher(
            self.target, captured.hidden_TH, draft.target_ids_V, settings.require_kept_argmax
        )
        output = distillation_loss(
            [state.detach() for state in states],
            draft.lm_head.weight.detach(),
            teacher,
            batch.loss_rows,
            normalizer_S=normalizer_S,
            decay=settings.step_decay,
        )
        torch.autograd.backward(states, output.grad_z)
        self.master.collect({HEAD: output.grad_head_VH})
        return output

    def learning_rate(self, step: int) -> float:
        """The rate of a step."""
        settings = self.settings
        return learning_rate(
            step,
            num_steps=self.num_steps,
            peak=settings.learning_rate,
            final_ratio=settings.final_learning_rate_ratio,
            warmup_ratio=settings.warmup_ratio,
        )


def train(
    target: Target,
    draft_config: DraftConfig,
    *,
    kept_ids: Tensor,
    records: Iterable[Record],
    settings: TrainSettings,
    out_dir: Path,
    progress: Callable[[TrainProgress], None] | None = None,
    stop_at: int | None = None,
    export_dtype: torch.dtype = torch.bfloat16,
) -> TrainResult:
    """Train a draft for `target` (loaded, on its device; it is only read) into `out_dir`.

    kept_ids: int64, ascending target ids of the draft's vocabulary. out_dir gets log.jsonl and
    checkpoints/step-NNNNNN, each a draft that serves (SpecForge's layout, `export_dtype`); the
    newest one also holds the training state. When out_dir has one of the same run, training goes
    on after it exactly (up to the order of sums in a GPU's attention); of another run, EyasError.
    stop_at: end after this step, to go on later. progress: called with each log line (by the first
    process only, as files are written). Several processes (torch.distributed) split each step's
    batches and give the same result as one.
    """
    processes = Processes.current()
    trainer, identity = _prepare(
        target, draft_config, records=records, kept_ids=kept_ids, settings=settings
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    first = _resume(trainer, out_dir, identity)
    last_step = min(trainer.num_steps, stop_at or trainer.num_steps)
    clock = _Clock(trainer, first)
    last = None
    for step, (epoch, plan) in zip(
        range(first + 1, last_step + 1), trainer.plans(first), strict=False
    ):
        trainer.run_step(step, plan)
        saves = step == last_step or step % settings.checkpoint_every == 0
        if saves or step % settings.log_every == 0:
            last = clock.report(step, epoch)
            if processes.is_first:
                append_line(out_dir, last)
                if progress is not None:
                    progress(last)
        if saves:
            if processes.is_first:
                _save(trainer, out_dir, step, identity, export_dtype)
            processes.wait()
            clock.skip()
    newest = list(find_checkpoints(out_dir).items())[-1]
    return TrainResult(trainer.draft, newest[1], newest[0], last)


def _prepare(
    target: Target,
    draft_config: DraftConfig,
    *,
    records: Iterable[Record],
    kept_ids: Tensor,
    settings: TrainSettings,
) -> tuple[Trainer, RunIdentity]:
    decoder = draft_config.decoder
    if settings.max_length > decoder.max_position_embeddings:
        raise EyasError(
            f"max_length ({settings.max_length}) is more than the draft's "
            f"max_position_embeddings ({decoder.max_position_embeddings})"
        )
    # Refuse now what could not be exported in the end.
    draft_config_json(
        draft_config,
        num_target_layers=target.num_layers,
        format="specforge",
        dtype=torch.bfloat16,
    )
    corpus = Corpus.read(records, max_length=settings.max_length)
    if int(corpus.tokens.max()) >= target.vocab_size:
        raise EyasError(
            f"the conversations have the token id {corpus.tokens.max()}, the target only "
            f"{target.vocab_size} tokens: they were tokenized for another"
        )
    draft = build_draft(target, draft_config, kept_ids, seed=settings.seed)
    processes = Processes.current()
    trainer = Trainer(target, draft, corpus, settings=settings, processes=processes)
    identity = RunIdentity.of(
        settings,
        num_steps=trainer.num_steps,
        corpus=corpus.fingerprint(),
        draft=repr(draft_config),
        kept_ids=hashlib.sha256(kept_ids.cpu().numpy().tobytes()).hexdigest(),
    )
    return trainer, identity


def _resume(trainer: Trainer, out_dir: Path, identity: RunIdentity) -> int:
    """The step after which to go on: 0 in a new folder."""
    found = [f for f in find_checkpoints(out_dir).values() if (f / STATE_FILE).exists()]
    step = 0
    if found:
        step, trainer.metrics.num_tokens = load_state(
            found[-1], master=trainer.master, optimizer=trainer.optimizer, identity=identity
        )
    if trainer.processes.is_first:
        cut_log(out_dir, step)
    trainer.processes.wait()
    return step


def _save(
    trainer: Trainer, out_dir: Path, step: int, identity: RunIdentity, dtype: torch.dtype
) -> None:
    folder = begin_checkpoint(out_dir, step)
    export_draft(
        trainer.draft,
        folder,
        num_target_layers=trainer.target.num_layers,
        target_vocab_size=trainer.target.vocab_size,
        dtype=dtype,
    )
    save_state(
        folder,
        step=step,
        master=trainer.master,
        optimizer=trainer.optimizer,
        num_tokens=trainer.metrics.num_tokens,
        identity=identity,
    )
    finish_checkpoint(out_dir, step)


class _Clock:
    """Makes log lines; measures rates without the time that checkpoints take."""

    def __init__(self, trainer: Trainer, first_step: int) -> None:
        self._trainer, self._last_step = trainer, first_step
        self._num_tokens = trainer.metrics.num_tokens
        self._start = time.perf_counter()

    def skip(self) -> None:
        """Leave out the time since the last report."""
        self._start = time.perf_counter()

    def report(self, step: int, epoch: int) -> TrainProgress:
        """The means since the last report. Raises EyasError when training has diverged."""
        trainer = self._trainer
        losses, accuracies, norm = trainer.metrics.read(trainer.processes)
        now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        num_tokens = trainer.metrics.num_tokens
        weights = [trainer.settings.step_decay**k for k in range(len(losses))]
        loss = sum(weight * one for weight, one in zip(weights, losses, strict=True))
        rate = trainer.learning_rate(step)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise EyasError(
                f"training diverged before step {step} (loss {loss}, gradient norm {norm}): lower "
                f"learning_rate (it is {rate:.2g} here) and train into another folder"
            )
        per_step = seconds / max(step - self._last_step, 1)
        line = TrainProgress(
            step=step,
            num_steps=trainer.num_steps,
            epoch=epoch,
            loss=loss,
            loss_by_step=tuple(losses),
            accuracy_by_step=tuple(accuracies),
            learning_rate=rate,
            gradient_norm=norm,
            tokens=num_tokens,
            tokens_per_second=(num_tokens - self._num_tokens) / seconds,
            seconds_left=(trainer.num_steps - step) * per_step,
        )
        self._last_step, self._num_tokens, self._start = step, num_tokens, now
        return line
