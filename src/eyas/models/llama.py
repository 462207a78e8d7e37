"""Llama, and what differs from it only by configuration (Qwen2: biases; Qwen3: q and k norms)."""

from __future__ import annotations

from eyas.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Blocks of grouped-query attention and a gated MLP, as the shared decoder has them."""
