"""Which keys of a draft's config.json are understood.

A flag that changes the computation and is not known must stop the start: ignored, it costs
acceptance and nothing else shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eyas.models.config_file import Fields
from eyas.models.findings import Findings

# Read by draft_config, in every format and place.
FLAGS = {"norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"}
READ_KEYS = FLAGS | {
    "eagle_aux_hidden_state_layer_ids",
    "num_aux_hidden_states",
    "draft_vocab_size",
    "target_hidden_size",
    "tie_word_embeddings",
    "eagle_config",
    "speculators_model_type",
    "transformer_layer_config",
    "bias",
}
# Read from the description of the decoder layer.
LAYER_KEYS = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "hidden_act",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "quantization_config",
    "compression_config",
    "dtype",
    "torch_dtype",
    "model_type",
    "architectures",
}
# Neither read nor part of a draft's forward pass: provenance, training, generation.
NEUTRAL_KEYS = {
    "speculators_version",
    "speculators_config",
    # Of the target's experts, copied with the rest of its config.json; the draft's MLP is dense,
    # and tensors of experts would be unknown ones.
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "moe_layer_freq",
    "num_nextn_predict_layers",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "qk_head_dim",
    "embed_requires_grad",
    "has_no_defaults_at_init",
    "target_model_type",
    "verifier",
    "auto_map",
    "attention_dropout",
    "initializer_range",
    "pretraining_tp",
    "use_cache",
    "transformers_version",
    "tokenizer_class",
    "name_or_path",
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "id2label",
    "label2id",
    "problem_type",
    "task_specific_params",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "chunk_size_feed_forward",
    "is_decoder",
    "is_encoder_decoder",
    "tie_encoder_decoder",
    "torchscript",
    "use_bfloat16",
    "pruned_heads",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
    "output_scores",
    "return_dict_in_generate",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "finetuning_task",
    "prefix",
    "tf_legacy_loss",
}
# Nested in `eagle_config` (ModelOpt, SpecForge): the values that this draft computes with.
# None: any value, as it is read elsewhere or does not reach a one-layer forward pass.
EAGLE_CONFIG_VALUES: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(FLAGS),
    "eagle_aux_hidden_state_layer_ids": None,
    "num_aux_hidden_states": None,
    "has_lm_head": None,
    "next_layer_regular": None,
    "parallel_draft_heads_num_layers": None,
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (0, 1),
    "eagle_decoder_type": ("llama",),
}
# Words in names of keys that mean arithmetic; others (notes of a tool) are left alone.
_MATHS = (
    *("norm", "residual", "fc", "aux", "eagle", "draft", "fus", "scal", "multipl", "softcap"),
    *("gate", "parallel", "mask", "bias", "rope", "rotary", "qk", "attn", "attention", "layer"),
    *("embed", "expert", "hidden", "logit"),
)


def report_unknown_keys(config: Mapping[str, Any], findings: Findings, *, strict: bool) -> None:
    """Report keys at the top level that are set and not understood.

    strict: every such key is an error (speculators: its configuration classes define all keys);
    otherwise those whose name speaks of arithmetic.
    """
    top = READ_KEYS | NEUTRAL_KEYS | LAYER_KEYS
    _report("config.json", _unknown(config, top, strict=strict), findings)
    layer = config.get("transformer_layer_config")
    if isinstance(layer, dict):
        known = LAYER_KEYS | NEUTRAL_KEYS | {"tie_word_embeddings"}
        unknown = _unknown(layer, known, strict=False)
        _report("transformer_layer_config", unknown, findings)


def report_eagle_config(eagle_config: Mapping[str, Any], findings: Findings) -> None:
    """Report keys of `eagle_config` that are unknown or have a value that is not computed."""
    unknown = [k for k, v in eagle_config.items() if k not in EAGLE_CONFIG_VALUES and v is not None]
    _report("eagle_config", unknown, findings)
    for key, allowed in EAGLE_CONFIG_VALUES.items():
        value = eagle_config.get(key)
        if allowed is not None and value is not None and value not in allowed:
            findings.error(
                "draft",
                "draft-option-unsupported",
                f"eagle_config has {key} = {value!r}; this engine computes with "
                f"{' or '.join(repr(v) for v in allowed)} only",
                "use a draft that was trained without that option",
            )


def read_flag(name: str, places: Iterable[Fields], findings: Findings) -> bool | None:
    """A flag that may stand in several places; None when it stands in none."""
    values = {place.where: place.flag(name, False) for place in places if name in place}
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{value} in {where}" for where, value in values.items())
        findings.error("draft", "draft-flags-disagree", f"{name} is {shown}", "keep one of the two")
    return next(iter(values.values()), None)


def _unknown(config: Mapping[str, Any], known: set[str], *, strict: bool) -> list[str]:
    set_keys = [key for key, value in config.items() if key not in known and value]
    return [k for k in set_keys if strict or any(word in k.lower() for word in _MATHS)]


def _report(where: str, keys: list[str], findings: Findings) -> None:
    if keys:
        findings.error(
            "draft",
            "draft-option-unknown",
            f"{where} sets {', '.join(keys)}, which is not known here and may change what the "
            "draft computes",
            "remove the key if it is only a note; else this draft needs support for it first",
        )
