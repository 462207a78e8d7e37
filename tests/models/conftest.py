"""A tiny Llama as a GGUF file, made the way llama.cpp's converter makes one."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, FFN = 2, 32, 4, 2, 64
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# "12" and "1 2" would merge if digits reached the byte-level step in one piece.
MERGES = ["1 2", "h i", "Ġ hi"]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True)
class TinyGguf:
    """The file, and the weights that it was made from by their names in transformers."""

    path: Path
    weights: dict[str, np.ndarray]


def tokens() -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), *merged]


def hugging_face_weights() -> dict[str, np.ndarray]:
    """Random weights that bfloat16 holds exactly: small integers."""
    rng = np.random.default_rng(0)
    kv_rows = HIDDEN // NUM_HEADS * NUM_KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(tokens()), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(NUM_LAYERS):
        parts = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (kv_rows, HIDDEN),
            "self_attn.v_proj": (kv_rows, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return {
        name: rng.integers(-100, 100, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def llama_cpp_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order, one row at a time: row 2i is row i of a head, row 2i+1 is i + d/2."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + i + half * head_dim // 2
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def write_gguf(path: Path, weights: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens())
    types = [3 if token in SPECIAL_TOKENS else 1 for token in tokens()]
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    for name, weight in weights.items():
        stored = weight
        if "q_proj" in name:
            stored = llama_cpp_rows(weight, NUM_HEADS)
        if "k_proj" in name:
            stored = llama_cpp_rows(weight, NUM_KV_HEADS)
        gguf_name = name_map.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    weights = hugging_face_weights()
    write_gguf(path, weights)
    return TinyGguf(path, weights)
