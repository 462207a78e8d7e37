"""Llama against transformers, and the boundaries that it captures (D3)."""

import dataclasses

import pytest
import torch
from fixtures.tiny import (
    VOCAB,
    fresh_backend,
    full_forward,
    llama_config,
    load_named,
    random_prompts,
    random_weights,
    tiny_target,
)
from torch import Tensor
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as HFLlama

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.models.config import ModelConfig, RopeConfig
from eyas.models.llama import LlamaForCausalLM
from eyas.types import EyasError

LLAMA3 = RopeConfig(
    theta=1000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
CONFIGS = {
    "plain": llama_config(),
    "llama3": llama_config(rope=LLAMA3),
    "linear": llama_config(rope=RopeConfig(kind="linear", factor=4.0)),
    "yarn": llama_config(
        rope=RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=80)
    ),
    "tied": llama_config(tie_word_embeddings=True, rope=RopeConfig(theta=500.0)),
    "mha": llama_config(num_kv_heads=4, head_dim=8),
    "biased": llama_config(qkv_bias=True, o_bias=True, mlp_bias=True, num_kv_heads=1),
}
NUM_TOKENS, PAGE_SIZE = 100, 16


def hf_twin(config: ModelConfig, *, seed: int = 0) -> HFLlama:
    """A random model of transformers with the same shape."""
    rope = config.rope
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta}
    scaling = dataclasses.asdict(rope).items()
    parameters |= {
        name: value
        for name, value in scaling
        if name not in ("kind", "theta", "partial") and value is not None
    }
    model = HFLlama(
        LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=parameters,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=config.qkv_bias,
            mlp_bias=config.mlp_bias,
        )
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        random = torch.randn(parameter.shape, generator=generator) * 0.25
        parameter.data = 1 + random if "norm" in name else random
    return model


def ours_from(hf: HFLlama, config: ModelConfig) -> LlamaForCausalLM:
    """Our model with the other's weights, by name."""
    model = LlamaForCausalLM(config, dtype=torch.float32, device="cpu")
    weights = hf.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    load_named(model, weights)
    return model


@dataclasses.dataclass
class Reference:
    """What transformers computes for a fixed text: boundaries 0 .. n, [T, H] each."""

    ours: LlamaForCausalLM
    tokens: list[int]
    logits_TV: Tensor
    boundaries: list[Tensor]


@pytest.fixture(scope="module", params=list(CONFIGS))
def reference(request: pytest.FixtureRequest) -> Reference:
    config = CONFIGS[request.param]
    hf = hf_twin(config)
    tokens = random_prompts([NUM_TOKENS])[0]
    last: list[Tensor] = []
    hook = hf.model.layers[-1].register_forward_hook(
        lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        out = hf(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    boundaries = [state[0] for state in out.hidden_states[:-1]] + [last[0].view(NUM_TOKENS, -1)]
    return Reference(ours_from(hf, config), tokens, out.logits[0], boundaries)


@torch.inference_mode()
def chunked(model: LlamaForCausalLM, tokens: list[int], chunk: int) -> tuple[Tensor, Tensor | None]:
    """Logits and features of a prefill in chunks through a paged cache with shuffled pages."""
    num_pages = -(-len(tokens) // PAGE_SIZE)
    backend = fresh_backend(model.kv_layout, num_pages=num_pages, page_size=PAGE_SIZE)
    table_1P = torch.arange(num_pages).flip(0)[None] + NUM_RESERVED_PAGES
    logits, features = [], []
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        plan = backend.plan_prefill(
            page_table_BP=table_1P, chunks=[(start, end)], device=torch.device("cpu")
        )
        out = model.forward(torch.tensor(tokens[start:end]), torch.arange(start, end), plan)
        logits.append(model.compute_logits(out.hidden_TH))
        if out.features_TF is not None:
            features.append(out.features_TF)
    return torch.cat(logits), torch.cat(features) if features else None


@torch.inference_mode()
def decoded(model: LlamaForCausalLM, tokens: list[int], num_prompt: int) -> Tensor:
    """Logits of rows fed one at a time: root-only trees, committed from scratch to pages."""
    num_pages = -(-len(tokens) // PAGE_SIZE)
    backend = fresh_backend(model.kv_layout, num_pages=num_pages, page_size=PAGE_SIZE)
    table_1P = torch.arange(num_pages).flip(0)[None] + NUM_RESERVED_PAGES
    prompt = backend.plan_prefill(
        page_table_BP=table_1P, chunks=[(0, num_prompt)], device=torch.device("cpu")
    )
    model.forward(torch.tensor(tokens[:num_prompt]), torch.arange(num_prompt), prompt)
    slot_1, logits = torch.zeros(1, dtype=torch.int64), []
    for position in range(num_prompt, len(tokens)):
        plan = backend.plan_tree(
            page_table_BP=table_1P,
            slots_B=slot_1,
            first_index=0,
            end_index_B=torch.tensor([position]),
            visible_BQN=torch.ones(1, 1, 1, dtype=torch.bool),
            first_node=0,
            max_kv_len=128,
        )
        out = model.forward(torch.tensor(tokens[position : position + 1]), slot_1 + position, plan)
        logits.append(model.compute_logits(out.hidden_TH))
        row = backend.page_rows(table_1P, torch.tensor([[position]]))[0]
        backend.pool.copy_rows(backend.scratch_rows(slot_1, slot_1)[0], row)
    return torch.cat(logits)


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 64, 7, 1])
def test_prefill_logits_equal_transformers(reference: Reference, chunk: int) -> None:
    logits_TV, _ = chunked(reference.ours, reference.tokens, chunk)
    torch.testing.assert_close(logits_TV, reference.logits_TV, atol=1e-4, rtol=0)


def test_decode_logits_equal_transformers(reference: Reference) -> None:
    logits_TV = decoded(reference.ours, reference.tokens, 33)
    torch.testing.assert_close(logits_TV, reference.logits_TV[33:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 7])
def test_captured_boundaries_equal_transformers(reference: Reference, chunk: int) -> None:
    model = reference.ours
    num_layers, hidden = model.num_layers, model.hidden_size
    model.set_eagle3_layers_to_capture(range(num_layers + 1))
    _, features_TF = chunked(model, reference.tokens, chunk)
    model.set_eagle3_layers_to_capture(())
    assert features_TF is not None
    captured = features_TF.split(hidden, dim=1)
    assert len(captured) == num_layers + 1
    assert torch.equal(captured[0], reference.boundaries[0])
    for boundary, (ours, theirs) in enumerate(zip(captured, reference.boundaries, strict=True)):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        # The comparison would see a neighbour: no two boundaries are nearly the same.
        for other in range(boundary):
            assert (ours - captured[other]).abs().max() > 0.1


def test_a_part_of_the_boundaries_is_that_part() -> None:
    model, tokens = tiny_target(), random_prompts([9])[0]
    everything, _ = full_forward(model, tokens, range(5))
    some, _ = full_forward(model, tokens, (1, 4))
    none, _ = full_forward(model, tokens)
    assert none.features_TF is None
    assert everything.features_TF is not None and some.features_TF is not None
    chosen = everything.features_TF.view(9, 5, -1)[:, [1, 4]].flatten(1)
    assert torch.equal(some.features_TF, chosen)
    assert torch.equal(some.hidden_TH, none.hidden_TH)


@pytest.mark.parametrize("num_layers", [1, 5])
def test_boundary_i_holds_the_layers_below_it(num_layers: int) -> None:
    """Layer i adds 2^i to a residual stream that starts at 0: boundary i is 2^i - 1, exactly.

    A layer more or less, a missing residual or a final norm would all give another number.
    """
    model = LlamaForCausalLM(
        llama_config(num_layers=num_layers, mlp_bias=True), dtype=torch.float32, device="cpu"
    )
    weights = {name: w * 0 for name, w in random_weights(model, 0).items()}
    for layer in range(num_layers):
        weights[f"model.layers.{layer}.mlp.down_proj.bias"] += 2.0**layer
    load_named(model, weights)
    output, _ = full_forward(model, [3, 1, 4], range(num_layers + 1))
    assert output.features_TF is not None
    expected = torch.arange(num_layers + 1).exp2().sub(1).repeat_interleave(model.hidden_size)
    assert torch.equal(output.features_TF, expected.expand(3, -1))


@pytest.mark.parametrize("wrong", [(-1,), (0, 5), (2, 1), (1, 1)])
def test_wrong_boundaries_are_refused_and_change_nothing(wrong: tuple[int, ...]) -> None:
    model = tiny_target()
    model.set_eagle3_layers_to_capture((1, 2))
    with pytest.raises(EyasError, match="boundaries"):
        model.set_eagle3_layers_to_capture(wrong)
    assert model.captured_boundaries == (1, 2)


def test_embedding_and_head_are_shared_and_replaced() -> None:
    model, tokens = tiny_target(), [5, 6]
    embed_VH, head_VH = model.get_embed_and_head()
    assert embed_VH.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert head_VH.data_ptr() == model.lm_head.weight.data_ptr() != embed_VH.data_ptr()
    before, _ = full_forward(model, tokens, (0,))
    model.set_embed_and_head(embed_VH * 2, head_VH * 3)
    after, _ = full_forward(model, tokens, (0,))
    assert before.features_TF is not None and after.features_TF is not None
    assert torch.equal(after.features_TF, before.features_TF * 2)
    logits_TV = model.compute_logits(before.hidden_TH)
    torch.testing.assert_close(logits_TV, before.hidden_TH @ head_VH.T * 3, atol=1e-4, rtol=0)
    with pytest.raises(EyasError, match="embedding and head must be"):
        model.set_embed_and_head(embed_VH[1:], head_VH)


def test_a_tied_head_is_the_embedding() -> None:
    model = tiny_target(llama_config(tie_word_embeddings=True))
    embed_VH, head_VH = model.get_embed_and_head()
    assert embed_VH.data_ptr() == head_VH.data_ptr()
    assert [n for n, _ in model.named_parameters()].count("lm_head.weight") == 0


def test_positions_and_context_matter() -> None:
    """The tiny target is no bigram model: equality of its outputs says something of its cache."""
    model = tiny_target()
    one, _ = full_forward(model, [1, 2, 3, 4])
    two, _ = full_forward(model, [2, 1, 3, 4])
    assert (one.hidden_TH[-1] - two.hidden_TH[-1]).abs().max() > 0.05
    assert model.vocab_size == VOCAB and model.num_layers == 4 and model.hidden_size == 32
