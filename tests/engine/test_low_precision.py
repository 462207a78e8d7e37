"""In bfloat16 a text may part from plain decoding only where two tokens are all but equal.

vllm#42517, EAGLE#212, #75: the number of rows changes the rounding of products. In float32 the
texts are the same (tests/engine/test_same_text.py); here the place where they part is looked at.
"""

import pytest
import torch
from fixtures.sampling_world import SHAPES, Answer, ask, logits_by_step
from fixtures.tiny import llama_config, worker_shape
from fixtures.world import World, world

from eyas.config import PLAIN, TreeShape
from eyas.engine.engine import Engine
from eyas.engine.worker import Worker
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.llama import LlamaForCausalLM
from eyas.types import SamplingParams

# Logits are up to 40 here, so that neighbours among bfloat16 values are up to 0.25 apart.
BOUND = 0.5
GREEDY = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture(scope="module")
def w() -> World:
    return world()


def rounded(w: World) -> tuple[LlamaForCausalLM, Eagle3Draft]:
    """The world's models in bfloat16."""
    target = LlamaForCausalLM(llama_config(), dtype=torch.bfloat16, device="cpu")
    target.load_state_dict(w.target.state_dict())
    draft = Eagle3Draft(w.draft.config, dtype=torch.bfloat16, device="cpu")
    own = {name: value for name, value in w.draft.state_dict().items() if "embed" not in name}
    draft.load_state_dict(own)
    draft.share_with_target(target)
    return target, draft


def answers(target: LlamaForCausalLM, draft: Eagle3Draft | None, tree: TreeShape) -> list[Answer]:
    worker = Worker(
        target,
        draft,
        shape=worker_shape(tree),
        dtype=torch.bfloat16,
        draft_dtype=torch.bfloat16,
        device="cpu",
    )
    worker.target_pool.poison()
    engine = Engine(worker, eos_token_ids=(), vocab_size=64, chunk_tokens=64, run_ahead=0)
    return ask(engine, world().prompts, [GREEDY] * len(world().prompts))


@pytest.mark.parametrize("shape", ["chain", "pruned tree"])
def test_texts_part_only_at_near_ties(w: World, shape: str) -> None:
    target, draft = rounded(w)
    plain = answers(target, None, PLAIN)
    num_parted = num_same = 0
    for prompt, one, other in zip(
        w.prompts, plain, answers(target, draft, SHAPES[shape]), strict=True
    ):
        pairs = list(zip(one.tokens, other.tokens, strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            num_same += 1
            continue
        num_parted += 1
        logits = logits_by_step(w, prompt, one.tokens[: first + 1])[first]
        assert max(logits) - min(logits[token] for token in pairs[first]) < BOUND
    assert num_same > num_parted
    print(f"{num_parted} of {len(plain)} texts part at a near tie")
