"""The engine with the C kernels and without: the same model, and the same text.

Shape suffixes: T tokens, V vocabulary, B requests, Q rows a request, N scratch nodes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures.tiny import make_engine, random_prompts, run, worker_shape
from fixtures.world import World, world
from torch import Tensor
from transformers import AutoModelForCausalLM

from eyas.attention.torch_backend import TorchBackend
from eyas.cache.pool import NUM_RESERVED_PAGES, KVPool
from eyas.config import PLAIN, TreeShape
from eyas.engine.llm import LLM
from eyas.kernels import native, native_attention
from eyas.models.checkpoint import Checkpoint
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.llama import LlamaForCausalLM
from eyas.models.loader import load_weights
from eyas.models.target_config import read_target_config
from eyas.types import SamplingParams

NUM_TOKENS, NUM_PREFILLED = 48, 24
GREEDY = SamplingParams(max_tokens=40, temperature=0)


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """Without a compiler there is nothing to compare with."""
    if not native.status().startswith("native"):
        pytest.skip(native.status())
    with torch.inference_mode():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the entries that were used."""
    made: list[str] = []
    for name in ("rms_norm", "add_rms_norm", "silu_mul", "argmax", "RopeWriter"):
        module = native_attention if name == "RopeWriter" else native
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, _f=original, _n=name, **k: made.append(_n) or _f(*a, **k)
        )
    plan = native_attention.FewRowsAttention
    monkeypatch.setattr(
        native_attention, "FewRowsAttention", lambda *a: made.append("FewRowsAttention") or plan(*a)
    )
    return made


def logits_of(model: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    """A prompt chunk, then one token at a time in a poisoned pool."""
    pool = KVPool(
        model.kv_layout,
        num_pages=NUM_RESERVED_PAGES + 4,
        page_size=16,
        num_slots=1,
        num_scratch_rows=2,
        dtype=torch.float32,
        device="cpu",
    )
    pool.poison()
    backend, slots_B = TorchBackend(pool), torch.tensor([0])
    table_BP = torch.arange(4)[None] + NUM_RESERVED_PAGES
    token_T, position_T = torch.tensor(tokens), torch.arange(len(tokens))
    plan = backend.plan_prefill(
        page_table_BP=table_BP, chunks=[(0, NUM_PREFILLED)], device=torch.device("cpu")
    )
    parts = [model.forward(token_T[:NUM_PREFILLED], position_T[:NUM_PREFILLED], plan).hidden_TH]
    for index in range(NUM_PREFILLED, len(tokens)):
        here = slice(index, index + 1)
        plan = backend.plan_tree(
            page_table_BP=table_BP,
            slots_B=slots_B,
            first_index=0,
            end_index_B=position_T[here],
            visible_BQN=torch.ones(1, 1, 1, dtype=torch.bool),
            first_node=0,
            max_kv_len=64,
        )
        parts.append(model.forward(token_T[here], position_T[here], plan).hidden_TH)
        source_T = backend.scratch_rows(slots_B, torch.tensor([0]))[0]
        pool.copy_rows(source_T, backend.page_rows(table_BP, position_T[None, here])[0])
    return model.compute_logits(torch.cat(parts))


def test_logits_of_smollm2_equal_transformers(smollm2_dir: Path, calls: list[str]) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    config = read_target_config(smollm2_dir)
    with torch.inference_mode(False):  # several threads fill the weights, and the mode is one's
        ours = LlamaForCausalLM(config, dtype=torch.float32, device="cpu", max_model_len=64)
        load_weights(ours, Checkpoint.open(smollm2_dir))
    tokens = torch.randint(49152, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    logits_TV = logits_of(ours, tokens.tolist())
    expected_TV = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=0)
    assert {"rms_norm", "add_rms_norm", "silu_mul", "RopeWriter", "FewRowsAttention"} <= set(calls)


@pytest.fixture(scope="module")
def w() -> World:
    return world()


@pytest.mark.parametrize("tree", [PLAIN, TreeShape(3, 1, 4), TreeShape(3, 3, 10)])
def test_greedy_text_is_the_same_with_and_without(
    tree: TreeShape, w: World, calls: list[str]
) -> None:
    prompts = random_prompts([5, 17, 40, 70])

    def texts() -> list[list[int]]:
        engine = make_engine(w.target, w.draft, worker_shape(tree, num_slots=4))
        return [g.tokens for g in run(engine, prompts, [GREEDY] * 4)]

    used = texts()
    num_calls = len(calls)
    with native.disabled():
        assert texts() == used
    assert len(calls) == num_calls > 100


def test_a_draft_step_in_one_call_is_accepted_as_often(smollm2_dir: Path) -> None:
    """Its int8 head proposes what the exact one does, as good as always."""
    llm = LLM("smollm2-135m", max_model_len=512, max_batch_size=4, acceptance_probe=False)
    draft = llm.engine.worker.draft
    assert isinstance(draft, Eagle3Draft) and draft._step is not None
    prompts = ["Explain how a rainbow forms.", "Write a short story about a cat.", "1, 2, 3,"]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    lengths = []
    for step in (draft._step, None):
        draft._step = step
        outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
        num_rounds = sum(o.num_rounds for o in outputs)
        lengths.append(sum(o.num_round_tokens for o in outputs) / num_rounds)
    assert lengths[1] > 1.4 and abs(lengths[0] - lengths[1]) < 0.12
