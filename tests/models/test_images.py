"""Image files: sizes, decoding, and what is refused."""

import dataclasses
import io
import random
import struct
import zlib
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from eyas.models.config import VisionConfig
from eyas.models.images import (
    ImageError,
    ImageLimits,
    fit_image,
    fitted_size,
    largest_tokens,
    read_image,
)

KIMI, LIMITS = VisionConfig(), ImageLimits()
SMALL = VisionConfig(patch_size=4, max_patches=64, max_side_patches=12)


def file_of(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def gradient(width: int, height: int, mode: str = "RGB") -> Image.Image:
    row = Image.linear_gradient("L").resize((width, height))
    other = row.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    turned = row.rotate(90).resize((width, height))
    return Image.merge("RGB", (row, other, turned)).convert(mode)


def pixels(image: Any) -> torch.Tensor:
    """[Y, X, 3] of an ImageInput."""
    values = torch.frombuffer(bytearray(image.rgb), dtype=torch.uint8)
    return values.view(image.height, image.width, 3)


# Worked out by hand from the published rule: never up; the whole number of patches, and those of a
# side, are limited; then each side is filled up to a multiple of 28.
@pytest.mark.parametrize(
    ("size", "shrunk", "num_tokens"),
    [
        ((28, 28), (28, 28), 1),
        ((1, 1), (1, 1), 1),
        ((29, 28), (29, 28), 2),
        ((1080, 1920), (1080, 1920), 39 * 69),
        ((3000, 4000), (1554, 2073), 56 * 75),  # 214 × 285 patches: × sqrt(16384 / 60990)
        ((10, 14336), (5, 7168), 256),  # 512 patches a side
        ((14, 20000), (5, 7168), 256),
    ],
)
def test_sizes_by_hand(size: tuple[int, int], shrunk: tuple[int, int], num_tokens: int) -> None:
    found, padded = fitted_size(*size, KIMI)
    assert found == shrunk
    assert padded[0] % 28 == padded[1] % 28 == 0
    assert padded[0] * padded[1] == num_tokens * 28 * 28


def test_a_larger_budget_keeps_more() -> None:
    _, padded = fitted_size(3000, 4000, dataclasses.replace(KIMI, max_patches=65536))
    assert padded == (108 * 28, 143 * 28)  # a count that Kimi-K3's preprocessing is known for


@pytest.mark.parametrize("vision", [KIMI, SMALL, VisionConfig(max_patches=16)])
def test_no_image_is_larger_than_the_largest(vision: VisionConfig) -> None:
    rng, most = random.Random(0), 0
    for _ in range(20_000):
        scale = 10 ** rng.uniform(0, 2.5)
        size = [max(1, int(scale * 10 ** rng.uniform(0, 2))) for _ in range(2)]
        shrunk, padded = fitted_size(*size, vision)
        assert all(
            s <= p <= vision.max_side_patches * vision.patch_size
            for s, p in zip(shrunk, padded, strict=True)
        )
        most = max(most, padded[0] * padded[1] // vision.token_size**2)
    assert most <= largest_tokens(vision)
    if vision.max_patches > vision.max_side_patches:  # else the bound is loose
        assert most > 0.5 * largest_tokens(vision)


def test_pixels_stay_and_the_rest_is_black() -> None:
    image = gradient(37, 20)
    found = read_image(file_of(image), SMALL, LIMITS)
    assert (found.height, found.width, found.num_tokens) == (24, 40, 15)
    wanted = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(20, 37, 3)
    assert torch.equal(pixels(found)[:20, :37], wanted)
    assert not pixels(found)[20:].any() and not pixels(found)[:, 37:].any()


def test_a_large_image_is_shrunk_as_pillow_does() -> None:
    image = gradient(300, 200)
    found = read_image(file_of(image), SMALL, LIMITS)
    (height, width), padded = fitted_size(200, 300, SMALL)
    assert (found.height, found.width) == padded and (height, width) == (26, 39)
    wanted = image.resize((width, height), Image.Resampling.BICUBIC)
    assert pixels(found)[:height, :width].flatten().tolist() == list(wanted.tobytes())


MODES = {
    "PNG": ("RGB", "L", "RGBA", "P", "1", "LA"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("RGB", "L", "P", "1"),
    "BMP": ("RGB", "L", "P", "1"),
}


@pytest.mark.parametrize(
    ("kind", "mode"), [(k, mode) for k, modes in MODES.items() for mode in modes]
)
def test_formats_and_modes(kind: str, mode: str) -> None:
    image = gradient(20, 12).convert(mode) if mode != "P" else gradient(20, 12).quantize(32)
    data = file_of(image, kind)
    with Image.open(io.BytesIO(data)) as stored:
        wanted = fit_image(stored.convert("RGB"), SMALL)
    assert read_image(data, SMALL, LIMITS) == wanted


def test_sixteen_bits_are_not_cut_off() -> None:
    wide = Image.frombytes("I;16", (8, 8), struct.pack("<64H", *(i * 1000 for i in range(64))))
    found = pixels(read_image(file_of(wide), SMALL, LIMITS))
    assert found[:8, :8, 0].flatten().tolist() == [i * 1000 // 256 for i in range(64)]
    assert fit_image(wide, SMALL) == read_image(file_of(wide), SMALL, LIMITS)


def test_a_picture_without_pixels_is_refused() -> None:
    with pytest.raises(ImageError, match="0 × 5 pixels"):
        fit_image(Image.new("RGB", (0, 5)), SMALL)


def test_photographs_are_turned_upright() -> None:
    image, exif = gradient(24, 16), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    data = file_of(image, "PNG", exif=exif)
    with Image.open(io.BytesIO(data)) as stored:
        upright = ImageOps.exif_transpose(stored)
    assert upright is not None and upright.size == (16, 24)
    assert read_image(data, SMALL, LIMITS) == fit_image(upright, SMALL)


def test_images_are_told_apart_by_content_and_size() -> None:
    one, again = (read_image(file_of(gradient(24, 16)), SMALL, LIMITS) for _ in range(2))
    assert one.digest == again.digest
    others = [gradient(16, 24), gradient(24, 16).rotate(180), gradient(25, 16)]
    digests = {read_image(file_of(image), SMALL, LIMITS).digest for image in [*others]}
    assert len({one.digest, *digests}) == 4
    flat = [Image.new("RGB", size) for size in ((8, 32), (32, 8), (16, 16))]  # the same bytes
    assert len({fit_image(image, SMALL).digest for image in flat}) == 3


def bomb(width: int, height: int) -> bytes:
    """A PNG that says to be huge, and is a few hundred bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (
        chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + parts


def animation(kind: str) -> bytes:
    frames = [gradient(20, 12), gradient(20, 12).rotate(180)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no image that can be read"),
        (b"hello", r"GIF, BMP\): it begins like none of these$"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image that can be read"),
        (file_of(gradient(64, 64))[:100], "no image that can be read"),
        (file_of(gradient(64, 64), "JPEG")[:300], "no image that can be read"),
        (file_of(gradient(8, 8), "TIFF"), "no image that can be read"),
        (file_of(gradient(8, 8), "PDF"), "no image that can be read"),
        (animation("GIF"), "is an animation"),
        (animation("WEBP"), "is an animation"),
        (animation("PNG"), "is an animation"),
        (bomb(8000, 8000), "has 8000 × 8000 pixels, at most 50000000"),
        (bomb(10_000, 10_000), "pixels, at most 50000000"),  # Pillow warns of it
        (bomb(100_000, 100_000), "pixels, at most 50000000"),  # and of this one raises
        (b"\x00" * (10 * 2**20 + 1), "has 10485761 bytes, at most 10485760"),
    ],
)
def test_what_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ImageError, match=text):
        read_image(data, SMALL, LIMITS)


def test_damaged_files_are_refused_and_nothing_else() -> None:
    rng = random.Random(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = file_of(gradient(32, 32), kind)
        for _ in range(60):
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                read_image(bytes(damaged), SMALL, LIMITS)
            except ImageError:
                continue


def test_limits_are_the_callers() -> None:
    data = file_of(gradient(20, 10))
    for limits in (ImageLimits(max_image_pixels=199), ImageLimits(max_image_bytes=len(data) - 1)):
        with pytest.raises(ImageError):
            read_image(data, SMALL, limits)
    exact = ImageLimits(max_image_pixels=200, max_image_bytes=len(data))
    assert read_image(data, SMALL, exact).num_tokens == 6
