"""Memory of a training step: no full-vocabulary copy of the teacher, and linear in the length."""

from collections.abc import Callable

import pytest
import torch
from fixtures.tiny import llama_config, tiny_target
from fixtures.training import settings, talk
from torch.profiler import ProfilerActivity, profile

from eyas.train.draft import build_draft, design_draft
from eyas.train.loss import CHUNK_BYTES
from eyas.train.packing import Corpus
from eyas.train.trainer import Trainer

MIB = 2**20


def allocated_peak(function: Callable[[], object]) -> int:
    """Bytes that the allocator had handed out at the worst moment of a call, above its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def step_peak(num_tokens: int, *, vocab_size: int, draft_vocab_size: int) -> int:
    """Peak of one optimizer step over a single conversation of this length."""
    config = llama_config(vocab_size=vocab_size, max_position_embeddings=2**14)
    target = tiny_target(config)
    kept_V = torch.arange(draft_vocab_size) + 7
    draft = build_draft(target, design_draft(config, draft_vocab_size), kept_V, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
    options = settings(
        num_draft_steps=2,
        tokens_per_step=num_tokens,
        tokens_per_batch=num_tokens,
        max_length=num_tokens,
    )
    corpus = Corpus.read([talk(tokens, num_tokens // 4)], max_length=num_tokens)
    trainer = Trainer(target, draft, corpus, settings=options)
    _, plan = next(trainer.plans(0))
    return allocated_peak(lambda: trainer.run_step(1, plan))


def test_large_vocabulary() -> None:
    """150 000 tokens, 2 000 rows: the teacher's logits alone would be 1.2 GB in fp32, the draft's
    525 MB. Bounded by the chunks, the optimizer (three copies of the head) and 20 MiB of rows."""
    vocab_size, draft_vocab_size, num_tokens = 150_000, 32_000, 2048
    peak = step_peak(num_tokens, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)
    head_bytes = draft_vocab_size * 32 * 4
    assert peak < 1.2 * CHUNK_BYTES["cpu"] + 5 * head_bytes + 20 * MIB
    assert peak < num_tokens * vocab_size * 4 / 8


def test_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the length needs twice the memory; scores of 4k x 4k would be 268 MB a pass."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", MIB)  # the constant part, made small
    peaks = [step_peak(n, vocab_size=64, draft_vocab_size=32) for n in (1024, 2048, 4096)]
    growth = [b - a for a, b in zip(peaks, peaks[1:], strict=False)]
    assert 1.8 < growth[1] / growth[0] < 2.2
    assert peaks[2] < 60 * MIB
