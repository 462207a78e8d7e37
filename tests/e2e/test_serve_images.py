"""A small Kimi-K2.5 on disk (INT4 experts, vision tower, its own tokenizer) through `eyas serve`
with a draft, spoken to with images and text; the offline engine without a draft says the same."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import PIL.Image
import pytest
from fixtures.checkpoints import DraftShape, write_draft
from fixtures.kimi_vision import write_served_kimi
from fixtures.server_process import Process

from eyas.engine.llm import LLM
from eyas.types import SamplingParams

PICTURE = PIL.Image.linear_gradient("L").resize((41, 25)).convert("RGB")
OTHER = PICTURE.rotate(180)
PICTURE_TOKENS = 4 * 6  # squares of 8 pixels
QUESTION = "What do you see?"
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def data_url(image: PIL.Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def shown(url: str, text: str = QUESTION) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi")
    write_served_kimi(path / "target")
    shape = DraftShape(vocab_size=676, layer_ids=(1, 2, 3))
    write_draft(path / "draft", shape)
    PICTURE.save(path / "picture.png")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    flags = ["--draft", str(folder / "draft"), "--topk=2", "--num-speculative-tokens=3"]
    flags += ["--max-model-len=512", "--max-batch-size=4", "--served-model-name=kimi"]
    flags += ["--allow-local-images", str(folder), "--max-image-pixels=5000"]
    running = Process(folder / "target", folder / "log", *flags)
    try:
        running.wait_for(status="ready")
        yield running
        assert running.stop() == 0, running.log.read_text()
        assert "Traceback" not in running.log.read_text()
    finally:
        running.process.kill()
        running.process.wait()


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder / "target"), max_model_len=512, max_batch_size=1)


def ask(client: openai.OpenAI, messages: Any, **settings: Any) -> Any:
    settings = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}} | settings
    return client.chat.completions.create(model="kimi", messages=messages, **settings)


def test_answers_with_images_and_without(client: openai.OpenAI, llm: LLM) -> None:
    texts = []
    for image in (PICTURE, OTHER):
        answer = ask(client, shown(data_url(image)))
        parts = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": parts}]
        wanted = llm.chat(messages, GREEDY)
        texts.append(answer.choices[0].message.content)
        assert texts[-1] == wanted.text and len(texts[-1]) > 10
        assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert texts[0] != texts[1]
    plain = [{"role": "user", "content": QUESTION}]
    answer = ask(client, plain)
    wanted = llm.chat(plain, GREEDY)
    assert answer.choices[0].message.content == wanted.text
    with_image = len(llm.tokenizer.render_chat(plain)) + PICTURE_TOKENS
    # Beside the picture's tokens: its begin, "image" in pieces, the end of that, and its end.
    assert with_image < ask(client, shown(data_url(PICTURE))).usage.prompt_tokens < with_image + 10


def test_seeded_sampling_with_an_image(client: openai.OpenAI, llm: LLM, folder: Path) -> None:
    parts = [{"type": "image", "image": folder / "picture.png"}, {"type": "text", "text": QUESTION}]
    params = dataclasses.replace(GREEDY, temperature=1.0, seed=5)
    wanted = llm.chat([{"role": "user", "content": parts}], params).text
    stream = ask(client, shown(data_url(PICTURE)), temperature=1.0, seed=5, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted


def test_a_local_file_and_pages_found_again(client: openai.OpenAI, folder: Path) -> None:
    first = ask(client, shown(data_url(PICTURE)))
    again = ask(client, shown((folder / "picture.png").as_uri()))
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    other = ask(client, shown(data_url(OTHER.rotate(90))))
    assert other.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://example.org/a.png", "images are not fetched over https"),
        ("data:image/png;base64,AAAA", "no image that can be read"),
        (data_url(PICTURE.resize((100, 60))), "has 100 × 60 pixels, at most 5000"),
        ("file:///etc/hostname", "no readable file in the folder"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, url: str, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        ask(client, shown(url))
    assert caught.value.code == "invalid_image" and caught.value.param == "messages[0].content"


def test_the_log_says_that_images_are_taken(server: Process) -> None:
    log = server.log.read_text()
    assert "images: 8 × 8 pixels a token, at most 256 patches" in log
    assert "int4 (groups of 32): experts" in log
