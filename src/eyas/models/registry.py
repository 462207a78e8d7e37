"""Which class serves which architecture; classes are imported when asked for."""

from __future__ import annotations

import difflib
import importlib

from eyas.types import EyasError

TARGETS = {
    "DeepseekV2ForCausalLM": "eyas.models.deepseek_v3:DeepseekV3ForCausalLM",
    "DeepseekV3ForCausalLM": "eyas.models.deepseek_v3:DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration": "eyas.models.kimi_k25:KimiK25ForConditionalGeneration",
    "LlamaForCausalLM": "eyas.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "eyas.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "eyas.models.llama:LlamaForCausalLM",
    "Qwen3MoeForCausalLM": "eyas.models.qwen3_moe:Qwen3MoeForCausalLM",
}


def target_class(architecture: str) -> type:
    """The class of a target architecture. Raises EyasError that names the supported ones."""
    if architecture not in TARGETS:
        near = difflib.get_close_matches(architecture, TARGETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise EyasError(
            f"unsupported target architecture {architecture!r}{hint} "
            f"(supported: {', '.join(sorted(TARGETS))})"
        )
    module, _, name = TARGETS[architecture].partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found
