"""Text to tokens and back: transformers' tokenizer and chat template, incremental decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.types import EyasError

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A checkpoint folder's tokenizer.

    Raises EyasError when the folder has none that can be read.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # heavy: two seconds

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError) as error:
            raise EyasError(
                f"{folder} has no tokenizer that can be read ({error}): copy the model's "
                "tokenizer.json and tokenizer_config.json there"
            ) from error

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_settings: Any
    ) -> list[int]:
        """Token ids of messages under the chat template, ready for the assistant's answer.

        Raises EyasError if there is no template or it refuses the messages.
        """
        if not self.has_chat_template:
            raise EyasError("this model has no chat template: use a plain prompt (completions)")
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_settings
            )
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise EyasError(f"the chat template refused the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)


class Detokenizer:
    """Decodes a growing token list; holds back bytes that are not a whole character yet.

    The text of a token depends on its neighbours (spaces, byte tokens), so each piece is the
    difference of two decodings that start at a place where the text is settled.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._settled = 0  # decoding starts here
        self._shown = 0  # tokens whose text was returned

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """New text; with is_last also what was held back (an unfinished character as U+FFFD)."""
        self._token_ids += token_ids
        before = self._tokenizer.decode(self._token_ids[self._settled : self._shown])
        text = self._tokenizer.decode(self._token_ids[self._settled :])
        if not is_last and text.endswith(_REPLACEMENT):
            return ""
        self._settled, self._shown = self._shown, len(self._token_ids)
        return text[len(before) :]
