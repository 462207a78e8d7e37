"""Every family against transformers, and drafts against a row-by-row one: from a folder of files,
through the readers and the strict loader, to logits over a paged cache."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import (
    DraftShape,
    draft_config,
    write_draft,
    write_target,
)
from fixtures.slow_draft import SlowDraft
from fixtures.tiny import fresh_backend, random_prompts
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.models.checkpoint import Checkpoint
from eyas.models.draft_config import canonical_name, read_draft_config
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.loader import load_weights
from eyas.models.registry import target_class
from eyas.models.target_config import read_target_config

FAMILIES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
# The served length of all tests lies above max_position_embeddings, where "dynamic" differs.
NUM_TOKENS, NUM_PROMPT, MAX_POSITIONS, PAGE_SIZE, VOCAB = 96, 75, 64, 16, 64
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is written. is_legacy: config.json as transformers 4 wrote it. changes: of the config.
    storage: "safetensors", "shards" or "bin"."""

    family: str
    rope: str = "default"
    is_legacy: bool = False
    storage: str = "safetensors"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    f"{family}-{rope}-{'legacy' if is_legacy else 'modern'}": Case(family, rope, is_legacy)
    for i, family in enumerate(FAMILIES)
    for j, rope in enumerate(ROPES)
    # Each family has both spellings, and each rope too; `test_both_spellings` crosses them.
    for is_legacy in [(i + j) % 2 == 0]
} | {
    "llama-biases": Case("llama", changes={"attention_bias": True, "mlp_bias": True}),
    "qwen3-biases": Case("qwen3", changes={"attention_bias": True}),
    "qwen2-tied-bin": Case("qwen2", storage="bin", changes={"tie_word_embeddings": True}),
    "qwen3-tied-shards": Case("qwen3", storage="shards", changes={"tie_word_embeddings": True}),
    "llama-bin": Case("llama", storage="bin", is_legacy=True),
    "llama-one-head": Case("llama", changes={"num_key_value_heads": 1, "head_dim": 8}),
    "llama-another-name": Case("llama", changes={"model_type": "a_new_name"}),
}


def write_family(folder: Path, case: Case) -> None:
    """A tiny random model as `save_pretrained` leaves it, its config.json changed if asked."""
    model_class, config_class = FAMILIES[case.family]
    changes = dict(case.changes)
    model_type = changes.pop("model_type", None)
    head_dim = {} if case.family == "qwen2" else {"head_dim": 12}  # not hidden / heads
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPES[case.rope] | {"rope_theta": 500.0},
        "tie_word_embeddings": False,
    }
    model = model_class(config_class(**(sizes | head_dim | changes)))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        random = torch.randn(parameter.shape, generator=generator) * 0.25
        parameter.data = 1 + random if "norm" in name else random
    model.save_pretrained(folder, max_shard_size="40KB" if case.storage == "shards" else "5GB")
    if case.storage == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    if case.is_legacy or model_type is not None:
        data = json.loads((folder / "config.json").read_text())
        data = respell(data) if case.is_legacy else data | {"model_type": model_type}
        (folder / "config.json").write_text(json.dumps(data))


def respell(data: dict[str, Any]) -> dict[str, Any]:
    """config.json of transformers 5 in the spelling of transformers 4."""
    rope = dict(data.pop("rope_parameters"))
    data["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    data["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    data["torch_dtype"] = data.pop("dtype")
    return data


def load_target(folder: Path) -> Any:
    """The engine's model of a folder, for the served length of these tests."""
    config = read_target_config(folder)
    model: Any = target_class(config.architecture)(
        config, dtype=torch.float32, device="cpu", max_model_len=NUM_TOKENS
    )
    load_weights(model, Checkpoint.open(folder))
    return model


def reference(folder: Path, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """What transformers makes of the same folder: logits, and boundaries 0 .. n ([T, H] each)."""
    model_class: Any = AutoModelForCausalLM
    if json.loads((folder / "config.json").read_text())["model_type"] == "a_new_name":
        model_class = LlamaForCausalLM
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    last: list[Tensor] = []
    model.model.layers[-1].register_forward_hook(
        lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    below = [state[0] for state in out.hidden_states[:-1]]  # the last one is normed
    return out.logits[0], [*below, last[0].view(len(tokens), -1)]


@torch.inference_mode()
def serve(model: Any, tokens: list[int], *, chunk: int) -> tuple[Tensor, Tensor]:
    """Logits and features of all tokens: a prompt in chunks, then rows one at a time, as roots of
    trees that are copied from scratch to pages in a shuffled order."""
    num_pages = -(-len(tokens) // PAGE_SIZE)
    backend = fresh_backend(model.kv_layout, num_pages=num_pages, page_size=PAGE_SIZE)
    table_1P = torch.arange(num_pages).flip(0)[None] + NUM_RESERVED_PAGES
    slot_1, outputs = torch.zeros(1, dtype=torch.int64), []
    for start in range(0, NUM_PROMPT, chunk):
        end = min(start + chunk, NUM_PROMPT)
        plan = backend.plan_prefill(
            page_table_BP=table_1P, chunks=[(start, end)], device=torch.device("cpu")
        )
        outputs.append(
            model.forward(torch.tensor(tokens[start:end]), torch.arange(start, end), plan)
        )
    for position in range(NUM_PROMPT, len(tokens)):
        plan = backend.plan_tree(
            page_table_BP=table_1P,
            slots_B=slot_1,
            first_index=0,
            end_index_B=torch.tensor([position]),
            visible_BQN=torch.ones(1, 1, 1, dtype=torch.bool),
            first_node=0,
            max_kv_len=len(tokens),
        )
        outputs.append(model.forward(torch.tensor([tokens[position]]), slot_1 + position, plan))
        row = backend.page_rows(table_1P, torch.tensor([[position]]))[0]
        backend.pool.copy_rows(backend.scratch_rows(slot_1, slot_1)[0], row)
    logits = [model.compute_logits(output.hidden_TH) for output in outputs]
    return torch.cat(logits), torch.cat([output.features_TF for output in outputs])


@pytest.mark.parametrize("name", list(CASES))
def test_equals_transformers(tmp_path: Path, name: str) -> None:
    write_family(tmp_path, CASES[name])
    tokens = random_prompts([NUM_TOKENS], vocab_size=VOCAB)[0]
    logits_TV, boundaries = reference(tmp_path, tokens)
    assert (len(Checkpoint.open(tmp_path).files) > 1) == (CASES[name].storage == "shards")
    model = load_target(tmp_path)
    model.set_eagle3_layers_to_capture(range(model.num_layers + 1))
    for chunk in (NUM_PROMPT, 7):
        ours_TV, features_TF = serve(model, tokens, chunk=chunk)
        torch.testing.assert_close(ours_TV, logits_TV, atol=1e-4, rtol=0)
        captured = features_TF.split(model.hidden_size, dim=1)
        for ours, theirs in zip(captured, boundaries, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_rope_changes_the_logits(tmp_path: Path, family: str) -> None:
    """Else a scaling that is read and dropped could pass the comparison."""
    tokens, results = random_prompts([NUM_TOKENS], vocab_size=VOCAB)[0], []
    for rope in ROPES:
        write_family(tmp_path / rope, Case(family, rope))
        model = load_target(tmp_path / rope)
        model.set_eagle3_layers_to_capture((0,))
        results.append(serve(model, tokens, chunk=NUM_PROMPT)[0])
    for index, logits_TV in enumerate(results):
        for other_TV in results[:index]:
            assert (logits_TV[-1] - other_TV[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_both_spellings(tmp_path: Path, family: str, rope: str) -> None:
    configs = []
    for is_legacy in (False, True):
        folder = tmp_path / str(is_legacy)
        write_family(folder, Case(family, rope, is_legacy))
        configs.append(read_target_config(folder))
    assert configs[0] == configs[1]
    assert (configs[0].rope.kind, configs[0].rope.theta) == (rope, 500.0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5e5}
# Of eight layers: what leaves the last one too.
LAST: dict[str, Any] = {"num_states": 4, "layer_ids": (2, 4, 6, 8)}
HALF = {"partial_rotary_factor": 0.5}
NESTED = DraftShape(format="speculators", layer_ids=(2, 4, 5))
NESTED_LAYER = draft_config(NESTED)["transformer_layer_config"] | {"rope_parameters": PLAIN_ROPE}
# Drafts as they are found: (shape, keys of config.json beside it, rope of the layer).
DRAFTS: dict[str, tuple[DraftShape, dict[str, Any], dict[str, Any]]] = {
    "qwen": (DraftShape(format="speculators", qk_norm=True, has_embedding=True), {}, {}),
    "qwen-normed": (
        DraftShape(
            format="speculators",
            qk_norm=True,
            norm_before_residual=True,
            fc_norm=True,
            rope_theta=1e6,
        ),
        {},
        {"rope_theta": 1e6},
    ),
    "qwen-specforge": (DraftShape(format="specforge", qk_norm=True, layer_ids=(1, 3, 4)), {}, {}),
    "tied-flag-beside-own-head": (DraftShape(), {"tie_word_embeddings": True}, {}),
    "wide-heads": (DraftShape(hidden_size=80, head_dim=32, has_embedding=True), {}, {}),
    "last-layer": (DraftShape(**LAST), {}, {}),
    "last-layer-norm_before_residual": (DraftShape(**LAST, norm_before_residual=True), {}, {}),
    "last-layer-norm_before_fc": (DraftShape(**LAST, norm_before_fc=True), {}, {}),
    "last-layer-fc_norm": (DraftShape(**LAST, fc_norm=True), {}, {}),
    "last-layer-norm_output": (DraftShape(**LAST, norm_output=True), {}, {}),
    "no-rope-keys": (DraftShape(), {}, {}),
    "rope-base-alone": (DraftShape(rope_theta=5e5), {}, {"rope_theta": 5e5}),
    "rope-parameters": (DraftShape(), {"rope_parameters": PLAIN_ROPE}, PLAIN_ROPE),
    "one-rope-under-two-names": (
        DraftShape(),
        {"rope_parameters": PLAIN_ROPE, "rope_scaling": PLAIN_ROPE},
        PLAIN_ROPE,
    ),
    "nested-rope-parameters": (NESTED, {"transformer_layer_config": NESTED_LAYER}, PLAIN_ROPE),
    "yarn": (DraftShape(rope_theta=5e5, rope_scaling=YARN), {}, {"rope_theta": 5e5, **YARN}),
    "partly-rotated": (DraftShape(), HALF, HALF),
}


class SlowestDraft(SlowDraft):
    """With norms on q and k where the checkpoint has them, and transformers' own frequencies."""

    def __init__(self, folder: Path, weights: dict[str, Tensor], rope: dict[str, Any]) -> None:
        target = read_target_config(folder.parent / "target")
        config = read_draft_config(folder, target)
        super().__init__(config, weights)
        dim = int(config.decoder.head_dim * rope.get("partial_rotary_factor", 1.0))
        if rope.get("rope_type") == "yarn":
            theirs = LlamaConfig(head_dim=dim, rope_parameters=rope)
            inv_freq, self.scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        else:
            exponent = torch.arange(0, dim, 2) / dim
            inv_freq, self.scale = rope.get("rope_theta", 1e4) ** -exponent.double(), 1.0
        self.inv_freq, self.dim = inv_freq.double(), dim

    def rotate(self, head: Tensor, position: int) -> Tensor:
        angle = position * self.inv_freq
        turn = torch.complex(angle.cos(), angle.sin()) * self.scale
        turned = torch.complex(*head[: self.dim].chunk(2)) * turn
        return torch.cat((turned.real, turned.imag, head[self.dim :]))

    def _heads(self, name: str, read: Tensor) -> Tensor:
        heads = super()._heads(name, read)
        norm = f"layers.0.self_attn.{name}_norm.weight"
        if norm not in self.weights:
            return heads
        return torch.stack([self.norm(head, norm) for head in heads])


NUM_PAIRS, NUM_STEPS = 9, 4


@torch.inference_mode()
def run_draft(draft: Eagle3Draft, tokens: list[int], features_TF: Tensor) -> Tensor:
    """Logits of the base pairs, then of recurrent steps, which feed back the hidden state."""
    backend = fresh_backend(draft.kv_layout, num_pages=1, page_size=len(tokens))
    table_1P = torch.full((1, 1), NUM_RESERVED_PAGES)
    logits, start, hidden_TH = [], 0, draft.combine(features_TF)
    while start < len(tokens):
        end = start + len(hidden_TH)
        plan = backend.plan_prefill(
            page_table_BP=table_1P, chunks=[(start, end)], device=torch.device("cpu")
        )
        rows_T = torch.arange(start, end)
        out = draft.forward(torch.tensor(tokens)[rows_T], hidden_TH, rows_T, rows_T * 0, plan)
        logits.append(out.logits_TV)
        start, hidden_TH = end, out.hidden_TH[-1:]
    return torch.cat(logits)


def run_slow(slow: SlowDraft, tokens: list[int], features_TF: Tensor) -> Tensor:
    """The same, row by row."""
    past, logits, hidden = [], [], slow.combine(features_TF[0])
    for position, token in enumerate(tokens):
        if position < len(features_TF):
            hidden = slow.combine(features_TF[position])
        out = slow.step(token, hidden, position, past=past)
        past.append(out.entry)
        logits.append(out.logits)
        hidden = out.hidden
    return torch.stack(logits)


@pytest.mark.parametrize("name", list(DRAFTS))
def test_drafts_equal_a_row_by_row_one(tmp_path: Path, name: str) -> None:
    shape, said, rope = DRAFTS[name]
    # The target's base is another one: it is not to be inherited.
    target_weights = write_target(tmp_path / "target", config={"rope_theta": 3e6})
    weights = write_draft(tmp_path / "draft", shape, config=said)
    target = load_target(tmp_path / "target")
    config = read_draft_config(tmp_path / "draft", target.config)
    draft = Eagle3Draft(config, dtype=torch.float32, device="cpu", max_model_len=NUM_TOKENS)
    load_weights(draft, Checkpoint.open(tmp_path / "draft"), rename=canonical_name)
    draft.share_with_target(target)
    weights.setdefault("embed_tokens.weight", target_weights["model.embed_tokens.weight"])
    slow = SlowestDraft(tmp_path / "draft", weights, rope)
    tokens = random_prompts([NUM_PAIRS + NUM_STEPS], vocab_size=256)[0]
    generator = torch.Generator().manual_seed(2)
    features_TF = torch.randn(NUM_PAIRS, config.num_features, generator=generator) * 2
    ours_TV = run_draft(draft, tokens, features_TF)
    theirs_TV = run_slow(slow, tokens, features_TF).float()
    assert ours_TV.shape == (NUM_PAIRS + NUM_STEPS, 97) and theirs_TV.std() > 0.05
    torch.testing.assert_close(ours_TV, theirs_TV, atol=1e-4, rtol=0)
    assert config.decoder.qk_norm == shape.qk_norm
