"""Stop strings: found token by token as the host reads them, wherever in a round they end."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.engine.tokenizer import Detokenizer, Tokenizer


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the earliest stop string in it."""
    found = [place for place in (text.find(s) for s in stop) if place >= 0]
    return text[: min(found)] if found else text


class StopTextMatcher:
    """Watches the text of one request for its stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, min_tokens: int) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop, self._min_tokens = stop, min_tokens
        self._longest = max(len(s) for s in stop)
        self._tail, self._num_tokens = "", 0

    def num_kept(self, token_ids: Sequence[int]) -> int | None:
        """How many of the new tokens stay, the one that completes a stop string included.

        None while none is complete. A string that began before min_tokens tokens counts only if
        it ends after them.
        """
        for number, token in enumerate(token_ids, start=1):
            self._num_tokens += 1
            piece = self._detokenizer.add([token])
            window = self._tail + piece
            if self._num_tokens > self._min_tokens and any(s in window for s in self._stop):
                return number
            self._tail = window[max(0, len(window) - self._longest + 1) :]
        return None
