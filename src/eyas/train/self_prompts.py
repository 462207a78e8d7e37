"""Prompts that the target writes itself: it continues the template where a user would begin.

An instruction-tuned model has learnt what users ask, so what it puts there is close to its own
training questions (Xu et al., "Magpie: alignment data synthesis from scratch by prompting aligned
LLMs with nothing", 2024).
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from eyas.engine.tokenizer import Tokenizer
from eyas.train.batching import Answer, Job, JobEngine, is_looping, run_jobs
from eyas.train.masks import ChatTemplate
from eyas.train.prompts import Prompt, normalised
from eyas.train.stage_settings import SelfPromptSettings
from eyas.types import SamplingParams

SOURCE = "written-by-target"


@dataclasses.dataclass
class SelfPrompts:
    """The prompts, and how many tries were dropped, by reason."""

    prompts: list[Prompt]
    dropped: Counter[str]


def write_self_prompts(
    engine: JobEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    settings: SelfPromptSettings,
    *,
    held_out: Collection[str] = (),
    window: int,
    on_done: Callable[[int, int], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> SelfPrompts:
    """Let the target write prompts. held_out: normalised texts that may not be among them.

    The same settings give the same prompts in the same order, up to the rounding of the batch.
    """
    opening, turn_end = template.user_turn()
    written: dict[int, str] = {}
    dropped: Counter[str] = Counter()
    num_ended = 0

    def done(index: int, answer: Answer) -> Iterable[Job]:
        nonlocal num_ended
        num_ended += 1
        text = tokenizer.decode(answer.token_ids).strip()
        reason = _reason_to_drop(answer, text, settings)
        if reason is None:
            written[index] = text
        else:
            dropped[reason] += 1
        if on_done is not None:
            on_done(num_ended, settings.count)
        return ()

    def jobs() -> Iterator[Job]:
        for index in range(settings.count):
            params = SamplingParams(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=settings.seed + index,
                stop_token_ids=(turn_end,),
                speculation=False,
            )
            yield Job(opening, params, functools.partial(done, index))

    run_jobs(engine, jobs(), window=window, on_tokens=on_tokens)
    seen = set(held_out)
    prompts = []
    for _, text in sorted(written.items()):
        key = normalised(text)
        if key in seen:
            dropped["seen before"] += 1
            continue
        seen.add(key)
        prompts.append(Prompt((text,), SOURCE))
    return SelfPrompts(prompts, dropped)


def _reason_to_drop(answer: Answer, text: str, settings: SelfPromptSettings) -> str | None:
    if answer.was_cut:
        return "no end"
    if is_looping(answer.token_ids):
        return "looping"
    if len(normalised(text)) < settings.min_characters or "\ufffd" in text:
        return "too short or broken"
    return None


def save_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write a prompt file (.jsonl.gz) that read_prompts reads; complete or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with gzip.open(unfinished, "wt", encoding="utf-8") as file:
        for prompt in prompts:
            messages = prompt.messages()
            messages += [{"role": "user", "content": turn} for turn in prompt.turns[1:]]
            line = {"messages": messages, "source": prompt.source}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    unfinished.rename(path)
