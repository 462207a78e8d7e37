"""One streamed answer over HTTP, with the moments at which its tokens came."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx


@dataclasses.dataclass
class RequestRecord:
    """What became of one request. Times are seconds on the clock that was given.

    planned: when it was to be sent; sent: when it was. first, last: of its tokens. gaps: (seconds
    since the chunk before, tokens in the chunk) of all chunks but the first. error: None for a
    whole answer.
    """

    planned: float
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    gaps: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    text: str = ""
    error: str | None = None

    @property
    def first_token_seconds(self) -> float:
        """From the planned moment, so that a late client does not make the server look good."""
        assert self.first is not None
        return self.first - self.planned

    @property
    def mean_inter_token_seconds(self) -> float:
        """Of the tokens after the first chunk; 0 where there are none."""
        num_tokens = sum(count for _, count in self.gaps)
        return sum(gap for gap, _ in self.gaps) / num_tokens if num_tokens else 0.0


async def stream_chat(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    *,
    planned: float,
    now: Callable[[], float],
) -> RequestRecord:
    """Send a chat request and read its stream to the end. What goes wrong is the record's `error`.

    Tokens of a chunk are counted by the usage that it tells; a server that tells none until the
    end is taken to send one a chunk.
    """
    record = RequestRecord(planned, sent=now())
    streaming = {"stream": True}
    streaming["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}  # type: ignore[assignment]
    try:
        url = "/v1/chat/completions"
        async with client.stream("POST", url, json={**body, **streaming}) as response:
            if response.status_code != 200:
                record.error = f"HTTP {response.status_code}"
                await response.aread()
            else:
                await _read(response, record, now)
    except httpx.HTTPError as error:
        record.error = type(error).__name__
    record.ended = now()
    if record.error is None and record.first is None:
        record.error = "no token"
    return record


async def _read(response: httpx.Response, record: RequestRecord, now: Callable[[], float]) -> None:
    pieces: list[str] = []
    async for data in _events(response):
        if data == "[DONE]":
            record.text = "".join(pieces)
            return
        event = json.loads(data)
        if "error" in event:
            record.error = f"error event: {event['error'].get('type', 'unknown')}"
            return
        text = "".join(_text(choice) for choice in event.get("choices", []))
        pieces.append(text)
        _count(record, event.get("usage"), has_text=bool(text), time=now())
    record.error = "the stream ended early"


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def _text(choice: Mapping[str, Any]) -> str:
    """What a choice says, hidden reasoning included."""
    delta = choice.get("delta") or {}
    return "".join(delta.get(key) or "" for key in ("reasoning_content", "content"))


def _count(
    record: RequestRecord, usage: Mapping[str, Any] | None, *, has_text: bool, time: float
) -> None:
    """Take in one event: how many tokens it brought, and when."""
    before = record.num_tokens
    if usage:
        record.num_tokens = usage["completion_tokens"]
        record.num_prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        record.num_cached_tokens = details.get("cached_tokens") or 0
    elif has_text:
        record.num_tokens += 1
    brought = record.num_tokens - before
    if not has_text or not brought:
        return
    if record.last is None:
        record.first = time
    else:
        record.gaps.append((time - record.last, brought))
    record.last = time
