"""Speculation on targets with latent attention and experts: the same text as plain decoding, and
after every round the caches of a fresh prefill, with Llama-type and latent drafts."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from fixtures.mixtures import latent_decoder, tiny_mixture
from fixtures.tiny import (
    VOCAB,
    draft_config,
    fit_head,
    fresh_backend,
    full_forward,
    llama_config,
    make_engine,
    random_prompts,
    run,
    tiny_draft_and_weights,
    tiny_target,
    worker_shape,
)

from eyas.cache.pool import NUM_RESERVED_PAGES, KVPool
from eyas.config import PLAIN, TreeShape
from eyas.engine.engine import Engine
from eyas.models.config import DraftConfig
from eyas.scheduler.scheduler import Phase, Request
from eyas.types import SamplingParams

TARGETS = ("deepseek", "lite", "kimi", "qwen")
SHAPES = {"plain": PLAIN, "chain": TreeShape(3, 1, 4), "tree": TreeShape(4, 3, 12)}
LENGTHS, NUM_NEW = (2, 17, 40, 65), 48
# Each with the sizes and flags of drafts in the wild.
DRAFTS: dict[str, DraftConfig] = {
    "llama": draft_config(),
    "latent": draft_config(latent_decoder()),
    "latent 3.1": draft_config(latent_decoder(), fc_norm=True, norm_output=True),
    "latent, whole vocabulary": draft_config(
        latent_decoder(), draft_vocab_size=VOCAB, has_d2t=False, norm_before_residual=True
    ),
    "latent, query not compressed": draft_config(
        latent_decoder(latent=dataclasses.replace(latent_decoder().latent, q_lora_rank=None)),
        norm_before_fc=True,
    ),
}
PROMPTS = random_prompts(LENGTHS)
PARAMS = [
    SamplingParams(max_tokens=NUM_NEW, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 1.0, 0.7, 0.0))
]


@functools.cache
def target_of(name: str) -> Any:
    return tiny_mixture(name)


@functools.cache
def plain(name: str) -> list[list[int]]:
    """What each prompt gives alone, without a draft."""
    engine = make_engine(target_of(name), run_ahead=1)
    pairs = zip(PROMPTS, PARAMS, strict=True)
    return [run(engine, [prompt], [params])[0].tokens for prompt, params in pairs]


@functools.cache
def draft_of(target: str, name: str) -> Any:
    """A draft that is right now and then."""
    config = dataclasses.replace(DRAFTS[name], target_hidden_size=target_of(target).hidden_size)
    draft, _ = tiny_draft_and_weights(target_of(target), config)
    texts = [p + a for p, a in zip(PROMPTS, plain(target), strict=True)]
    fit_head(draft, target_of(target), texts)
    return draft


@pytest.mark.parametrize("draft", ["llama", "latent"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("target", TARGETS)
def test_speculation_does_not_show(target: str, shape: str, draft: str) -> None:
    engine = make_engine(
        target_of(target), draft_of(target, draft), worker_shape(SHAPES[shape]), run_ahead=1
    )
    results = run(engine, PROMPTS, PARAMS)
    assert [r.tokens for r in results] == plain(target)
    assert {n for r in results for n in r.rounds} >= {1, 2}  # acceptances and rejections


@pytest.mark.parametrize("draft", list(DRAFTS)[2:])
@pytest.mark.parametrize("target", TARGETS)
def test_drafts_of_every_format(target: str, draft: str) -> None:
    engine = make_engine(target_of(target), draft_of(target, draft), worker_shape(SHAPES["tree"]))
    results = run(engine, PROMPTS, PARAMS)
    assert [r.tokens for r in results] == plain(target)
    assert max(n for r in results for n in r.rounds) > 1


def test_a_latent_draft_on_a_llama_target() -> None:
    target = tiny_target(llama_config())
    answers = [r.tokens for r in run(make_engine(target), PROMPTS, PARAMS)]
    draft, _ = tiny_draft_and_weights(target, DRAFTS["latent"])
    engine = make_engine(target, draft, worker_shape(SHAPES["tree"]))
    assert [r.tokens for r in run(engine, PROMPTS, PARAMS)] == answers


def test_the_targets_look_back_and_choose_different_experts() -> None:
    """Equality of their outputs says something of the caches and of the routing."""
    for name in TARGETS:
        target = target_of(name)
        one, _ = full_forward(target, [1, 2, 3, 4])
        two, _ = full_forward(target, [2, 1, 3, 4])
        assert (one.hidden_TH[-1] - two.hidden_TH[-1]).abs().max() > 0.05
        gates = [m for m in target.modules() if type(m).__name__ == "Router"]
        chosen: list[torch.Tensor] = []

        def keep(module: Any, args: Any, out: Any, chosen: Any = chosen) -> None:
            chosen.append(out[0])

        hooks = [gate.register_forward_hook(keep) for gate in gates]
        full_forward(target, PROMPTS[3])
        for hook in hooks:
            hook.remove()
        assert all(len(experts.unique()) >= 6 for experts in chosen)


@torch.inference_mode()
def fresh(target: Any, draft: Any, text: list[int]) -> tuple[KVPool, KVPool]:
    """Both caches after one pass over a text: token t is at row first + t, pair t at first + t."""
    output, pool = full_forward(target, text, draft.boundaries)
    assert output.features_TF is not None
    backend = fresh_backend(draft.kv_layout, num_pages=1, page_size=len(text))
    num_pairs = len(text) - 1
    rows_T = torch.arange(num_pairs) + NUM_RESERVED_PAGES * len(text)
    draft.write_kv(
        torch.tensor(text[1:]),
        draft.combine(output.features_TF[:-1]),
        torch.arange(num_pairs),
        backend.plan_write(rows_T),
    )
    return pool, backend.pool


def check_caches(engine: Engine, request: Request, pools: tuple[KVPool, KVPool], size: int) -> int:
    """Compare a request's entries in both caches; returns its committed length."""
    worker, slot = engine.worker, request.slot
    assert slot is not None and worker.draft_pool is not None
    length, first = int(worker.state.length_S[slot]), NUM_RESERVED_PAGES * size
    pages = worker.state.page_table_SP[slot].tolist()
    # The draft's entry of pair t is at index t + 1.
    for pool, want, start in zip(
        (worker.target_pool, worker.draft_pool), pools, (0, 1), strict=True
    ):
        index = range(start, length + start)
        rows = [pages[i // pool.page_size] * pool.page_size + i % pool.page_size for i in index]
        for ours, theirs in ((pool.k_LRKD, want.k_LRKD), (pool.v_LRKD, want.v_LRKD)):
            expected = theirs[:, first : first + length]
            torch.testing.assert_close(ours[:, rows], expected, atol=2e-4, rtol=1e-4)
    return length


@pytest.mark.parametrize("draft", ["llama", "latent 3.1"])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("target", ["lite", "kimi", "qwen"])
def test_the_caches_equal_a_fresh_prefill_after_every_round(
    target: str, shape: str, draft: str
) -> None:
    model, drafter = target_of(target), draft_of(target, draft)
    engine = make_engine(model, drafter, worker_shape(SHAPES[shape]), chunk_tokens=23)
    wanted, requests = {}, []
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        text = prompt + plain(target)[index]
        wanted[str(index)] = fresh(model, drafter, text), len(text)
        engine.add(str(index), prompt, params)
        requests.append(engine.requests[str(index)])
    lengths = set()
    while engine.has_work:
        engine.step()
        for request in requests:
            if request.phase is Phase.RUNNING:
                pools, size = wanted[request.request_id]
                lengths.add(check_caches(engine, request, pools, size))
    assert len(lengths) > 30
    if target == "kimi":  # one vector a token, no values beside it
        assert engine.worker.target_pool.v_LRKD.numel() == 0
        assert engine.worker.target_pool.k_LRKD.shape[-1] == 24


def test_found_prefixes_do_not_show() -> None:
    """Latent pages are shared between requests as any other."""
    model, drafter = target_of("deepseek"), draft_of("deepseek", "latent")
    engine = make_engine(model, drafter, worker_shape(SHAPES["tree"], page_size=8, num_pages=400))
    for _ in range(2):
        results = run(engine, PROMPTS, PARAMS)
        assert [r.tokens for r in results] == plain("deepseek")
    engine.add("again", PROMPTS[3], PARAMS[3])
    again = engine.requests["again"]
    while engine.has_work:
        engine.step()
    assert again.num_cached_tokens == 64
