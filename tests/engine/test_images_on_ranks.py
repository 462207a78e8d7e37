"""Two ranks give what one gives of prompts with images; each encodes them by itself."""

from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import DraftShape, write_draft
from fixtures.kimi_vision import VISION, write_kimi_vision
from fixtures.ranks import RankThreads, ThreadFollowers
from PIL import Image

from eyas.comm.group import Group
from eyas.config import EngineConfig
from eyas.engine.check import run_check
from eyas.engine.engine import Engine
from eyas.engine.image_places import place_images
from eyas.engine.load import build_engine, build_worker, load_models
from eyas.engine.worker import Worker
from eyas.models.images import fit_image
from eyas.models.sharding import WHOLE, Parallel
from eyas.types import SamplingParams

PLACEHOLDER = 200
PARAMS = [
    SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    for temperature in (0.0, 0.8)
]
SIDE = VISION["patch_size"] * 2


def say(engine: Engine) -> list[list[int]]:
    """Two requests together, the second with two pictures; and how many were encoded."""
    assert engine.vision is not None and engine.worker.images is not None
    picture = Image.linear_gradient("L").resize((4 * SIDE, 3 * SIDE))
    pictures = [fit_image(picture.rotate(turn), engine.vision) for turn in (0, 180)]
    text = [5 * i % 199 for i in range(20)]
    prompts = [[*text[:4], PLACEHOLDER, *text[4:]], [PLACEHOLDER, *text, PLACEHOLDER, 7]]
    said: list[list[int]] = []
    for number, (prompt, shown) in enumerate(zip(prompts, (pictures[:1], pictures), strict=True)):
        token_ids, images = place_images(prompt, shown, PLACEHOLDER)
        engine.add(str(number), token_ids, PARAMS[number], images)
        said.append([])
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            said[int(output.request_id)] += output.new_token_ids
    return [*said, [engine.worker.images.num_encoded]]


@pytest.fixture(scope="module")
def threads() -> Any:
    ranks = RankThreads(2)
    yield ranks
    ranks.close()


def test_two_ranks_equal_one(threads: RankThreads, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 250}
    write_kimi_vision(tmp_path / "target", placeholder=PLACEHOLDER, num_hidden_layers=4, **sizes)
    (tmp_path / "target/tokenizer.json").write_text("{}")
    write_draft(tmp_path / "draft", DraftShape(vocab_size=250, intermediate_size=96))
    config = EngineConfig(
        model=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        draft_boundaries=(0, 2, 4),
        device="cpu",
        max_model_len=96,
        max_batch_size=2,
        topk=2,
        prefill_chunk_tokens=9,
    )
    report = run_check(config, budget_bytes=1 << 34)
    report.raise_on_errors()
    alone = say(build_engine(config, report, load_models(config, report, parallel=WHOLE)))
    workers: list[Worker] = []

    def models(group: Group) -> Any:
        return load_models(config, report, parallel=Parallel(group))

    def follow(group: Group) -> Worker:
        workers.append(build_worker(config, report, models(group)))
        return workers[-1]

    def lead(group: Group, followers: ThreadFollowers) -> list[list[int]]:
        return say(build_engine(config, report, models(group), followers=followers))

    assert ThreadFollowers(threads).run(lead, follow) == alone
    assert len(set(alone[0])) > 3 and len(set(alone[1])) > 3
    (other,) = workers
    assert other.images is not None and [other.images.num_encoded] == alone[2]
