"""Kimi-K2.5 with images against transformers: from a folder, through the readers and the strict
loader, the tower and the projector, to logits over a paged cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.kimi_vision import (
    PLACEHOLDER,
    random_pixels,
    reference_patches,
    write_kimi_vision,
)
from fixtures.mixtures import NUM_PROMPT, NUM_TOKENS, VOCAB, run_paged
from fixtures.tiny import random_prompts
from torch import Tensor

from eyas.contract.target import GivenRows
from eyas.contract.vision import ImageEncoder
from eyas.models.checkpoint import Checkpoint
from eyas.models.findings import Findings
from eyas.models.loader import load_weights
from eyas.models.registry import target_class
from eyas.models.target_config import read_target_config
from eyas.models.vision_config import with_stored_vision

GRIDS = ((6, 6), (2, 2), (4, 10), (12, 2))  # the learned grid's own, smaller, and odd ones
LAYOUTS = ("published", "saved", "memory")


def load_kimi(folder: Path) -> Any:
    checkpoint, findings = Checkpoint.open(folder), Findings()
    config = with_stored_vision(read_target_config(folder), checkpoint, findings)
    assert findings == [] and config.vision is not None
    model: Any = target_class(config.architecture)(
        config, dtype=torch.float32, device="cpu", max_model_len=NUM_TOKENS
    )
    load_weights(model, checkpoint)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_the_tower_equals_transformers(tmp_path: Path, layout: str) -> None:
    theirs = write_kimi_vision(tmp_path, layout)
    ours = load_kimi(tmp_path)
    assert isinstance(ours, ImageEncoder)
    for seed, (rows, columns) in enumerate(GRIDS):
        pixels = random_pixels(rows, columns, seed=seed)
        values, grid = reference_patches(pixels)
        (wanted,) = theirs.model.get_image_features(values, grid).pooler_output
        found = ours.encode_image(pixels)
        assert found.shape == (rows * columns // 4, 32) and wanted.std() > 0.1
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def prompt_with_images(grids: tuple[tuple[int, int], ...]) -> tuple[list[int], list[int]]:
    """(tokens, where each image starts): the placeholder stands nowhere else."""
    tokens = [t % PLACEHOLDER for t in random_prompts([NUM_TOKENS], vocab_size=VOCAB)[0]]
    starts, start = [], 5
    for rows, columns in grids:
        size = rows * columns // 4
        tokens[start : start + size] = [PLACEHOLDER] * size
        starts.append(start)
        start += size + 3
    assert start < NUM_PROMPT
    return tokens, starts


@pytest.mark.parametrize("chunk", [NUM_PROMPT, 7])
@pytest.mark.parametrize("grids", [(), GRIDS[:1], GRIDS], ids=["text", "one", "four"])
@torch.no_grad()
def test_logits_and_boundaries_equal_transformers(
    tmp_path: Path, grids: tuple[tuple[int, int], ...], chunk: int
) -> None:
    theirs = write_kimi_vision(tmp_path)
    ours = load_kimi(tmp_path)
    tokens, starts = prompt_with_images(grids)
    images = [random_pixels(*grid, seed=seed) for seed, grid in enumerate(grids)]
    inputs: dict[str, Tensor] = {}
    if images:
        values, sizes = zip(*map(reference_patches, images), strict=True)
        inputs = {"pixel_values": torch.cat(values), "image_grid_thw": torch.cat(sizes)}
    last: list[Tensor] = []
    hook = theirs.model.language_model.layers[-1].register_forward_hook(
        lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    out = theirs(torch.tensor([tokens]), output_hidden_states=True, **inputs)
    hook.remove()
    ours.set_eagle3_layers_to_capture(range(ours.num_layers + 1))
    rows = [p for s, g in zip(starts, grids, strict=True) for p in range(s, s + g[0] * g[1] // 4)]
    given = None
    if images:
        given = GivenRows(torch.tensor(rows), torch.cat([ours.encode_image(i) for i in images]))
    logits, features = run_paged(ours, tokens, chunk=chunk, given=given)
    boundaries = [*(state[0] for state in out.hidden_states[:-1]), last[0].view(NUM_TOKENS, -1)]
    torch.testing.assert_close(features, torch.cat(boundaries, dim=-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, out.logits[0], atol=1e-4, rtol=0)
    assert logits.std() > 0.2


@torch.no_grad()
def test_an_image_changes_what_follows_it_alone(tmp_path: Path) -> None:
    write_kimi_vision(tmp_path)
    model = load_kimi(tmp_path)
    tokens, (start,) = prompt_with_images(GRIDS[:1])
    model.set_eagle3_layers_to_capture((0,))
    logits = []
    for seed in (0, 1):
        image = model.encode_image(random_pixels(6, 6, seed=seed))
        given = GivenRows(torch.arange(start, start + 9), image)
        found, boundary_0 = run_paged(model, tokens, given=given)
        assert torch.equal(boundary_0[start : start + 9], image)
        logits.append(found)
    changed = (logits[0] - logits[1]).abs().amax(-1) > 1e-3
    assert not changed[:start].any() and changed[start:].float().mean() > 0.9
