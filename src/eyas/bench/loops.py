"""Tells text that repeats itself: a draft guesses a loop too well for its acceptance to mean much.

A benchmark with random prompts once showed an acceptance that no chat reached, as the output had
fallen into two alternating tokens; so distinct bigrams are counted, and looped output is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 64  # bigrams looked at together
MIN_DISTINCT = 0.5  # share of them that must be distinct; prose has more than 0.9


def distinct_bigrams(token_ids: Sequence[int]) -> int:
    """Number of distinct pairs of neighbours."""
    return len(set(zip(token_ids, token_ids[1:], strict=False)))


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether any WINDOW neighbouring bigrams (all, in a shorter text) have few distinct ones."""
    num_bigrams = len(token_ids) - 1
    if num_bigrams < 1:
        return False
    width = min(WINDOW, num_bigrams)
    return any(
        distinct_bigrams(token_ids[start : start + width + 1]) < MIN_DISTINCT * width
        for start in range(num_bigrams - width + 1)
    )
