"""The memory plan, target and draft in words; limits that a target is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.engine.check_report import format_bytes
from eyas.engine.memory_plan import MIN_MODEL_LEN, MemoryNeed, MemoryPlan, longest_length
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.findings import Findings
from eyas.types import MAX_STOP_IDS


def report_end_tokens(target: ModelConfig, findings: Findings) -> None:
    """Report more end tokens than a request can have: each would be refused."""
    num_ids = sum(token < target.vocab_size for token in target.eos_token_ids)
    if num_ids > MAX_STOP_IDS:
        findings.error(
            "target",
            "end-tokens",
            f"config.json and generation_config.json name {num_ids} end tokens, at most "
            f"{MAX_STOP_IDS} can be watched",
            "keep those in eos_token_id that end an answer",
        )


def describe_target(target: ModelConfig) -> str:
    """One line on what will be built."""
    experts, quant = target.experts, target.quant
    parts = [f"{target.num_layers} layers", f"hidden {target.hidden_size}", _heads(target)]
    if experts is not None:
        shared = f" and shared ones of {experts.shared_size}" if experts.shared_size else ""
        parts.append(
            f"{experts.num_experts_per_token} of {experts.num_experts} experts{shared} in "
            f"{len(experts.layers)} layers"
        )
    parts.append(f"vocabulary {target.vocab_size}")
    if target.tie_word_embeddings:
        parts.append("tied head")
    if quant is not None:
        names = ", ".join(sorted(quant.parts))
        parts.append(f"{quant.scheme} (groups of {quant.group_size}): {names}")
    return f"{target.architecture}: " + ", ".join(parts)


def _heads(model: ModelConfig) -> str:
    latent = model.latent
    if latent is None:
        return f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    return (
        f"{model.num_heads} heads of {latent.nope_head_dim}+{latent.rope_head_dim} over a latent "
        f"of {latent.kv_lora_rank}"
    )


def describe_draft(draft: DraftConfig) -> str:
    """One line on what will be built."""
    decoder = draft.decoder
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    set_flags = [name for name in flags if getattr(draft, name)]
    own = "own" if draft.has_embedding else "the target's"
    head = "own" if draft.has_head else "tied" if decoder.tie_word_embeddings else "the target's"
    return (
        f"{draft.format}: hidden {decoder.hidden_size}, {_heads(decoder)}, vocabulary "
        f"{draft.draft_vocab_size}, rope base {decoder.rope.theta:g} ({decoder.rope.kind}), "
        f"embedding {own}, head {head}" + (f", {', '.join(set_flags)}" if set_flags else "")
    )


def describe_plan(plan: MemoryPlan) -> str:
    """One line on where the memory goes."""
    parts = {
        "target": plan.target_weight_bytes,
        "draft": plan.draft_weight_bytes,
        "packed copies": plan.packed_bytes,
        "KV": plan.kv_bytes,
        "page ends": plan.page_end_bytes,
        "scratch": plan.scratch_bytes,
        "slots": plan.slot_bytes,
        "tables": plan.table_bytes,
        "activations": plan.activation_bytes,
    }
    shown = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
    if plan.num_ranks > 1:
        budget += " a rank"
    return (
        f"{format_bytes(plan.total_bytes)}{budget}: {shown}; {plan.kv_tokens} KV tokens, model "
        f"length {plan.max_model_len}"
    )


def report_plan(
    need: MemoryNeed,
    plan: MemoryPlan,
    findings: Findings,
    *,
    fitting: Callable[[], Sequence[int]] = tuple,
    device_bytes: int | None = None,
) -> None:
    """Report a plan that does not fit, with what would; or what was cut to make it fit.

    fitting: numbers of ranks above this one with which it fits. device_bytes: of the device that is
    planned for, of which the budget is a part.
    """
    if plan.budget_bytes is None:
        findings.skip("device", "memory-unknown", "the device's memory could not be read")
        return
    if not plan.fits:
        _report_too_small(need, plan, findings, fitting=fitting(), device_bytes=device_bytes)
        return
    if plan.max_model_len < (need.max_model_len or need.default_model_len):
        findings.warn(
            "device",
            "model-length-reduced",
            f"one request of the target's {need.default_model_len} tokens does not fit: the model "
            f"length is {plan.max_model_len}",
            "set --max-model-len to choose it, lower --max-batch-size, or use a device with more "
            "memory",
        )
    elif plan.kv_tokens < plan.max_model_len:
        findings.warn(
            "settings",
            "kv-cache-below-length",
            f"the KV cache holds {plan.kv_tokens} tokens, less than one request of the model "
            f"length {plan.max_model_len}: longer requests are refused",
            "raise --kv-cache-tokens, or lower --max-model-len to say so openly",
        )


def _report_too_small(
    need: MemoryNeed,
    plan: MemoryPlan,
    findings: Findings,
    *,
    fitting: Sequence[int],
    device_bytes: int | None,
) -> None:
    assert plan.budget_bytes is not None
    more_ranks = [f"--tp {fitting[0]}"] if fitting else []
    each = " on each rank" if plan.num_ranks > 1 else ""
    least = need.total_bytes(1, MIN_MODEL_LEN)
    if least > plan.budget_bytes:
        enough = _least_bytes(need)
        device = f"use a device with at least {format_bytes(enough)} to spare"
        if device_bytes is not None:
            whole = math.ceil(enough * device_bytes / plan.budget_bytes / (1 << 30) * 10) / 10
            device += f" (--device-memory {whole})"
        findings.error(
            "device",
            "memory-weights",
            f"the weights need {format_bytes(need.weight_bytes)} and one short request "
            f"{format_bytes(least - need.weight_bytes)} more{each}; "
            f"{format_bytes(plan.budget_bytes)} are available",
            device
            + "".join(f", or {option}" for option in more_ranks)
            + (", or --dtype bfloat16" if need.dtype.itemsize > 2 else ""),
        )
        return
    findings.error(
        "device",
        "memory",
        f"{describe_plan(plan)}: that does not fit",
        "use " + " or ".join(_options(need, plan, plan.budget_bytes) + more_ranks),
    )


def _least_bytes(need: MemoryNeed) -> int:
    """What the settings need at least: a short request where the plan may choose the length."""
    model_len = need.max_model_len or need.default_model_len
    if need.max_model_len is None and need.kv_cache_tokens is None:
        model_len = min(MIN_MODEL_LEN, model_len)
    num_pages = need.num_pages(1, need.kv_cache_tokens or model_len)
    return need.total_bytes(need.max_batch_size, model_len, num_pages)


def _options(need: MemoryNeed, plan: MemoryPlan, budget_bytes: int) -> list[str]:
    """Settings of which each one makes it fit."""
    if need.kv_cache_tokens is not None:
        rest = budget_bytes - need.total_bytes(need.max_batch_size, plan.max_model_len, 0)
        num_pages = rest // need.page_bytes - NUM_RESERVED_PAGES
        if num_pages > 0:
            return [f"--kv-cache-tokens {num_pages * need.page_size}"]
    options = []
    if plan.largest_batch:
        options.append(f"--max-batch-size {plan.largest_batch}")
    if plan.longest_one:
        options.append(f"--max-model-len {plan.longest_one}")
    if not options:
        length = longest_length(need, batch_size=1, budget_bytes=budget_bytes)
        options.append(f"--max-batch-size 1 --max-model-len {length}")
    if need.kv_cache_tokens is None:
        return options
    return [f"{option} without --kv-cache-tokens" for option in options]
