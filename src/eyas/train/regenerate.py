"""Stage 1: the target answers the prompts itself, through the engine that will serve it.

A draft learns to foretell its target, so it must see the target's own words, at the temperatures at
which it will be used: here a share of greedy answers, the rest sampled. A row holds the very tokens
that were served and generated, never text that was tokenized again.

Conversations come in groups of a fixed number of prompts, a group a shard. Seeds and temperatures
depend on a prompt's place in the list alone, so shards are the same whenever and in whatever batch
they are made (up to the rounding of the batch), and a stopped run goes on after the last shard.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eyas.engine.tokenizer import Tokenizer
from eyas.train.batching import Answer, Job, JobEngine, is_looping, run_jobs
from eyas.train.dataset import SHARD_SUFFIX, DatasetError, Row, write_shard
from eyas.train.masks import ChatTemplate, RowBuilder
from eyas.train.prompts import Prompt
from eyas.train.stage_settings import RegenerateSettings
from eyas.types import EyasError, SamplingParams

REPORT_FILE = "report.json"


class Outcome:
    """Names of what a report counts."""

    KEPT = "kept"
    LOOPING = "looping"
    TOO_LONG = "prompt too long"
    EMPTY = "empty"
    CUT = "cut at the limit"
    ANSWER_TOKENS = "answer tokens"
    TOKENS = "tokens"
    ROWS = "rows"


@dataclasses.dataclass
class Report:
    """What a regeneration came to. counts: by Outcome. by_source: kept conversations.
    seconds: spent, over all runs."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    by_source: Counter[str] = dataclasses.field(default_factory=Counter)
    num_prompts: int = 0
    seconds: float = 0.0

    def add(self, group: dict[str, Any]) -> None:
        """Count one finished group."""
        self.counts.update(group["counts"])
        self.by_source.update(group["by_source"])
        self.num_prompts += group["num_prompts"]

    def line(self) -> str:
        """One line for people."""
        dropped = ", ".join(
            f"{self.counts[name]} {name}"
            for name in (Outcome.LOOPING, Outcome.TOO_LONG, Outcome.EMPTY)
        )
        return (
            f"{self.counts[Outcome.KEPT]} of {self.num_prompts} conversations kept with "
            f"{self.counts[Outcome.ANSWER_TOKENS]} answer tokens ({dropped} dropped; "
            f"{self.counts[Outcome.CUT]} {Outcome.CUT})"
        )


@dataclasses.dataclass
class _Group:
    """The prompts of one shard. left: conversations that have not ended."""

    name: str
    first: int
    left: int
    rows: dict[int, list[Row]] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    by_source: Counter[str] = dataclasses.field(default_factory=Counter)


class Regeneration:
    """Answers prompts into a dataset folder; what the folder has already is not done again.

    Raises EyasError when the folder was made from other prompts or settings.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        folder: Path,
        settings: RegenerateSettings,
        *,
        target: str,
    ) -> None:
        self._prompts, self._folder, self._settings = prompts, folder, settings
        folder.mkdir(parents=True, exist_ok=True)
        self._report_path = folder / REPORT_FILE
        identity = [target, dataclasses.asdict(settings), [dataclasses.astuple(p) for p in prompts]]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        self._state: dict[str, Any] = {"made_from": digest, "seconds": 0.0, "shards": {}}
        if self._report_path.exists():
            self._state = json.loads(self._report_path.read_text())
            if self._state["made_from"] != digest:
                raise EyasError(
                    f"{folder} was made from other prompts, settings or another target: give "
                    "another folder, or delete this one"
                )
        self._on_done: Callable[[int, int], None] | None = None
        self._started = 0.0
        self._num_ended = 0

    @property
    def num_done(self) -> int:
        """Prompts whose shard is written."""
        return sum(group["num_prompts"] for group in self._done().values())

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.num_done == len(self._prompts)

    def report(self) -> Report:
        """Counts of all that is done."""
        report = Report(seconds=self._state["seconds"])
        for group in self._done().values():
            report.add(group)
        return report

    def _done(self) -> dict[str, dict[str, Any]]:
        shards: dict[str, dict[str, Any]] = self._state["shards"]
        return {name: g for name, g in shards.items() if (self._folder / name).exists()}

    def run(
        self,
        engine: JobEngine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        window: int,
        stop_at: float | None = None,
        on_done: Callable[[int, int], None] | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Report:
        """Answer what is left. See run_jobs for window, stop_at and on_tokens.

        on_done: called with (prompts done, all prompts), those in unfinished shards counted in.
        """
        self._on_done, self._started = on_done, time.monotonic()
        self._num_ended = self.num_done
        jobs = self._jobs(tokenizer, template)
        run_jobs(engine, jobs, window=window, stop_at=stop_at, on_tokens=on_tokens)
        return self.report()

    def _jobs(self, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Job]:
        done, size = self._done(), self._settings.shard_size
        for first in range(0, len(self._prompts), size):
            name = f"shard-{first // size:05d}{SHARD_SUFFIX}"
            if name in done:
                continue
            members = range(first, min(first + size, len(self._prompts)))
            group = _Group(name, first, len(members))
            for index in members:
                conversation = _Conversation(
                    self._prompts[index],
                    self._settings,
                    index=index,
                    tokenizer=tokenizer,
                    template=template,
                )
                yield from self._next(group, conversation)

    def _next(self, group: _Group, conversation: _Conversation) -> Iterable[Job]:
        """The conversation's next request; without one it has ended."""
        prompt_ids = conversation.next_prompt()
        if prompt_ids is None:
            self._end(group, conversation)
            return ()

        def done(answer: Answer) -> Iterable[Job]:
            conversation.add(prompt_ids, answer)
            return self._next(group, conversation)

        return (Job(prompt_ids, conversation.params, done),)

    def _end(self, group: _Group, conversation: _Conversation) -> None:
        rows = conversation.rows()
        group.counts.update(conversation.counts)
        if rows:
            group.rows[conversation.index] = rows
            group.by_source[conversation.prompt.source] += 1
        group.left -= 1
        self._num_ended += 1
        if self._on_done is not None:
            self._on_done(self._num_ended, len(self._prompts))
        if not group.left:
            self._write(group)

    def _write(self, group: _Group) -> None:
        num_prompts = min(self._settings.shard_size, len(self._prompts) - group.first)
        rows = [row for _, rows in sorted(group.rows.items()) for row in rows]
        write_shard(self._folder / group.name, rows)
        now = time.monotonic()
        self._state["seconds"] += now - self._started
        self._started = now
        self._state["shards"][group.name] = {
            "num_prompts": num_prompts,
            "counts": dict(group.counts),
            "by_source": dict(group.by_source),
        }
        unfinished = self._report_path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self._state, indent=1) + "\n")
        unfinished.rename(self._report_path)


def read_report(folder: Path) -> Report | None:
    """The report of a dataset; None where nothing was regenerated."""
    path = folder / REPORT_FILE
    if not path.exists():
        return None
    state = json.loads(path.read_text())
    report = Report(seconds=state["seconds"])
    for group in state["shards"].values():
        report.add(group)
    return report


def foreign_shards(folder: Path) -> list[Path]:
    """Shards of a dataset that no regeneration wrote."""
    path = folder / REPORT_FILE
    own = json.loads(path.read_text())["shards"] if path.exists() else {}
    shards = sorted(folder.glob(f"[!.]*{SHARD_SUFFIX}"))  # maybe none yet
    return [shard for shard in shards if shard.name not in own]


class _Conversation:
    """One prompt as it is answered, turn after turn."""

    def __init__(
        self,
        prompt: Prompt,
        settings: RegenerateSettings,
        *,
        index: int,
        tokenizer: Tokenizer,
        template: ChatTemplate,
    ) -> None:
        self.prompt, self.index = prompt, index
        self.counts: Counter[str] = Counter()
        self._settings, self._tokenizer, self._template = settings, tokenizer, template
        self._params = settings.params(index)
        self._messages: list[dict[str, str]] = []
        self._num_turns, self._ended = 0, False
        self._builder = RowBuilder(template, prompt.source)

    @property
    def params(self) -> SamplingParams:
        """Of the next answer: every turn has noise of its own."""
        assert self._params.seed is not None
        return dataclasses.replace(self._params, seed=self._params.seed + self._num_turns)

    def next_prompt(self) -> list[int] | None:
        """The next request's tokens, as a server renders them; None when the conversation ended."""
        if self._ended or self._num_turns == len(self.prompt.turns):
            return None
        if self._num_turns == 0:
            self._messages = self.prompt.messages()
        else:
            turn = self.prompt.turns[self._num_turns]
            self._messages.append({"role": "user", "content": turn})
        prompt_ids = self._tokenizer.render_chat(self._messages, self._template.settings)
        if len(prompt_ids) > self._settings.max_prompt_tokens:
            if self._num_turns == 0:
                self.counts[Outcome.TOO_LONG] += 1
            return None
        return prompt_ids

    def add(self, prompt_ids: Sequence[int], answer: Answer) -> None:
        """One answer. A looping one is dropped, and one without an end has no next turn."""
        self._ended = answer.was_cut
        if is_looping(answer.token_ids):
            self._ended = True
            self.counts[Outcome.LOOPING] += 1
            return
        self.counts[Outcome.CUT] += answer.was_cut
        self._builder.add(prompt_ids, answer.token_ids)
        self._num_turns += 1
        # What a client would send back: the text, without the token that ended it.
        text = self._tokenizer.decode(answer.token_ids)
        self._messages.append({"role": "assistant", "content": text})

    def rows(self) -> list[Row]:
        """The finished conversation, up to a turn that was dropped."""
        if not self._num_turns:
            return []
        try:
            rows = self._builder.rows()
        except DatasetError:  # nothing but empty thoughts
            self.counts[Outcome.EMPTY] += 1
            return []
        self.counts[Outcome.KEPT] += 1
        self.counts[Outcome.ROWS] += len(rows)
        self.counts[Outcome.TOKENS] += sum(len(row.input_ids) for row in rows)
        self.counts[Outcome.ANSWER_TOKENS] += sum(row.num_answer_tokens for row in rows)
        return rows
