"""The trainer's draft steps against the engine's own rounds, and against the draft alone."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.mixtures import tiny_mixture
from fixtures.slow_draft import SlowDraft
from fixtures.tiny import full_forward, random_prompts
from fixtures.training import (
    engine_logits,
    greedy_text,
    random_talks,
    served,
    settings,
    shake,
    talk,
    target_in,
    trainer_logits,
    vocabulary_with,
)
from torch import Tensor

from eyas.attention.torch_backend import TorchBackend
from eyas.cache.pool import NUM_RESERVED_PAGES, KVPool
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.llama import LlamaForCausalLM
from eyas.models.loader import load_weights
from eyas.models.target_config import read_target_config
from eyas.train.capture import capture
from eyas.train.draft import build_draft, design_draft
from eyas.train.export import draft_tensors
from eyas.train.packing import Corpus, make_batch
from eyas.train.trainer import Trainer

DEPTH = 7
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_output, fc_norm": {"norm_output": True, "fc_norm": True},
    "norm_before_residual, norm_before_fc": {"norm_before_residual": True, "norm_before_fc": True},
}


def make_draft(
    target: LlamaForCausalLM, kept_V: Tensor, *, scale: float = 0.2, **flags: Any
) -> Eagle3Draft:
    config = dataclasses.replace(design_draft(target.config, len(kept_V)), **flags)
    draft = build_draft(target, config, kept_V, seed=1)
    shake(draft, scale=scale)
    return draft


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_steps_equal_engine_depths(flags: dict[str, Any], tmp_path: Path) -> None:
    """fp64, several rounds, the text packed among others."""
    target = target_in(torch.float64)
    (prompt,) = random_prompts([13])
    text = greedy_text(target, prompt, 26)
    draft = make_draft(target, vocabulary_with(text, 50, target.vocab_size), **flags)
    talks = [*random_talks(2), talk(text, len(prompt)), *random_talks(1)]
    first_row = sum(len(t.input_ids) for t in talks[:2])
    trained_STV = trainer_logits(target, draft, talks, num_steps=DEPTH)
    found = engine_logits(
        target,
        served(draft, target, tmp_path, torch.float64),
        text,
        num_prompt=len(prompt),
        depth=DEPTH,
        dtype=torch.float64,
    )
    compared = [(t, k) for t, k in found if t + 2 + k < len(text)]
    assert {k for _, k in compared} == set(range(DEPTH)) and len({t for t, _ in compared}) >= 3
    for t, k in compared:
        difference = (found[t, k] - trained_STV[k, first_row + t]).abs().max()
        assert difference < 1e-9, (t, k, float(difference))


def test_steps_equal_engine_depths_of_smollm2(smollm2_dir: Path, tmp_path: Path) -> None:
    """The real target in fp32."""
    config = read_target_config(smollm2_dir)
    target = LlamaForCausalLM(config, dtype=torch.float32, device="cpu", max_model_len=300)
    load_weights(target, Checkpoint.open(smollm2_dir))
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    text = greedy_text(target, prompt, 17)
    draft = make_draft(target, vocabulary_with(text, 512, target.vocab_size), scale=0.02)
    trained_STV = trainer_logits(target, draft, [talk(text, len(prompt))], num_steps=DEPTH)
    found = engine_logits(
        target,
        served(draft, target, tmp_path, torch.float32),
        text,
        num_prompt=len(prompt),
        depth=DEPTH,
        dtype=torch.float32,
    )
    compared = [(t, k) for t, k in found if t + 2 + k < len(text)]
    assert {k for _, k in compared} == set(range(DEPTH)) and len({t for t, _ in compared}) >= 2
    largest = max(float(logits.abs().max()) for logits in found.values())
    for t, k in compared:
        difference = float((found[t, k] - trained_STV[k, t]).abs().max())
        assert difference < 1e-4 * max(1.0, largest / 10), (t, k, difference, largest)


def test_every_row_equals_its_chain_alone() -> None:
    """Each base pair's chain by the row-by-row draft, which knows neither masks nor packing."""
    target = target_in(torch.float64)
    kept_V = vocabulary_with([], 30, target.vocab_size)
    draft = make_draft(target, kept_V)
    tokens = random_talks(1)[0].input_ids
    weights = draft_tensors(draft) | {"embed_tokens.weight": target.get_embed_and_head()[0]}
    slow = SlowDraft(draft.config, weights)
    trained_STV = trainer_logits(target, draft, [talk(tokens, 4)], num_steps=4)
    features_TF = reference_features(target, tokens, draft.boundaries)
    combined = [slow.combine(features) for features in features_TF]
    pairs = range(len(tokens) - 1)
    entries = [slow.entry(tokens[t + 1], combined[t], t) for t in pairs]
    for t in pairs:
        past, hidden = entries[:t], combined[t]
        for k in range(min(4, len(tokens) - 1 - t)):
            out = slow.step(tokens[t + 1 + k], hidden, t + k, past=past)
            past, hidden = [*past, out.entry], out.hidden
            difference = float((out.logits - trained_STV[k, t]).abs().max())
            # The engine's rotary angles are made in fp32.
            assert difference < 1e-6, (t, k, difference)


def reference_features(
    target: LlamaForCausalLM, tokens: list[int], boundaries: tuple[int, ...]
) -> Tensor:
    """Captured by the serving backend."""
    pool = KVPool(
        target.kv_layout,
        num_pages=NUM_RESERVED_PAGES + 1,
        page_size=len(tokens),
        num_slots=1,
        num_scratch_rows=1,
        dtype=torch.float64,
        device="cpu",
    )
    plan = TorchBackend(pool).plan_prefill(
        page_table_BP=torch.tensor([[NUM_RESERVED_PAGES]]),
        chunks=[(0, len(tokens))],
        device=torch.device("cpu"),
    )
    target.set_eagle3_layers_to_capture(boundaries)
    with torch.no_grad():
        output = target.forward(torch.tensor(tokens), torch.arange(len(tokens)), plan)
    assert output.features_TF is not None
    return output.features_TF


@pytest.mark.parametrize("name", ["deepseek", "kimi", "qwen"])
def test_capture_of_other_families(name: str) -> None:
    """Latent attention, experts, a wrapper: packed capture is what serving captures, and a draft of
    plain layout can be trained on it."""
    target = tiny_mixture(name)
    talks = random_talks(3)
    corpus = Corpus.read(talks, max_length=100)
    batch = make_batch(corpus, range(3), num_steps=2, device="cpu")
    captured = capture(target, batch, (1, 3))
    assert captured.features_TF is not None and target.captured_boundaries == ()
    start = 0
    for one in talks:
        alone, _ = full_forward(target, one.input_ids, (1, 3))
        assert alone.features_TF is not None
        rows = slice(start, start := start + len(one.input_ids))
        pairs = (
            (captured.features_TF[rows], alone.features_TF.clone()),
            (captured.hidden_TH[rows], alone.hidden_TH.clone()),
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    config = design_draft(read_config(target), 32)
    draft = build_draft(target, config, torch.arange(32), seed=0)
    trainer = Trainer(target, draft, corpus, settings=settings(num_steps=1))
    before = trainer.master.flat.clone()
    trainer.run_step(1, [[0, 1, 2]])
    assert trainer.master.flat.isfinite().all() and not trainer.master.flat.equal(before)


def read_config(target: Any) -> ModelConfig:
    """A target's configuration, inside its wrapper."""
    inner = getattr(target, "inner_model_attribute", None)
    config = getattr(target, inner).config if inner else target.config
    assert isinstance(config, ModelConfig)
    return config
