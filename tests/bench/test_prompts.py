"""Prompts have the length asked for, and keep the template's ending."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.prompts import BUILT_IN, built_in_prompts, cut, file_prompts, random_prompts
from eyas.types import EyasError


class WordTokenizer:
    """One token a word; the template is two tokens, the words, and three tokens."""

    HEAD, TAIL = [1, 2], [3, 4, 5]

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, 10 + len(self._ids)) for word in text.split()]

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        words = [token for m in messages for token in self.encode(str(m["content"]))]
        return [*self.HEAD, *words, *self.TAIL]


def user(text: str) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": text}]


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_cutting_keeps_head_and_ending() -> None:
    tokenizer = WordTokenizer()
    whole = tokenizer.render_chat(user("a b c d e f"))
    assert cut(tokenizer, user("a b c d e f"), num_tokens=8) == whole[:5] + [3, 4, 5]


def test_a_short_conversation_stays_whole() -> None:
    tokenizer = WordTokenizer()
    whole = tokenizer.render_chat(user("a b"))
    assert cut(tokenizer, user("a b"), num_tokens=7) == whole
    assert cut(tokenizer, user("a b"), num_tokens=None) == whole


def test_a_length_that_the_template_fills_is_refused() -> None:
    with pytest.raises(EyasError, match="takes 5 tokens: --prompt-tokens"):
        cut(WordTokenizer(), user("a b c"), num_tokens=5)


def test_without_a_template_the_text_is_cut() -> None:
    tokenizer = WordTokenizer(has_chat_template=False)
    assert cut(tokenizer, user("a b c d"), num_tokens=3) == tokenizer.encode("a b c")


@pytest.mark.parametrize("num_tokens", [6, 64, 1000])
@pytest.mark.parametrize("has_chat_template", [True, False])
def test_built_in_prompts_have_one_length_and_differ(
    num_tokens: int, has_chat_template: bool
) -> None:
    tokenizer = WordTokenizer(has_chat_template=has_chat_template)
    prompts = built_in_prompts(tokenizer, count=len(BUILT_IN), num_tokens=num_tokens)
    assert {len(prompt) for prompt in prompts} == {num_tokens}
    assert len({tuple(prompt) for prompt in prompts}) == len(BUILT_IN)


def test_more_prompts_than_are_built_in_differ_from_the_beginning() -> None:
    tokenizer = WordTokenizer()
    prompts = built_in_prompts(tokenizer, count=2 * len(BUILT_IN), num_tokens=20)
    assert len({tuple(prompt[:6]) for prompt in prompts}) == len(prompts)


def test_file_prompts_of_both_kinds(tmp_path: Path) -> None:
    lines = [{"prompt": "a b"}, "", {"messages": [*user("c"), *user("d e")]}]
    path = write_lines(tmp_path / "prompts.jsonl", lines)
    tokenizer = WordTokenizer()
    prompts = file_prompts(tokenizer, path, count=2, num_tokens=None)
    assert prompts == [tokenizer.render_chat(user("a b")), tokenizer.render_chat(user("c d e"))]


def test_file_prompts_that_are_too_short_are_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b c d e"}])
    (prompt,) = file_prompts(WordTokenizer(), path, count=1, num_tokens=8)
    assert len(prompt) == 8
    with pytest.raises(EyasError, match="has 1 prompts of at least 8 tokens, and 2 are needed"):
        file_prompts(WordTokenizer(), path, count=2, num_tokens=8)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        {"text": "a"},
        {"prompt": ""},
        {"prompt": 3},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": ["a"]},
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: object) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, line])
    with pytest.raises(EyasError, match=r"p\.jsonl:2 is"):
        file_prompts(WordTokenizer(), path, count=1, num_tokens=None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="--prompts .* cannot be read"):
        file_prompts(WordTokenizer(), tmp_path / "none.jsonl", count=1, num_tokens=None)


def test_random_prompts_are_the_same_in_every_run() -> None:
    prompts = random_prompts(50, count=3, num_tokens=40)
    assert prompts == random_prompts(50, count=3, num_tokens=40)
    assert [len(prompt) for prompt in prompts] == [40] * 3
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
