"""Kimi's tokenizer from its files, without the code that is published beside them.

`tiktoken.model` has a token a line: its bytes in base64, and its rank, which is its id. A text is
cut by a pattern; in each piece the adjacent pair whose joined bytes have the lowest rank is merged,
until none has any. Special tokens, 256 of them, stand behind the last rank; their names are in
tokenizer_config.json. Made into a `tokenizers` tokenizer, which does the same with merges written
out as pairs. Of the published code's ways one is left out: it cuts runs of more than 25,000 signs
without a space (or of spaces) for the sake of its library, at which a token may then end.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.models.config_file import LFS_PREFIX, read_json
from eyas.types import EyasError

FILE, CONFIG = "tiktoken.model", "tokenizer_config.json"
NUM_SPECIAL = 256
# Chinese characters; words, which may begin with one other sign, in two cases, with English
# endings; up to three digits; signs; line ends; spaces. `tokenization_kimi.py` of Kimi-K2 has it.
_WORD_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (
    rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
)
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_WORD_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_WORD_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def is_tiktoken_folder(folder: Path) -> bool:
    """Whether the tokenizer's only form is a tiktoken file."""
    return (folder / FILE).exists() and not (folder / "tokenizer.json").exists()


def load_tiktoken(folder: Path) -> Any:
    """A transformers tokenizer from the files in `folder`.

    Raises EyasError for a file that is broken or is another model's.
    """
    from transformers import PreTrainedTokenizerFast

    ranks = read_ranks(folder / FILE)
    config_file = folder / CONFIG
    config = read_json(config_file) if config_file.exists() else {}
    special = _special_tokens(config, first=len(ranks))
    tokenizer = make_tokenizer(ranks, special)
    roles = {role: _content(config[role]) for role in _ROLES if config.get(role) is not None}
    for role, name in roles.items():
        # transformers would add a token that the model has no row for.
        if name is None or tokenizer.token_to_id(name) is None:
            raise EyasError(f"{CONFIG}: {role} names no token of {FILE}: {config[role]!r}")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        chat_template=_chat_template(folder, config),
        clean_up_tokenization_spaces=False,
        **roles,
    )


_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Rank by token, in the order of the ranks, which must be 0, 1, 2 and so on.

    Raises EyasError for a file that is no such list.
    """
    ranks: dict[bytes, int] = {}
    try:
        raw = path.read_bytes()
        if raw.startswith(LFS_PREFIX):
            raise EyasError(f"{path} is a Git-LFS pointer and not the file: run `git lfs pull`")
        for line in raw.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise EyasError(
            f"{path} is no list of tokens in base64 with their ranks: {error}"
        ) from None
    if list(ranks.values()) != list(range(len(ranks))) or len(ranks) < NUM_SPECIAL:
        raise EyasError(f"{path} does not number its tokens from 0 on: get it again")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise EyasError(f"{path} has no token for the byte {missing[0]}: get it again")
    return ranks


def make_tokenizer(ranks: Mapping[bytes, int], special: Mapping[int, Any]) -> Any:
    """A `tokenizers.Tokenizer`; special: AddedToken by id.

    Raises EyasError for two tokens of one name.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    symbols = _byte_symbols()
    vocab = {_spelled(token, symbols): rank for token, rank in ranks.items()}
    merges = [(_spelled(left, symbols), _spelled(right, symbols)) for left, right in _merges(ranks)]
    # ignore_merges: a piece that is a token itself stays whole, as tiktoken has it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([special[number] for number in sorted(special)])
    for number, token in special.items():
        if tokenizer.token_to_id(token.content) != number:
            raise EyasError(f"the special token {number}, {token.content!r}, is another one's name")
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs that make each token, by its rank: every way to cut it into two tokens, for
    tiktoken merges by the joined bytes and does not ask how the halves came about."""
    for token in ranks:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _special_tokens(config: Mapping[str, Any], *, first: int) -> dict[int, Any]:
    """By id: those that the configuration names, and the reserved ones between them."""
    from tokenizers import AddedToken

    named = config.get("added_tokens_decoder") or {}
    is_object = isinstance(named, dict)
    if not is_object or not all(key.isdecimal() and _content(v) for key, v in named.items()):
        raise EyasError(f"{CONFIG}: added_tokens_decoder must be an object of tokens by their ids")
    ids = {int(number): entry for number, entry in named.items()}
    outside = [number for number in ids if not first <= number < first + NUM_SPECIAL]
    if outside:
        raise EyasError(
            f"{CONFIG} names the special token {outside[0]}, and {FILE} has {first} "
            f"tokens: special ones are {first} to {first + NUM_SPECIAL - 1}; the files belong to "
            "different models"
        )
    tokens = {}
    for number in range(first, first + NUM_SPECIAL):
        entry = ids.get(number, f"<|reserved_token_{number}|>")
        entry = entry if isinstance(entry, dict) else {"content": entry}
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word")}
        tokens[number] = AddedToken(
            entry["content"], special=bool(entry.get("special", True)), normalized=False, **flags
        )
    return tokens


def _content(token: Any) -> str | None:
    """A token's text; configurations write it alone or with flags. None for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's own file, else the configuration's."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise EyasError(f"{file} is no text in UTF-8: {error}") from None
    template = config.get("chat_template")
    return template if isinstance(template, str) else None


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _spelled(token: bytes, symbols: list[str]) -> str:
    return "".join([symbols[byte] for byte in token])
