"""What a request may ask for, as far as its numbers tell: seen by clients before they send it, and
by the engine, which has other callers too."""

from __future__ import annotations

from eyas.engine.messages import EngineInfo
from eyas.types import MAX_STOP_IDS, EyasError, SamplingParams, TooLongError


def most_new_tokens(info: EngineInfo, num_prompt: int, params: SamplingParams) -> int:
    """How many tokens the answer to such a prompt may have.

    Raises TooLongError where prompt and answer do not fit, EyasError for tokens that do not exist.
    """
    check_prompt_length(info, num_prompt)
    _check_tokens(info, params)
    room = info.max_model_len - num_prompt
    if params.min_tokens > room:
        raise TooLongError(
            f"min_tokens {params.min_tokens} does not fit: after {num_prompt} prompt tokens the "
            f"model length of {info.max_model_len} leaves {room}",
            param="min_tokens",
        )
    if params.max_tokens is None:
        return room
    if params.max_tokens > room:
        raise TooLongError(
            f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} exceed the model "
            f"length of {info.max_model_len}: ask for at most {room} tokens",
            param="max_tokens",
        )
    return params.max_tokens


def check_prompt_length(info: EngineInfo, num_prompt: int, *, is_least: bool = False) -> None:
    """Raises TooLongError unless an answer fits after the prompt. is_least: it may be longer."""
    if num_prompt >= info.max_model_len:
        number = f"at least {num_prompt}" if is_least else num_prompt
        raise TooLongError(
            f"the prompt has {number} tokens, the model length is {info.max_model_len} and at "
            "least one token must be left for the answer: shorten the prompt"
        )


def _check_tokens(info: EngineInfo, params: SamplingParams) -> None:
    fields = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    for name, token_ids in fields.items():
        wrong = [token for token in token_ids if not 0 <= token < info.vocab_size]
        if wrong:
            raise EyasError(
                f"{name}: token {wrong[0]} is outside the vocabulary of {info.vocab_size}",
                param=name,
            )
    num_stop = len(info.stop_ids(params))
    if num_stop > MAX_STOP_IDS:
        raise EyasError(
            f"{num_stop} stop token ids (the model's own included), at most {MAX_STOP_IDS} are "
            "supported",
            param="stop_token_ids",
        )
