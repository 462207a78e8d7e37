"""Stop strings: found token by token as the host reads them, wherever in a round they end."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.engine.tokenizer import Decoder, Detokenizer
from eyas.types import FinishReason


def _earliest(text: str, stop: Sequence[str], known: int) -> int | None:
    """Where the earliest stop string begins, of those that end after `known` characters."""
    places = [text.find(s, max(0, known - len(s) + 1)) for s in stop]
    return min((place for place in places if place >= 0), default=None)


class StopTextMatcher:
    """Watches the text of one request for its stop strings. after: its prompt."""

    def __init__(
        self,
        tokenizer: Decoder,
        stop: Sequence[str],
        *,
        min_tokens: int,
        after: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, after=after)
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
            found = _earliest(window, self._stop, len(self._tail)) is not None
            if found and self._num_tokens > self._min_tokens:
                return number
            self._tail = window[max(0, len(window) - self._longest + 1) :]
        return None


class AnswerText:
    """The text of one answer as its tokens come: without stop strings and the final stop token.

    What may be the beginning of a stop string is kept back until more is known, so that a stream
    never shows one. The whole text does not depend on how the tokens were cut into calls.
    stop_ids: all tokens that end the request (EngineInfo.stop_ids). after: the prompt.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        stop: Sequence[str],
        *,
        stop_ids: Sequence[int],
        after: Sequence[int] = (),
    ) -> None:
        self._detokenizer, self._held = Detokenizer(tokenizer, after=after), ""
        self._stop, self._stop_ids = stop, frozenset(stop_ids)

    def add(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> str:
        """Text that may be shown now. finish_reason: that of the last output, None before it."""
        if finish_reason is None:
            return self._hold_back(self._held + self._detokenizer.add(token_ids))
        if finish_reason is not FinishReason.STOP or not token_ids:
            return self._held + self._detokenizer.add(token_ids, is_last=True)
        *before, last = token_ids
        is_stop_id = last in self._stop_ids
        text = self._held + self._detokenizer.add(before, is_last=is_stop_id)
        # A stop string that counts ends in the last token; those before min_tokens stay.
        known = len(text)
        text += self._detokenizer.add([last], is_last=True)
        place = _earliest(text, self._stop, known)
        if place is not None:
            return text[:place]
        return text[:known] if is_stop_id else text

    def _hold_back(self, text: str) -> str:
        longest = max((len(s) for s in self._stop), default=1) - 1
        starts = range(max(0, len(text) - longest), len(text))
        safe = next(
            (i for i in starts if any(s.startswith(text[i:]) for s in self._stop)), len(text)
        )
        self._held = text[safe:]
        return text[:safe]
