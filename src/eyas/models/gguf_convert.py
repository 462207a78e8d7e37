"""Convert a Llama-family GGUF file into a Hugging Face folder.

GGUF is a storage format here, not a runtime: the one embedded model is published in it. Only what
that needs is read (architecture "llama", pre-tokenizer "smollm"); anything else is refused.

Shapes: O output features, I input features of a linear layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.types import EyasError

if TYPE_CHECKING:
    import gguf
    import torch

WEIGHTS_FILE = "model.safetensors"

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# gguf.TokenType, as the file stores it.
_CONTROL = 3
_USER_DEFINED = 4


def convert_gguf(
    source: Path, folder: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write ``source`` into the existing ``folder`` as a Hugging Face model.

    The files: config.json, generation_config.json, tokenizer.json, tokenizer_config.json (with the
    chat template) and model.safetensors. ``progress`` is told the bytes of weights converted so far
    and in all, of the quantized file.

    Weights are stored in bfloat16, the precision in which such models are trained and published:
    the unquantized norms of a file come out bit for bit, and on a 4-bit weight the rounding (1 part
    in 256 at most) is far below the quantization step (measured on SmolLM2-135M: 6.5e-5 nats of KL
    divergence, 0.0004 nats of loss). Every dtype that loads the folder starts from the same
    numbers, so a draft trained in bfloat16 meets the same target when that is served in float32.

    Raises EyasError when the file is of another architecture or tokenizer.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    tensor_names = {tensor.name for tensor in reader.tensors}
    config = llama_config(reader, tied="output.weight" not in tensor_names)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})
    _write_tokenizer(reader, folder, model_max_length=config["max_position_embeddings"])
    _write_weights(reader.tensors, folder / WEIGHTS_FILE, config=config, progress=progress)


def llama_config(reader: gguf.GGUFReader, *, tied: bool) -> dict[str, Any]:
    """The config.json of a Llama in GGUF; ``tied`` when it has no head of its own."""
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise EyasError(
            f"cannot convert a GGUF file of architecture {architecture!r}, only 'llama'"
        )
    hidden_size = _field(reader, "llama.embedding_length")
    num_heads = _field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": _decimal(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _decimal(_field(reader, "llama.rope.freq_base")),
        },
        "tie_word_embeddings": tied,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "use_cache": True,
    }


def undo_rotary_permutation(weight_OI: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection from llama.cpp's order to Hugging Face's.

    llama.cpp rotates neighbouring dimensions (0, 1), (2, 3), ... of a head and stores the rows
    interleaved to suit; transformers rotates the halves: (0, d/2), (1, d/2 + 1), ...
    """
    num_rows, num_inputs = weight_OI.shape
    pairs = weight_OI.reshape(num_heads, num_rows // num_heads // 2, 2, num_inputs)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_inputs)


def hugging_face_name(name: str) -> str:
    """The name in transformers of a tensor of a Llama GGUF file; EyasError when there is none."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", index, part, "weight"] if part in _BLOCK_NAMES:
            return f"model.layers.{index}.{_BLOCK_NAMES[part]}.weight"
    raise EyasError(f"the GGUF file holds a tensor which a Llama does not have: {name}")


def _write_weights(
    tensors: Iterable[gguf.ReaderTensor],
    path: Path,
    *,
    config: dict[str, Any],
    progress: Callable[[int, int], None] | None,
) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    tensors = list(tensors)
    total_bytes = sum(int(tensor.n_bytes) for tensor in tensors)
    done_bytes = 0
    heads_of = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, num_heads in heads_of.items():
            if f".{part}." in tensor.name:
                values = undo_rotary_permutation(values, num_heads)
        name = hugging_face_name(tensor.name)
        # A copy in any case: an unquantized tensor is a view of the read-only file.
        weights[name] = torch.tensor(values).to(torch.bfloat16)
        done_bytes += int(tensor.n_bytes)
        if progress:
            progress(done_bytes, total_bytes)
    save_file(weights, path, metadata={"format": "pt"})
    # safetensors makes a file that only its owner can read; a cache folder may be shared.
    path.chmod(path.with_name("config.json").stat().st_mode)


def _write_tokenizer(reader: gguf.GGUFReader, folder: Path, *, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Built here because transformers' reader of GGUF tokenizers ignores the pre-tokenizer's name:
    "smollm" splits numbers into single digits before the byte-level split.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise EyasError(f"cannot convert a GGUF tokenizer of kind {kind}, only ('gpt2', 'smollm')")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    token_types = _field(reader, "tokenizer.ggml.token_type")
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    tokenizer.save(str(folder / "tokenizer.json"))

    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special_tokens = {
        f"{ours}_token": tokens[_field(reader, f"tokenizer.ggml.{theirs}_token_id")]
        for ours, theirs in names.items()
    }
    settings = {
        # Takes tokenizer.json as it is; the class of the model's family would rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        **special_tokens,
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _field(reader: gguf.GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise EyasError(f"the GGUF file has no field {name}")
    return field.contents()


def _decimal(value: float) -> float:
    """The decimal that a float32 was written from: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
