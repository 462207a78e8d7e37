"""Several ranks give what one gives: captured states; greedy and seeded texts by chain and tree."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import DraftShape, TargetShape, write_draft, write_target
from fixtures.mixtures import latent_config, write_reference
from fixtures.quantized import EXPERT, INT4_TAG, int4, quantize
from fixtures.ranks import RankThreads, ThreadFollowers, same_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.comm.group import Group
from eyas.config import EngineConfig, TreeShape
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.engine.engine import Engine
from eyas.engine.load import build_engine, build_worker, load_models
from eyas.engine.worker import Worker
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.sharding import WHOLE, Parallel
from eyas.models.weight_slots import weight_slots
from eyas.types import SamplingParams

CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(3, 2, 7)
MIXTURE: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "vocab_size": 250,  # four ranks have 63, 63, 63 and 61 rows
}
DENSE = {"num_layers": 4, "vocab_size": 250}


def write_kimi(folder: Path, **changes: Any) -> None:
    """The text part under its wrapper's names."""
    write_reference(folder, "kimi-k2", **(MIXTURE | changes))
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")


def dense(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: write_target(folder, TargetShape(**(DENSE | changes)))


def mixture(name: str) -> Callable[[Path], object]:
    return lambda folder: write_reference(folder, name, **MIXTURE)


def write_int4_kimi(folder: Path) -> None:
    """Experts of two groups of 32: one for each of two ranks."""
    write_kimi(folder, moe_intermediate_size=64)
    quantize(folder, EXPERT, int4, INT4_TAG)


FAMILIES: dict[str, Callable[[Path], object]] = {
    "llama": dense(),
    "llama, tied": dense(tied=True),
    "qwen2": dense(architecture="Qwen2ForCausalLM"),
    "qwen3": dense(architecture="Qwen3ForCausalLM"),
    "qwen3-moe": mixture("qwen3-moe"),
    "v2-lite": mixture("v2-lite"),
    "v3": mixture("v3"),
    "kimi-k2.5": write_kimi,
    "kimi-k2.5, int4": write_int4_kimi,
}


@dataclasses.dataclass
class Case:
    """A pair of folders, and what the check said of it."""

    config: EngineConfig
    report: CheckReport


def make_case(folder: Path, family: str, draft: DraftShape, **settings: Any) -> Case:
    FAMILIES[family](folder / "target")
    (folder / "target/tokenizer.json").write_text("{}")
    write_draft(folder / "draft", draft)
    config = EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "draft"),
        draft_boundaries=(0, 2, 4),
        device="cpu",
        dtype="float32",
        max_model_len=96,
        max_batch_size=4,
        num_speculative_tokens=TREE.depth,
        topk=TREE.topk,
        num_tree_nodes=TREE.num_nodes,
        prefill_chunk_tokens=24,
        **settings,
    )
    report = run_check(config, budget_bytes=1 << 34)
    report.raise_on_errors()
    return Case(config, report)


@torch.inference_mode()
def capture(worker: Worker, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(captured states, logits) of a prompt."""
    runner = worker.runner
    pages = torch.arange(NUM_RESERVED_PAGES, worker.shape.num_pages)[None]
    plan = runner.backend.plan_prefill(
        page_table_BP=pages, chunks=[(0, len(tokens))], device=torch.device("cpu")
    )
    output = runner.target.forward(torch.tensor(tokens), torch.arange(len(tokens)), plan)
    assert output.features_TF is not None
    return output.features_TF.clone(), runner.target.compute_logits(output.hidden_TH).clone()


def texts(engine: Engine, tree: TreeShape, params: Sequence[SamplingParams]) -> list[list[Any]]:
    """What a batch of requests is told: tokens, log-probabilities and the number of rounds."""
    engine.tree = tree
    found: list[list[Any]] = [[] for _ in params]
    for number, one in enumerate(params):
        prompt = [(7 * number + 3 * i) % 250 for i in range(20 + 9 * number)]
        engine.add(str(number), prompt, one)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tops = [[token for token, _ in logprob.top] for logprob in output.logprobs]
            found[int(output.request_id)] += [*output.new_token_ids, tops, output.num_rounds]
    return found


GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
EVERY_OPTION = SamplingParams(
    max_tokens=10,
    seed=6,
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.001,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={5: 2.0, 130: 1.0},
    min_tokens=4,
    logprobs=2,
)


def everything(engine: Engine) -> dict[str, Any]:
    """Batches that need little of the sampler, and one that needs all of it."""
    return {
        "greedy chain": texts(engine, CHAIN, [GREEDY, GREEDY]),
        "seeded tree": texts(engine, TREE, [GREEDY, SEEDED, SEEDED]),
        "every option": texts(engine, CHAIN, [SEEDED, EVERY_OPTION]),
    }


PROMPT = [3 * i % 250 for i in range(40)]


def alone(case: Case) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    models = load_models(case.config, case.report, parallel=WHOLE)
    engine = build_engine(case.config, case.report, models)
    captured = capture(engine.worker, PROMPT)
    return captured, everything(engine)


def together(
    threads: RankThreads, case: Case, *, expert_parallel: bool = False
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def models(group: Group) -> Any:
        return load_models(case.config, case.report, parallel=Parallel(group, expert_parallel))

    def follow(group: Group) -> Worker:
        worker = build_worker(case.config, case.report, models(group))
        seen[group.rank] = capture(worker, PROMPT)
        return worker

    def lead(group: Group, followers: ThreadFollowers) -> dict[str, Any]:
        engine = build_engine(case.config, case.report, models(group), followers=followers)
        seen[0] = capture(engine.worker, PROMPT)
        return everything(engine)

    found = ThreadFollowers(threads).run(lead, follow)
    return [seen[rank] for rank in range(threads.size)], found


@pytest.fixture(scope="module")
def two() -> Iterator[RankThreads]:
    threads = RankThreads(2)
    yield threads
    threads.close()


@pytest.fixture(scope="module")
def four() -> Iterator[RankThreads]:
    threads = RankThreads(4)
    yield threads
    threads.close()


def require_equal(threads: RankThreads, case: Case, **how: Any) -> None:
    (states, logits), said = alone(case)
    captured, found = together(threads, case, **how)
    for part, wanted in enumerate((states, logits)):
        assert same_bytes([one[part] for one in captured])
        assert torch.allclose(captured[0][part], wanted, atol=1e-4, rtol=1e-4)
    assert found == said
    tokens = {item for text in said["seeded tree"] for item in text if isinstance(item, int)}
    assert len(tokens) > 5


DRAFT = DraftShape(vocab_size=250, intermediate_size=96)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_two_ranks_equal_one(family: str, two: RankThreads, tmp_path: Path) -> None:
    require_equal(two, make_case(tmp_path, family, DRAFT))


@pytest.mark.parametrize("family", [name for name in FAMILIES if "int4" not in name])
def test_four_ranks_equal_one(family: str, four: RankThreads, tmp_path: Path) -> None:
    """With two key/value heads: each is on two ranks."""
    require_equal(four, make_case(tmp_path, family, DRAFT))


@pytest.mark.parametrize("family", ["qwen3-moe", "v3"])
def test_experts_by_number(family: str, two: RankThreads, tmp_path: Path) -> None:
    require_equal(two, make_case(tmp_path, family, DRAFT), expert_parallel=True)


def test_a_draft_with_latent_attention(two: RankThreads, tmp_path: Path) -> None:
    case = make_case(tmp_path, "v3", DRAFT)
    draft = case.report.draft
    assert draft is not None
    decoder = dataclasses.replace(
        draft.decoder,
        latent=latent_config(),
        num_kv_heads=1,
        head_dim=latent_config().rope_head_dim,
    )
    draft = dataclasses.replace(draft, decoder=decoder, has_d2t=False, draft_vocab_size=90)
    model = Eagle3Draft(draft, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator).mul_(0.1)
        if parameter.dim() == 1:
            parameter.data.add_(1)
    tensors = {
        name: slot.part_of(model.get_parameter(slot.path)).clone()
        for name, slot in weight_slots(model).items()
    }
    (tmp_path / "latent").mkdir()
    save_file(tensors, tmp_path / "latent/model.safetensors")
    config = dataclasses.replace(case.config, draft=str(tmp_path / "latent"))
    require_equal(two, Case(config, dataclasses.replace(case.report, draft=draft)))


class Noisy(nn.Module):
    """A layer whose results are a little off."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.generator = inner, torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + torch.randn(out.shape, generator=self.generator) * 1e-3


@pytest.mark.parametrize("where", ["logits", "states"])
def test_noise_on_one_rank_parts_nobody(where: str, two: RankThreads, tmp_path: Path) -> None:
    """Tied logits, and 1e-3 of noise on what the second rank computes of them, or of the states
    before them: both report the same tokens, and the run ends."""
    case = make_case(tmp_path, "llama", DRAFT)

    def make(group: Group) -> Any:
        models = load_models(case.config, case.report, parallel=Parallel(group))
        target, draft = models.target, models.draft
        name = {"logits": "lm_head", "states": "embed_tokens"}[where]
        for holder in (target if where == "logits" else target.model, draft):
            layer = getattr(holder, name)
            if where == "logits":
                layer.weight.data.zero_()
            if group.rank == 1:
                setattr(holder, name, Noisy(layer))
        return models

    def follow(group: Group) -> Worker:
        return build_worker(case.config, case.report, make(group))

    def lead(group: Group, followers: ThreadFollowers) -> list[Any]:
        engine = build_engine(case.config, case.report, make(group), followers=followers)
        told = followers.told[0]
        for name in ("prefill", "round"):
            launch = getattr(engine.worker, name)

            def launch_and_note(*args: Any, launch: Any = launch, **kwargs: Any) -> Any:
                pending = launch(*args, **kwargs)
                told.extend(pending.read())
                return pending

            setattr(engine.worker, name, launch_and_note)
        said = everything(engine)
        return [text for texts in said.values() for text in texts]

    followers = ThreadFollowers(two)
    said = followers.run(lead, follow)
    assert followers.told[0] == followers.told[1] and len(followers.told[0]) > 30
    assert all(sum(isinstance(item, int) for item in text) > 10 for text in said)
