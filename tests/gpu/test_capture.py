"""A round that was captured as CUDA graphs and is replayed gives the same tokens."""

import pytest
import torch
from torch import nn

from eyas.config import PLAIN, TreeShape
from eyas.contract.draft import Draft
from eyas.engine.engine import Engine
from eyas.engine.worker import Worker, WorkerShape
from eyas.kernels import SamplingMode
from eyas.models.config import DraftConfig, ModelConfig, RopeConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.llama import LlamaForCausalLM
from eyas.speculative.round import PrefillChunk
from eyas.speculative.state import SlotSettings
from eyas.types import SamplingParams

VOCAB, MODEL_LEN, NEW_TOKENS = 256, 256, 48
PROMPTS = [[(7 * i + 3 * n) % VOCAB for i in range(n)] for n in (1, 16, 33, 70)]
PARAMS = [
    SamplingParams(max_tokens=NEW_TOKENS, temperature=float(i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]
SHAPES = [PLAIN, TreeShape(3, 1, 4), TreeShape(3, 4, 20)]


def fill(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        value = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data.copy_(value + 1 if parameter.dim() == 1 else value)


def models(device: str) -> tuple[LlamaForCausalLM, Eagle3Draft]:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        hidden_size=64,
        intermediate_size=96,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=MODEL_LEN,
        tie_word_embeddings=False,
    )
    target = LlamaForCausalLM(config, dtype=torch.float32, device=device)
    fill(target, 0)
    draft_config = DraftConfig(
        format="specforge",
        decoder=config,
        target_hidden_size=64,
        draft_vocab_size=97,
        boundaries=(2, 3, 6),
        boundary_rule="test",
    )
    draft = Eagle3Draft(draft_config, dtype=torch.float32, device=device)
    fill(draft, 1)
    draft.d2t.copy_(torch.arange(97))  # every second token
    draft.share_with_target(target)
    return target, draft


def worker(
    target: LlamaForCausalLM,
    draft: Draft | None,
    tree: TreeShape,
    device: str,
    *,
    cuda_graphs: bool = False,
) -> Worker:
    shape = WorkerShape(
        num_slots=len(PROMPTS), num_pages=80, page_size=16, max_model_len=MODEL_LEN, tree=tree
    )
    dtype = torch.float32
    made = Worker(
        target,
        draft,
        shape=shape,
        dtype=dtype,
        draft_dtype=dtype,
        device=device,
        cuda_graphs=cuda_graphs,
    )
    made.target_pool.poison()
    if made.draft_pool is not None:
        made.draft_pool.poison()
    return made


def run_engine(made: Worker, *, run_ahead: int) -> list[list[int]]:
    engine = Engine(made, eos_token_ids=[], vocab_size=VOCAB, chunk_tokens=64, run_ahead=run_ahead)
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add(str(i), prompt, params)
    while engine.has_work:
        for output in engine.step():
            outputs[int(output.request_id)] += output.new_token_ids
    return outputs


@torch.inference_mode()
def run_graph(made: Worker, tree: TreeShape) -> list[list[int]]:
    """Prefill eagerly, capture one round, replay it until every request has ended."""
    mode = SamplingMode(noise=True)
    pages = iter(range(2, 80))
    outputs = []
    for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        settings = SlotSettings(params, NEW_TOKENS, slot, [], prompt)
        made.admit(slot, settings, pages=[next(pages) for _ in range(16)], num_cached=0)
        chunk = PrefillChunk(slot, 0, prompt, None)
        outputs.append(list(made.prefill([chunk], mode=mode, tree=tree).read()[0].token_ids))
    slots_B = torch.arange(len(PROMPTS), device="cuda")
    kept = [t for t in vars(made.state).values() if isinstance(t, torch.Tensor)]
    kept += [
        p
        for pool in (made.target_pool, made.draft_pool)
        if pool
        for p in (pool.k_LRKD, pool.v_LRKD)
    ]
    saved = [t.clone() for t in kept]

    def one_round() -> torch.Tensor:
        return made.runner.round(slots_B, tree, max_kv_len=MODEL_LEN, mode=mode).packed

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            one_round()
    torch.cuda.current_stream().wait_stream(stream)
    for tensor, value in zip(kept, saved, strict=True):
        tensor.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = one_round()
    for _ in range(NEW_TOKENS):
        graph.replay()
        for tokens, row in zip(outputs, packed.tolist(), strict=True):
            tokens += row[: row[-3]]
    return outputs


@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_replayed_rounds_give_the_tokens_of_the_engine(tree: TreeShape) -> None:
    target, _ = models("cpu")
    expected = run_engine(worker(target, None, PLAIN, "cpu"), run_ahead=0)
    assert all(len(tokens) == NEW_TOKENS for tokens in expected)
    target, draft = models("cuda")
    for run_ahead in (0, 1):
        for cuda_graphs in (False, True):
            made = worker(target, draft, tree, "cuda", cuda_graphs=cuda_graphs)
            assert run_engine(made, run_ahead=run_ahead) == expected
            assert (made.graphs is not None and len(made.graphs) > 0) == cuda_graphs
    assert run_graph(worker(target, draft, tree, "cuda"), tree) == expected
