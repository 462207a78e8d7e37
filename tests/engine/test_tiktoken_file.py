"""Kimi's tokenizer from its files: the same ids as the tiktoken library with the same pattern."""

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from fixtures.kimi_tokenizer import TEXT, small_ranks, special_ids, write_kimi_tokenizer

from eyas.engine import tiktoken_file
from eyas.engine.tiktoken_file import PATTERN, make_tokenizer, read_ranks
from eyas.engine.tokenizer import Detokenizer, Tokenizer
from eyas.types import EyasError

SIGNS = [
    *"abcxyzABCXYZ'sStTlLmMvVrReEdD 0123456789.,;:!?()[]{}<>|=+-*/\\\"`~@#$%^&_\n\r\t",
    *"中文字符日本語テキスカナ한국어Приветمرحبا你好世界々〆ーㄅ𠀀😀👩é́ǅßİſⅧ²１ʰª",
    *("\u00a0", "\u3000", "\u2028", "\x85", "\u200b", "\u200d", "\x00", "\ufeff"),
    *("aaaaa", "====", "  ", "\r\n", "'ll", "'S", " the", "<|im_end|>", "<|reserved_token_500|>"),
]


def reference(ranks: dict[bytes, int], special: dict[str, int]) -> Callable[[str], list[int]]:
    """As the published code encodes: all special tokens are taken from the text."""
    encoding = tiktoken.Encoding(
        "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    return lambda text: encoding.encode(text, allowed_special="all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_kimi_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def test_ids_are_tiktokens(tokenizer: Tokenizer) -> None:
    ranks = small_ranks()
    wanted = reference(ranks, special_ids(len(ranks)))
    rng, seen = random.Random(0), set()
    texts = [TEXT, *("".join(rng.choices(SIGNS, k=rng.randint(1, 60))) for _ in range(4000))]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == wanted(text), repr(text)
        seen.update(ids)
    assert len(seen) > 200


def pair_ranks() -> dict[bytes, int]:
    """Every pair of a byte with one of some, and the seams of Chinese characters: where a text is
    cut decides what is merged."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for sign in b"aB 1!\n'":
        for byte in range(256):
            ranks.setdefault(bytes([sign, byte]), len(ranks))
            ranks.setdefault(bytes([byte, sign]), len(ranks))
    for last in range(0x80, 0xC0):
        for first in range(0xE4, 0xEA):
            ranks[bytes([last, first])] = len(ranks)
    return ranks


def sensitive_text(code: int) -> str:
    """A code point beside all kinds of neighbours."""
    sign = chr(code)
    return sign.join(("a", "B", "1", " ", "!", "\n", "a'", ""))


def test_texts_are_cut_as_tiktoken_cuts_them() -> None:
    ranks = pair_ranks()
    ours, wanted = make_tokenizer(ranks, {}), reference(ranks, {})
    blocks = [range(0x3400), range(0xAC00, 0xAC40), range(0xF900, 0x10000), range(0x1F300, 0x1F700)]
    blocks += [range(0x4E00, 0x9FFF, 97), range(0x20000, 0x323B0, 997), range(0x10000, 0x1F000, 31)]
    for codes in blocks:
        for code in codes:
            text = sensitive_text(code)
            assert ours.encode(text).ids == wanted(text), hex(code)


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        (r"[\p{Han}]+|", r"[\p{Han}]|"),
        (r"&&[^\p{Han}]", ""),
        ("(?i:", "(?:"),
        (r"\p{N}{1,3}", r"\p{N}+"),
        (r"[\r\n]*", ""),
        (r"\s+(?!\S)|", ""),
        (r"\p{Lm}", ""),
    ],
)
def test_the_comparison_would_notice(
    part: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = pair_ranks()
    wanted = reference(ranks, {})
    assert part in PATTERN
    monkeypatch.setattr(tiktoken_file, "PATTERN", PATTERN.replace(part, instead))
    ours = make_tokenizer(ranks, {})
    texts = [sensitive_text(code) for code in (*range(0x300), *range(0x2B0, 0x2C0), 0x4E2D, 0x3005)]
    texts += ["a'LLa", "1111", "!!\n\na", "a  B", "中文"]
    assert any(ours.encode(text).ids != wanted(text) for text in texts)


def test_special_tokens_stand_where_they_are_published(folder: Path, tokenizer: Tokenizer) -> None:
    ids = write_kimi_tokenizer(folder)
    text = "".join(ids)
    assert tokenizer.encode(text) == list(ids.values())
    # <think> is no special token there, and so is shown.
    assert tokenizer.decode(list(ids.values())) == "<think></think>"
    assert tokenizer.encode("<|reserved_token_425|>") == [425]
    assert tokenizer._tokenizer.eos_token_id == ids["[EOS]"]
    assert len(tokenizer._tokenizer) == 420 + 256
    assert tokenizer.encode("") == []


def test_a_conversation(folder: Path, tokenizer: Tokenizer) -> None:
    ids = write_kimi_tokenizer(folder)
    parts = [{"type": "text", "text": "What is "}, {"type": "image"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    tokens = tokenizer.render_chat(messages, {"thinking": False})
    assert tokens == [
        ids["<|im_system|>"],
        *tokenizer.encode("system"),
        ids["<|im_middle|>"],
        *tokenizer.encode("Be brief."),
        ids["<|im_end|>"],
        ids["<|im_user|>"],
        *tokenizer.encode("user"),
        ids["<|im_middle|>"],
        *tokenizer.encode("What is "),
        ids["<|media_begin|>"],
        *tokenizer.encode("image"),
        *(ids[f"<|media_{name}|>"] for name in ("content", "pad", "end")),
        ids["<|im_end|>"],
        ids["<|im_assistant|>"],
        *tokenizer.encode("assistant"),
        *(ids[name] for name in ("<|im_middle|>", "<think>", "</think>")),
    ]


def test_tokens_are_bytes_and_texts_come_piece_by_piece(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    ranks = {rank: token for token, rank in small_ranks().items()}
    assert [tokenizer.token_bytes(token) for token in ids] == [ranks[token] for token in ids]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([token]) for token in ids]
    assert "".join(pieces) + detokenizer.add([], is_last=True) == TEXT
    assert tokenizer.token_bytes(422) == b"<|im_end|>"


def test_a_tokenizer_json_beside_it_is_taken(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_kimi_tokenizer(tmp_path)
    tokenizer._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"broken")
    assert Tokenizer(tmp_path).encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda lines: lines[:-1] + [b"#### 419"], "is no list of tokens"),
        (lambda lines: lines[:-1] + [lines[-1] + b" 7"], "is no list of tokens"),
        (lambda lines: lines[:300] + lines[301:], "does not number its tokens"),
        (lambda lines: [b"version https://git-lfs.github.com/spec/v1"], "run `git lfs pull`"),
        (lambda lines: [], "does not number its tokens"),
        (
            lambda lines: [base64.b64encode(b"zz") + b" 0", *lines[1:]],
            "has no token for the byte 0",
        ),
    ],
)
def test_broken_files_are_refused(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], text: str
) -> None:
    write_kimi_tokenizer(tmp_path)
    file = tmp_path / "tiktoken.model"
    file.write_bytes(b"\n".join(change(file.read_bytes().splitlines())))
    with pytest.raises(EyasError, match=text):
        read_ranks(file)
    with pytest.raises(EyasError, match="has no tokenizer that can be read"):
        Tokenizer(tmp_path)


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    write_kimi_tokenizer(tmp_path, 420)
    config = (tmp_path / "tokenizer_config.json").read_text()
    write_kimi_tokenizer(tmp_path, 400)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(EyasError, match="special ones are 400 to 655"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"added_tokens_decoder": ["[BOS]"]}, "must be an object of tokens"),
        ({"added_tokens_decoder": {"first": {"content": "[BOS]"}}}, "must be an object of tokens"),
        ({"added_tokens_decoder": {"420": {"special": True}}}, "must be an object of tokens"),
        ({"added_tokens_decoder": {"420": {"content": ""}}}, "must be an object of tokens"),
        ({"added_tokens_decoder": {"420": {"content": "a"}}}, "'a', is another one's name"),
        ({"added_tokens_decoder": {"420": "<a>", "421": "<a>"}}, "'<a>', is another one's name"),
        ({"eos_token": "<no such>"}, "eos_token names no token"),
        ({"bos_token": 5}, "bos_token names no token"),
    ],
)
def test_a_broken_configuration_is_refused(tmp_path: Path, change: Any, text: str) -> None:
    write_kimi_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EyasError, match=f"{text}.*tiktoken.model and tokenizer_config.json there"):
        Tokenizer(tmp_path)


def test_tokens_are_named_with_flags_too(tmp_path: Path) -> None:
    ids = write_kimi_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    named = {"eos_token": {"__type": "AddedToken", "content": "[EOS]", "lstrip": False}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    assert Tokenizer(tmp_path)._tokenizer.eos_token_id == ids["[EOS]"]
