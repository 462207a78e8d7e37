"""Request fields that are not served: which are refused, and which values of them do no harm.

A field that is silently ignored gives wrong answers (other servers drop penalties or seeds), so
everything that would change the answer is refused by name until it is implemented.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from eyas.server.errors import ApiError, shortened

_MAX_NAMED = 10  # unknown fields: a body may hold a million of them

# They do not change the answer.
HARMLESS = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}

# Known but not implemented, with the values that ask for nothing (null always does).
_BOTH_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "include_stop_str_in_output": (False,),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
CHAT_NEUTRAL = _BOTH_NEUTRAL | {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
COMPLETION_NEUTRAL = _BOTH_NEUTRAL | {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}


def served_fields(
    body: Mapping[str, Any], *, known: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields of `known` that a body sets; null counts as not set.

    Raises ApiError (400), naming them, for fields that nobody knows or that are known and not
    implemented, unless the value is one that asks for nothing.
    """
    names = {*known, *neutral, *HARMLESS}
    unknown = [name for name in body if name not in names]
    if unknown:
        hinted = [_with_hint(name, names) for name in unknown[:_MAX_NAMED]]
        if len(unknown) > _MAX_NAMED:
            hinted.append(f"and {len(unknown) - _MAX_NAMED} more")
        text = f"unknown field(s): {', '.join(hinted)}"
        raise ApiError(400, text, param=unknown[0], code="unknown_field")
    refused = list(_refused(body, neutral))
    if refused:
        raise ApiError(
            400,
            f"not supported: {', '.join(refused)}; leave out what the answer can do without",
            param=refused[0],
            code="unsupported_field",
        )
    return {name: value for name, value in body.items() if name in known and value is not None}


def _refused(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and not any(_same(value, other) for other in values):
            yield name


def _same(value: Any, other: Any) -> bool:
    """Equal and alike: True is not 1 here."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _with_hint(name: str, names: Collection[str]) -> str:
    name = shortened(name)
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"{name} (did you mean {near[0]}?)" if near else name
