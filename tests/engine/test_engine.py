"""The loop over a Python device: no page, slot or token is lost, whatever happens when."""

import dataclasses
from collections.abc import Sequence

import pytest
from fixtures.fake_worker import VOCAB, FakeWorker, answer
from fixtures.tiny import worker_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.config import PLAIN, TreeShape
from eyas.engine.engine import Engine
from eyas.engine.worker import WorkerShape
from eyas.types import EyasError, FinishReason, SamplingParams

MODEL_LEN = 24


def make(shape: WorkerShape, **changes: object) -> tuple[Engine, FakeWorker]:
    worker = FakeWorker(shape)
    arguments: dict[str, object] = {
        "eos_token_ids": (),
        "vocab_size": VOCAB,
        "chunk_tokens": 8,
        "run_ahead": 0,
    }
    engine = Engine(worker, **(arguments | changes))  # type: ignore[arg-type]
    return engine, worker


def check(engine: Engine) -> None:
    """What holds between any two steps."""
    scheduler, shape = engine.scheduler, engine.worker.shape
    allocator = scheduler.allocator
    held = {page for request in scheduler.admitted for page in request.pages}
    assert len(held) + allocator.num_free == shape.num_pages - NUM_RESERVED_PAGES
    slots = [request.slot for request in scheduler.admitted]
    assert sorted([*slots, *scheduler._free_slots]) == list(range(shape.num_slots))
    arrivals = [request.arrival for request in scheduler.admitted]
    assert arrivals == sorted(arrivals)
    waiting = [request.arrival for request in scheduler.waiting]
    assert waiting == sorted(waiting)
    assert all(not request.pages and request.slot is None for request in scheduler.waiting)
    # First come, first served: nobody is admitted before somebody who waits.
    assert not waiting or not arrivals or max(arrivals) < min(waiting)


@dataclasses.dataclass
class Asked:
    """A request with what came out of it so far."""

    prompt: list[int]
    num_new: int
    stops: tuple[int, ...]
    got: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    aborted: bool = False


class Script:
    """Drives an engine by events and compares every output with plain decoding."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.asked = engine, []

    def add(self, asked: Asked) -> None:
        params = SamplingParams(
            max_tokens=asked.num_new, temperature=0, seed=0, stop_token_ids=asked.stops
        )
        self.engine.add(str(len(self.asked)), asked.prompt, params)
        self.asked.append(asked)

    def abort(self, number: int) -> None:
        self.engine.abort(str(number))
        if number < len(self.asked) and self.asked[number].finish is None:
            self.asked[number].aborted = True

    def step(self) -> None:
        for output in self.engine.step():
            asked = self.asked[int(output.request_id)]
            assert not asked.aborted and asked.finish is None and output.new_token_ids
            asked.got += output.new_token_ids
            asked.finish = output.finish_reason
        check(self.engine)

    def finish(self) -> None:
        for _ in range(600):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the loop does not come to an end"
        for asked in self.asked:
            expected = answer(asked.prompt, asked.num_new, stops=asked.stops)
            if asked.aborted:
                assert asked.got == expected[: len(asked.got)]
                continue
            assert asked.got == expected
            stopped = expected[-1] in asked.stops
            assert asked.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        worker, allocator = self.engine.worker, self.engine.scheduler.allocator
        assert not worker.slots and not self.engine.requests  # type: ignore[attr-defined]
        assert allocator.num_free == allocator.num_usable


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """Prompts of few tokens and few beginnings, so that prefixes are shared."""
    head = draw(st.sampled_from([[], [0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1], [3] * 9]))
    prompt = head + draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
    num_new = draw(st.sampled_from([1, 2, 5, 9, 12, 15])) % (MODEL_LEN - len(prompt)) + 1
    return Asked(prompt, num_new, tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=1))))


EVENTS = st.lists(
    st.one_of(
        requests(),
        st.integers(0, 5),  # abort that request
        st.just("step"),
        st.just("step"),
    ),
    max_size=20,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    first=st.lists(requests(), min_size=3, max_size=6),
    events=EVENTS,
    num_slots=st.integers(2, 4),
    page_size=st.sampled_from([1, 2, 3, 8]),
    spare_tokens=st.integers(0, 30),
    depth=st.integers(0, 3),
    chunk_tokens=st.integers(1, 12),
    run_ahead=st.integers(0, 1),
    prefix_caching=st.booleans(),
)
def test_nothing_is_lost(
    first: Sequence[Asked],
    events: Sequence[Asked | int | str],
    num_slots: int,
    page_size: int,
    spare_tokens: int,
    depth: int,
    chunk_tokens: int,
    run_ahead: int,
    prefix_caching: bool,
) -> None:
    """Random requests, aborts and steps; pages from just enough for one request on."""
    shape = WorkerShape(
        num_slots=num_slots,
        num_pages=NUM_RESERVED_PAGES + -(-(MODEL_LEN + spare_tokens) // page_size),
        page_size=page_size,
        max_model_len=MODEL_LEN,
        tree=TreeShape(depth, 1, depth + 1),
    )
    engine, _ = make(
        shape, chunk_tokens=chunk_tokens, run_ahead=run_ahead, prefix_caching=prefix_caching
    )
    script = Script(engine)
    for event in [*first, *events]:
        if isinstance(event, Asked):
            script.add(dataclasses.replace(event, got=[]))
        elif isinstance(event, int):
            script.abort(event)
        else:
            script.step()
    script.finish()


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("depth", [0, 3])
def test_an_abort_after_every_step_frees_everything(depth: int, run_ahead: int) -> None:
    """Queued, between prompt chunks, while a round is unread, and after the end."""
    shape = worker_shape(TreeShape(depth, 1, depth + 1), page_size=2, num_pages=40, num_slots=2)
    for num_steps in range(14):
        engine, worker = make(shape, chunk_tokens=3, run_ahead=run_ahead)
        script = Script(engine)
        for head in range(3):
            script.add(Asked([head, 1, 2, 3, 4, 0, 1], 12, ()))
        for _ in range(num_steps):
            script.step()
        for number in range(3):
            script.abort(number)
            check(engine)
        assert not worker.slots
        assert engine.scheduler.allocator.num_free == 38
        script.finish()


def test_aborting_what_is_unknown_or_over_does_nothing() -> None:
    engine, _ = make(worker_shape())
    engine.abort("nobody")
    script = Script(engine)
    script.add(Asked([1], 3, ()))
    script.finish()
    engine.abort("0")
    assert not engine.has_work


def test_an_id_can_be_used_again_once_it_is_free() -> None:
    engine, _ = make(worker_shape(), run_ahead=1)
    params = SamplingParams(max_tokens=9, temperature=0, seed=0)
    engine.add("a", [1], params)
    with pytest.raises(EyasError, match="request id 'a' is in use"):
        engine.add("a", [2], params)
    engine.step()
    engine.abort("a")  # its launches are unread
    engine.add("a", [2], params)
    got = []
    while engine.has_work:
        got += [t for output in engine.step() for t in output.new_token_ids]
    assert got == answer([2], 9)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_run_ahead_keeps_that_many_turns_unread(run_ahead: int) -> None:
    engine, worker = make(worker_shape(), run_ahead=run_ahead)
    engine.add("a", [1], SamplingParams(max_tokens=6, temperature=0, seed=0))
    known = []
    while engine.has_work:
        known += [t for output in engine.step() for t in output.new_token_ids]
        launched = 1 + worker.num_rounds  # the prefill's token, and one a round
        if len(known) < 6:
            assert launched - len(known) == run_ahead * (2 if worker.num_rounds == 1 else 1)
    assert known == answer([1], 6)


def test_an_idle_engine_steps_in_vain() -> None:
    engine, worker = make(worker_shape(), run_ahead=1)
    assert engine.step() == [] and not engine.has_work
    assert worker.num_rounds == 0


def test_prefill_and_rounds_alternate() -> None:
    """A long prompt comes in chunks; requests that run go on between them."""
    engine, worker = make(worker_shape(), chunk_tokens=4)
    script = Script(engine)
    script.add(Asked([1], 20, ()))
    script.step()
    script.add(Asked([2, 3] * 10, 4, ()))
    for number in range(1, 6):
        before = worker.num_rounds
        script.step()
        assert worker.num_chunk_tokens == 1 + 4 * number
        assert worker.num_rounds == before + 1
    script.finish()


class TestRefusals:
    """Requests that can never run as asked are refused at once, with numbers that help."""

    def refuse(
        self, match: str, prompt: list[int], *, vocab_size: int = VOCAB, **params: object
    ) -> None:
        shape = worker_shape(PLAIN, num_pages=6, page_size=4, max_model_len=20)
        engine, _ = make(shape, eos_token_ids=range(3), vocab_size=vocab_size)
        with pytest.raises(EyasError, match=match):
            engine.add("a", prompt, SamplingParams(**params))  # type: ignore[arg-type]
        assert not engine.has_work and not engine.requests

    def test_an_empty_prompt(self) -> None:
        self.refuse("the prompt is empty", [])

    @pytest.mark.parametrize("token", [-1, VOCAB])
    def test_a_token_outside_the_vocabulary(self, token: int) -> None:
        self.refuse(f"token {token} is outside", [0, token])

    def test_a_bias_outside_the_vocabulary(self) -> None:
        self.refuse(
            "logit_bias: token 5 is outside the vocabulary of 5", [0], logit_bias={VOCAB: 1.0}
        )

    def test_a_stop_token_outside_the_vocabulary(self) -> None:
        """It would index past the logits as soon as any request of the batch has min_tokens."""
        self.refuse(
            "stop_token_ids: token 5 is outside", [0], stop_token_ids=(1, VOCAB), max_tokens=1
        )

    @pytest.mark.parametrize("length", [20, 21])
    def test_a_prompt_that_leaves_no_room(self, length: int) -> None:
        self.refuse(f"the prompt has {length} tokens, the model length is 20", [1] * length)

    def test_more_tokens_than_the_model_length(self) -> None:
        self.refuse("5 prompt tokens and max_tokens 16 exceed.*at most 15", [1] * 5, max_tokens=16)

    def test_more_pages_than_there_are(self) -> None:
        self.refuse("needs 5 KV pages and the cache has 4", [1] * 5, max_tokens=12)

    def test_too_many_stop_tokens(self) -> None:
        stops = tuple(range(1, 33))  # token 0 is an end token
        self.refuse(
            r"33 stop token ids .*, at most 32",
            [1],
            vocab_size=40,
            stop_token_ids=stops,
            max_tokens=1,
        )

    def test_stop_strings_without_a_tokenizer(self) -> None:
        self.refuse("stop strings need the model's tokenizer", [1], stop=("x",), max_tokens=1)

    def test_the_longest_that_fits_is_taken(self) -> None:
        shape = worker_shape(PLAIN, num_pages=7, page_size=4, max_model_len=20)
        engine, _ = make(shape)
        script = Script(engine)
        script.add(Asked([1] * 19, 1, ()))
        script.add(Asked([1], 19, ()))
        script.finish()
