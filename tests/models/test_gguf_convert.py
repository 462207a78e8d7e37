"""GGUF to Hugging Face: weights bit for bit, configuration, tokenizer, chat template."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from eyas.models.gguf_convert import convert_gguf, hugging_face_name, undo_rotary_permutation
from eyas.types import EyasError


@pytest.fixture(scope="module")
def tiny_folder(tiny_gguf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(tiny_gguf.path, folder)
    return folder


def test_every_weight_comes_out_bit_for_bit(tiny_gguf: Any, tiny_folder: Path) -> None:
    weights = load_file(tiny_folder / "model.safetensors")
    assert weights.keys() == tiny_gguf.weights.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.float(), torch.from_numpy(tiny_gguf.weights[name])), name


def test_rotary_rows_return_to_the_halves_of_a_head() -> None:
    # One head of 4: llama.cpp stores 0, 2, 1, 3. Two heads of 4 follow one another.
    weight_OI = np.array([0, 2, 1, 3, 4, 6, 5, 7], dtype=np.float32)[:, None]
    assert undo_rotary_permutation(weight_OI, 2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_config_is_what_transformers_reads(tiny_folder: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_folder)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (32, 2, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings is True
    assert config.dtype == torch.bfloat16
    generation = json.loads((tiny_folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_numbers_split_into_digits_before_the_merges(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    # The merge "1 2" is in the vocabulary; the pre-tokenizer keeps the digits apart all the same.
    assert "12" in tokenizer.get_vocab()
    assert tokenizer.tokenize("hi 12 hi") == ["hi", "Ġ", "1", "2", "Ġhi"]
    text = "<|im_start|>hi 12<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi 12"


def test_chat_template_travels(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nhi"


def test_progress_ends_at_the_total(tiny_gguf: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert_gguf(tiny_gguf.path, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == len(tiny_gguf.weights)
    assert seen == sorted(seen)
    assert seen[-1] == (seen[0][1], sum(w.nbytes for w in tiny_gguf.weights.values()))


def test_another_tokenizer_is_refused(tiny_gguf: Any, tmp_path: Path) -> None:
    data = tiny_gguf.path.read_bytes()
    other = tmp_path / "other.gguf"
    assert data.count(b"smollm") == 1
    other.write_bytes(data.replace(b"smollm", b"qwen22"))
    with pytest.raises(EyasError, match="qwen22"):
        convert_gguf(other, tmp_path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EyasError, match="mamba"):
        convert_gguf(path, tmp_path)


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(EyasError, match=r"blk\.0\.attn_q\.bias"):
        hugging_face_name("blk.0.attn_q.bias")


def test_real_model_tokenizes_digits_one_by_one(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    pieces = tokenizer.tokenize("In 2024, it's 1234567.")
    assert pieces == ["In", "Ġ", *"2024", ",", "Ġit", "'s", "Ġ", *"1234567", "."]
    text = "  naïve\tcafé 東京 🙂\n\n<|im_start|>x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_real_model_renders_its_chat_template(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert ids.count(1) == 3 and ids.count(2) == 2
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)


def test_real_model_knows_the_capital_of_france(smollm2_dir: Path) -> None:
    """Rows of q and k in the wrong order would leave nothing of what it has learnt."""
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    tokens_BT = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits_V = model(tokens_BT).logits[0, -1]
    assert tokenizer.decode(logits_V.argmax().item()) == " Paris"
