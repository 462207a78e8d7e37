"""Prompt files, and the rule that nothing of an evaluation file is trained on."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from eyas.types import EyasError

_MAX_SHOWN = 3  # prompts quoted in a refusal
_MIN_CONTAINED = 12  # characters, to look for within a text


class PromptError(EyasError):
    """A prompt file that cannot be used; the text says which line, and what to write."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The user's side of a conversation. system: None leaves the template its own default."""

    turns: tuple[str, ...]
    source: str = ""
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """The messages before the first answer."""
        first = {"role": "user", "content": self.turns[0]}
        if self.system is None:
            return [first]
        return [{"role": "system", "content": self.system}, first]


def read_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """The prompts of .jsonl and .jsonl.gz files, in order.

    A line has "prompt" (a text), "turns" (texts of the user) or "messages" (as in chat requests;
    answers in them are left out, for the target writes its own). "source" is a name for reports,
    by default the file's. Raises PromptError for anything else.
    """
    return [prompt for path in paths for prompt in _read(path)]


def _read(path: Path) -> list[Prompt]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            lines = file.read().split("\n")  # splitlines would cut at U+2028 inside a text
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PromptError(f"prompt file {path} cannot be read: {error}") from error
    source = path.name.partition(".")[0]
    prompts = [
        _prompt(line, f"{path}:{number}", source)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"prompt file {path} is empty")
    return prompts


def _prompt(line: str, where: str, source: str) -> Prompt:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is not valid JSON: {error}") from None
    turns, system = _turns(data) if isinstance(data, dict) else ((), None)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PromptError(
            f'{where} is no prompt: write {{"prompt": "..."}}, {{"turns": ["...", "..."]}} or '
            '{"messages": [{"role": "user", "content": "..."}]}'
        )
    return Prompt(tuple(turns), str(data.get("source", source)), system)


def _turns(data: dict[str, Any]) -> tuple[Sequence[Any], str | None]:
    if "prompt" in data:
        return [data["prompt"]], None
    if isinstance(data.get("turns"), list):
        return data["turns"], None
    messages = data.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return (), None
    roles = [message.get("role") for message in messages]
    if not set(roles) <= {"system", "user", "assistant"} or "system" in roles[1:]:
        return (), None
    system = str(messages[0].get("content")) if roles[0] == "system" else None
    return [m.get("content") for m in messages if m["role"] == "user"], system


def normalised(text: str) -> str:
    """A text without what may differ between two copies of it: case, punctuation, spaces."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(c if c.isalnum() else " " for c in folded).split())


def normalised_turns(prompts: Iterable[Prompt]) -> set[str]:
    """Every user turn, normalised; those without a letter or digit are left as they are."""
    return {normalised(turn) or turn for prompt in prompts for turn in prompt.turns}


def shared_with(prompts: Sequence[Prompt], held_out: Collection[str]) -> list[Prompt]:
    """The prompts that have a turn in a set of normalised turns."""
    return [p for p in prompts if not normalised_turns([p]).isdisjoint(held_out)]


def refuse_overlap(prompts: Sequence[Prompt], evaluation: Sequence[Prompt]) -> None:
    """Raises PromptError when a prompt to train on is in the evaluation too."""
    shared = shared_with(prompts, normalised_turns(evaluation))
    _refuse([prompt.turns[0] for prompt in shared])


def refuse_contained(texts: Iterable[str], evaluation: Sequence[Prompt]) -> None:
    """Raises PromptError when a whole conversation has a turn of the evaluation somewhere in it.

    Only turns of some length are looked for: "why" is in many texts.
    """
    turns = [turn for turn in normalised_turns(evaluation) if len(turn) >= _MIN_CONTAINED]
    found = {turn for text in map(normalised, texts) for turn in turns if turn in text}
    _refuse(sorted(found))


def _refuse(shared: Sequence[str]) -> None:
    if shared:
        quoted = "; ".join(repr(text[:80]) for text in shared[:_MAX_SHOWN])
        raise PromptError(
            f"prompts to train on that are in the evaluation file too: {len(shared)} ({quoted}); "
            "take them out of one of the two, or the evaluation would measure memory"
        )


def select(
    prompts: Sequence[Prompt], *, seed: int, num_prompts: int | None, num_validation: int
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts to train on, prompts to set aside), drawn at random; copies are dropped first.

    Raises PromptError when nothing would be left to train on.
    """
    distinct = {tuple(sorted(normalised_turns([p]))): p for p in reversed(prompts)}
    drawn = list(distinct.values())[::-1]
    random.Random(seed).shuffle(drawn)
    validation, rest = drawn[:num_validation], drawn[num_validation:]
    if not rest:
        raise PromptError(
            f"{len(drawn)} different prompts, of which {num_validation} are set aside, leave none "
            "to train on: add prompts, or lower --num-validation"
        )
    return rest[:num_prompts], validation
