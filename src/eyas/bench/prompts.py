"""Prompts of a benchmark: built in, from a file, or random tokens; cut to a fixed length."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eyas.types import EyasError

Messages = list[Mapping[str, Any]]


class ChatTokenizer(Protocol):
    """What is needed of engine.tokenizer.Tokenizer."""

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of messages, ready for the answer."""


# Tasks with long, varied answers, first those in whose answers even a tiny model does not soon
# repeat itself. Longer prompts take several of them.
BUILT_IN = (
    "I teach the violin to beginners of all ages and have noticed that adults give up after about "
    "five months, while children who stay for half a year usually stay for years. Help me to think "
    "about the reasons: time, hands, taste, shame, the price of lessons, the sound in a small flat "
    "at nine in the evening. For each reason propose something that I could change in the first "
    "twenty lessons, how I would see after a term whether it helped, and what it would cost me. "
    "Then sketch one lesson of forty-five minutes in the fourth month, minute by minute.",
    "A colleague claims that the price of bread in our town has risen because the mill by the "
    "river closed. I think that energy, wages and the bad harvest two years ago matter more. Lay "
    "out both arguments fairly. List the figures that one would need to decide between them, where "
    "a citizen could find such figures, which of them are likely to mislead, and how long the "
    "delay between a cause and its effect on the shelf may be. Finish with the way in which you "
    "would present the result at a public meeting of thirty people, some of whom have worked at "
    "the mill, without boring anyone and without hurting anyone.",
    "We run a small library with nine thousand books, two part-time employees and an old catalogue "
    "program that prints labels but cannot search by subject. The town has given us money for one "
    "year to replace it. Some of the volunteers want a hosted service, others want something that "
    "runs on the computer under the desk and keeps working when the network is down. Compare the "
    "two ways with regard to cost, privacy of the readers, backups, training and what happens if "
    "the supplier gives up. Then describe, month by month, how we could move the records without "
    "closing the library for more than three days.",
    "Explain to a curious fourteen-year-old how a suspension bridge stands. Begin with a washing "
    "line and a wet towel, go on to the forces in a hanging cable and in the towers, say why the "
    "deck is stiffened, and tell the story of a bridge that moved too much in the wind. Use no "
    "formulas, but do use numbers where they help, such as how many wires a main cable has and how "
    "far the towers lean. At the end suggest an experiment with string, two chairs and a few books "
    "that shows where the load goes, and three questions to think about on the way to school.",
    "Plan a walking holiday of eight days for three friends in their sixties: one has a bad knee, "
    "one paints, and one wants to see old railways. They like simple inns, local cheese and being "
    "out of the sun between noon and three. Choose a region that you know something about, give a "
    "stage for each day with its length in kilometres and hours, a way to shorten it, something to "
    "draw, and something made of iron. Say what to pack for rain, how to send the luggage ahead, "
    "and what to do on a day when nobody feels like walking.",
    "Tell a story about a lighthouse keeper who receives, every autumn, a crate of clocks that "
    "have stopped, with a note asking for them to be set going by the first of March. Nobody "
    "knows who sends them. This year there is one clock more than usual, it is running, and it "
    "runs backwards. Let the story be about patience and not about magic, let the weather matter, "
    "and give the keeper a sister on the mainland who writes letters that are too short. Keep the "
    "sentences plain. The ending should answer one question and leave another one open.",
    "Write a Python module that reads a log file of a web server, groups the requests by hour and "
    "path, and prints the ten slowest groups with the number of requests and the median and the "
    "ninety-fifth percentile of the response time. Lines that cannot be parsed must be counted and "
    "not lost; the file may be compressed, and it may be larger than memory. Explain each decision "
    "before the code: which data structure holds the times, how the percentile is found, what "
    "happens with a request that crosses midnight, and how you would test the parser. Then give "
    "the code with type hints and a short command line, and after it two unit tests.",
    "My grandmother kept bees for forty years in a village near the coast, and she left me six "
    "hives, a smoker, two veils and a notebook with remarks about the weather, the lime trees and "
    "the temper of each colony. I have never opened a hive. It is early spring, the nights are "
    "still cold, and on warm afternoons I can see foragers coming home with yellow pollen. One of "
    "the hives is silent. Write me a letter of advice: what to look at first, what to leave alone "
    "until May, how to tell whether the silent hive is dead or only weak, which tools I should buy "
    "new, and how to approach the neighbours, who are afraid of being stung. Be concrete and kind.",
)


def built_in_prompts(tokenizer: ChatTokenizer, *, count: int, num_tokens: int) -> list[list[int]]:
    """`count` prompts of exactly `num_tokens` tokens.

    Raises EyasError when the chat template alone needs more tokens.
    """
    prompts = []
    for first in range(count):
        texts = itertools.cycle(
            BUILT_IN[first % len(BUILT_IN) :] + BUILT_IN[: first % len(BUILT_IN)]
        )
        # A repeated prompt would make a cache of equal prefixes look good: number them.
        text = next(texts) if first < len(BUILT_IN) else f"Task {first + 1}. {next(texts)}"
        while len(tokenizer.encode(text)) < num_tokens:
            text += f"\n\n{next(texts)}"
        messages: Messages = [{"role": "user", "content": text}]
        prompts.append(cut(tokenizer, messages, num_tokens=num_tokens))
    return prompts


def file_prompts(
    tokenizer: ChatTokenizer, path: Path, *, count: int, num_tokens: int | None
) -> list[list[int]]:
    """The first `count` prompts of a JSONL file that are long enough, cut to `num_tokens` tokens;
    None leaves them as long as they are.

    Raises EyasError on lines that are no prompts and when there are not enough of them.
    """
    prompts: list[list[int]] = []
    for messages in read_messages(path):
        prompt = cut(tokenizer, messages, num_tokens=num_tokens)
        if num_tokens is None or len(prompt) == num_tokens:
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts
    enough = "" if num_tokens is None else f" of at least {num_tokens} tokens"
    raise EyasError(
        f"{path} has {len(prompts)} prompts{enough}, and {count} are needed: lower --batch or "
        "--num-prompts" + ("" if num_tokens is None else ", or --prompt-tokens")
    )


def random_prompts(vocab_size: int, *, count: int, num_tokens: int) -> list[list[int]]:
    """Prompts of random token ids, the same in every run."""
    source = random.Random(0)
    return [[source.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def cut(tokenizer: ChatTokenizer, messages: Messages, *, num_tokens: int | None) -> list[int]:
    """Token ids of messages, at most `num_tokens` of them.

    Tokens go from the end of the conversation, but the template's own ending, which asks for the
    answer, stays. Raises EyasError when nothing of the conversation would be left.
    """
    if not tokenizer.has_chat_template:
        text = "\n\n".join(str(message["content"]) for message in messages)
        return tokenizer.encode(text)[:num_tokens]
    prompt = tokenizer.render_chat(messages)
    if num_tokens is None or len(prompt) <= num_tokens:
        return prompt
    empty = tokenizer.render_chat([{"role": "user", "content": ""}])
    if num_tokens <= len(empty):
        raise EyasError(
            f"the chat template alone takes {len(empty)} tokens: --prompt-tokens must be above that"
        )
    pairs = zip(reversed(prompt), reversed(empty), strict=False)
    num_ending = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return prompt[: num_tokens - num_ending] + prompt[len(prompt) - num_ending :]


def read_messages(path: Path) -> list[Messages]:
    """The conversations of a JSONL file. Raises EyasError on lines that are no prompts."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EyasError(f"--prompts {path} cannot be read: {error}") from None
    return [_messages(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def _messages(line: str, where: str) -> Messages:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise EyasError(f"{where} is not valid JSON: {error}") from None
    if isinstance(data, dict):
        prompt, messages = data.get("prompt"), data.get("messages")
        if isinstance(prompt, str) and prompt:
            return [{"role": "user", "content": prompt}]
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return messages
    raise EyasError(
        f'{where} is no prompt: write {{"prompt": "..."}} or '
        '{"messages": [{"role": "user", "content": "..."}]} on each line'
    )


def _is_message(message: Any) -> bool:
    keys = ("role", "content")
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in keys)
