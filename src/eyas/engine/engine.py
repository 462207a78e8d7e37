"""The loop: admit, prefill a chunk, run a round, read what earlier launches told (D6, D8).

The loop is synchronous and owns no thread: `step` does one turn. `run_ahead` launches stay unread
when a step returns, so that the host works on one round while the device runs the next.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
import secrets
from collections import deque
from collections.abc import Callable, Sequence

from eyas import kernels
from eyas.cache.pages import OutOfPagesError, PageAllocator
from eyas.config import PLAIN, TreeShape
from eyas.engine.image_places import check_places
from eyas.engine.limits import most_new_tokens
from eyas.engine.messages import EngineInfo
from eyas.engine.stats import EngineStats
from eyas.engine.stop_text import StopTextMatcher
from eyas.engine.tokenizer import Decoder
from eyas.engine.worker import Pending, RoundResult, Worker
from eyas.kernels import SamplingMode
from eyas.models.config import VisionConfig
from eyas.scheduler.scheduler import Phase, Request, Scheduler
from eyas.speculative.round import PrefillChunk
from eyas.speculative.state import SlotSettings, sampling_mode
from eyas.types import (
    EyasError,
    FinishReason,
    ImageInput,
    SamplingParams,
    StepOutput,
    TokenLogprob,
)

logger = logging.getLogger(__name__)

_FINISH = {kernels.FINISH_STOP: FinishReason.STOP, kernels.FINISH_LENGTH: FinishReason.LENGTH}


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A prefill or a round that the host has not read. tree: the round's shape, None: prefill."""

    requests: list[Request]
    pending: Pending
    tree: TreeShape | None


class Engine:
    """Serves requests on one worker. Not thread-safe: call it from one thread.

    eos_token_ids: end a request unless it ignores them. chunk_tokens: prompt tokens prefilled
    between two rounds. run_ahead: turns that stay unread when a step returns, 0 or 1. vision: of
    a target whose images are served.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        chunk_tokens: int,
        run_ahead: int,
        prefix_caching: bool = True,
        vision: VisionConfig | None = None,
    ) -> None:
        shape = worker.shape
        self.worker, self.vision = worker, vision
        self.max_model_len = shape.max_model_len
        self._vocab_size = vocab_size
        # A config may name an end token past the vocabulary: nothing can choose it.
        self._eos_token_ids = tuple(t for t in eos_token_ids if t < vocab_size)
        self._run_ahead = run_ahead
        self.scheduler = Scheduler(
            PageAllocator(shape.num_pages),
            num_slots=shape.num_slots,
            page_size=shape.page_size,
            chunk_tokens=chunk_tokens,
            round_tokens=shape.tree.depth + 1,
            prefix_caching=prefix_caching,
        )
        self.tree = shape.tree  # of the next rounds; any shape within the worker's own
        self.tokenizer: Decoder | None = None  # needed by requests with stop strings
        self._stop_text: dict[str, StopTextMatcher] = {}
        self.requests: dict[str, Request] = {}
        self._unread: deque[list[_Launch]] = deque()  # one list a turn, oldest first
        self._arrivals = itertools.count()
        self.stats = EngineStats()
        self.on_round: Callable[[], None] | None = None  # tests look at the state between rounds

    @property
    def info(self) -> EngineInfo:
        """What clients need to know once."""
        return EngineInfo(self.max_model_len, self._vocab_size, self._eos_token_ids, self.vision)

    @property
    def has_work(self) -> bool:
        """Whether another step would do something."""
        return self.scheduler.has_work or bool(self._unread)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[ImageInput] = (),
    ) -> None:
        """Queue a request; images lie at their places in the prompt, in order.

        Raises EyasError when it can never run as asked.
        """
        if request_id in self.requests:
            raise EyasError(f"request id {request_id!r} is in use")
        max_new_tokens = self._validate(prompt_token_ids, params)
        check_places(images, prompt_token_ids, self.vision)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            seed=_signed64(secrets.randbits(64) if params.seed is None else params.seed),
            max_new_tokens=max_new_tokens,
            arrival=next(self._arrivals),
            images=tuple(images),
        )
        self.requests[request_id] = request
        if params.stop:
            assert self.tokenizer is not None
            self._stop_text[request_id] = StopTextMatcher(
                self.tokenizer,
                params.stop,
                min_tokens=params.min_tokens,
                after=request.prompt_token_ids,
            )
        self.scheduler.add(request)

    def _validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        if not prompt_token_ids:
            raise EyasError("the prompt is empty: give at least one token", param="prompt")
        num_prompt = len(prompt_token_ids)
        max_new_tokens = most_new_tokens(self.info, num_prompt, params)
        wrong = [t for t in prompt_token_ids if not 0 <= t < self._vocab_size]
        if wrong:
            text = f"token {wrong[0]} is outside the vocabulary of {self._vocab_size}"
            raise EyasError(text, param="prompt")
        if params.stop and self.tokenizer is None:
            raise EyasError("stop strings need the model's tokenizer, which is not loaded")
        usable = self.scheduler.allocator.num_usable
        needed = self.scheduler.num_pages(num_prompt + max_new_tokens)
        if needed > usable:
            raise EyasError(
                f"the request needs {needed} KV pages and the cache has {usable}: raise "
                "--kv-cache-tokens or lower max_tokens"
            )
        return max_new_tokens

    def stop_ids(self, params: SamplingParams) -> list[int]:
        """All tokens that end a request: its own and, unless it ignores them, the model's."""
        return self.info.stop_ids(params)

    def abort(self, request_id: str) -> None:
        """End a request now; its slot and pages are free at once. Unknown ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._finish(request)

    def step(self) -> list[StepOutput]:
        """One turn of the loop; returns what became known."""
        with self.stats.turn(), self.worker.busy():
            outputs = self._admit()
            self._unread.append([])
            self._launch_prefill()
            outputs += self._make_room()
            self._launch_round()
            idle = not (self._unread and self._unread[-1])
            return outputs + self._read_down_to(0 if idle else self._run_ahead)

    def _admit(self) -> list[StepOutput]:
        """Let requests into slots; one that cannot be set up fails alone."""
        failed = []
        for request in self.scheduler.admit():
            try:
                self._enter_slot(request)
            except Exception as error:  # whatever it is, the others are not to suffer
                failed.append(self._fail(request, error))
        return failed

    def _fail(self, request: Request, error: Exception) -> StepOutput:
        """End a request for a fault of ours."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        self._finish(request)
        self.requests.pop(request.request_id, None)
        text = f"{type(error).__name__}: {error}"
        return StepOutput(request.request_id, (), FinishReason.ERROR, error=text)

    def _enter_slot(self, request: Request) -> None:
        assert request.slot is not None
        settings = SlotSettings(
            params=request.params,
            remaining=request.num_remaining,
            seed=request.seed,
            stop_ids=self.stop_ids(request.params),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
        )
        self.worker.admit(
            request.slot, settings, pages=request.pages, num_cached=request.num_computed
        )

    def _launch_prefill(self) -> None:
        chunks = []
        planned = self.scheduler.plan_prefill()
        for chunk in planned:
            request = chunk.request
            assert request.slot is not None
            tokens = request.token_ids
            next_token = None if chunk.is_last else tokens[chunk.end]
            images = request.images_within(chunk.start, chunk.end)
            piece = tokens[chunk.start : chunk.end]
            chunks.append(PrefillChunk(request.slot, chunk.start, piece, next_token, images))
        if chunks:
            requests = [c.request for c in planned]
            with self.stats.prefill():
                pending = self.worker.prefill(chunks, mode=_mode(requests), tree=self.tree)
            self._unread[-1].append(_launch(requests, pending, None))

    def _make_room(self) -> list[StepOutput]:
        """Grow every running request for the next round; read, then preempt, where pages lack."""
        outputs: list[StepOutput] = []
        grown: list[Request] = []
        for request in self.scheduler.running:
            while request.phase is Phase.RUNNING:
                try:
                    if self.scheduler.grow(request):
                        grown.append(request)
                    break
                except OutOfPagesError:
                    if any(self._unread):  # reading may free pages, and preemption needs it
                        outputs += self._read_down_to(0)
                        continue
                    slot = self.scheduler.admitted[-1].slot
                    self.scheduler.preempt()
                    self.stats.counters.num_preemptions += 1
                    assert slot is not None
                    self.worker.release(slot)
        tables = {r.slot: r.pages for r in grown if r.slot is not None}  # others have left again
        if tables:
            self.worker.set_pages(tables)
        return outputs

    def _launch_round(self) -> None:
        running = self.scheduler.running
        if not running:
            return
        slots = [r.slot for r in running if r.slot is not None]
        round_tokens = self.worker.shape.tree.depth + 1
        longest = max(r.num_tokens + r.num_unread * round_tokens for r in running)
        tree = self._next_tree(running)
        with self.stats.round(len(running), tree):
            pending = self.worker.round(slots, max_kv_len=longest, mode=_mode(running), tree=tree)
        if not self._unread:  # making room has read this turn's prefill already
            self._unread.append([])
        self._unread[-1].append(_launch(running, pending, tree))
        if self.on_round is not None:
            self.on_round()

    def _next_tree(self, running: Sequence[Request]) -> TreeShape:
        """The shape of the next round: plain when no request wants speculation."""
        return self.tree if any(r.params.speculation for r in running) else PLAIN

    def _read_down_to(self, num_turns: int) -> list[StepOutput]:
        """Read the oldest turns until `num_turns` are unread."""
        outputs: list[StepOutput] = []
        while len(self._unread) > num_turns:
            for launch in self._unread.popleft():
                outputs += self._read(launch)
        return outputs

    def _read(self, launch: _Launch) -> list[StepOutput]:
        with self.stats.wait():
            results = launch.pending.read()
        if launch.tree is not None:
            parts = launch.pending.part_seconds()
            self.stats.parts(len(launch.requests), launch.tree, parts)
        outputs = (
            self._apply(request, result, tree=launch.tree)
            for request, result in zip(launch.requests, results, strict=True)
        )
        return [output for output in outputs if output is not None]

    def _apply(
        self, request: Request, result: RoundResult, *, tree: TreeShape | None
    ) -> StepOutput | None:
        if request.phase is Phase.FINISHED:  # aborted, or stopped in an earlier launch
            return None
        request.num_unread -= 1
        if not result.token_ids:
            return None
        tokens, reason = result.token_ids, _FINISH.get(result.finish)
        matcher = self._stop_text.get(request.request_id)
        try:
            num_kept = matcher.num_kept(tokens) if matcher is not None else None
        except Exception as error:  # a tokenizer's, of one request's tokens
            return self._fail(request, error)
        if num_kept is not None:
            tokens, reason = tokens[:num_kept], FinishReason.STOP
        request.output_token_ids += tokens
        if tree is not None:
            depth = tree.depth if request.params.speculation else 0
            self.stats.read(num_accepted=result.num_accepted, num_tokens=len(tokens), depth=depth)
            request.count_round(num_accepted=result.num_accepted, num_tokens=len(tokens))
        self.scheduler.publish(request)
        if reason is not None:
            self._finish(request)
            del self.requests[request.request_id]
        return StepOutput(
            request.request_id,
            tokens,
            reason,
            num_rounds=request.num_rounds,
            num_round_tokens=request.num_round_tokens,
            num_cached_tokens=request.num_cached_tokens,
            accepted_counts=() if reason is None else tuple(request.accepted_counts),
            logprobs=_asked_logprobs(request.params, result.logprobs[: len(tokens)]),
        )

    def _finish(self, request: Request) -> None:
        if request.slot is not None:
            self.worker.release(request.slot)
        self.scheduler.finish(request)
        self._stop_text.pop(request.request_id, None)


def _launch(requests: list[Request], pending: Pending, tree: TreeShape | None) -> _Launch:
    for request in requests:
        request.num_unread += 1
    return _Launch(requests, pending, tree)


def _mode(requests: Sequence[Request]) -> SamplingMode:
    return functools.reduce(operator.or_, (sampling_mode(r.params) for r in requests))


def _asked_logprobs(
    params: SamplingParams, logprobs: tuple[TokenLogprob, ...]
) -> tuple[TokenLogprob, ...]:
    """What the request asked for of what its batch computed."""
    if params.logprobs is None:
        return ()
    return tuple(dataclasses.replace(t, top=t.top[: params.logprobs]) for t in logprobs)


def _signed64(value: int) -> int:
    """Any integer as a signed 64-bit one, so that equal seeds stay equal."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value
