"""Which tokens of a conversation the target would write itself, by what its template renders.

No header of any template is known here. For each answer the template is rendered twice: as a
server renders it before the answer (with the generation prompt), and with the answer in place. The
answer is what the second text has more, up to the token that ends the turn; what the template adds
after that token belongs to the next prompt. So the tokens before an answer are those that a server
would feed the target, to the last one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.train.dataset import DatasetError, Row
from eyas.types import EyasError

Message = Mapping[str, Any]

_MARK = "EYAS-MARKS-THIS-PLACE"  # stands for a content whose surroundings are looked for
_THINK = re.compile(r"(?P<open><think>|◁think▷)?\s*(</think>|◁/think▷)\s*")
_OPEN_THINK = re.compile(r"(<think>|◁think▷)\s*$")
_MAX_EMPTY_THINK = 16  # tokens


class ChatTemplate:
    """A tokenizer's chat template, as text and as tokens.

    tokenizer: one of transformers. settings: further variables of the template (such as
    enable_thinking), the same for every conversation.
    """

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise EyasError(
                "the target has no chat template, which tells questions from answers: put its "
                "chat_template.jinja or tokenizer_config.json into the folder"
            )
        self._tokenizer, self.settings = tokenizer, dict(settings or {})
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        added |= set(tokenizer.all_special_tokens)
        longest_first = sorted(added, key=lambda token: (-len(token), token))
        self._added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any] | None = None) -> ChatTemplate:
        """The template in a checkpoint folder."""
        from transformers import AutoTokenizer  # heavy

        return cls(AutoTokenizer.from_pretrained(str(folder)), settings)

    def added_ids(self) -> list[int]:
        """Ids of the tokens that are no merges of others: special ones, those that end turns."""
        return sorted({*map(int, self._tokenizer.added_tokens_decoder), *self._special_ids()})

    def _special_ids(self) -> list[int]:
        return [int(token) for token in self._tokenizer.all_special_ids]

    def text(self, messages: Sequence[Message], *, for_answer: bool) -> str:
        """The messages as text. for_answer: with what asks the assistant to answer."""
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=for_answer,
                **self.settings,
            )
        except Exception as error:  # a template can fail in any way on what it was not made for
            raise DatasetError(f"the chat template refused the messages: {error}") from error
        return rendered

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, as a server makes them."""
        return [int(t) for t in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids with every special token in it."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def user_turn(self) -> tuple[list[int], int]:
        """(tokens before the first user's words, the token that ends them): a target that
        continues the former writes a question itself."""
        messages = [{"role": "user", "content": _MARK}]
        before, after = _around_mark(self.text(messages, for_answer=True))
        end = self._added.search(after)
        if end is None:
            raise EyasError("the chat template has no token that ends a user's words")
        return self.encode(before), self.encode(end.group())[0]

    def answer(self, messages: Sequence[Message], index: int) -> tuple[list[int], list[int]]:
        """(prompt tokens as served, answer tokens up to the end of the turn) of the answer
        messages[index].

        Raises DatasetError when the template renders an answer differently from how the target
        would write it (some leave its thoughts out): then only the target can write it.
        """
        before = messages[:index]
        prompt = self.text(before, for_answer=True)
        whole = self.text(messages[: index + 1], for_answer=False)
        mark = {"role": "assistant", "content": _MARK}
        _, ending = _around_mark(self.text([*before, mark], for_answer=False))
        answer = self._after_prompt(prompt, whole, before)
        if answer is None or not answer.endswith(ending):
            raise DatasetError(
                f"message {index} is not rendered as the target would write it after "
                f"{prompt[-40:]!r}: leave the answers out and let the target write them"
            )
        turn_end = self._added.search(ending)
        kept = prompt + answer[: len(answer) - len(ending)]
        kept += ending[: turn_end.end()] if turn_end else ""
        prompt_ids, ids = self.encode(prompt), self.encode(kept)
        if ids[: len(prompt_ids)] == prompt_ids:
            return prompt_ids, ids[len(prompt_ids) :]
        # The last token of the prompt would merge with the answer's first characters.
        answer_ids = self.encode(kept[len(prompt) :])
        if self.decode(prompt_ids + answer_ids) != self.decode(ids):
            raise DatasetError(f"message {index} cannot be cut off its prompt without other tokens")
        return prompt_ids, answer_ids

    def _after_prompt(self, prompt: str, whole: str, before: Sequence[Message]) -> str | None:
        """What a conversation's text has after the prompt for its last answer; None if that cannot
        be told."""
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        # An answer can change how the turns before it are rendered (their thoughts go). Then it
        # comes after the last place of what asks for an answer.
        asking = prompt.removeprefix(self.text(before, for_answer=False))
        if not asking or asking == prompt or whole.count(asking) != prompt.count(asking):
            return None
        return whole.rpartition(asking)[2]

    def num_untrained(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> int:
        """How many tokens an answer begins with that are empty think tags.

        They come from the template or from a switch in the prompt: as a habit they would teach the
        draft that nothing is ever thought.
        """
        opened = _OPEN_THINK.search(self.decode(prompt_ids[-_MAX_EMPTY_THINK:])) is not None
        found = 0
        for count in range(1, min(len(answer_ids), _MAX_EMPTY_THINK) + 1):
            match = _THINK.fullmatch(self.decode(answer_ids[:count]).lstrip())
            if match is not None and bool(match["open"]) is not opened:
                found = count
        return found


class RowBuilder:
    """Puts the turns of one conversation into as few rows as the template allows.

    A turn continues the row of the turn before if its prompt begins with that row's tokens. Some
    templates render earlier answers differently (without thoughts): then a new row begins, in which
    the earlier answers count as prompt.
    """

    def __init__(self, template: ChatTemplate, source: str) -> None:
        self._template, self._source = template, source
        self._rows: list[Row] = []
        self._ids: list[int] = []
        self._mask: list[int] = []

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """One answer after its whole prompt, earlier turns included."""
        num_known = len(self._ids)
        if list(prompt_ids[:num_known]) != self._ids:
            self._flush()
            num_known = 0
        self._ids += prompt_ids[num_known:]
        self._mask += [0] * (len(prompt_ids) - num_known)
        num_untrained = self._template.num_untrained(prompt_ids, answer_ids)
        self._ids += answer_ids
        self._mask += [0] * num_untrained + [1] * (len(answer_ids) - num_untrained)

    def _flush(self) -> None:
        if self._ids:
            self._rows.append(Row(self._ids, self._mask, self._source))
        self._ids, self._mask = [], []

    def rows(self) -> list[Row]:
        """The rows. Raises DatasetError when one has nothing to learn from."""
        self._flush()
        return self._rows


def conversation_rows(
    template: ChatTemplate, messages: Sequence[Message], *, source: str = ""
) -> list[Row]:
    """Rows of a conversation whose answers are known, every assistant's message an answer.

    Raises DatasetError if there is none, or see ChatTemplate.answer.
    """
    builder = RowBuilder(template, source)
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            builder.add(*template.answer(messages, index))
    rows = builder.rows()
    if not rows:
        raise DatasetError("the conversation has no assistant's message to learn from")
    return rows


def _around_mark(text: str) -> tuple[str, str]:
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise DatasetError("the chat template leaves out the content of a plain message")
    return before, after
