"""MoonViT, the vision tower of Kimi-K2.5, and the projector into the language model.

A vision transformer over patches at the image's own resolution: learned positions, resampled to
the grid of patches, beside rotary ones of two axes; every patch sees every other one. The tower
takes clips too; here an image is a clip of one frame, for which its temporal parts are nothing.
Kimi-VL technical report (2025), section 2.1; Kimi K2.5 report (2026), on MoonViT-3D.

Shape suffixes: Y, X pixels, N patches, M tokens of the language model (a square of patches each),
K patches a token, C tower width, H hidden size of the language model, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas import kernels
from eyas.models.config import VisionConfig
from eyas.models.linear import Linear

_LAYER_EPS = 1e-5
_MAX_COLOUR = 255


def _norm(size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> nn.LayerNorm:
    return nn.LayerNorm(size, eps=eps, dtype=dtype, device=device)


class _Weights(nn.Module):
    """A weight, and a bias where it has one, under a checkpoint's name."""

    def __init__(
        self,
        shape: tuple[int, ...],
        num_biases: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = None
        if num_biases is not None:
            self.bias = nn.Parameter(torch.empty(num_biases, dtype=dtype, device=device))


class PatchEmbedding(nn.Module):
    """Patches of pixels as vectors, with learned positions added."""

    def __init__(
        self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        size, width = config.patch_size, config.hidden_size
        self.patch_size = size
        self.proj = _Weights((width, 3, size, size), width, dtype=dtype, device=device)
        self.pos_emb = _Weights((*config.grid_size, width), None, dtype=dtype, device=device)
        self.mean, self.std = config.mean, config.std

    def forward(self, pixels_YX3: Tensor) -> Tensor:
        """uint8 [Y, X, 3] -> [N, C], rows of patches from the top."""
        weight, size = self.proj.weight, self.patch_size
        mean, std = (pixels_YX3.new_tensor(v, dtype=torch.float32) for v in (self.mean, self.std))
        colours = (pixels_YX3.float() / _MAX_COLOUR - mean) / std
        rows, columns = pixels_YX3.shape[0] // size, pixels_YX3.shape[1] // size
        patches = colours.view(rows, size, columns, size, 3).permute(0, 2, 4, 1, 3)
        patches_NE = patches.reshape(rows * columns, -1).to(weight.dtype)
        embedded_NC = F.linear(patches_NE, weight.flatten(1), self.proj.bias)
        return embedded_NC + self._positions(rows, columns)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """The learned grid resampled to the image's."""
        grid_YXC = self.pos_emb.weight
        if grid_YXC.shape[:2] == (rows, columns):
            return grid_YXC.flatten(0, 1)
        resampled = F.interpolate(
            grid_YXC.float().permute(2, 0, 1)[None], size=(rows, columns), mode="bicubic"
        )
        return resampled[0].flatten(1).T.to(grid_YXC.dtype)


def axial_rotary(
    config: VisionConfig, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cos, sin), fp32 [N, 1, D] each, as kernels.apply_rope takes them.

    A head's pairs turn by the patch's column and its row in turn, at falling frequencies.
    """
    head_dim = config.hidden_size // config.num_heads
    exponent = torch.arange(0, head_dim, 4, device=device, dtype=torch.float32) / head_dim
    inv_freq = config.rope_theta**-exponent
    row_N, column_N = (
        place.reshape(-1, 1).float()
        for place in torch.meshgrid(
            torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
        )
    )
    angles = torch.stack((column_N * inv_freq, row_N * inv_freq), dim=-1).flatten(1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class VisionMLP(nn.Module):
    """fc1(gelu(fc0(x)))."""

    def __init__(
        self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        width, size = config.hidden_size, config.intermediate_size
        self.fc0 = Linear(width, size, bias=True, dtype=dtype, device=device)
        self.fc1 = Linear(size, width, bias=True, dtype=dtype, device=device)

    def forward(self, x_NC: Tensor) -> Tensor:
        """[N, C] -> [N, C]."""
        return self.fc1(F.gelu(self.fc0(x_NC), approximate="tanh"))  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    """A pre-norm transformer block in which all patches see each other."""

    def __init__(
        self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.halves = config.num_heads, config.halves
        merged: int | dict[str, int] = 3 * width
        if config.halves:  # that layout stores the three apart
            merged = {f"attn.{name}_proj": width for name in "qkv"}
        self.norm0 = _norm(width, _LAYER_EPS, dtype, device)
        self.wqkv = Linear(width, merged, bias=True, dtype=dtype, device=device)
        self.wo = Linear(width, width, bias=True, dtype=dtype, device=device)
        self.norm1 = _norm(width, _LAYER_EPS, dtype, device)
        self.mlp = VisionMLP(config, dtype=dtype, device=device)

    def forward(self, x_NC: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[N, C] -> [N, C]."""
        x_NC = x_NC + self.wo(self._attend(self.norm0(x_NC), rotary))
        return x_NC + self.mlp(self.norm1(x_NC))  # type: ignore[no-any-return]

    def _attend(self, x_NC: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """By itself, so that nothing of it is held while the MLP runs."""
        qkv = self.wqkv(x_NC).view(len(x_NC), 3, self.num_heads, -1)
        q_NHD, k_NHD, v_NHD = qkv.unbind(1)
        heads = [self._rotate(q_NHD, rotary), self._rotate(k_NHD, rotary), v_NHD]
        q, k, v = (part.transpose(0, 1)[None] for part in heads)
        seen_HND = F.scaled_dot_product_attention(q, k, v)[0]
        return seen_HND.transpose(0, 1).flatten(1)

    def _rotate(self, x_NHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotation in fp32. Pairs (2i, 2i + 1) are taken apart first, in queries and keys alike,
        which their product does not see."""
        if not self.halves:
            x_NHD = x_NHD.reshape(*x_NHD.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return kernels.apply_rope(x_NHD.float(), *rotary).to(x_NHD.dtype)


class _Encoder(nn.Module):
    """The checkpoint's `encoder.*`."""

    def __init__(
        self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            VisionBlock(config, dtype=dtype, device=device) for _ in range(config.num_layers)
        )
        self.final_layernorm = _norm(config.hidden_size, _LAYER_EPS, dtype, device)


class MoonViT(nn.Module):
    """The vision tower."""

    def __init__(
        self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config, dtype=dtype, device=device)
        self.encoder = _Encoder(config, dtype=dtype, device=device)
        self.requires_grad_(False)

    def forward(self, pixels_YX3: Tensor) -> Tensor:
        """uint8 [Y, X, 3], sides multiples of `token_size` -> [M, K, C]."""
        config, merge = self.config, self.config.merge_size
        rows, columns = (side // config.patch_size for side in pixels_YX3.shape[:2])
        rotary = axial_rotary(config, rows, columns, pixels_YX3.device)
        x_NC = self.patch_embed(pixels_YX3)
        for block in self.encoder.blocks:
            x_NC = block(x_NC, rotary)
        x_NC = self.encoder.final_layernorm(x_NC)
        squares: Tensor = x_NC.view(rows // merge, merge, columns // merge, merge, -1)
        return squares.transpose(1, 2).reshape(-1, merge * merge, config.hidden_size)


class PatchProjector(nn.Module):
    """A square of patches as one vector of the language model."""

    def __init__(
        self,
        config: VisionConfig,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        size = config.hidden_size * config.merge_size**2
        self.pre_norm = _norm(config.hidden_size, config.norm_eps, dtype, device)
        self.proj = nn.Sequential(
            Linear(size, size, bias=True, dtype=dtype, device=device),
            nn.GELU(),
            Linear(size, hidden_size, bias=True, dtype=dtype, device=device),
        )
        self.requires_grad_(False)

    def forward(self, x_MKC: Tensor) -> Tensor:
        """[M, K, C] -> [M, H]."""
        return self.proj(self.pre_norm(x_MKC).flatten(1))  # type: ignore[no-any-return]
