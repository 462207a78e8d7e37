"""Checkpoints with random weights in a real model's shape: target, draft and a tokenizer.

    python scripts/random_checkpoint.py FOLDER [--shape llama-3.1-8b] [--num-shards 4]

Weights are made on the GPU, where there is one, and written by several threads: an 8B takes as
long as the disk needs for 16 GB. FOLDER/target and FOLDER/draft are then like any other checkpoint.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from eyas.bench.shapes import write_shape
from eyas.config import EngineConfig
from eyas.engine.check import run_check
from eyas.engine.load import random_models
from eyas.models.weight_slots import weight_slots


def write_checkpoints(folder: Path, *, shape: str, num_shards: int) -> tuple[Path, Path]:
    """Write both checkpoints; returns their folders."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig(model=shape, draft="random", device=device, max_model_len=256)
    config = write_shape(config, folder)
    assert config.draft is not None
    report = run_check(dataclasses.replace(config, max_batch_size=1))
    report.raise_on_errors()
    found = random_models(config, report)
    assert found.draft is not None and report.target is not None
    target_folder, draft_folder = Path(config.model), Path(config.draft)
    _write(target_folder, stored_tensors(found.target), num_shards)
    _write(draft_folder, stored_tensors(found.draft), 1)
    draft = json.loads((draft_folder / "config.json").read_text())
    draft["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(_layer_ids(config))}
    (draft_folder / "config.json").write_text(json.dumps(draft))
    write_tokenizer(target_folder, report.target.vocab_size)
    return target_folder, draft_folder


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights by the names that a checkpoint gives them."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: slot.part_of(tensors[slot.path]) for name, slot in weight_slots(model).items()}


def _layer_ids(config: EngineConfig) -> tuple[int, ...]:
    """Boundaries as this format counts them: by the layer whose input they are."""
    assert config.draft_boundaries is not None
    return config.draft_boundaries


def _write(folder: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size > total * len(shards) / num_shards and len(shards) < num_shards:
            shards.append({})
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    with concurrent.futures.ThreadPoolExecutor(len(shards)) as pool:
        for done in [pool.submit(_save, folder / n, s) for n, s in zip(names, shards, strict=True)]:
            done.result()
    if len(shards) > 1:
        weight_map = {name: file for file, s in zip(names, shards, strict=True) for name in s}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    on_host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(on_host, path, metadata={"format": "pt"})


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE of about the model's vocabulary, with random merges: it takes as long to
    load as a real one."""
    source = random.Random(0)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokens, merges = list(symbols), []
    while len(vocab) < vocab_size - 8:
        left, right = source.choice(tokens), source.choice(symbols)
        if left + right not in vocab and len(left) < 8:
            merges.append((left, right))
            vocab[left + right] = len(vocab)
            tokens.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--num-shards", type=int, default=4)
    given = parser.parse_args()
    start = time.perf_counter()
    written = write_checkpoints(given.folder, shape=given.shape, num_shards=given.num_shards)
    size = sum(file.stat().st_size for folder in written for file in folder.iterdir())
    print(f"{size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s: {written[0]}, {written[1]}")


if __name__ == "__main__":
    main()
