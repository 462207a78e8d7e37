"""Which part of each weight a rank holds, by rules that the weights themselves declare (D13).

Columns and rows in the sense of the matrix product: a layer whose *outputs* are divided (q, k, v,
gate, up; by heads or by intermediate size) is followed by one whose *inputs* are divided the same
way (o, down), after which the ranks' results are added up. Embeddings and heads are divided by
vocabulary, experts by intermediate size or by number. What does not divide is held whole by every
rank. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019), section 3.

Shape suffixes: T rows, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eyas.comm.group import ALONE, Group
from eyas.comm.vocabulary import VocabularyPart
from eyas.models.config import ModelConfig, QuantConfig, QuantizedPart


class Shard(NamedTuple):
    """Elements start .. start + size - 1 of `full`."""

    start: int
    size: int
    full: int

    @property
    def is_whole(self) -> bool:
        """Whether that is all there is."""
        return self.size == self.full

    def times(self, elements: int) -> Shard:
        """The same part where each element stands for several."""
        return Shard(*(number * elements for number in self))

    def scaled(self, local: int) -> tuple[slice, int]:
        """(part, full size) along a dimension that has `local` entries for this part: packed
        numbers and scales stand for several elements each."""
        if self.is_whole:
            return slice(0, local), local
        unit = self.size // local if local else 1
        assert self.start % unit == 0 and self.size == local * unit, "a part ends within a group"
        first = self.start // unit
        return slice(first, first + local), -(-self.full // unit)


Size = int | Shard
Sizes = Size | Mapping[str, Size]


def local_sizes(in_features: Size, out_features: Sizes) -> tuple[int, int, dict[str, int] | None]:
    """What a rank holds: (inputs, outputs, outputs by part where there are parts)."""
    parts = None
    if isinstance(out_features, Mapping):
        parts = {part: _local(size) for part, size in out_features.items()}
        return _local(in_features), sum(parts.values()), parts
    return _local(in_features), _local(out_features), parts


def _local(size: Size) -> int:
    return size.size if isinstance(size, Shard) else size


class WeightShards(NamedTuple):
    """How a linear layer's weight is divided. outputs: by part ("" where it has no parts)."""

    outputs: Mapping[str, Shard]
    inputs: Shard | None

    @classmethod
    def of(cls, in_features: Size, out_features: Sizes) -> WeightShards | None:
        """None for a weight that is held whole."""
        named = out_features if isinstance(out_features, Mapping) else {"": out_features}
        outputs = {
            part: size
            for part, size in named.items()
            if isinstance(size, Shard) and not size.is_whole
        }
        is_split = isinstance(in_features, Shard) and not in_features.is_whole
        inputs = in_features if is_split else None
        return cls(outputs, inputs) if outputs or inputs else None  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class HeadShards:
    """Attention heads of a rank. group: adds up what the ranks make of them."""

    q: Shard
    kv: Shard
    group: Group


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How a model is divided among the ranks of a group; an argument of every model.

    expert_parallel: each rank holds some of the experts, not a part of each.
    """

    group: Group = ALONE
    expert_parallel: bool = False

    def split(self, size: int, quant: QuantConfig | None = None) -> Shard:
        """This rank's equal part, in whole groups of a quantized storage; all of it where that is
        not to be had."""
        unit = 1 if quant is None else quant.group_size
        num_ranks = self.group.size
        if size % (unit * num_ranks):
            return Shard(0, size, size)
        part = size // num_ranks
        return Shard(self.group.rank * part, part, size)

    def group_of(self, shard: Shard) -> Group:
        """Who adds up the results of layers with these inputs: nobody where they are whole."""
        return ALONE if shard.is_whole else self.group

    def vocabulary(self, size: int) -> Shard:
        """Rows of an embedding or a head: equal parts but for the last ranks'."""
        part = -(-size // self.group.size)
        start = min(self.group.rank * part, size)
        return Shard(start, min(part, size - start), size)

    def vocabulary_part(self, size: int) -> VocabularyPart | None:
        """Whose logits a head's are; None where each rank has all."""
        shard = self.vocabulary(size)
        return None if shard.is_whole else VocabularyPart(*shard, self.group)

    def attention(self, config: ModelConfig) -> HeadShards:
        """Heads of a rank, with the key/value heads that they read: one such head stands on
        several ranks where there are fewer of them. All heads where they do not divide."""
        heads = self.split(config.num_heads)
        kv = self._kv_heads(config.num_kv_heads)
        if heads.is_whole or kv is None or not self._whole_groups(config, heads.size):
            num_heads, num_kv = config.num_heads, config.num_kv_heads
            return HeadShards(Shard(0, num_heads, num_heads), Shard(0, num_kv, num_kv), ALONE)
        return HeadShards(heads, kv, self.group)

    def _kv_heads(self, num_kv_heads: int) -> Shard | None:
        num_ranks, rank = self.group.size, self.group.rank
        if num_kv_heads % num_ranks == 0:
            return self.split(num_kv_heads)
        if num_ranks % num_kv_heads == 0:
            return Shard(rank * num_kv_heads // num_ranks, 1, num_kv_heads)
        return None

    def _whole_groups(self, config: ModelConfig, num_heads: int) -> bool:
        """Whether quantized projections divide between heads."""
        quant, latent = config.quant_of("attention"), config.latent
        if quant is None:
            return True
        dims = [config.head_dim]
        if latent is not None:
            expanded = latent.nope_head_dim + latent.v_head_dim
            dims = [latent.qk_head_dim, expanded, latent.v_head_dim]
        return all(num_heads * dim % quant.group_size == 0 for dim in dims)

    def mlp(self, config: ModelConfig, size: int, part: QuantizedPart) -> Shard:
        """Inner elements of an MLP."""
        return self.split(size, config.quant_of(part))

    def experts(self, config: ModelConfig) -> tuple[Shard, Shard]:
        """(experts, inner elements of each) of a rank."""
        assert config.experts is not None
        number, size = config.experts.num_experts, config.experts.intermediate_size
        if self.expert_parallel:
            return self.split(number), Shard(0, size, size)
        return Shard(0, number, number), self.mlp(config, size, "experts")


WHOLE = Parallel()


def undivided(config: ModelConfig, parallel: Parallel) -> dict[str, str]:
    """What every rank would hold whole although it is large: sizes in words, by name."""
    found: dict[str, str] = {}
    if parallel.group.size == 1:
        return found

    def note(name: str, shard: Shard, text: str, quant: QuantConfig | None = None) -> None:
        if shard.is_whole:
            groups = "" if quant is None else f" in groups of {quant.group_size}"
            found[name] = f"{text}{groups}"

    text = f"{config.num_heads} attention heads"
    if config.latent is None and config.num_kv_heads != config.num_heads:
        text += f" over {config.num_kv_heads} key/value heads"
    note("attention", parallel.attention(config).q, text, config.quant_of("attention"))
    experts = config.experts
    if experts is None or len(experts.layers) < config.num_layers:
        size = config.intermediate_size
        shard = parallel.mlp(config, size, "mlp")
        note("mlp", shard, f"an intermediate size of {size}", config.quant_of("mlp"))
    if experts is None:
        return found
    number, inner = parallel.experts(config)
    if parallel.expert_parallel:
        note("experts", number, f"{experts.num_experts} experts")
    else:
        text = f"experts of an intermediate size of {experts.intermediate_size}"
        note("experts", inner, text, config.quant_of("experts"))
    if experts.shared_size:
        size = experts.shared_size
        shard = parallel.mlp(config, size, "shared_experts")
        text = f"shared experts of an intermediate size of {size}"
        note("shared_experts", shard, text, config.quant_of("shared_experts"))
    return found


def local_config(config: ModelConfig, parallel: Parallel) -> ModelConfig:
    """The shape of what one rank computes, for plans; its vocabulary stays whole."""
    heads, experts = parallel.attention(config), config.experts
    if experts is not None:
        number, inner = parallel.experts(config)
        shared = parallel.mlp(config, experts.shared_size, "shared_experts")
        experts = dataclasses.replace(
            experts,
            num_experts=number.size,
            intermediate_size=inner.size,
            shared_size=shared.size,
        )
    return dataclasses.replace(
        config,
        num_heads=heads.q.size,
        num_kv_heads=heads.kv.size,
        intermediate_size=parallel.mlp(config, config.intermediate_size, "mlp").size,
        experts=experts,
    )


class VocabularyEmbedding(nn.Embedding):
    """Rows of an embedding that a rank holds; the others' rows come over the group.

    weight: [size, H], not trained; without one, uninitialised.
    """

    def __init__(self, weight_VH: Tensor, shard: Shard, group: Group) -> None:
        # `_weight`: the constructor would fill it with random numbers first.
        num_rows, width = weight_VH.shape
        super().__init__(num_rows, width, _weight=weight_VH, _freeze=True)
        self.shard = shard
        self.group = ALONE if shard.is_whole else group
        if not shard.is_whole:
            self.shards = WeightShards({"": shard}, None)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """[T] int64 -> [T, H]; the same bytes on every rank, as all but one add zeros."""
        if self.group.size == 1:
            return super().forward(tokens_T)
        local_T = tokens_T - self.shard.start
        is_here_T = (local_T >= 0) & (local_T < self.shard.size)
        if self.shard.size == 0:
            zeros = self.weight.new_zeros(*tokens_T.shape, self.weight.shape[1])
            return self.group.all_reduce(zeros)
        rows_TH = super().forward(torch.where(is_here_T, local_T, 0))
        return self.group.all_reduce(rows_TH.masked_fill(~is_here_T[..., None], 0))
