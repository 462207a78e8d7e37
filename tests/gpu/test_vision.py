"""The vision tower on a GPU: as on the CPU, and in what time at Kimi-K2.5's own size."""

import time

import pytest
import torch
from fixtures.mixtures import deepseek_config, fill

from eyas.engine.image_rows import ImageRows
from eyas.engine.memory_images import encoding_bytes
from eyas.models.config import VisionConfig
from eyas.models.kimi_k25 import KimiK25ForConditionalGeneration
from eyas.models.vision_tower import MoonViT, PatchProjector
from eyas.speculative.round import PrefillChunk
from eyas.types import ImageInput

SMALL = VisionConfig(
    num_layers=3,
    hidden_size=96,
    intermediate_size=200,
    num_heads=4,
    patch_size=6,
    grid_size=(8, 8),
    placeholder_id=3,
)
KIMI, KIMI_HIDDEN = VisionConfig(), 7168


def pixels(rows: int, columns: int, vision: VisionConfig) -> torch.Tensor:
    shape = (rows * vision.patch_size, columns * vision.patch_size, 3)
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (2, 2), (14, 30), (64, 2)])
@torch.inference_mode()
def test_images_are_encoded_as_on_the_cpu(rows: int, columns: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = deepseek_config(vision=SMALL)
    model = KimiK25ForConditionalGeneration(config, dtype=torch.float32, device="cpu")
    fill(model, seed=0)
    image = pixels(rows, columns, SMALL)
    wanted = model.encode_image(image)
    model.vision_tower.cuda()
    model.mm_projector.cuda()
    found = model.encode_image(image.cuda())
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-3, rtol=1e-4)


class KimiEncoder:
    """Tower and projector of Kimi-K2.5's size, without the language model."""

    def __init__(self) -> None:
        where = {"dtype": torch.bfloat16, "device": "cuda"}
        self.tower = MoonViT(KIMI, **where)
        self.projector = PatchProjector(KIMI, KIMI_HIDDEN, **where)
        for module in (self.tower, self.projector):
            for parameter in module.parameters():
                parameter.normal_(std=0.02)

    def encode_image(self, pixels_YX3: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.projector(self.tower(pixels_YX3))
        return rows


@torch.inference_mode()
def test_the_largest_image_fits_the_plan_and_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    encoder, lines = KimiEncoder(), []
    for rows, columns in ((16, 16), (32, 32), (64, 64), (128, 128)):
        image = pixels(rows, columns, KIMI)
        shown = ImageInput(
            height=image.shape[0],
            width=image.shape[1],
            rgb=image.numpy().tobytes(),
            num_tokens=rows * columns // 4,
            digest=b"",
        )
        chunk = PrefillChunk(0, 0, [0] * shown.num_tokens, None, [shown])
        seconds = []
        for _ in range(4):
            kept = ImageRows(encoder, max_tokens=1, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            given = kept.of([chunk])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            assert given is not None and given.embed_NH.isfinite().all()
            peak = torch.cuda.max_memory_allocated() - before
        lines.append(
            f"{image.shape[0]:5} x {image.shape[1]:<5} {shown.num_tokens:5} tokens "
            f"{min(seconds[1:]) * 1e3:8.1f} ms {peak / 2**20:8.0f} MiB"
        )
    planned = encoding_bytes(deepseek_config(vision=KIMI, hidden_size=KIMI_HIDDEN), 2)
    assert peak <= planned
    with capsys.disabled():
        print("\nKimi-K2.5's vision tower, bfloat16", *lines, sep="\n")
        print(f"planned for the largest: {planned / 2**20:.0f} MiB")
