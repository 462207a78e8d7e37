"""What a model needs of attention: one call per layer, already planned for the batch (D2, D7, D8).

Shape suffixes: T tokens (rows of the batch, flattened), H query heads, K key/value heads,
D head size.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """How one model's keys and values are stored, per token and layer.

    num_layers, num_kv_heads: counts. head_dim: elements of a key; v_head_dim: of a value that is
    stored. value_in_key: the value is that many first elements of its key (latent attention), and
    v_head_dim is 0.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    value_in_key: int = 0

    @property
    def value_dim(self) -> int:
        """Elements of what attention returns for one head."""
        return self.value_in_key or self.v_head_dim

    @property
    def elements_per_token(self) -> int:
        """Stored elements for one token over all layers (bytes = this × dtype size)."""
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.v_head_dim)


class Attention(Protocol):
    """Attention for one forward pass; reads lengths and page tables from device memory."""

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys (rotated) and values of the batch's rows in the cache of `layer`."""

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        """Attend with queries [T, H, D] over the cache of `layer`; returns [T, H * Dv].

        scale: of the scores before the softmax; None is 1 / sqrt(D).
        """


@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of each head of q and of k, before they rotate: weights [D] and their epsilon."""

    q_D: Tensor
    k_D: Tensor
    eps: float


class RotatingAttention(Attention, Protocol):
    """Attention that may also take a layer's fused projection as it comes.

    What a model may use where it finds it; one without the method is asked in steps.
    """

    def rotate_and_write(
        self,
        layer: int,
        qkv_TE: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        num_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """Rotate q and k as kernels.apply_rope does, store k and v; returns q [T, H, D].

        qkv_TE: [T, H * D + K * D + K * Dv]. None: nothing was done, do it in steps.
        """


class ProjectionAttention(RotatingAttention, Protocol):
    """Attention that may also do a whole layer's share at once."""

    def attend_projection(
        self,
        layer: int,
        qkv_TE: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        num_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """`rotate_and_write`, then `attend` with its queries: [T, H * Dv]. None as above."""
