"""Whole rounds in Triton are the torch ones; and what enters a slot in one packed row."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures.tiny import (
    make_engine,
    random_prompts,
    run,
    scripted,
    tiny_draft,
    tiny_target,
    worker_shape,
)
from torch import Tensor

from eyas import kernels
from eyas.cache.pool import TRASH_PAGE
from eyas.config import PLAIN, TreeShape
from eyas.engine.worker import Worker
from eyas.kernels import SamplingMode
from eyas.speculative.state import SlotSettings
from eyas.types import SamplingParams

pytestmark = pytest.mark.interpreter

GREEDY, SAMPLED = SamplingMode(), SamplingMode(noise=True)


ROUNDS = {
    "plain": (PLAIN, SAMPLED),
    "chain": (TreeShape(3, 1, 4), SAMPLED),
    "greedy chain": (TreeShape(2, 1, 3), GREEDY),
    "tree": (TreeShape(3, 2, 8), SAMPLED),
    "one level": (TreeShape(1, 3, 4), SAMPLED),
    "more candidates than kernels take": (TreeShape(2, 17, 20), SAMPLED),
    "everything": (
        TreeShape(2, 2, 6),
        SamplingMode(noise=True, truncate=True, penalize=True, bias=True, num_logprobs=2),
    ),
}
OPTIONS = SamplingParams(
    max_tokens=60,
    min_tokens=8,
    temperature=0.8,
    top_k=20,
    top_p=0.95,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={3: 2.0, 9: -1.0},
    seed=11,
    logprobs=2,
)
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0, seed=1),
    SamplingParams(max_tokens=9, temperature=1.0, seed=3),
    OPTIONS,
]


def use_triton(worker: Worker) -> None:
    """What a GPU's worker has from the start."""
    from eyas.speculative.triton_steps import TritonSteps

    worker.runner.steps = TritonSteps(worker.state)
    worker.runner.sampler = worker.runner.steps.sampler
    if worker.proposer is not None:
        worker.proposer.steps = worker.runner.steps


def started(make_draft: Callable[[], Any], shape: TreeShape, *, triton: bool) -> Worker:
    """Three requests after their prefill and a round."""
    engine = make_engine(tiny_target(), make_draft(), worker_shape(shape, num_slots=4))
    if triton:
        use_triton(engine.worker)
    for number, prompt in enumerate(random_prompts([14, 3, 33])):
        engine.add(str(number), prompt, PARAMS[number])
    engine.step()
    for request in engine.requests.values():  # room for all that the test will add
        request.num_unread = 60
        engine.scheduler.grow(request)
        assert request.slot is not None
        engine.worker.set_pages({request.slot: request.pages})
    return engine.worker


def lucky_draft() -> Any:
    """Right about most tokens of the greedy request, and of none of the others."""
    prompts = random_prompts([14])
    answer = run(make_engine(tiny_target()), prompts, PARAMS[:1])[0].tokens
    wrong = [token if place % 5 else (token + 1) % 64 for place, token in enumerate(answer)]
    return scripted([prompts[0] + wrong])


DRAFTS = {"random": lambda: tiny_draft(tiny_target()), "lucky": lucky_draft}


@pytest.mark.parametrize(
    ("name", "draft"),
    [*((name, "lucky") for name in ROUNDS), ("chain", "random"), ("tree", "random")],
)
@torch.inference_mode()
def test_whole_rounds(name: str, draft: str) -> None:
    """The same tokens, state, keys and values, with padding in the batch."""
    shape, mode = ROUNDS[name]
    theirs, ours = (started(DRAFTS[draft], shape, triton=triton) for triton in (False, True))
    trash = ours.state.trash_slot
    slots_B, most = torch.tensor([2, trash, 0, 1, trash]), 0
    for _ in range(2):
        want, got = (
            worker.runner.round(slots_B, shape, max_kv_len=128, mode=mode)
            for worker in (theirs, ours)
        )
        live = [0, 2, 3]
        for request in live:
            num = int(want.packed[request, -3])
            assert torch.equal(got.packed[request, -3:], want.packed[request, -3:])
            assert torch.equal(got.packed[request, :num], want.packed[request, :num])
            if mode.num_logprobs is not None:
                assert got.logprob is not None and want.logprob is not None
                torch.testing.assert_close(got.logprob[request, :num], want.logprob[request, :num])
        most = max(most, int(want.packed[:, -3].max()))
        assert_same_worker(ours, theirs)
    assert draft != "lucky" or most == shape.depth + 1


def assert_same_worker(ours: Worker, theirs: Worker) -> None:
    """State of all real slots, and all that their pages hold."""
    close = {"atol": 1e-4, "rtol": 1e-4, "equal_nan": True}
    for name, value in vars(theirs.state).items():
        if isinstance(value, Tensor):
            mine = getattr(ours.state, name)[:-1]
            torch.testing.assert_close(mine, value[:-1], **close, msg=lambda m, n=name: f"{n}: {m}")
    pools = [(ours.target_pool, theirs.target_pool), (ours.draft_pool, theirs.draft_pool)]
    for mine, other in pools:
        assert mine is not None and other is not None
        real = slice(TRASH_PAGE * mine.page_size + mine.page_size, mine.num_page_rows)
        torch.testing.assert_close(mine.k_LRKD[:, real], other.k_LRKD[:, real], **close)
        torch.testing.assert_close(mine.v_LRKD[:, real], other.v_LRKD[:, real], **close)
    assert ours.proposer is not None and theirs.proposer is not None
    ends = [p.page_end_PH[TRASH_PAGE + 1 :] for p in (ours.proposer, theirs.proposer)]
    torch.testing.assert_close(*ends, **close)


def test_a_packed_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes what the assignments write, and one slot only."""
    shape = TreeShape(1, 3, 4)
    ours = started(DRAFTS["random"], shape, triton=False).state
    ours.stop_ids_SM = ours.stop_ids_SM[:, :8]  # rows need not follow one another
    theirs = copy.deepcopy(ours)
    everything = SamplingParams(
        temperature=0.3,
        top_k=7,
        top_p=0.35,
        min_p=0.15,
        min_tokens=4,
        presence_penalty=-1.5,
        frequency_penalty=0.7,
        repetition_penalty=1.1,
        logit_bias={3: -2.5, 8: 7.0},
        speculation=False,
    )
    for slot, params in ((2, everything), (0, SamplingParams(temperature=0)), (2, OPTIONS)):
        request = SlotSettings(params, 9, -(2**63), [5, 2**40], [1, 2, 3], [4])
        theirs.admit(slot, request)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "has_triton", lambda device: True)
            ours.admit(slot, request)
        for name, value in vars(theirs).items():
            if isinstance(value, Tensor):
                assert torch.equal(getattr(ours, name), value), name
