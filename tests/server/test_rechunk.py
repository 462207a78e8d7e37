"""One answer cut into chunks in every way there is: text, stops and log-probabilities stay."""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
from fixtures.byte_tokenizers import write_byte_fallback

from eyas.engine.stop_text import AnswerText
from eyas.engine.tokenizer import Tokenizer
from eyas.server.token_text import LogprobTexts, ShownLogprob, TokenTexts
from eyas.types import FinishReason, TokenLogprob


@dataclasses.dataclass(frozen=True)
class Case:
    """text: of the whole answer; its last `cut` tokens never come. shown: what clients see."""

    text: str
    shown: str
    stop: tuple[str, ...] = ()
    finish: FinishReason = FinishReason.LENGTH
    cut: int = 0


CASES = {
    "emoji": Case("a😀the", "a😀the"),
    "chinese": Case("漢字 the", "漢字 the"),
    "thai": Case("ไทย a", "ไทย a"),
    "in mid-character": Case("the😀漢", "the😀\ufffd", cut=2),
    "a stop after a character": Case("😀 the!", "😀 t", ("he!",), FinishReason.STOP),
    "a stop in two characters": Case("a漢字ไ", "a", ("x", "漢字ไ"), FinishReason.STOP),
    "the start of a stop": Case("a 漢字the", "a 漢字the", ("thea", "字the!")),
}


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


def splits(tokens: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """All ways to cut a list into parts: 2 to the power of its length less one."""
    for mask in range(1 << (len(tokens) - 1)):
        places = [i + 1 for i in range(len(tokens) - 1) if mask >> i & 1]
        bounds = [0, *places, len(tokens)]
        yield [tokens[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_every_split_of_an_answer(
    tokenizer: Tokenizer, byte_fallback: Tokenizer, kind: str, name: str
) -> None:
    if kind == "byte fallback":
        tokenizer = byte_fallback
    case, prompt = CASES[name], tokenizer.encode("a")
    tokens = tokenizer.encode(f"a{case.text}")[len(prompt) :]
    tokens = tokens[: len(tokens) - case.cut]
    texts, expected, seen = TokenTexts(tokenizer), None, 0
    for chunks in splits(tokens):
        answer = AnswerText(tokenizer, case.stop, stop_ids=(), after=prompt)
        shown = LogprobTexts(tokenizer, texts, start=0, after=prompt)
        pieces: list[str] = []
        logprobs: list[ShownLogprob] = []
        for number, chunk in enumerate(chunks, start=1):
            pieces.append(answer.add(chunk, case.finish if number == len(chunks) else None))
            logprobs += shown.add([TokenLogprob(token, -float(token)) for token in chunk])
            so_far = "".join(pieces)
            assert number == len(chunks) or case.shown.startswith(so_far)
            assert number == len(chunks) or "\ufffd" not in so_far
        assert "".join(pieces) == case.shown, chunks
        expected = expected or logprobs
        assert logprobs == expected and len(logprobs) == len(tokens)
        seen += 1
    assert seen == 1 << (len(tokens) - 1) > 15
