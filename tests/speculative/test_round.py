"""The round by itself: shapes that change from round to round, padding, and slots at rest (D1)."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from fixtures.tiny import make_engine, worker_shape
from fixtures.world import World, world

from eyas.cache.pool import NULL_PAGE
from eyas.config import PLAIN, TreeShape
from eyas.engine.engine import Engine
from eyas.engine.worker import Worker
from eyas.kernels import FINISH_LENGTH, FINISH_STOP, NO_FINISH, SamplingMode
from eyas.speculative.round import RoundOutput

MODE = SamplingMode(noise=True)
CHAIN, TREE, WIDEST = TreeShape(3, 1, 4), TreeShape(3, 2, 9), TreeShape(4, 3, 25)
CHOSEN = (1, 9, 16)  # prompts of 2, 24 and 64 tokens: sampled, sampled, greedy


@pytest.fixture(scope="module")
def w() -> World:
    return world()


def started(w: World) -> tuple[Engine, Worker]:
    """An engine whose three requests have had their prefill and one round of the widest tree."""
    engine = make_engine(w.target, w.draft, worker_shape(WIDEST, num_slots=4), chunk_tokens=500)
    for index in CHOSEN:
        engine.add(str(index), w.prompts[index], w.params[index])
    engine.step()
    for request in engine.requests.values():  # room for all that the test will add
        request.num_unread = 60
        engine.scheduler.grow(request)
        assert request.slot is not None
        engine.worker.set_pages({request.slot: request.pages})
    return engine, engine.worker


def known(w: World, worker: Worker, slot: int, index: int) -> list[int]:
    """The answer so far by the device: as long as the committed length and the pending token."""
    num_new = int(worker.state.length_S[slot]) + 1 - len(w.prompts[index])
    answer = w.plain[index][:num_new]
    assert int(worker.state.pending_S[slot]) == answer[-1]
    return answer


def emitted(output: RoundOutput, row: int) -> list[int]:
    packed = output.packed[row].tolist()
    return packed[: packed[-3]]


@torch.inference_mode()
def run_round(
    worker: Worker, slots: Sequence[int], tree: TreeShape, *, max_kv_len: int = 320
) -> RoundOutput:
    return worker.runner.round(torch.tensor(slots), tree, max_kv_len=max_kv_len, mode=MODE)


@torch.inference_mode()
def prime(worker: Worker, slots: Sequence[int]) -> None:
    assert worker.proposer is not None
    worker.proposer.prime(torch.tensor(slots), max_kv_len=320, mode=MODE)


@pytest.mark.parametrize("seed", [0, 1])
def test_shapes_may_change_from_round_to_round(w: World, seed: int) -> None:
    """Text and state between rounds are the same whatever the shapes were (D1).

    Acceptance too: a chain from here accepts what it accepts when all rounds were chains.
    """
    _, worker = started(w)
    _, straight = started(w)
    generator = torch.Generator().manual_seed(seed)
    shapes = [PLAIN, CHAIN, TREE, WIDEST, TreeShape(1, 1, 2), TreeShape(1, 3, 4)]
    primed, slots = True, [0, 1, 2]
    for _ in range(12):
        tree = shapes[int(torch.randint(0, len(shapes), (1,), generator=generator))]
        if tree.depth and not primed:
            prime(worker, slots)
        output = run_round(worker, slots, tree)
        primed = tree.depth > 0
        for slot, index in enumerate(CHOSEN):
            answer = known(w, worker, slot, index)
            assert answer[-len(emitted(output, slot)) :] == emitted(output, slot)
    prime(worker, slots)
    for slot in slots:  # bring the other worker to the same length, one token at a time
        while straight.state.length_S[slot] < worker.state.length_S[slot]:
            run_round(straight, [slot], PLAIN)
    prime(straight, slots)
    assert torch.equal(worker.state.length_S, straight.state.length_S)
    for name in ("draft_input_SH", "draft_hidden_SH", "candidate_score_SK"):
        ours, theirs = getattr(worker.state, name)[:3], getattr(straight.state, name)[:3]
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    assert torch.equal(worker.state.candidate_token_SK[:3], straight.state.candidate_token_SK[:3])
    for _ in range(6):
        ours, theirs = run_round(worker, slots, TREE), run_round(straight, slots, TREE)
        assert torch.equal(ours.packed, theirs.packed)


@pytest.mark.parametrize("tree", [PLAIN, CHAIN, WIDEST], ids=["plain", "chain", "tree"])
def test_the_bound_of_the_lengths_may_be_exact(w: World, tree: TreeShape) -> None:
    """No entry of the longest request is left out, the draft's for its pending token included."""
    _, tight = started(w)
    _, loose = started(w)
    for _ in range(8):
        longest = int(tight.state.length_S.max())
        ours = run_round(tight, [0, 1, 2], tree, max_kv_len=longest)
        theirs = run_round(loose, [0, 1, 2], tree)
        assert torch.equal(ours.packed, theirs.packed)
    if tree.depth:  # every node drafted for the longest request says so, accepted or not
        for slot in range(3):
            length = int(loose.state.length_S[slot])
            trees = [drafted(loose, slot, tree, max_kv_len=bound) for bound in (length, 320)]
            assert torch.equal(*trees)


@torch.inference_mode()
def drafted(worker: Worker, slot: int, tree: TreeShape, *, max_kv_len: int) -> torch.Tensor:
    """The tokens of a slot's next tree."""
    assert worker.proposer is not None
    slots_1 = torch.tensor([slot])
    return worker.proposer.draft_tree(slots_1, tree, max_kv_len=max_kv_len, mode=MODE).token_BN


def test_priming_twice_changes_nothing(w: World) -> None:
    _, worker = started(w)
    before = {name: value.clone() for name, value in tensors(worker).items()}
    prime(worker, [0, 1, 2])
    for name, value in tensors(worker).items():
        torch.testing.assert_close(value, before[name], msg=lambda m, n=name: f"{n}: {m}")


def tensors(worker: Worker) -> dict[str, torch.Tensor]:
    return {n: v for n, v in vars(worker.state).items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("tree", [PLAIN, CHAIN, TREE, WIDEST], ids=["plain", "c", "t", "widest"])
def test_padding_is_a_no_op(w: World, tree: TreeShape) -> None:
    """Rows of the trash slot, repeated and in between: the others' results are the same, the
    null page stays zero, and the trash slot itself does not move."""
    _, padded = started(w)
    _, plain = started(w)
    trash = padded.state.trash_slot
    for _ in range(4):
        ours = run_round(padded, [trash, 2, trash, 0, 1, trash], tree)
        theirs = run_round(plain, [2, 0, 1], tree)
        # Slots of a batch may be in any order; only the rows of real slots say something.
        assert [emitted(ours, r) for r in (1, 3, 4)] == [emitted(theirs, r) for r in range(3)]
        assert [emitted(ours, r) for r in (0, 2, 5)] == [[], [], []]
    for pool in (padded.target_pool, padded.draft_pool):
        assert pool is not None
        first = pool.page_size * NULL_PAGE
        assert not pool.k_LRKD[:, first : first + pool.page_size].any()
        assert not pool.v_LRKD[:, first : first + pool.page_size].any()
    state = padded.state
    assert (int(state.length_S[trash]), bool(state.active_S[trash])) == (0, False)
    assert state.page_table_SP[trash].eq(NULL_PAGE).all()


@pytest.mark.parametrize("tree", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_an_inactive_slot_keeps_its_state_and_its_pages(w: World, tree: TreeShape) -> None:
    """A request that ended is launched once more under run-ahead (D6)."""
    engine, worker = started(w)
    slot = 1
    worker.state.active_S[slot] = False
    names = ("length_S", "pending_S", "remaining_S", "emitted_S", "active_S", "draft_input_SH")
    before = {name: getattr(worker.state, name)[slot].clone() for name in names}
    pages = engine.scheduler.admitted[slot].pages
    pools = [worker.target_pool, worker.draft_pool]
    content = [page_content(pool, pages) for pool in pools]
    output = run_round(worker, [0, 1, 2], tree)
    assert emitted(output, slot) == [] and emitted(output, 0) and emitted(output, 2)
    for name, value in before.items():
        assert torch.equal(getattr(worker.state, name)[slot], value), name
    for pool, old in zip(pools, content, strict=True):
        assert torch.equal(page_content(pool, pages), old)


def page_content(pool: object, pages: list[int]) -> torch.Tensor:
    """Keys of some pages; NaN, which is never equal to itself, as a number."""
    size = pool.page_size  # type: ignore[attr-defined]
    rows = [page * size + i for page, i in itertools.product(pages, range(size))]
    return pool.k_LRKD[:, rows].nan_to_num(nan=1e9).clone()  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_slots_limit_of_drafted_tokens(w: World, limit: int) -> None:
    """Per request: a round emits at most limit + 1 tokens; the text is the same."""
    _, worker = started(w)
    worker.state.max_draft_S[0] = limit
    sizes = []
    for _ in range(30):
        output = run_round(worker, [0, 1, 2], WIDEST)
        sizes.append([len(emitted(output, row)) for row in range(3)])
        known(w, worker, 0, CHOSEN[0])
    assert max(size[0] for size in sizes) == limit + 1
    assert max(size[1] for size in sizes) > 3


def test_a_round_reports_what_was_accepted_before_any_cut(w: World) -> None:
    """num_accepted is the draft's merit, not the limits'."""
    _, worker = started(w)
    _, free = started(w)
    worker.state.remaining_S[:3] = 1
    cut, whole = run_round(worker, [0, 1, 2], WIDEST), run_round(free, [0, 1, 2], WIDEST)
    assert cut.packed[:, -3].tolist() == [1, 1, 1]
    assert torch.equal(cut.packed[:, -1], whole.packed[:, -1])
    assert torch.equal(whole.packed[:, -1], whole.packed[:, -3] - 1)


@pytest.mark.parametrize("tree", [PLAIN, WIDEST], ids=["plain", "tree"])
def test_a_request_that_ended_is_at_rest_from_then_on(w: World, tree: TreeShape) -> None:
    """By a stop token in slot 0 and by its last token in slot 1, before the host knows (D6)."""
    _, worker = started(w)
    state = worker.state
    state.stop_ids_SM[0, 0] = w.plain[CHOSEN[0]][len(known(w, worker, 0, CHOSEN[0]))]
    state.remaining_S[1] = 1
    output = run_round(worker, [0, 1, 2], tree)
    assert output.packed[:2, -3].tolist() == [1, 1]
    assert output.packed[:, -2].tolist() == [FINISH_STOP, FINISH_LENGTH, NO_FINISH]
    assert state.active_S[:3].tolist() == [False, False, True]
    lengths = state.length_S[:2].tolist()
    again = run_round(worker, [0, 1, 2], tree)
    assert again.packed[:2, -3:-1].tolist() == [[0, NO_FINISH], [0, NO_FINISH]]
    assert state.length_S[:2].tolist() == lengths and emitted(again, 2)
