"""The draft that is trained: its shape, its first weights, and its fp32 master copy.

It is `models.eagle3.Eagle3Draft` itself. Only its head is held back during training: the loss
applies it to a few rows at a time.

Shape suffixes: T rows, H hidden, V draft vocabulary, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eyas.contract.target import Target
from eyas.models.boundaries import default_boundaries
from eyas.models.config import DraftConfig, ModelConfig, RopeConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.linear import Linear
from eyas.train.vocabulary import vocabulary_maps
from eyas.types import EyasError

HEAD = "lm_head.weight"


def design_draft(
    target: ModelConfig,
    draft_vocab_size: int,
    *,
    boundaries: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> DraftConfig:
    """One layer of the target's own sizes, reading the usual boundaries; a plain Llama layer (no
    biases, experts or latent attention) whatever the target is, as every engine can load that.

    intermediate_size: width of its MLP, None for the target's. Of a small model most bytes are the
    head's: fewer tokens and a wider MLP may then foretell more at the same cost.
    fc_norm, norm_output: EAGLE-3.1's norms of each captured state and of what is fed back, which
    keep large residual streams in hand; engines before mid-2026 do not know them.
    """
    num_kv_heads, head_dim, rope = target.num_kv_heads, target.head_dim, target.rope
    if target.latent is not None:
        # Such a head has no size of its own; that of published drafts for these targets.
        num_kv_heads = target.num_heads
        head_dim = max(2, target.hidden_size // target.num_heads // 2 * 2)
        rope = RopeConfig(theta=rope.theta)
    decoder = ModelConfig(
        architecture="LlamaForCausalLMEagle3",
        model_type="llama",
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=rope,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=False,
        dtype=target.dtype,
        eos_token_ids=target.eos_token_ids,
        bos_token_id=target.bos_token_id,
    )
    return DraftConfig(
        format="specforge",
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size,
        boundaries=boundaries or choose_boundaries(target.num_layers),
        boundary_rule="chosen for training",
        fc_norm=fc_norm,
        norm_output=norm_output,
    )


def choose_boundaries(num_layers: int) -> tuple[int, ...]:
    """The field's default where it names three states; in a target too small for that, evenly
    spread ones, none twice."""
    default = default_boundaries(num_layers)
    if list(default) == sorted(set(default)):
        return default
    spread = {math.ceil(num_layers * share / 3) for share in (1, 2, 3)}
    return tuple(sorted(spread))


class DeferredHead(Linear):
    """A head that hands its input on; the loss multiplies by `weight` in chunks of rows."""

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H], unchanged."""
        return x_TH


def build_draft(
    target: Target,
    config: DraftConfig,
    kept_V: Tensor,
    *,
    seed: int,
    initializer_range: float = 0.02,
    max_model_len: int | None = None,
) -> Eagle3Draft:
    """A draft to be trained, on the target's device and in its dtype, with a `DeferredHead`.

    kept_V: int64 [V], ascending target ids. The head starts as the target's rows of them and the
    final norm as the target's, all other norms as ones, matrices as normal(0, initializer_range).
    The embedding is the target's own, shared and frozen.
    Raises EyasError for a config that cannot share the embedding, or float16.
    """
    embed_VH, head_VH = target.get_embed_and_head()
    dtype, device = embed_VH.dtype, embed_VH.device
    _require_trainable(config, kept_V, embed_VH)
    draft = Eagle3Draft(config, dtype=dtype, device=device, max_model_len=max_model_len)
    d2t_V, _ = vocabulary_maps(kept_V.cpu(), target.vocab_size)
    if config.has_d2t:
        draft.d2t.copy_(d2t_V)
    draft.share_with_target(target)
    draft.lm_head = DeferredHead(
        config.decoder.hidden_size, config.draft_vocab_size, dtype=dtype, device=device
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(draft).values():
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            random = torch.randn(parameter.shape, generator=generator) * initializer_range
            parameter.copy_(random)
        if draft.fc.bias is not None:
            draft.fc.bias.zero_()
        if head_VH.shape[1] == draft.hidden_size:
            draft.lm_head.weight.copy_(head_VH[kept_V.to(device)])
        final_norm = _final_norm(target)
        if final_norm is not None and final_norm.shape == draft.norm.weight.shape:
            draft.norm.weight.copy_(final_norm)
    return draft


def _require_trainable(config: DraftConfig, kept_V: Tensor, embed_VH: Tensor) -> None:
    if embed_VH.dtype == torch.float16:
        raise EyasError(
            "training in float16 would need loss scaling: load the target in bfloat16 or float32"
        )
    if config.decoder.hidden_size != embed_VH.shape[1]:
        raise EyasError(
            f"the draft's hidden size {config.decoder.hidden_size} must be the target's "
            f"({embed_VH.shape[1]}), whose embedding it shares"
        )
    if config.has_embedding or not config.has_head:
        raise EyasError("a draft to be trained shares the embedding and has a head of its own")
    if len(kept_V) != config.draft_vocab_size:
        raise EyasError(
            f"the draft has {config.draft_vocab_size} rows for a vocabulary of {len(kept_V)} tokens"
        )
    if not config.has_d2t and len(kept_V) != len(embed_VH):
        raise EyasError("a draft with a reduced vocabulary needs a map (has_d2t)")
    if len(kept_V) > len(embed_VH):
        raise EyasError(
            f"the draft's vocabulary of {len(kept_V)} is larger than the target's {len(embed_VH)}"
        )


def _final_norm(target: Any) -> Tensor | None:
    """The scale of the target's final norm, inside any wrappers; None where it has another name."""
    while (inner := getattr(target, "inner_model_attribute", None)) is not None:
        target = getattr(target, inner)
    weight = getattr(getattr(getattr(target, "model", None), "norm", None), "weight", None)
    return weight if isinstance(weight, Tensor) else None


def trainable_parameters(draft: Eagle3Draft) -> dict[str, nn.Parameter]:
    """Everything but the embedding, which is the target's."""
    return {
        name: parameter
        for name, parameter in draft.named_parameters()
        if not name.startswith("embed_tokens.")
    }


class MasterWeights:
    """One flat fp32 copy (fp64 for an fp64 draft) of all that is trained, with its gradient.

    The draft computes in its own dtype; sums of gradients over batches and the optimizer's small
    steps need more digits. Being flat, it takes one collective, one norm and one optimizer kernel.
    """

    def __init__(self, draft: Eagle3Draft) -> None:
        self.parameters = trainable_parameters(draft)
        first = next(iter(self.parameters.values()))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        pieces = [p.detach().to(dtype).flatten() for p in self.parameters.values()]
        self.flat = nn.Parameter(torch.cat(pieces))
        self.flat.grad = torch.zeros_like(self.flat)
        self._grads = self.views(self.flat.grad)
        for name, parameter in self.parameters.items():
            # The head's gradient comes from the loss, not from a graph.
            parameter.requires_grad_(name != HEAD)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor's parts by parameter name, sharing its memory."""
        sizes = [p.numel() for p in self.parameters.values()]
        parts = torch.split(flat.detach(), sizes)
        named = zip(self.parameters.items(), parts, strict=True)
        return {name: part.view(parameter.shape) for (name, parameter), part in named}

    @torch.no_grad()
    def collect(self, others: Mapping[str, Tensor]) -> None:
        """Add the draft's gradients, and `others` by name, to the flat one; clears the draft's."""
        for name, parameter in self.parameters.items():
            grad = others.get(name, parameter.grad)
            if grad is not None:
                self._grads[name].add_(grad)
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the weights to the draft, rounded to its dtype."""
        views = list(self.views(self.flat).values())
        torch._foreach_copy_(list(self.parameters.values()), views)
