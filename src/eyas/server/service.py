"""From prompts to text: tokenizes, submits to the engine, decodes what it emits.

Tokens become text here, in the event loop's thread, so that the engine's thread never waits for a
tokenizer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from eyas.engine.async_engine import RequestFailedError
from eyas.engine.stop_text import AnswerText
from eyas.engine.tokenizer import Tokenizer
from eyas.server.engine_client import EngineClient, OutputStream
from eyas.server.errors import ApiError
from eyas.server.images import ImageReader
from eyas.server.prompts import PromptEncoder
from eyas.server.token_text import LogprobTexts, ShownLogprob, TokenTexts
from eyas.types import FinishReason, ImageInput, SamplingParams, StepOutput

MAX_SEQUENCES = 1024  # prompts × n of one HTTP request

Result = TypeVar("Result")


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
    prompt_token_ids: Sequence[int]
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
        self._vocab_size, self._start = engine.info.vocab_size, answer.prompt_text
        stop_ids = engine.info.stop_ids(answer.params)
        prompt, stop = answer.prompt_token_ids, answer.params.stop
        self._text = AnswerText(tokenizer, stop, stop_ids=stop_ids, after=prompt)
        start = len(answer.prompt_text)
        self._logprobs = LogprobTexts(tokenizer, texts, start=start, after=prompt)

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
        self.engine, self.prompts = engine, PromptEncoder(engine, tokenizer, images)
        self._tokenizer, self._texts = tokenizer, TokenTexts(tokenizer)
        self._ids = itertools.count()

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

        Raises EyasError if the engine refuses any choice; none runs on then.
        """
        if len(prompts) * num_choices > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"{len(prompts)} prompts × n {num_choices} exceed {MAX_SEQUENCES} answers in one "
                "request: send several",
                param="n",
                code="invalid_value",
            )
        wanted = [
            (number, prompt, self._params(params, i, len(prompt), default_max_tokens))
            for number, prompt in enumerate(prompts)
            for i in range(num_choices)
        ]
        streams = await _all_or_none(
            [
                self.engine.submit(
                    f"request-{next(self._ids)}", prompt, one, images[number] if images else ()
                )
                for number, prompt, one in wanted
            ]
        )
        answers = [
            Answer(stream, one, prompt, number, echo[number] if echo else "")
            for stream, (number, prompt, one) in zip(streams, wanted, strict=True)
        ]
        return Generation(
            answers,
            self._tokenizer,
            engine=self.engine,
            texts=self._texts,
            num_prompt_tokens=sum(map(len, prompts)),
        )

    def close(self) -> None:
        """Let the threads go."""
        self.prompts.close()

    def _params(
        self, params: SamplingParams, choice: int, num_prompt: int, default: int | None
    ) -> SamplingParams:
        room = self.engine.info.max_model_len - num_prompt
        if params.max_tokens is None and default is not None and params.min_tokens <= room:
            limit = min(max(default, params.min_tokens), room)
            params = dataclasses.replace(params, max_tokens=limit)
        if params.seed is not None:
            params = dataclasses.replace(params, seed=params.seed + choice)
        return params


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
