"""Text to tokens and back: transformers' tokenizer and chat template, incremental decoding."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eyas.engine.tiktoken_file import FILE, is_tiktoken_folder, load_tiktoken
from eyas.types import EyasError

_REPLACEMENT = "\ufffd"
_MAX_UNFINISHED = 3  # bytes of a character whose last byte is missing
_TEMPLATE_INPUTS = {"messages", "self"}  # beside the parameters of apply_chat_template
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_MAX_CONTEXT = 8  # prompt tokens that are looked at for the end of its text
_MAX_HELD = 16  # tokens; more than that are no unfinished character but a run of wrong bytes


class Tokenizer:
    """A checkpoint folder's tokenizer.

    Raises EyasError when the folder has none that can be read.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # heavy: two seconds

        is_tiktoken = is_tiktoken_folder(folder)
        try:
            if is_tiktoken:
                self._tokenizer: Any = load_tiktoken(folder)
            else:
                self._tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except Exception as error:  # broken files make transformers raise anything
            file = FILE if is_tiktoken else "tokenizer.json"
            raise EyasError(
                f"{folder} has no tokenizer that can be read ({error}): copy the model's {file} "
                "and tokenizer_config.json there"
            ) from error
        self._byte_of = _BYTE_LEVEL if _is_byte_level(self._tokenizer) else None

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises EyasError for half a character, which no encoding has."""
        try:
            # verbose: it would warn of texts that are longer than the tokenizer's file says.
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except TypeError:
            if not any("\ud800" <= character <= "\udfff" for character in text):
                raise
            raise EyasError("a text holds half a character (a lone surrogate)") from None
        return [int(token) for token in ids]

    def least_tokens(self, num_characters: int) -> int:
        """So many tokens at least has a text of that length: to refuse long ones unread.

        A text that the normalizer shrinks to less than a quarter may have fewer.
        """
        return num_characters // (4 * self._longest_token)

    @functools.cached_property
    def _longest_token(self) -> int:
        return max((len(piece) for piece in self._tokenizer.get_vocab()), default=1)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, alone: exact bytes even where they are half a character.

        Special tokens are their names; an id without a token is empty.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if isinstance(piece, bytes):  # some slow tokenizers keep bytes
            return piece
        if self._byte_of is not None:
            # Added tokens are stored as plain text, which other characters may be part of.
            known = [self._byte_of.get(character) for character in piece]
            exact = [byte for byte in known if byte is not None]
            return bytes(exact) if len(exact) == len(known) else str(piece).encode()
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("\u2581", " ").encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_settings: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of messages under the chat template, ready for the assistant's answer.

        template_settings: more variables for the template (such as enable_thinking). Raises
        EyasError if there is no template, it refuses the messages, or a setting is no template
        variable but one of ours.
        """
        if not self.has_chat_template:
            raise EyasError("this model has no chat template: use a plain prompt (completions)")
        settings = dict(template_settings or {})
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        for name in settings:
            if name in parameters or name in _TEMPLATE_INPUTS:
                raise EyasError(f"chat_template_kwargs may not set {name!r}")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **settings
            )
        except Exception as error:  # a template can fail in any way on what it was not made for
            raise EyasError(f"the chat template refused the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)


def _byte_level_table() -> dict[str, int]:
    """The byte of each printable stand-in, as GPT-2's byte-level BPE chose them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_LEVEL = _byte_level_table()


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the tokenizer's pieces are written in GPT-2's stand-ins."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return False
    found = json.loads(decoder.__getstate__())
    parts = found.get("decoders", []) if found["type"] == "Sequence" else [found]
    return any(part["type"] == "ByteLevel" for part in parts)


class Decoder(Protocol):
    """What a Detokenizer needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens; U+FFFD for bytes that are no character."""


class Detokenizer:
    """Decodes a growing token list; holds back bytes that are not a whole character yet.

    The text of a token depends on its neighbours (spaces, byte tokens), so each piece is what
    tokens add to the text of some already shown tokens before them. The whole text does not depend
    on how the list was cut into calls.

    after: tokens of which the list is the continuation: a decoder that strips the first space of a
    text shall leave that of an answer.
    """

    def __init__(self, tokenizer: Decoder, *, after: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._window = self._context(after)  # shown tokens for context, then held ones
        self._num_shown = len(self._window)  # the window's first tokens, whose text was returned
        self._shown_text = self._decode(self._window) if self._window else ""  # their text

    def _context(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens that are whole characters, none after a special token: that is where a
        text begins."""
        for number in range(1, min(len(tokens), _MAX_CONTEXT) + 1):
            context = list(tokens[-number:])
            text = self._decode(context)
            if not text:
                break
            if _REPLACEMENT not in text:
                return context
        return []

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """New text; with is_last also what was held back (an unfinished character as U+FFFD)."""
        whole = [*self._window, *token_ids]
        text = self._decode(whole)
        if _REPLACEMENT not in text:
            self._window = whole
            return self._show(len(whole), text)
        pieces = [self._add_one(token) for token in token_ids]
        if is_last and self._num_shown < len(self._window):
            pieces.append(self._show(len(self._window), self._decode(self._window)))
        return "".join(pieces)

    def _add_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._show(len(self._window), text)
        if len(self._window) - self._num_shown < _MAX_HELD:
            return ""
        end = self._settled_end(text)
        return self._show(end, self._decode(self._window[:end]))

    def _settled_end(self, text: str) -> int:
        """Where to cut a long run of held tokens that still ends in U+FFFD.

        An unfinished character has at most three bytes and so is within the last three tokens.
        Before them, a cut is right where both sides decode to the same as the whole.
        """
        for end in range(len(self._window) - _MAX_UNFINISHED, self._num_shown, -1):
            if self._decode(self._window[:end]) + self._decode(self._window[end:]) == text:
                return end
        return len(self._window)

    def _show(self, end: int, text: str) -> str:
        """Return what the window's tokens up to `end`, whose text is `text`, add to the shown."""
        if text.startswith(self._shown_text):
            piece = text[len(self._shown_text) :]
        else:  # some decoders spoil a whole run of byte tokens for one bad byte in it
            piece = self._decode(self._window[self._num_shown : end])
        if piece:
            # The new tokens are the next ones' context. Tokens without text (special ones) would
            # not do: decoders which strip the first space would strip it again after them.
            self._window = self._window[self._num_shown :]
            end -= self._num_shown
            text = self._decode(self._window[:end])
        self._num_shown, self._shown_text = end, text
        return piece
