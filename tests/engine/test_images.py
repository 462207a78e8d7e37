"""Requests with images: speculation does not show, and neither do chunks, pages found again,
preemption, or what else runs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fixtures.kimi_vision import (
    PLACEHOLDER,
    TINY_VISION,
    Shown,
    image_of,
    tiny_kimi,
    with_images,
)
from fixtures.mixtures import latent_decoder
from fixtures.tiny import (
    Generated,
    count_preemptions,
    draft_config,
    fit_head,
    fresh_backend,
    make_engine,
    random_prompts,
    run,
    tiny_draft_and_weights,
    worker_shape,
)

from eyas.cache.pool import NUM_RESERVED_PAGES, KVPool
from eyas.config import PLAIN, TreeShape
from eyas.contract.target import GivenRows
from eyas.engine.engine import Engine
from eyas.engine.image_places import place_images
from eyas.engine.image_rows import ImageRows
from eyas.scheduler.scheduler import Phase
from eyas.types import EyasError, ImageInput, SamplingParams

SHAPES = {"plain": PLAIN, "chain": TreeShape(3, 1, 4), "tree": TreeShape(4, 3, 12)}
NUM_NEW = 40
TEXTS = random_prompts([3, 21, 33, 18])
IMAGES = [image_of(4, 4, seed=0), image_of(2, 7, seed=1), image_of(1, 1, seed=2)]
SHOWN = [
    with_images(TEXTS[0], {1: IMAGES[0]}),
    with_images(TEXTS[1], {0: IMAGES[1], 12: IMAGES[2]}),
    with_images(TEXTS[2], {30: IMAGES[0], 32: IMAGES[1]}),
    with_images(TEXTS[3], {}),
]
PARAMS = [
    SamplingParams(max_tokens=NUM_NEW, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 1.0, 0.7, 0.0))
]


@functools.cache
def target() -> Any:
    return tiny_kimi()


def engine_with(draft: Any = None, shape: str = "plain", **settings: Any) -> Engine:
    chunk_tokens = settings.pop("chunk_tokens", 64)
    run_ahead = settings.pop("run_ahead", 0)
    return make_engine(
        target(),
        draft,
        worker_shape(SHAPES[shape], **settings),
        chunk_tokens=chunk_tokens,
        run_ahead=run_ahead,
        vision=TINY_VISION,
    )


def answers(engine: Engine, shown: Sequence[Shown] = SHOWN) -> list[Generated]:
    pairs = zip(shown, PARAMS, strict=False)
    prompts, params = zip(*((one.prompt, p) for one, p in pairs), strict=True)
    return run(engine, prompts, params, [one.images for one in shown])


@functools.cache
def plain() -> list[list[int]]:
    """What each prompt gives alone, in one chunk, without a draft."""
    texts = []
    for shown, params in zip(SHOWN, PARAMS, strict=True):
        engine = engine_with()
        texts.append(run(engine, [shown.prompt], [params], [shown.images])[0].tokens)
    return texts


@functools.cache
def draft_of(kind: str) -> Any:
    """A draft that is right now and then."""
    config = draft_config(latent_decoder()) if kind == "latent" else draft_config()
    draft, _ = tiny_draft_and_weights(target(), config)
    texts = [s.prompt + a for s, a in zip(SHOWN, plain(), strict=True)]
    fit_head(draft, target(), texts)
    return draft


@pytest.mark.parametrize("draft", ["llama", "latent"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_speculation_does_not_show(shape: str, draft: str) -> None:
    engine = engine_with(draft_of(draft), shape, run_ahead=1)
    results = answers(engine)
    assert [r.tokens for r in results] == plain()
    assert {n for r in results for n in r.rounds} >= {1, 2}


def test_images_matter() -> None:
    other = with_images(TEXTS[0], {1: image_of(4, 4, seed=9)})
    found = run(engine_with(), [other.prompt], PARAMS[:1], [other.images])[0].tokens
    assert other.prompt == SHOWN[0].prompt and found != plain()[0]


@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_chunks_do_not_show(chunk_tokens: int) -> None:
    engine = engine_with(draft_of("latent"), "tree", chunk_tokens=chunk_tokens)
    assert [r.tokens for r in answers(engine)] == plain()
    assert engine.worker.images is not None
    # Each picture is seen in many chunks, and encoded once while it is among the latest.
    assert engine.worker.images.num_encoded <= 5


def test_preemption_does_not_show() -> None:
    engine = engine_with(draft_of("llama"), "chain", num_pages=11 + NUM_RESERVED_PAGES)
    victims = count_preemptions(engine)
    assert [r.tokens for r in answers(engine)] == plain()
    assert victims


def ask(engine: Engine, shown: Shown) -> tuple[list[int], int]:
    """(the answer, prompt tokens found in the cache)."""
    engine.add("x", shown.prompt, PARAMS[0], shown.images)
    request = engine.requests["x"]
    while engine.has_work:
        engine.step()
    return request.output_token_ids, request.num_cached_tokens


def test_pages_are_shared_by_pictures_and_not_by_placeholders() -> None:
    engine = engine_with(draft_of("llama"), "chain", page_size=8)
    images = engine.worker.images
    assert images is not None
    text = random_prompts([25])[0]
    one, other = (with_images(text, {3: image_of(4, 4, seed=seed)}) for seed in (0, 1))
    assert one.prompt == other.prompt
    first, num_cached = ask(engine, one)
    assert num_cached == 0 and images.num_encoded == 1
    again, num_cached = ask(engine, one)
    assert again == first and num_cached == 40 and images.num_encoded == 1
    second, num_cached = ask(engine, other)
    assert second != first and num_cached == 0 and images.num_encoded == 2
    assert second == ask(engine_with(), other)[0]
    # The same pictures one token further: what stands before them is all that is shared.
    moved = with_images(text, {9: image_of(4, 4, seed=0)})
    assert ask(engine, moved) == (ask(engine_with(), moved)[0], 0)
    # A page that ends before the picture does not know of it: the first is that of `moved`.
    late = [with_images(text, {20: image_of(4, 4, seed=seed)}) for seed in (0, 1)]
    assert [ask(engine, shown)[1] for shown in late] == [8, 16]


def test_two_pictures_in_another_order() -> None:
    text, pictures = random_prompts([40])[0], (image_of(2, 2, seed=3), image_of(2, 2, seed=4))
    engine = engine_with(page_size=8)
    both = [
        with_images(text, dict(zip((1, 20), order, strict=True)))
        for order in (pictures, pictures[::-1])
    ]
    assert both[0].prompt == both[1].prompt
    found = [ask(engine, shown) for shown in both]
    assert found == [(ask(engine_with(), shown)[0], 0) for shown in both]
    assert found[0][0] != found[1][0]


def given_rows(shown: Shown) -> GivenRows:
    rows = [p for image in shown.images for p in range(image.start, image.end)]
    parts = [
        target().encode_image(
            torch.frombuffer(bytearray(image.rgb), dtype=torch.uint8).view(
                image.height, image.width, 3
            )
        )
        for image in shown.images
    ]
    return GivenRows(torch.tensor(rows), torch.cat(parts))


@torch.inference_mode()
def fresh(draft: Any, shown: Shown, text: list[int]) -> tuple[KVPool, KVPool]:
    """Both caches after one pass over a text: token t is at row first + t, pair t at first + t."""
    model, num_tokens = target(), len(text)
    backend = fresh_backend(model.kv_layout, num_pages=1, page_size=num_tokens)
    model.set_eagle3_layers_to_capture(draft.boundaries)
    plan = backend.plan_prefill(
        page_table_BP=torch.tensor([[NUM_RESERVED_PAGES]]),
        chunks=[(0, num_tokens)],
        device=torch.device("cpu"),
    )
    output = model.forward(torch.tensor(text), torch.arange(num_tokens), plan, given_rows(shown))
    assert output.features_TF is not None
    of_draft = fresh_backend(draft.kv_layout, num_pages=1, page_size=num_tokens)
    rows_T = torch.arange(num_tokens - 1) + NUM_RESERVED_PAGES * num_tokens
    draft.write_kv(
        torch.tensor(text[1:]),  # of an image, the token that stands for it
        draft.combine(output.features_TF[:-1]),
        torch.arange(num_tokens - 1),
        of_draft.plan_write(rows_T),
    )
    return backend.pool, of_draft.pool


@pytest.mark.parametrize("shape", ["plain", "tree"])
def test_the_caches_equal_a_fresh_prefill_after_every_round(shape: str) -> None:
    draft, shown = draft_of("latent"), SHOWN[1]
    engine = engine_with(draft, shape, chunk_tokens=9)
    text = shown.prompt + plain()[1]
    pools, size = fresh(draft, shown, text), len(text)
    engine.add("x", shown.prompt, PARAMS[1], shown.images)
    request, lengths = engine.requests["x"], set()
    while engine.has_work:
        engine.step()
        if request.phase is not Phase.RUNNING:
            continue
        worker, slot = engine.worker, request.slot
        length = int(worker.state.length_S[slot])
        pages = worker.state.page_table_SP[slot].tolist()
        ours = (worker.target_pool, worker.draft_pool)
        for pool, want, start in zip(ours, pools, (0, 1), strict=True):
            index = range(start, length + start)
            rows = [pages[i // pool.page_size] * pool.page_size + i % pool.page_size for i in index]
            first = NUM_RESERVED_PAGES * size
            torch.testing.assert_close(
                pool.k_LRKD[:, rows].cpu(),
                want.k_LRKD[:, first : first + length],
                atol=2e-4,
                rtol=1e-4,
            )
        lengths.add(length)
    assert len(lengths) > 10


def test_what_does_not_fit_is_refused() -> None:
    engine, shown = engine_with(), SHOWN[1]
    image = shown.images[0]
    for images, text in (
        ((dataclasses.replace(image, start=1),), "does not lie on 14 placeholders"),
        (shown.images[::-1], "does not lie on"),
        ((dataclasses.replace(image, start=len(shown.prompt) - 2),), "does not lie on"),
    ):
        with pytest.raises(EyasError, match=text):
            engine.add("x", shown.prompt, PARAMS[0], images)
    text_alone = make_engine(target(), shape=worker_shape())
    with pytest.raises(EyasError, match="takes no images"):
        text_alone.add("x", shown.prompt, PARAMS[0], shown.images)
    assert not engine.has_work and not text_alone.has_work


def test_places_of_images() -> None:
    one, other = image_of(1, 2, seed=0), image_of(2, 2, seed=1)
    prompt, placed = place_images([5, PLACEHOLDER, 6, PLACEHOLDER], [one, other], PLACEHOLDER)
    assert prompt == [5, *[PLACEHOLDER] * 2, 6, *[PLACEHOLDER] * 4]
    assert [(image.start, image.end) for image in placed] == [(1, 3), (4, 8)]
    for tokens in ([5], [PLACEHOLDER] * 2):
        with pytest.raises(EyasError, match=f"{tokens.count(PLACEHOLDER)} place.* and 1 image"):
            place_images(tokens, [one], PLACEHOLDER)


def test_the_latest_images_are_kept() -> None:
    class Encoder:
        def encode_image(self, pixels_YX3: torch.Tensor) -> torch.Tensor:
            side = TINY_VISION.token_size
            return torch.zeros(pixels_YX3.shape[0] * pixels_YX3.shape[1] // side**2, 3)

    rows = ImageRows(Encoder(), max_tokens=10, device="cpu")
    for seed, num_encoded in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        image: ImageInput = image_of(2, 2, seed=seed)
        assert rows._rows(image).shape == (4, 3)
        assert rows.num_encoded == num_encoded
    assert rows._rows(image_of(4, 4, seed=3)).shape == (16, 3)  # alone, larger than the room
