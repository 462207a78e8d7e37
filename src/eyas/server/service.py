"""From prompts to text: tokenizes, submits to the engine, decodes what it emits.

Tokens become text here, in the event loop's thread, so that the engine's thread never waits for a
tokenizer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from eyas.engine.async_engine import EngineStatus
from eyas.engine.tokenizer import Detokenizer, Tokenizer
from eyas.server.errors import ApiError
from eyas.types import EyasError, FinishReason, SamplingParams, StepOutput

MAX_SEQUENCES = 1024  # prompts × n of one HTTP request

Result = TypeVar("Result")


class OutputStream(Protocol):
    """Outputs of one request that the engine has accepted."""

    async def __anext__(self) -> StepOutput:
        """The next output. Raises EngineDeadError if the engine ends first."""

    def close(self) -> None:
        """Abort the request if it still runs. May be repeated."""


class EngineClient(Protocol):
    """What the server needs of an engine; AsyncEngine has it."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""

    @property
    def error(self) -> str | None:
        """Why the engine has ended, None while it lives."""

    def status(self) -> EngineStatus:
        """How full the engine is."""

    async def submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> OutputStream:
        """Queue a request. Raises EyasError if the engine refuses it, EngineDeadError if ended."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """News of one choice: text that is ready, and why it ended if it did."""

    index: int
    text: str
    finish_reason: FinishReason | None


class _Choice:
    """One sequence: its stream and the text so far undecided."""

    def __init__(self, index: int, stream: OutputStream, tokenizer: Tokenizer) -> None:
        self.index, self.stream = index, stream
        self._detokenizer = Detokenizer(tokenizer)

    def decode(self, output: StepOutput) -> Piece:
        token_ids = output.new_token_ids
        if output.finish_reason is FinishReason.STOP:
            token_ids = token_ids[:-1]  # the stop token is no part of the text
        text = self._detokenizer.add(token_ids, is_last=output.finish_reason is not None)
        return Piece(self.index, text, output.finish_reason)


class Generation:
    """The running choices of one HTTP request. `close` it in any case: that aborts what runs.

    num_prompt_tokens: each prompt once, however many choices it has. num_completion_tokens: so
    far, over all choices, final stop tokens included; counted in tokens, never in chunks.
    """

    def __init__(
        self, streams: Sequence[OutputStream], tokenizer: Tokenizer, *, num_prompt_tokens: int
    ) -> None:
        self._choices = [_Choice(i, stream, tokenizer) for i, stream in enumerate(streams)]
        self.num_choices = len(self._choices)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = 0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """News of all choices as they come, in order within each choice."""
        waiting = {asyncio.ensure_future(c.stream.__anext__()): c for c in self._choices}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: waiting[future].index):
                    choice, output = waiting.pop(future), future.result()
                    self.num_completion_tokens += len(output.new_token_ids)
                    yield choice.decode(output)
                    if output.finish_reason is None:
                        waiting[asyncio.ensure_future(choice.stream.__anext__())] = choice
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def collect(self) -> list[Piece]:
        """Wait for all choices; one piece each, with its whole text."""
        texts = [""] * self.num_choices
        reasons: list[FinishReason | None] = [None] * self.num_choices
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                texts[piece.index] += piece.text
                reasons[piece.index] = piece.finish_reason
        return [Piece(i, *pair) for i, pair in enumerate(zip(texts, reasons, strict=True))]

    def close(self) -> None:
        """Abort what still runs. May be repeated."""
        for choice in self._choices:
            choice.stream.close()


class Service:
    """An engine with its tokenizer. vocab_size: of the model (the tokenizer's may differ)."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self.engine = engine
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ids = itertools.count()
        # Not the event loop's thread, for a long prompt takes a while; one, for tokenizers are
        # not promised to be safe in several.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="eyas-tokenizer")

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
    ) -> list[int]:
        """Token ids of a conversation. Raises EyasError if the template refuses it."""
        return await self._in_thread(lambda: self._tokenizer.render_chat(messages, settings))

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of prompts; those that come as ids stay as they are."""
        encode = self._tokenizer.encode
        return await self._in_thread(
            lambda: [encode(p) if isinstance(p, str) else p for p in prompts]
        )

    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        num_choices: int = 1,
        default_max_tokens: int | None = None,
    ) -> Generation:
        """Start all choices; returns once the engine has accepted each of them.

        Choice number i of a prompt is index prompt × num_choices + i; with a seed it uses
        seed + i. default_max_tokens: where params has no max_tokens, at most that many as fit;
        None means as many as fit. Raises ApiError (400) if the engine refuses any choice; none
        runs on then.
        """
        if len(prompts) * num_choices > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"{len(prompts)} prompts × n {num_choices} exceed {MAX_SEQUENCES} answers in one "
                "request: send several",
                param="n",
                code="invalid_value",
            )
        self._check_stop_ids(params)
        submissions = [
            self._submit(prompt, self._params(params, i, len(prompt), default_max_tokens))
            for prompt in prompts
            for i in range(num_choices)
        ]
        streams = await _all_or_none(submissions)
        num_prompt_tokens = sum(map(len, prompts))
        return Generation(streams, self._tokenizer, num_prompt_tokens=num_prompt_tokens)

    def close(self) -> None:
        """Let the tokenizer's thread go."""
        self._executor.shutdown(wait=False)

    async def _submit(self, prompt: list[int], params: SamplingParams) -> OutputStream:
        try:
            return await self.engine.submit(f"request-{next(self._ids)}", prompt, params)
        except EyasError as error:
            too_long = len(prompt) + (params.max_tokens or 1) > self.engine.max_model_len
            code = "context_length_exceeded" if too_long else "invalid_value"
            raise ApiError(400, str(error), code=code) from error

    def _params(
        self, params: SamplingParams, choice: int, num_prompt: int, default: int | None
    ) -> SamplingParams:
        if params.max_tokens is None and default is not None:
            room = max(1, self.engine.max_model_len - num_prompt)
            params = dataclasses.replace(params, max_tokens=min(default, room))
        if params.seed is not None:
            params = dataclasses.replace(params, seed=params.seed + choice)
        return params

    def _check_stop_ids(self, params: SamplingParams) -> None:
        for token in params.stop_token_ids:
            if token >= self._vocab_size:
                raise ApiError(
                    400,
                    f"stop token {token} is outside the vocabulary of {self._vocab_size}",
                    param="stop_token_ids",
                    code="invalid_value",
                )

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)


async def _all_or_none(submissions: Sequence[Any]) -> list[OutputStream]:
    """Await all submissions together; if one fails or the caller is cancelled, close the others."""
    tasks = [asyncio.ensure_future(submission) for submission in submissions]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                result.close()
        raise
