"""Training itself: it learns what it is shown, alone or shared out, and waits for no device."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from fixtures.tiny import random_prompts, run, tiny_target
from fixtures.training import (
    chain_engine,
    greedy_text,
    load_served,
    random_talks,
    settings,
    talk,
    vocabulary_with,
)
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.train.draft import build_draft, design_draft, trainable_parameters
from eyas.train.journal import TrainProgress, read_log
from eyas.train.packing import Corpus, count_batches
from eyas.train.processes import Processes
from eyas.train.schedule import learning_rate
from eyas.train.trainer import Trainer, train
from eyas.types import EyasError, SamplingParams

KEPT = torch.arange(0, 64, 2)


def test_overfitting_a_talk_and_serving_it(tmp_path: Path) -> None:
    """Accuracy 1 at every step, and the engine accepts nearly every draft of that prompt."""
    depth = 4
    target = tiny_target()
    target.lm_head.weight.data.mul_(8)  # no near ties, which soft targets do not decide
    (prompt,) = random_prompts([9])
    text = greedy_text(target, prompt, 41)
    kept_V = vocabulary_with(text, 48, target.vocab_size)
    result = train(
        target,
        design_draft(target.config, len(kept_V), boundaries=(1, 2, 4)),
        kept_ids=kept_V,
        records=[talk(text, len(prompt))],
        settings=settings(
            num_steps=150, num_draft_steps=depth, learning_rate=1e-2, checkpoint_every=1000
        ),
        out_dir=tmp_path,
    )
    assert result.last is not None
    assert result.last.accuracy_by_step == (1.0,) * depth
    draft = load_served(result.checkpoint, target, torch.float32)
    engine = chain_engine(target, draft, depth=depth, dtype=torch.float32)
    (answer,) = run(engine, [prompt], [SamplingParams(max_tokens=41, temperature=0)])
    assert [*prompt, *answer.tokens] == text
    assert sum(answer.rounds) / len(answer.rounds) >= depth + 0.5


def make_trainer(processes: Processes | None = None, **changes: Any) -> Trainer:
    target = tiny_target()
    options = settings(tokens_per_step=128, **changes)
    draft = build_draft(target, design_draft(target.config, len(KEPT)), KEPT, seed=0)
    corpus = Corpus.read(random_talks(9), max_length=options.max_length)
    return Trainer(target, draft, corpus, settings=options, processes=processes)


def test_first_weights() -> None:
    target = tiny_target()
    embed_VH, head_VH = target.get_embed_and_head()
    draft = build_draft(target, design_draft(target.config, len(KEPT)), KEPT, seed=0)
    weights = trainable_parameters(draft)
    assert torch.equal(weights["lm_head.weight"], head_VH[KEPT])
    assert torch.equal(weights["norm.weight"], target.model.norm.weight)
    assert weights["norm.weight"].data_ptr() != target.model.norm.weight.data_ptr()
    assert (weights["layers.0.hidden_norm.weight"] == 1).all()
    assert weights["fc.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert draft.embed_tokens is not None
    assert draft.embed_tokens.weight.data_ptr() == embed_VH.data_ptr()
    again = build_draft(target, design_draft(target.config, len(KEPT)), KEPT, seed=0)
    assert torch.equal(again.fc.weight, draft.fc.weight)


def test_target_is_not_touched() -> None:
    """Its weights stay as they are, and the optimizer holds the draft's master copy alone."""
    trainer = make_trainer()
    assert isinstance(trainer.target, torch.nn.Module)
    before = {name: p.clone() for name, p in trainer.target.named_parameters()}
    for step, (_, plan) in zip((1, 2), trainer.plans(0), strict=False):
        trainer.run_step(step, plan)
    assert all(torch.equal(p, before[n]) for n, p in trainer.target.named_parameters())
    assert all(p.grad is None for p in trainer.target.parameters())
    (group,) = trainer.optimizer.param_groups
    assert group["params"] == [trainer.master.flat] and group["weight_decay"] == 0
    assert trainer.master.flat.numel() == sum(
        p.numel() for n, p in trainer.draft.named_parameters() if "embed" not in n
    )


def test_every_weight_is_trained() -> None:
    trainer = make_trainer()
    before = {name: p.clone() for name, p in trainer.master.parameters.items()}
    _, plan = next(trainer.plans(0))
    trainer.run_step(1, plan)
    unchanged = [n for n, p in trainer.master.parameters.items() if torch.equal(p, before[n])]
    assert not unchanged


def test_a_target_that_could_be_trained_is_refused() -> None:
    target = tiny_target()
    next(target.parameters()).requires_grad_()
    draft = build_draft(target, design_draft(target.config, len(KEPT)), KEPT, seed=0)
    corpus = Corpus.read(random_talks(2), max_length=64)
    with pytest.raises(AssertionError):
        Trainer(target, draft, corpus, settings=settings())


def test_batches_of_a_step_add_up() -> None:
    """One batch of 128 tokens gives the gradients of two of 64 with the same talks."""
    one, two = make_trainer(tokens_per_batch=128), make_trainer(tokens_per_batch=64)
    _, plan = next(two.plans(0))
    two.run_step(1, plan)
    one.run_step(1, [[member for members in plan for member in members]])
    torch.testing.assert_close(one.master.flat, two.master.flat, rtol=1e-4, atol=1e-6)
    assert len(plan) == 2
    losses = [trainer.metrics.read(Processes())[0] for trainer in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class NoWaiting(TorchDispatchMode):
    """Fails on operations whose result the host must know before it can go on."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        assert not name.startswith(self.NAMES), f"{name} waits for the device"
        if name == "index":  # a mask as an index is a nonzero
            assert all(i is None or i.dtype != torch.bool for i in args[1])
        return function(*args, **kwargs or {})


def test_a_step_never_waits_for_the_device() -> None:
    trainer = make_trainer()
    plans = trainer.plans(0)
    trainer.run_step(1, next(plans)[1])  # cores have been tried by now
    trainer.optimizer.defaults["fused"] = True
    with NoWaiting():
        probe = torch.zeros(1)
        with pytest.raises(AssertionError, match="waits"):
            probe.item()
        loss_and_gradients(trainer, next(plans)[1])


def loss_and_gradients(trainer: Trainer, plan: list[list[int]]) -> None:
    """A step without the optimizer, which on a CPU counts its steps on the host."""
    optimizer_step = trainer.optimizer.step
    trainer.optimizer.step = lambda: None  # type: ignore[method-assign, assignment, return-value]
    trainer.run_step(2, plan)
    trainer.optimizer.step = optimizer_step  # type: ignore[method-assign]


def test_diverging_is_reported(tmp_path: Path) -> None:
    target = tiny_target()
    with torch.no_grad():
        target.model.layers[3].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(EyasError, match="diverged before step 5"):
        train(
            target,
            design_draft(target.config, len(KEPT)),
            kept_ids=KEPT,
            records=random_talks(4),
            settings=settings(),
            out_dir=tmp_path,
        )


def test_log_and_progress(tmp_path: Path) -> None:
    target, lines = tiny_target(), list[TrainProgress]()
    result = train(
        target,
        design_draft(target.config, len(KEPT)),
        kept_ids=KEPT,
        records=random_talks(4),
        settings=settings(log_every=4),
        out_dir=tmp_path,
        progress=lines.append,
    )
    assert [line.step for line in lines] == [4, 8, 10] == [x["step"] for x in read_log(tmp_path)]
    last = lines[-1]
    assert result.last == last and last.num_steps == 10 and last.seconds_left == 0
    assert last.loss == pytest.approx(sum(0.8**k * x for k, x in enumerate(last.loss_by_step)))
    assert all(0 <= a <= 1 for a in last.accuracy_by_step) and len(last.accuracy_by_step) == 3
    assert last.tokens_per_second > 0 and last.gradient_norm > 0
    assert last.learning_rate == pytest.approx(3e-4)
    assert lines[-1].loss < lines[0].loss


def test_learning_rate() -> None:
    rates = [
        learning_rate(step, num_steps=100, peak=1.0, final_ratio=0.1, warmup_ratio=0.05)
        for step in range(1, 101)
    ]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[-1] == pytest.approx(0.1) and rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[51] == pytest.approx(0.55, abs=0.02)
    assert learning_rate(1, num_steps=1, peak=1.0, final_ratio=0.1, warmup_ratio=0.0) == 0.1


def test_epochs_give_steps() -> None:
    trainer = make_trainer(num_steps=None, num_epochs=2.5)
    per_step = 128 // 64
    assert trainer.num_steps == -(-count_batches_by_hand(trainer, 2.5) // per_step)


def count_batches_by_hand(trainer: Trainer, num_epochs: float) -> int:
    seen = count = 0
    wanted = num_epochs * trainer.corpus.lengths.sum()
    for _, plan in trainer.plans(0):
        for members in plan:
            seen += trainer.corpus.lengths[members].sum()
            count += 1
            if seen >= wanted:
                lengths = trainer.corpus.lengths
                found = count_batches(lengths, tokens_per_batch=64, seed=0, num_epochs=num_epochs)
                assert found == count
                return count
    raise AssertionError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_per_batch": 48, "max_length": 48}, "multiple of tokens_per_batch"),
        ({"max_length": 100}, "must fit"),
        ({"learning_rate": 0.0}, "above 0"),
        ({"num_draft_steps": 65}, "at most 64"),
        ({"warmup_ratio": 1.5}, "between 0 and 1"),
        ({"num_steps": 0}, "at least 1"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EyasError, match=words):
        settings(**changes)


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    config = design_draft(target.config, len(KEPT))

    def start(**changes: Any) -> None:
        options: dict[str, Any] = {"kept_ids": KEPT, "records": random_talks(2)}
        train(target, config, settings=settings(), out_dir=tmp_path, **options | changes)

    with pytest.raises(EyasError, match="rows for a vocabulary of 3"):
        start(kept_ids=KEPT[:3])
    with pytest.raises(EyasError, match="token id 64"):
        start(records=[talk([1, 2, 64, 3, 4], 1)])
    with pytest.raises(EyasError, match="cannot share evenly"):
        make_trainer(Processes(0, 4))
    half = tiny_target().half()
    with pytest.raises(EyasError, match="loss scaling"):
        build_draft(half, config, KEPT, seed=0)


def _train_in(rank: int, folder: str) -> None:
    """One of two processes (a spawned one: it imports all anew)."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    _train_shared(Path(folder) / "two")
    torch.distributed.destroy_process_group()


def _train_shared(out_dir: Path) -> None:
    target = tiny_target()
    train(
        target,
        design_draft(target.config, len(KEPT)),
        kept_ids=KEPT,
        records=random_talks(9),
        settings=settings(num_steps=6, tokens_per_step=128, log_every=3, checkpoint_every=3),
        out_dir=out_dir,
        export_dtype=torch.float32,
    )


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Each takes half of every step's batches; weights, losses and files are those of one."""
    multiprocessing.spawn(_train_in, args=(str(tmp_path),), nprocs=2)
    _train_shared(tmp_path / "one")
    one, two = (read_log(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        assert b["loss_by_step"] == pytest.approx(a["loss_by_step"], rel=1e-4)
        assert b["accuracy_by_step"] == pytest.approx(a["accuracy_by_step"], abs=0.02)
        assert (a["tokens"], a["learning_rate"]) == (b["tokens"], b["learning_rate"])
    files = [
        tmp_path / name / "checkpoints/step-000006/model.safetensors" for name in ("one", "two")
    ]
    weights = [load_file(file) for file in files]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-5)
