"""The round can be captured: no host synchronisation, no shape that depends on data (D15).

Two nets over the same rounds: a dispatch mode that sees every operator, and the meta device, on
which a value that is asked for does not exist.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fixtures.capture_guard import CaptureError, CaptureGuard, on_meta, trace_of
from fixtures.tiny import make_engine, random_prompts, run, scripted, worker_shape, wrong_sequence
from fixtures.world import World, world
from torch import Tensor

from eyas.config import PLAIN, TreeShape
from eyas.engine.worker import Worker
from eyas.kernels import SamplingMode, native
from eyas.types import SamplingParams

VIOLATIONS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x[0]),
    "if": lambda x: 1 if (x > 0).all() else 0,
    "slice by a value": lambda x: x[: x.argmax()],
    "nonzero": lambda x: x.nonzero(),
    "where alone": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask assignment": lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "from a list": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "a list as an index": lambda x: x[[0, 2]],
    "repeats by a tensor": lambda x: x.repeat_interleave((x > 0).long()),
    "bincount": lambda x: (x > 0).long().bincount(),
    "to another device": lambda x: x.to("meta") + 1,
    "split by a value": lambda x: x.split(x.long().tolist()),
    "equal": lambda x: torch.equal(x, x + 1),
}


@pytest.mark.parametrize("name", list(VIOLATIONS))
def test_the_guard_sees_violations(name: str) -> None:
    """Each of them, or the meta device does: `tolist` goes past the dispatcher on a CPU."""
    function = VIOLATIONS[name]
    caught = False
    try:
        with CaptureGuard():
            function(torch.tensor([1.0, 1.0, 1.0]))
    except CaptureError:
        caught = True
    if not caught:
        with pytest.raises((RuntimeError, NotImplementedError)):
            function(torch.ones(3, device="meta"))


def test_the_guard_lets_ordinary_work_pass() -> None:
    x, index = torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    with CaptureGuard() as guard:
        y = torch.where(x > 2, x, 0.0)[index]
        y = y.repeat_interleave(2, dim=0) + torch.arange(3, device=x.device)
        x[index] = y[:2].softmax(-1)
    assert len(guard.trace) > 5


SHAPES = {"plain": PLAIN, "chain": TreeShape(3, 1, 4), "tree": TreeShape(3, 3, 10)}
MODES = {
    "greedy": SamplingMode(),
    "sampled": SamplingMode(noise=True),
    "everything": SamplingMode(noise=True, truncate=True, penalize=True, bias=True, num_logprobs=4),
}
OPTIONS = SamplingParams(
    max_tokens=200,
    min_tokens=30,
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias={3: 2.0, 9: -1.0},
    seed=11,
    logprobs=4,
)
GREEDY = SamplingParams(max_tokens=200, temperature=0)


@pytest.fixture(scope="module")
def w() -> World:
    return world()


@pytest.fixture(params=["native", "reference"])
def kernels_in_use(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the C kernels, which the guard does not see, and with torch operations alone."""
    with native.disabled() if request.param == "reference" else contextlib.nullcontext():
        yield


def prepared(w: World, tree: TreeShape, *, seed: int, draft: object = None) -> Worker:
    """A worker with three prompts in their slots (others of the same lengths for other seeds)."""
    engine = make_engine(w.target, draft or w.draft, worker_shape(tree, num_slots=4))
    for number, prompt in enumerate(random_prompts([5, 17, 40], seed=seed)):
        engine.add(str(number), prompt, OPTIONS if number else GREEDY)
    for _ in range(1 + seed % 2):
        engine.step()
    return engine.worker


@pytest.mark.usefixtures("kernels_in_use")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_round_neither_waits_nor_changes_shape(w: World, shape: str, mode: str) -> None:
    """And it is the same sequence of operators and shapes for other requests, lengths and
    acceptances: what was captured for one is right for the other."""
    tree = SHAPES[shape]
    first = trace_of(prepared(w, tree, seed=1), tree, MODES[mode])
    second = trace_of(prepared(w, tree, seed=2), tree, MODES[mode])
    assert len(first) > 100
    assert first == second
    half = len(first) // 2
    assert first[:half] == first[half:]


@pytest.mark.usefixtures("kernels_in_use")
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_finished_and_accepting_requests_take_the_same_path(w: World, shape: str) -> None:
    """A perfect draft, and slots that have nothing to do."""
    tree = SHAPES[shape]
    usual = trace_of(prepared(w, tree, seed=1), tree, MODES["sampled"])
    idle = prepared(w, tree, seed=1)
    idle.state.active_S.fill_(False)
    assert trace_of(idle, tree, MODES["sampled"]) == usual
    prompts = random_prompts([5, 17, 40], seed=1)
    options = [dataclasses.replace(o, max_tokens=50) for o in (GREEDY, OPTIONS, OPTIONS)]
    answers = [g.tokens for g in run(make_engine(w.target), prompts, options)]
    scripts = {
        "right": [p + a for p, a in zip(prompts, answers, strict=True)],
        "wrong": [wrong_sequence(p, a) for p, a in zip(prompts, answers, strict=True)],
    }
    traces, accepted = {}, {}
    for name, script in scripts.items():
        worker = prepared(w, tree, seed=1, draft=scripted(script))
        before = worker.state.length_S.clone()
        traces[name] = trace_of(worker, tree, MODES["everything"])
        accepted[name] = (worker.state.length_S - before)[:3].tolist()
    assert accepted == {"right": [2 * (tree.depth + 1)] * 3, "wrong": [2, 2, 2]}
    assert traces["right"] == traces["wrong"]


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("shape", list(SHAPES))
@torch.inference_mode()
def test_the_round_runs_without_values(w: World, shape: str, mode: str) -> None:
    """On the meta device nothing can be read, so nothing is."""
    tree = SHAPES[shape]
    worker = on_meta(prepared(w, tree, seed=1))
    slots_B = torch.empty(4, dtype=torch.int64, device="meta")
    out = worker.runner.round(slots_B, tree, max_kv_len=128, mode=MODES[mode])
    assert out.packed.is_meta and out.packed.shape == (4, tree.depth + 1 + 3)
    if MODES[mode].num_logprobs is not None:
        assert out.logprob is not None and out.logprob.shape == (4, tree.depth + 1, 5)
    with pytest.raises((RuntimeError, NotImplementedError)):
        out.packed.tolist()


def test_the_guard_is_at_work_in_the_round(w: World) -> None:
    """A synchronisation put into the round is found there."""
    tree = SHAPES["tree"]
    worker = prepared(w, tree, seed=1)
    emit = worker.runner.sampler.emit

    def with_a_peek(*args: Any, **kwargs: Any) -> Any:
        result = emit(*args, **kwargs)
        return result if result[0].sum() else result

    worker.runner.sampler.emit = with_a_peek  # type: ignore[method-assign]
    with native.disabled(), pytest.raises(CaptureError, match="_local_scalar_dense"):
        trace_of(worker, tree, MODES["greedy"])
