"""Where a prompt's images stand: a chat template writes one token for each, the model wants one for
each piece of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eyas.models.config import VisionConfig
from eyas.types import EyasError, ImageInput

NO_IMAGES = "this model takes no images: send text alone"


def place_images(
    token_ids: Sequence[int], images: Sequence[ImageInput], placeholder_id: int
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """(the prompt with as many placeholders as an image fills, the images at their places).

    Raises EyasError if the prompt has not one placeholder an image.
    """
    num_places = sum(token == placeholder_id for token in token_ids)
    if num_places != len(images):
        raise EyasError(
            f"the prompt has {num_places} place(s) for images and {len(images)} image(s) came "
            "with it: the chat template must write one for each, and texts must not hold the "
            "token that stands for an image"
        )
    prompt: list[int] = []
    placed: list[ImageInput] = []
    left = iter(images)
    for token in token_ids:
        if token == placeholder_id:
            image = dataclasses.replace(next(left), start=len(prompt))
            placed.append(image)
            prompt += [token] * image.num_tokens
        else:
            prompt.append(token)
    return prompt, tuple(placed)


def check_places(
    images: Sequence[ImageInput], token_ids: Sequence[int], vision: VisionConfig | None
) -> None:
    """Raises EyasError unless the images lie on placeholders of the prompt, in order."""
    if not images:
        return
    if vision is None:
        raise EyasError(NO_IMAGES)
    end = 0
    for image in images:
        tokens = token_ids[image.start : image.end]
        is_whole = len(tokens) == image.num_tokens and image.start >= end
        if not is_whole or any(token != vision.placeholder_id for token in tokens):
            raise EyasError(
                f"the image at position {image.start} does not lie on {image.num_tokens} "
                f"placeholders ({vision.placeholder_id}) of the prompt"
            )
        end = image.end
