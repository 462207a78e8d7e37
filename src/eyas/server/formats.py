"""The objects that clients get: whole answers and the chunks of streams, for both endpoints."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

from eyas.server.service import Generation, Piece
from eyas.server.token_text import ShownLogprob, TokenText


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """What is served. created: Unix time; fingerprint: the same as long as answers are."""

    name: str
    created: int
    fingerprint: str


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of a whole answer."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        logprobs = self._logprobs(piece)
        return _choice(piece.index, piece.finish_reason, logprobs, message=message)

    def start(self, index: int) -> dict[str, Any] | None:
        """What opens a choice in a stream."""
        return _choice(index, None, delta={"role": "assistant", "content": ""})

    def text(self, piece: Piece) -> dict[str, Any]:
        """More text of a choice in a stream."""
        return _choice(piece.index, None, self._logprobs(piece), delta={"content": piece.text})

    def finish(self, piece: Piece) -> dict[str, Any]:
        """What closes a choice in a stream."""
        return _choice(piece.index, piece.finish_reason, delta={})

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.logprobs:
            return None
        content = [
            _chat_token(one.token, one.logprob)
            | {"top_logprobs": [_chat_token(*alternative) for alternative in one.top]}
            for one in piece.logprobs
        ]
        return {"content": content, "refusal": None}


class CompletionFormat:
    """/v1/completions."""

    id_prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of a whole answer."""
        logprobs = self._logprobs(piece)
        return _choice(piece.index, piece.finish_reason, logprobs, text=piece.text)

    def start(self, index: int) -> dict[str, Any] | None:
        """Nothing opens a choice in a stream."""
        return None

    def text(self, piece: Piece) -> dict[str, Any]:
        """More text of a choice in a stream."""
        return _choice(piece.index, None, self._logprobs(piece), text=piece.text)

    def finish(self, piece: Piece) -> dict[str, Any]:
        """What closes a choice in a stream."""
        return _choice(piece.index, piece.finish_reason, text="")

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.logprobs:
            return None
        return {
            "tokens": [one.token.text for one in piece.logprobs],
            "token_logprobs": [one.logprob for one in piece.logprobs],
            "top_logprobs": [_alternatives(one) for one in piece.logprobs],
            "text_offset": [one.offset for one in piece.logprobs],
        }


Format = ChatFormat | CompletionFormat


class Envelope:
    """What all chunks of one answer have in common."""

    def __init__(self, form: Format, model: ModelCard) -> None:
        self.form = form
        self._common = {
            "id": form.id_prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def whole(self, pieces: list[Piece], generation: Generation) -> dict[str, Any]:
        """The answer in one object."""
        choices = [self.form.choice(piece) for piece in pieces]
        return self._object(self.form.whole, choices) | {"usage": usage(generation)}

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        """A chunk of a stream."""
        return self._object(self.form.chunk, list(choices))

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common, "object": kind, "choices": choices}


def usage(generation: Generation) -> dict[str, Any]:
    """Tokens so far."""
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def _choice(
    index: int,
    finish_reason: str | None,
    logprobs: dict[str, Any] | None = None,
    **content: Any,
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_token(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.data), "logprob": logprob}


def _alternatives(one: ShownLogprob) -> dict[str, float]:
    """The most probable tokens by text, the chosen one always among them, as OpenAI has it."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        found.setdefault(token.text, logprob)  # of tokens with one text, the best
    return found
