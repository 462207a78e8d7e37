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

from eyas.engine.async_engine import RequestFailedError
from eyas.engine.chat_images import EncodedPrompt, encode_chat
from eyas.engine.messages import EngineStatus
from eyas.engine.stats import EngineCounters
from eyas.engine.stop_text import AnswerText
from eyas.engine.tokenizer import Tokenizer
from eyas.models.config import VisionConfig
from eyas.server.errors import ApiError
from eyas.server.images import ImageReader
from eyas.server.token_text import LogprobTexts, ShownLogprob, TokenTexts
from eyas.types import EyasError, FinishReason, ImageInput, SamplingParams, StepOutput

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
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def vision(self) -> VisionConfig | None:
        """How images are prepared, None where none are taken."""

    @property
    def error(self) -> str | None:
        """Why the engine has ended, None while it lives."""

    @property
    def counters(self) -> EngineCounters:
        """What the engine has counted and timed, as far as it has told."""

    def status(self) -> EngineStatus:
        """How full the engine is."""

    def stop_ids(self, params: SamplingParams) -> Sequence[int]:
        """All tokens that end such a request."""

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[ImageInput] = (),
    ) -> OutputStream:
        """Queue a request. Raises EyasError if the engine refuses it, EngineDeadError if ended."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """News of one choice: text that is ready, and why it ended if it did.

    num_tokens: what it took. logprobs: one a token, where asked for; they come with their tokens,
    of which the text may still be held back.
    """

    index: int
    text: str
    finish_reason: FinishReason | None
    num_tokens: int = 0
    logprobs: tuple[ShownLogprob, ...] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
    """A choice as it starts. prompt_text: what it begins with (echo). prompt_index: whose it is."""

    stream: OutputStream
    params: SamplingParams
    prompt_index: int
    prompt_text: str = ""


class _Choice:
    """One sequence: its stream and the text so far undecided."""

    def __init__(
        self,
        index: int,
        answer: Answer,
        tokenizer: Tokenizer,
        *,
        engine: EngineClient,
        texts: TokenTexts,
    ) -> None:
        self.index, self.stream, self.prompt_index = index, answer.stream, answer.prompt_index
        self.num_cached_tokens = 0
        self._vocab_size, self._start = engine.vocab_size, answer.prompt_text
        stop_ids = engine.stop_ids(answer.params)
        self._text = AnswerText(tokenizer, answer.params.stop, stop_ids=stop_ids)
        self._logprobs = LogprobTexts(tokenizer, texts, start=len(answer.prompt_text))

    def decode(self, output: StepOutput) -> Piece:
        """Raises RequestFailedError if the engine gave the request up or said what is no token."""
        token_ids, reason = output.new_token_ids, output.finish_reason
        if reason is FinishReason.ERROR:
            raise RequestFailedError(output.error or "the engine gave it up")
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise RequestFailedError(f"the engine emitted token {token}, which does not exist")
        self.num_cached_tokens = output.num_cached_tokens
        text = self._start + self._text.add(token_ids, reason)
        self._start = ""
        logprobs = self._logprobs.add(output.logprobs)
        return Piece(self.index, text, reason, len(token_ids), logprobs)


class Generation:
    """The running choices of one HTTP request. `close` it in any case: that aborts what runs.

    num_prompt_tokens: each prompt once, however many choices it has. num_completion_tokens: so
    far, over all choices, final stop tokens included; counted in tokens, never in chunks.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        tokenizer: Tokenizer,
        *,
        engine: EngineClient,
        texts: TokenTexts,
        num_prompt_tokens: int,
    ) -> None:
        self._choices = [
            _Choice(i, answer, tokenizer, engine=engine, texts=texts)
            for i, answer in enumerate(answers)
        ]
        self.num_choices = len(self._choices)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = 0
        self.on_piece: Callable[[Piece], None] = lambda piece: None  # for metrics

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first choice of each prompt took from the prefix cache."""
        first: dict[int, int] = {}
        for choice in self._choices:
            first.setdefault(choice.prompt_index, choice.num_cached_tokens)
        return sum(first.values())

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """News of all choices as they come, in order within each choice."""
        if self.num_choices == 1:  # the usual case, without a task a token
            [choice] = self._choices
            reason = None
            while reason is None:
                output = await choice.stream.__anext__()
                reason = output.finish_reason
                yield self._piece(choice, output)
            return
        waiting = {asyncio.ensure_future(c.stream.__anext__()): c for c in self._choices}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: waiting[future].index):
                    choice, output = waiting.pop(future), future.result()
                    yield self._piece(choice, output)
                    if output.finish_reason is None:
                        waiting[asyncio.ensure_future(choice.stream.__anext__())] = choice
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _piece(self, choice: _Choice, output: StepOutput) -> Piece:
        self.num_completion_tokens += len(output.new_token_ids)
        piece = choice.decode(output)
        self.on_piece(piece)
        return piece

    async def collect(self) -> list[Piece]:
        """Wait for all choices; one piece each, with its whole text."""
        parts: list[list[Piece]] = [[] for _ in range(self.num_choices)]
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                parts[piece.index].append(piece)
        return [_whole(index, pieces) for index, pieces in enumerate(parts)]

    def close(self) -> None:
        """Abort what still runs. May be repeated."""
        for choice in self._choices:
            choice.stream.close()


def _whole(index: int, pieces: Sequence[Piece]) -> Piece:
    return Piece(
        index,
        "".join(piece.text for piece in pieces),
        pieces[-1].finish_reason,
        sum(piece.num_tokens for piece in pieces),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
    )


class Service:
    """An engine with its tokenizer. images: how those of clients are read; default: within the
    usual limits, from the request alone."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, images: ImageReader | None = None
    ) -> None:
        self.engine, self._images = engine, images or ImageReader()
        self._tokenizer, self._texts = tokenizer, TokenTexts(tokenizer)
        self._ids = itertools.count()
        # Not the event loop's thread, for a long prompt takes a while; one, for tokenizers are
        # not promised to be safe in several.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="eyas-tokenizer")

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        images: Sequence[tuple[str, str]] = (),
    ) -> EncodedPrompt:
        """A conversation with its images, given as (where it stands in the body, url).

        Raises EyasError if the template refuses it, ApiError (400) for an image that cannot be
        used.
        """
        vision = self.engine.vision
        read = await self._images.read_all(images, vision)
        return await self._in_thread(
            lambda: encode_chat(self._tokenizer, messages, read, vision=vision, settings=settings)
        )

    async def encode(
        self, prompts: Sequence[str | list[int]], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of prompts; those that come as ids stay as they are."""

        def encode(prompt: str | list[int]) -> list[int]:
            if not isinstance(prompt, str):
                return prompt
            return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

        return await self._in_thread(lambda: [encode(prompt) for prompt in prompts])

    async def decode(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """Texts of prompts; those that come as texts stay as they are.

        Raises ApiError (400) for ids that are no tokens.
        """
        for prompt in prompts:
            if not isinstance(prompt, str):
                self._check_ids(prompt)
        decode = self._tokenizer.decode
        return await self._in_thread(
            lambda: [p if isinstance(p, str) else decode(p) for p in prompts]
        )

    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        num_choices: int = 1,
        default_max_tokens: int | None = None,
        echo: Sequence[str] | None = None,
        images: Sequence[Sequence[ImageInput]] | None = None,
    ) -> Generation:
        """Start all choices; returns once the engine has accepted each of them.

        Choice number i of a prompt is index prompt × num_choices + i; with a seed it uses
        seed + i. default_max_tokens: where params has no max_tokens, at most that many as fit;
        None means as many as fit. echo: texts that the answers to each prompt begin with. images:
        of each prompt, in their places.

        Raises ApiError (400) if the engine refuses any choice; none runs on then.
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
        wanted = [
            (number, prompt, self._params(params, i, len(prompt), default_max_tokens))
            for number, prompt in enumerate(prompts)
            for i in range(num_choices)
        ]
        streams = await _all_or_none(
            [
                self._submit(prompt, one, images[number] if images else ())
                for number, prompt, one in wanted
            ]
        )
        answers = [
            Answer(stream, one, number, echo[number] if echo else "")
            for stream, (number, _, one) in zip(streams, wanted, strict=True)
        ]
        return Generation(
            answers,
            self._tokenizer,
            engine=self.engine,
            texts=self._texts,
            num_prompt_tokens=sum(map(len, prompts)),
        )

    def close(self) -> None:
        """Let the tokenizer's thread go."""
        self._executor.shutdown(wait=False)
        self._images.close()

    async def _submit(
        self, prompt: list[int], params: SamplingParams, images: Sequence[ImageInput]
    ) -> OutputStream:
        try:
            return await self.engine.submit(f"request-{next(self._ids)}", prompt, params, images)
        except EyasError as error:
            too_long = len(prompt) + (params.max_tokens or 1) > self.engine.max_model_len
            code = "context_length_exceeded" if too_long else "invalid_value"
            raise ApiError(400, str(error), code=code) from error

    def _params(
        self, params: SamplingParams, choice: int, num_prompt: int, default: int | None
    ) -> SamplingParams:
        if params.max_tokens is None and default is not None:
            room = max(1, self.engine.max_model_len - num_prompt)
            limit = max(min(default, room), params.min_tokens)
            params = dataclasses.replace(params, max_tokens=limit)
        if params.seed is not None:
            params = dataclasses.replace(params, seed=params.seed + choice)
        return params

    def _check_stop_ids(self, params: SamplingParams) -> None:
        for token in params.stop_token_ids:
            if token >= self.engine.vocab_size:
                raise ApiError(
                    400,
                    f"stop token {token} is outside the vocabulary of {self.engine.vocab_size}",
                    param="stop_token_ids",
                    code="invalid_value",
                )

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        wrong = [token for token in token_ids if not 0 <= token < self.engine.vocab_size]
        if wrong:
            text = f"token {wrong[0]} is outside the vocabulary of {self.engine.vocab_size}"
            raise ApiError(400, text, code="invalid_value")

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
