"""`eyas serve` with the real model, spoken to over HTTP as its users do."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fixtures.server_process import SLOTS, Process

COMMA = 28  # its token in this model's vocabulary
MESSAGES: Any = [{"role": "user", "content": "Name three birds of prey."}]


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_pieces(client: openai.OpenAI, **settings: Any) -> tuple[list[str], Any]:
    """The pieces of a streamed chat answer and its usage."""
    stream = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **settings,
    )
    chunks = list(stream)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    return [c.choices[0].delta.content or "" for c in chunks[:-1]], chunks[-1].usage


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").owned_by == "eyas"


def test_chat_answers_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    settings: Any = {"max_completion_tokens": 24, "temperature": 0}
    answer = client.chat.completions.create(model="smollm2", messages=MESSAGES, **settings)
    text = answer.choices[0].message.content
    assert text and answer.usage
    assert answer.usage.completion_tokens == 24
    assert answer.choices[0].finish_reason == "length"
    pieces, usage = chat_pieces(client, **settings)
    assert "".join(pieces) == text
    assert usage.prompt_tokens_details.cached_tokens >= 16  # a page at least
    usage.prompt_tokens_details = answer.usage.prompt_tokens_details
    assert usage == answer.usage


def test_seeded_sampling_is_the_same_twice_and_choices_count_the_seed_up(
    client: openai.OpenAI,
) -> None:
    settings: Any = {"max_tokens": 12, "temperature": 1.0}
    first, _ = chat_pieces(client, seed=7, **settings)
    again, _ = chat_pieces(client, seed=7, **settings)
    assert "".join(again) == "".join(first)
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, seed=6, n=3, **settings
    )
    texts = [choice.message.content for choice in answer.choices]
    assert texts[1] == "".join(first)
    assert len(set(texts)) == 3


def test_completions_in_text_and_tokens(client: openai.OpenAI) -> None:
    settings: Any = {"model": "smollm2", "temperature": 0, "max_tokens": 8}
    text = "The capital of France is"
    answer = client.completions.create(prompt=[text, "One, two,"], **settings)
    alone = client.completions.create(prompt=text, stream=True, **settings)
    assert "".join(chunk.choices[0].text for chunk in alone) == answer.choices[0].text
    assert "Paris" in answer.choices[0].text
    assert answer.usage and answer.usage.completion_tokens == 16
    arrays = client.completions.create(prompt=[[504, COMMA], [504, COMMA]], **settings)
    assert arrays.choices[0].text == arrays.choices[1].text
    assert arrays.usage and arrays.usage.prompt_tokens == 4


def test_a_stop_token_ends_the_answer_and_is_not_shown(client: openai.OpenAI) -> None:
    settings: Any = {"model": "smollm2", "temperature": 0, "prompt": "One, two, three, four,"}
    free = client.completions.create(max_tokens=8, **settings)
    stopped = client.completions.create(
        max_tokens=8, extra_body={"stop_token_ids": [COMMA]}, **settings
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == free.choices[0].text.split(",")[0]
    assert stopped.usage and stopped.usage.completion_tokens < 8


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"top_p": 0}, 400, "top_p: "),
        ({"tools": [{"type": "function"}]}, 400, "not supported: tools"),
        ({"temperature": -1}, 400, "temperature: "),
        ({"max_tokens": 1024}, 400, r"max_tokens 1024 exceed the model length of 1024"),
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "user", "content": "a " * 2000}]}, 400, "model length is 1024"),
        ({"extra_body": {"stop_token_ids": list(range(100))}}, 400, "stop_token_ids: 100 items"),
        ({"extra_body": {"stop_token_ids": list(range(3, 35))}}, 400, "stop token ids .* at most"),
        ({"model": "gpt-4"}, 404, "'gpt-4' is not served"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_before_a_stream(
    client: openai.OpenAI, fields: dict[str, Any], status: int, message: str, stream: bool
) -> None:
    request: Any = {"model": "smollm2", "messages": MESSAGES, "stream": stream} | fields
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.chat.completions.create(**request)
    assert caught.value.status_code == status


def test_prompts_around_the_model_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2", prompt=[504] * 1023)
    assert answer.usage and answer.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError, match="the prompt has 1024 tokens") as caught:
        client.completions.create(model="smollm2", prompt=[504] * 1024)
    assert caught.value.code == "context_length_exceeded"


def test_clients_that_leave_free_their_slots_and_pages(
    server: Process, client: openai.OpenAI
) -> None:
    [before] = server.wait_for(status="ready", num_running=0, num_waiting=0)
    assert before["num_free_pages"] == before["num_pages"]

    def one(number: int) -> str:
        """Requests 0 to 2 leave after two chunks, the others read on to the end."""
        stream = client.completions.create(
            model="smollm2",
            prompt=f"{number} birds sat in a tree.",
            max_tokens=900 if number < 3 else 16,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        reason = None
        for count, chunk in enumerate(stream):
            reason = chunk.choices[0].finish_reason
            if number < 3 and count == 1:
                stream.close()
                break
        return reason or "left"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == ["left"] * 3 + ["length"] * 5
    left = time.monotonic()
    server.wait_for(num_running=0, num_waiting=0, num_free_pages=before["num_pages"])
    assert time.monotonic() - left < 5  # 900 tokens would take far longer
    fill_every_slot(server)


def fill_every_slot(server: Process) -> None:
    """Run as many requests as there are slots at once, and leave them all."""
    ask = {"prompt": "Birds", "n": SLOTS, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask, timeout=30):
        server.wait_for(num_running=SLOTS, num_waiting=0)
    server.wait_for(num_running=0, num_waiting=0)
