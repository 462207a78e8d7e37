"""Tokens beside their log-probabilities: as text, as bytes, and where they begin in the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eyas.engine.tokenizer import Detokenizer, Tokenizer
from eyas.types import TokenLogprob

_LOWEST = -9999.0  # JSON has no infinity; OpenAI's stand-in for "impossible"
_MAX_CACHED = 1 << 16


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A token as clients see it. text: "bytes:\\xf0\\x9f" where the bytes are no text alone."""

    text: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class ShownLogprob:
    """One generated token. offset: in characters, where its text begins in the whole answer.

    top: the most probable tokens in its place with their log-probabilities, best first.
    """

    token: TokenText
    logprob: float
    top: tuple[tuple[TokenText, float], ...]
    offset: int


class TokenTexts:
    """The texts of a tokenizer's tokens, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is None:
            data = self._tokenizer.token_bytes(token_id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            known = TokenText(text, data)
            if len(self._known) < _MAX_CACHED:
                self._known[token_id] = known
        return known


class LogprobTexts:
    """Shows the log-probabilities of one answer, in order.

    start: where its own text begins. after: its prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, texts: TokenTexts, *, start: int, after: Sequence[int]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, after=after)
        self._texts, self._offset = texts, start

    def add(self, logprobs: Sequence[TokenLogprob]) -> tuple[ShownLogprob, ...]:
        """The next tokens. Whatever the calls, the offsets are the same."""
        return tuple(self._add_one(logprob) for logprob in logprobs)

    def _add_one(self, one: TokenLogprob) -> ShownLogprob:
        offset = self._offset
        self._offset += len(self._detokenizer.add([one.token_id]))
        top = tuple((self._texts[token], max(value, _LOWEST)) for token, value in one.top)
        return ShownLogprob(self._texts[one.token_id], max(one.logprob, _LOWEST), top, offset)
