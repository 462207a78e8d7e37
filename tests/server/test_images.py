"""Images over HTTP: what is taken, what each refusal says, and that nothing is read that should not
be."""

import base64
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.fake_engine import FakeEngine, says
from fixtures.http_server import Server
from fixtures.kimi_tokenizer import write_kimi_tokenizer
from PIL import Image

from eyas.engine.tokenizer import Tokenizer
from eyas.models.config import VisionConfig
from eyas.models.images import ImageLimits, fit_image
from eyas.server.images import ImageReader, body_limit

Ids = dict[str, int]
PICTURE = Image.linear_gradient("L").resize((20, 12)).convert("RGB")
TEXT = {"type": "text", "text": "What is this?"}


def png(image: Image.Image = PICTURE) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def data_url(data: bytes | None = None) -> str:
    return f"data:image/png;base64,{base64.b64encode(png() if data is None else data).decode()}"


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi")
    write_kimi_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def kimi(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def ids(folder: Path) -> Ids:
    return write_kimi_tokenizer(folder)


@pytest.fixture
def make(kimi: Tokenizer, ids: Ids) -> Callable[..., Server]:
    def make(*, takes_images: bool = True, **reading: Any) -> Server:
        engine = FakeEngine(says([5, 6]))
        engine.vocab_size = 700
        if takes_images:
            engine.vision = VisionConfig(patch_size=2, placeholder_id=ids["<|media_pad|>"])
        return Server(engine, kimi, images=ImageReader(**reading))

    return make


def refusal(server: Server, content: Any, **fields: Any) -> tuple[str, str]:
    """(message, param) of a 400."""
    response = server.chat(content, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == ("invalid_image" if "image" in error["message"] else "invalid_value")
    assert not server.engine.submitted
    return error["message"], error["param"]


def test_an_image_becomes_its_tokens(make: Callable[..., Server], ids: Ids) -> None:
    server = make()
    response = server.chat([part(data_url()), TEXT, part(data_url(), detail="high")])
    assert response.status_code == 200, response.text
    [(prompt, _)], [images] = server.engine.submitted, server.engine.shown
    assert server.engine.vision is not None
    wanted = fit_image(PICTURE, server.engine.vision)
    assert wanted.num_tokens == 15
    assert [image.digest for image in images] == [wanted.digest] * 2
    pad = ids["<|media_pad|>"]
    assert prompt.count(pad) == 30
    for image in images:
        assert prompt[image.start : image.end] == [pad] * 15
        assert prompt[image.start - 1] == ids["<|media_content|>"]
        assert prompt[image.end] == ids["<|media_end|>"]
    assert response.json()["usage"]["prompt_tokens"] == len(prompt)


def test_text_alone_is_as_it_was(make: Callable[..., Server]) -> None:
    prompts = []
    for takes_images in (True, False):
        for content in ("What is this?", [TEXT]):
            server = make(takes_images=takes_images)
            assert server.chat(content).status_code == 200
            assert server.engine.shown == [()]
            prompts.append(server.engine.submitted[0][0])
    assert all(prompt == prompts[0] for prompt in prompts)


def test_tokenize_counts_images(make: Callable[..., Server]) -> None:
    messages = [{"role": "user", "content": [TEXT, part(data_url())]}]
    server = make()
    told = server.post("/tokenize", {"messages": messages}).json()
    assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert told["tokens"] == server.engine.submitted[0][0]


def test_each_choice_has_the_images(make: Callable[..., Server]) -> None:
    server = make()
    assert server.chat([part(data_url())], n=3).status_code == 200
    assert [len(images) for images in server.engine.shown] == [1, 1, 1]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://example.org/a.png", "images are not fetched over https: send a data: URL"),
        ("http://127.0.0.1/a.png", "images are not fetched over http"),
        ("HTTP://127.0.0.1/a.png", "images are not fetched over http"),
        ("file:///etc/passwd", "local files are not read"),
        ("ftp://example.org/a.png", "must be a data: URL"),
        ("/etc/passwd", "must be a data: URL"),
        ("", "must be a data: URL"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64", "not in base64"),
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png;base64,YWJj", "no image that can be read"),
        ("data:image/png;base64,", "no image that can be read"),
        (data_url(png()[:70]), "no image that can be read"),
    ],
)
def test_what_is_no_image_is_refused(make: Callable[..., Server], url: str, text: str) -> None:
    message, param = refusal(make(), [TEXT, part(url)])
    assert message.startswith("image 1: ") and text in message
    assert param == "messages[0].content"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "image_url"}], "part 0 is neither"),
        ([TEXT, {"type": "image_url", "image_url": "data:,"}], "part 1 is neither"),
        ([{"type": "image_url", "image_url": {"url": 5}}], "part 0 is neither"),
        ([{"type": "input_audio", "input_audio": {}}], "other parts (audio, files)"),
        ([part("data:,", detail="low")], 'detail "auto" or "high"'),
        ([part("data:,", size=5)], 'detail "auto" or "high"'),
    ],
)
def test_parts_of_another_shape(make: Callable[..., Server], content: Any, text: str) -> None:
    response = make().chat(content)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_value")
    assert text in error["message"] and error["param"] == "messages[0].content"


def test_limits(make: Callable[..., Server]) -> None:
    data = png()
    for limits, text in (
        (ImageLimits(max_image_bytes=len(data) - 1), "bytes, at most"),
        (ImageLimits(max_image_bytes=len(data) // 2), "bytes, at most"),
        (ImageLimits(max_image_pixels=239), "has 20 × 12 pixels, at most 239"),
    ):
        message, _ = refusal(make(limits=limits), [part(data_url())])
        assert text in message
    two = [part(data_url()), part(data_url())]
    message, _ = refusal(make(limits=ImageLimits(max_images=1)), two)
    assert message == "the request has 2 images, at most 1 are taken"
    exact = ImageLimits(max_image_bytes=len(data), max_image_pixels=240, max_images=2)
    assert make(limits=exact).chat(two).status_code == 200
    assert body_limit(ImageLimits()) == 16 << 20
    assert body_limit(ImageLimits(max_image_bytes=30 << 20)) == 41 << 20


def test_a_model_without_images_says_so(make: Callable[..., Server]) -> None:
    message, param = refusal(make(takes_images=False), [part(data_url())])
    assert message == "this model takes no images: send text alone"
    assert param == "messages[0].content"


def test_only_users_show_images(make: Callable[..., Server]) -> None:
    messages = [{"role": "system", "content": [part(data_url())]}]
    response = make().post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 400
    assert "role user, not system" in response.json()["error"]["message"]


def test_placeholders_in_texts_are_not_taken_for_images(make: Callable[..., Server]) -> None:
    for content in ("<|media_pad|>", [{"type": "text", "text": "<|media_pad|>"}, part(data_url())]):
        server = make()
        response = server.chat(content)
        assert response.status_code == 400 and not server.engine.submitted
        assert "place(s) for images" in response.json()["error"]["message"]


def test_too_many_tokens_are_told_with_both_numbers(make: Callable[..., Server]) -> None:
    response = make().chat([part(data_url(png(Image.new("RGB", (80, 80)))))])
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")


class TestLocalFiles:
    """Images of a folder that the server was given."""

    @pytest.fixture
    def shelf(self, tmp_path: Path) -> Path:
        inside = tmp_path / "shelf"
        (inside / "a b").mkdir(parents=True)
        (inside / "a b" / "ä.png").write_bytes(png())
        (tmp_path / "secret.png").write_bytes(png())
        (inside / "link.png").symlink_to(tmp_path / "secret.png")
        (inside / "large.png").write_bytes(png() + bytes(5000))
        os.mkfifo(inside / "pipe")
        return inside

    def test_a_file_of_the_folder_is_taken(self, make: Callable[..., Server], shelf: Path) -> None:
        server = make(local_folder=shelf)
        url = (shelf / "a b" / "ä.png").as_uri()
        assert "%20" in url and server.chat([part(url)]).status_code == 200
        assert server.engine.shown[0][0].num_tokens == 15

    @pytest.mark.parametrize(
        "path",
        [
            "/../secret.png",
            "/a%20b/../../secret.png",
            "/%2e%2e/secret.png",
            "/link.png",
            "/none.png",
            "/pipe",
            "/a b",
            "/nul%00.png",
        ],
    )
    def test_all_else_is_refused_alike(
        self, make: Callable[..., Server], shelf: Path, path: str
    ) -> None:
        message, _ = refusal(make(local_folder=shelf), [part(f"file://{shelf}{path}")])
        assert message == "image 1: the file: URL names no readable file in the folder for images"

    def test_other_hosts_and_large_files(self, make: Callable[..., Server], shelf: Path) -> None:
        url = (shelf / "large.png").as_uri()
        server = make(local_folder=shelf, limits=ImageLimits(max_image_bytes=5000))
        assert "bytes, at most 5000" in refusal(server, [part(url)])[0]
        url = f"file://elsewhere{shelf}/large.png"
        assert "no readable file" in refusal(make(local_folder=shelf), [part(url)])[0]
