"""Stop strings: found token by token as the host reads them, wherever in a round they end."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.engine.tokenizer import Decoder, Detokenizer


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the earliest stop string in it."""
    found = [place for place in (text.find(s) for s in stop) if place >= 0]
    return text[: min(found)] if found else text


class StopTextMatcher:
    """Watches the text of one request for its stop strings."""

    def __init__(self, tokenizer: Decoder, stop: Sequence[str], *, min_tokens: int) -> None:
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


class StopHoldback:
    """Keeps back what may be the beginning of a stop string, so that a stream never shows one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held = stop, ""

    def add(self, piece: str, *, is_last: bool = False) -> str:
        """Text that may be shown now. is_last: nothing follows, so cut at the stop or show all."""
        text = self._held + piece
        cut = cut_at_stop(text, self._stop)
        if is_last or len(cut) < len(text):
            self._held = ""
            return cut
        longest = max((len(s) for s in self._stop), default=1) - 1
        starts = range(max(0, len(text) - longest), len(text))
        safe = next(
            (i for i in starts if any(s.startswith(text[i:]) for s in self._stop)), len(text)
        )
        self._held = text[safe:]
        return text[:safe]
