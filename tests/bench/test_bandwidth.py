"""What a step reads, and a sane measurement."""

import pytest
import torch
from fixtures.tiny import llama_config

from eyas.bench import bandwidth
from eyas.bench.bandwidth import ReadBandwidth, ReadCost, read_cost
from eyas.contract.attention import KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=12, v_head_dim=12)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_counts_only_as_a_head(tied: bool) -> None:
    config = llama_config(tie_word_embeddings=tied)
    cost = read_cost(config, target_weight_bytes=100_000, layout=LAYOUT, dtype_bytes=4)
    embedding_bytes = 0 if tied else config.vocab_size * config.hidden_size * 4
    assert cost.weight_bytes == 100_000 - embedding_bytes
    assert cost.kv_bytes_per_token == 4 * 2 * 24 * 4


def test_the_ceiling() -> None:
    cost = ReadCost(weight_bytes=1000, kv_bytes_per_token=10)
    assert cost.step_bytes(2, 50) == 2000
    # One step a second, two tokens a step.
    assert cost.most_tokens_per_second(2, 50, bytes_per_second=2000) == 2.0


def test_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bandwidth._BUFFER_BYTES, "cpu", 2**24)
    bytes_per_second = ReadBandwidth(torch.device("cpu")).measure()
    assert 1e7 < bytes_per_second < 1e13
