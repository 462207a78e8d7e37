"""From prompts to tokens and back, away from the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from eyas.engine.async_engine import EngineDeadError
from eyas.engine.chat_images import EncodedPrompt, encode_chat
from eyas.engine.limits import check_prompt_length
from eyas.engine.tokenizer import Tokenizer
from eyas.server.engine_client import EngineClient
from eyas.server.images import ImageReader
from eyas.types import EyasError

_LONG = 50_000  # characters, or tokens to decode: some 20 ms of work

Result = TypeVar("Result")


class PromptEncoder:
    """An engine's tokenizer, in threads of its own. images: how those of clients are read; default:
    within the usual limits, from the request alone."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, images: ImageReader | None = None
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._images = images or ImageReader()
        # Long texts have a thread of their own, for they would make all others wait.
        self._short, self._long = (
            ThreadPoolExecutor(1, thread_name_prefix=f"eyas-tokenizer-{kind}")
            for kind in ("short", "long")
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        images: Sequence[tuple[str, str]] = (),
        *,
        must_fit: bool = True,
    ) -> EncodedPrompt:
        """A conversation with its images, given as (where it stands in the body, url).

        must_fit: refuse one that is far too long for an answer without reading it. Raises
        EyasError if the template refuses it, ApiError (400) for an image that cannot be used.
        """
        size, vision = sum(map(_text_length, messages)), self._engine.info.vision
        read = await self._images.read_all(images, vision)

        def encode() -> EncodedPrompt:
            if must_fit:
                self._check_size(size)
            return encode_chat(self._tokenizer, messages, read, vision=vision, settings=settings)

        return await self._in_thread(encode, size=size)

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of prompts; those that come as ids stay as they are.

        Raises TooLongError for one after which no answer fits, before much work is done.
        """

        def encode(prompt: str | list[int]) -> list[int]:
            if isinstance(prompt, str):
                self._check_size(len(prompt))
                prompt = self._tokenizer.encode(prompt)
            check_prompt_length(self._engine.info, len(prompt))
            return prompt

        size = sum(map(len, prompts))
        return await self._in_thread(lambda: [encode(prompt) for prompt in prompts], size=size)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of any text."""
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
        return await self._in_thread(lambda: encode(text), size=len(text))

    async def decode(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """Texts of prompts; those that come as texts stay as they are.

        Raises EyasError for ids that are no tokens.
        """

        def decode(prompt: str | list[int]) -> str:
            if isinstance(prompt, str):
                return prompt
            self._check_ids(prompt)
            return self._tokenizer.decode(prompt)

        size = sum(map(len, prompts))
        return await self._in_thread(lambda: [decode(prompt) for prompt in prompts], size=size)

    def close(self) -> None:
        """Let the threads go; what has not begun ends with EngineDeadError."""
        for executor in (self._short, self._long):
            executor.shutdown(wait=False, cancel_futures=True)
        self._images.close()

    def _check_size(self, num_characters: int) -> None:
        least = self._tokenizer.least_tokens(num_characters)
        check_prompt_length(self._engine.info, least, is_least=True)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        vocab_size = self._engine.info.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise EyasError(f"token {wrong} is outside the vocabulary of {vocab_size}")

    async def _in_thread(self, function: Callable[[], Result], *, size: int) -> Result:
        executor = self._long if size > _LONG else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, function)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client has left
                raise
            raise EngineDeadError("the server is shutting down") from None  # see `close`


def _text_length(message: Mapping[str, Any]) -> int:
    content = message["content"]
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)
