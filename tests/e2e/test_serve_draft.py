"""Two servers of the real model, one with a draft: nothing but the rounds may differ."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fixtures.fitted_draft import write_fitted_draft
from fixtures.server_process import Process

from eyas.engine.llm import LLM
from eyas.types import SamplingParams

PROMPTS = ["The capital of France is", "Name three birds of prey.", "1, 2, 3, 4, 5,"]
MESSAGES: Any = [{"role": "user", "content": PROMPTS[1]}]
FLAGS = ["--dtype=float32", "--max-model-len=1024", "--served-model-name=smollm2"]
GREEDY: Any = {"temperature": 0, "max_tokens": 20}
SAMPLED: Any = {"temperature": 0.8, "seed": 11, "max_tokens": 14, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def draft(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    llm = LLM(str(smollm2_dir), dtype="float32", max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts = [o.prompt_token_ids + o.token_ids for o in llm.generate(PROMPTS, params)]
    chat = llm.chat(MESSAGES, params)
    texts.append(chat.prompt_token_ids + chat.token_ids)
    del llm
    folder = tmp_path_factory.mktemp("draft")
    write_fitted_draft(folder, smollm2_dir, texts)
    return folder


@pytest.fixture(scope="module")
def servers(
    server: Process, smollm2_dir: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Process, Process]]:
    log = tmp_path_factory.mktemp("draft-server") / "log"
    spec = Process(smollm2_dir, log, *FLAGS, f"--draft={draft}", "--log-format=json")
    try:
        spec.wait_for(status="ready")
        yield server, spec
    finally:
        spec.process.kill()
        spec.process.wait()


def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": PROMPTS, "logprobs": 3, **GREEDY},
    "long": {"prompt": PROMPTS[0], "logprobs": 0, "temperature": 0, "max_tokens": 40},
    "stop": {"prompt": PROMPTS[2], "logprobs": 1, "stop": ["13", " 9, 1"], **GREEDY},
    "options": {
        "prompt": PROMPTS[:2],
        "n": 2,
        "logprobs": 2,
        "logit_bias": {"28": -3.0, "30": 2},
        "top_p": 0.9,
        "presence_penalty": 0.2,
        "extra_body": {"min_p": 0.02, "top_k": 50, "min_tokens": 8, "repetition_penalty": 1.1},
        **SAMPLED,
    },
    "echo": {"prompt": PROMPTS[0], "echo": True, **SAMPLED},
}


def whole(server: Process, fields: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from one to the next."""
    with client(server) as openai_client:
        answer = openai_client.completions.create(model="smollm2", **fields).model_dump()
    return {name: answer[name] for name in ("choices", "usage", "system_fingerprint")}


def without_numbers(answer: dict[str, Any]) -> tuple[Any, list[float]]:
    """An answer's log-probabilities apart from all else."""
    numbers: list[float] = []

    def walk(value: Any) -> Any:
        if isinstance(value, float):
            numbers.append(value)
            return "number"
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    return walk(answer), numbers


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    (text, numbers), (other_text, other_numbers) = without_numbers(one), without_numbers(other)
    assert text == other_text
    assert numbers == pytest.approx(other_numbers, abs=1e-4)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_draft_changes_nothing(servers: tuple[Process, Process], name: str) -> None:
    """Text, log-probabilities and usage, also where a request switches speculation off."""
    plain, spec = servers
    fields = REQUESTS[name]
    expected = whole(plain, fields)
    same(whole(spec, fields), expected)
    if name in ("stop", "options"):
        off = {**fields.get("extra_body", {}), "speculation": False}
        same(whole(spec, {**fields, "extra_body": off}), expected)
    if name == "stop":
        assert expected["choices"][0]["finish_reason"] == "stop"


def test_streams_are_the_answers(servers: tuple[Process, Process]) -> None:
    settings: Any = {"logprobs": True, "top_logprobs": 2, **GREEDY}
    answers = []
    for server in servers:
        with client(server) as one:
            answer = one.chat.completions.create(model="smollm2", messages=MESSAGES, **settings)
            stream = one.chat.completions.create(
                model="smollm2",
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
                **settings,
            )
            chunks = list(stream)
        assert chunks[-1].usage and answer.usage
        cached = {"prompt_tokens_details": None}  # the second may find more in the cache
        usage = answer.usage.model_copy(update=cached)
        assert chunks[-1].usage.model_copy(update=cached) == usage
        choices = [chunk.choices[0] for chunk in chunks[:-1]]
        text = "".join(choice.delta.content or "" for choice in choices)
        assert text == answer.choices[0].message.content
        tokens = [t for choice in choices if choice.logprobs for t in choice.logprobs.content or []]
        assert answer.choices[0].logprobs
        assert [t.token for t in tokens] == [t.token for t in answer.choices[0].logprobs.content]
        streamed = [t.logprob for t in tokens]
        given = [t.logprob for t in answer.choices[0].logprobs.content or []]
        assert streamed == pytest.approx(given, abs=1e-4)
        assert len(tokens) == usage.completion_tokens
        answers.append((text, given, usage.completion_tokens, usage.prompt_tokens))
    assert answers[0][0] == answers[1][0] and answers[0][2:] == answers[1][2:]
    assert answers[0][1] == pytest.approx(answers[1][1], abs=1e-4)


def test_rounds_are_counted(servers: tuple[Process, Process]) -> None:
    plain, spec = (server.metrics() for server in servers)
    assert plain["eyas_acceptance_length"] == 1
    assert spec["eyas_acceptance_length"] > 1.05, "the draft is never right: this proves little"
    kept = [spec[f'eyas_accepted_draft_tokens_total{{position="{i}"}}'] for i in (1, 2, 3)]
    drafted = [spec[f'eyas_draft_tokens_total{{position="{i}"}}'] for i in (1, 2, 3)]
    assert drafted[0] == drafted[1] == drafted[2] > kept[0] >= kept[1] >= kept[2]
    part = 'eyas_round_seconds_total{{batch="1",part="{}",shape="chain-3"}}'
    draft, verify, both = (spec[part.format(name)] for name in ("draft", "verify", "round"))
    assert 0 < draft < verify
    assert draft + verify <= both
    assert plain['eyas_rounds_total{batch="1",shape="plain"}'] > 0
    assert spec["eyas_prefix_cache_queried_tokens_total"] > 0


def test_a_killed_engine_ends_the_server_with_one_report(servers: tuple[Process, Process]) -> None:
    """Streams get an error event; the exit code is 1; no process stays."""
    _, spec = servers
    pid = spec.engine_pid()
    ask = {"prompt": PROMPTS[0], "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{spec.url}/v1/completions", json=ask, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "the engine process was killed by SIGKILL" in rest[-1]
    assert '"error"' in rest[-1]
    assert spec.process.wait(30) == 1
    assert not Path(f"/proc/{pid}").exists()
    log = spec.log.read_text()
    assert log.count("the engine died") == 1 and "Traceback" not in log
    assert all(json.loads(line)["message"] for line in log.splitlines())
