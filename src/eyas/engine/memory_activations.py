"""What the forwards of a worker allocate at their worst moment, as a function of sizes.

A round or a prompt chunk goes through phases; each holds what earlier ones left (the plan of its
attention, captured states, logits) and something of its own on top. The largest phase counts. The
numbers are those of the reference attention, which gathers keys and values of one layer, and of a
batch in which every sampling option is on; they were compared with the allocator's own count
(tests/engine/test_memory_peak.py).

Symbols: B requests, Q rows of a request, T = B * Q rows, S cache rows read by a request.
"""

from __future__ import annotations

import dataclasses

from eyas.config import MAX_TREE_NODES, TreeShape
from eyas.engine.memory_images import encoding_bytes, kept_image_bytes
from eyas.engine.worker import KV_LEN_STEP
from eyas.kernels.moe import MAX_GATHERED, block_rows, num_blocks
from eyas.models.config import DraftConfig, ExpertsConfig, ModelConfig

# Bytes beside a logit itself. Sampling: counts, penalised and tempered scores, noise, and what
# truncation works on. A draft's proposal: the int64 hashes behind the noise, and scores in fp32.
_SAMPLER_BYTES, _HASH_BYTES, _FP32_BYTES = 34, 24, 4
_INDEX_BYTES = 8
# Bytes a number while it is expanded: packed, shifted and masked; or stored, in fp32, beside its
# scale and multiplied.
_EXPANDING = {"int4": 9, "fp8": 13}
_INDICES = 4  # a row's token, position, slot and where it is written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """Sizes that do not change. dtype_bytes: of weights, KV and hidden states;
    draft_dtype_bytes: the draft's (None: the same)."""

    target: ModelConfig
    draft: DraftConfig | None
    tree: TreeShape
    page_size: int
    prefill_chunk_tokens: int
    dtype_bytes: int
    draft_dtype_bytes: int | None = None

    def peak(self, batch_size: int, model_len: int) -> int:
        """Bytes at the worst moment."""
        kept = kept_image_bytes(self.target, self.dtype_bytes)
        return max(self.phases(batch_size, model_len).values()) + kept

    def phases(self, batch_size: int, model_len: int) -> dict[str, int]:
        """Bytes at the worst moment of each phase, by its name."""
        phases = self._round(batch_size, self._read_rows(model_len))
        if self.target.vision is not None:
            phases["images"] = encoding_bytes(self.target, self.dtype_bytes)
        return phases | self._prefill(batch_size, model_len)

    def _read_rows(self, model_len: int) -> int:
        """Cache rows that a round gathers for a request of the full length."""
        rounded = _round_up(model_len + self.tree.depth + 1, KV_LEN_STEP)
        return min(rounded, _round_up(model_len + MAX_TREE_NODES + 1, self.page_size))

    def _round(self, batch: int, rows: int) -> dict[str, int]:
        target, nodes = self.target, self.tree.num_nodes
        logits = batch * nodes * target.vocab_size
        plan = self._plan(target, batch, nodes, rows + nodes)
        kept = plan + self._states(batch * nodes)
        phases = {
            "verify": plan + self._forward(target, batch, nodes, rows + nodes),
            "sampling": kept + logits * (self.dtype_bytes + _SAMPLER_BYTES),
        }
        if self.draft is not None:
            num_rows = max(self.tree.num_draft_rows, 1)
            phases["drafting"] = self._draft_step(batch, self.tree.topk, rows + num_rows)
            held = kept + logits * self.dtype_bytes
            phases["extend"] = held + self._draft_step(batch, 1, rows + 1)
        return phases

    def _prefill(self, batch: int, model_len: int) -> dict[str, int]:
        """A chunk at the end of the longest prompt. Several prompts may share it: the masks need no
        more then, but each has rows to read, and may be at its end and choose a token."""
        target, size = self.target, self.dtype_bytes
        chunk = min(self.prefill_chunk_tokens, model_len)
        plan = self._plan(target, 1, chunk, model_len)
        plan += (min(batch, chunk) - 1) * model_len * _INDEX_BYTES
        kept = plan + self._states(chunk)
        logits = batch * target.vocab_size
        phases = {
            "prompt chunk": plan + self._forward(target, 1, chunk, model_len),
            "prompt sampling": kept + logits * (size + _SAMPLER_BYTES),
        }
        if self.draft is not None:
            held = kept + logits * size
            rows = self._read_rows(model_len) + 1
            phases["prompt features"] = held + chunk * self._feature_bytes(self.draft)
            phases["prompt extend"] = held + self._draft_step(batch, 1, rows)
        return phases

    def _feature_bytes(self, draft: DraftConfig) -> int:
        """What a row of features becomes on its way to the draft's keys and values."""
        size = self.draft_dtype_bytes or self.dtype_bytes
        converted = 0 if size == self.dtype_bytes else draft.num_features * size
        if draft.norm_before_fc:
            return converted + draft.num_features * (size + 2 * _FP32_BYTES)
        width = 2 * draft.num_features if draft.fc_norm else 5 * draft.decoder.hidden_size
        return converted + width * size

    def _plan(self, model: ModelConfig, batch: int, queries: int, rows: int) -> int:
        """Row numbers to read, and the mask: once by row, once by row and query head of a group."""
        groups = 0 if model.latent is not None else model.num_heads // model.num_kv_heads
        mask = queries * self.dtype_bytes * (1 + groups)
        indices = batch * queries * _INDICES * _INDEX_BYTES
        return batch * rows * (_INDEX_BYTES + mask) + indices

    def _states(self, num_rows: int) -> int:
        """What a target's forward returns: final states and captured ones."""
        width = self.target.hidden_size + (self.draft.num_features if self.draft else 0)
        return num_rows * width * self.dtype_bytes

    def _forward(self, model: ModelConfig, batch: int, queries: int, rows: int) -> int:
        """A target's forward beside its plan: captured states, rotation, and a layer at work."""
        features = self.draft.num_features if self.draft else 0
        num_rows = batch * queries
        layer = self._layer(model, num_rows, gathered=batch * rows)
        # Beside the halves of a block: embeddings, and the sum that entered the block with what
        # was still to be added to it.
        layer += 3 * num_rows * model.hidden_size * self.dtype_bytes
        joined = num_rows * features * self.dtype_bytes  # captured states become one tensor
        held = num_rows * (features + 2 * model.head_dim) * self.dtype_bytes
        return held + max(layer, joined)

    def _layer(
        self, model: ModelConfig, num_rows: int, *, gathered: int, extra_width: int = 0
    ) -> int:
        """Attention with its gathered keys and values, the MLP, or the experts."""
        hidden, head_dim, latent = model.hidden_size, model.head_dim, model.latent
        heads = (5 * model.num_heads + 3 * model.num_kv_heads) * head_dim
        read = 2 * model.num_kv_heads * head_dim
        if latent is not None:
            # Queries as projected, absorbed and joined; the output whole and cut.
            head = latent.qk_head_dim + 2 * latent.cached_dim + 2 * latent.kv_lora_rank
            heads, read = model.num_heads * head + 3 * latent.cached_dim, latent.cached_dim
        attention = num_rows * (2 * hidden + extra_width + heads)
        attention += gathered * read
        sums = num_rows * model.num_heads * _FP32_BYTES  # log-sum-exp of each row and head
        mlp = num_rows * (4 * hidden + 4 * model.intermediate_size)
        peaks = [attention * self.dtype_bytes + sums, mlp * self.dtype_bytes]
        if model.experts is not None:
            peaks.append(self._mixture(model, model.experts, num_rows))
        return max(peaks)

    def _mixture(self, model: ModelConfig, experts: ExpertsConfig, num_rows: int) -> int:
        """Rows laid out by expert at one of the two products, with the matrices that are expanded
        for it, or in order again, or the weighted sum of what came out."""
        hidden, size, rows = model.hidden_size, experts.intermediate_size, self.dtype_bytes
        chosen = num_rows * experts.num_experts_per_token
        block = block_rows(chosen, experts.num_experts)
        blocks = num_blocks(chosen, experts.num_experts)
        quant = model.quant_of("experts")
        wide = 0 if quant is None else _EXPANDING[quant.scheme]
        places, peaks = blocks * block, []
        for width_in, width_out in ((hidden, 2 * size), (size, hidden)):
            matrix = width_in * width_out
            num_expanded = min(max(MAX_GATHERED // matrix, 1), blocks)
            joined = 2 if num_expanded < blocks else 1  # pieces become one tensor
            held = places * width_in * rows
            peaks.append(held + (places * joined * width_out + num_expanded * matrix) * rows)
            peaks.append(held + num_expanded * matrix * wide)
        peaks.append((places + chosen) * hidden * rows)
        peaks.append(chosen * hidden * (rows + _FP32_BYTES))
        return max(peaks) + 4 * num_rows * hidden * rows

    def _draft_step(self, batch: int, queries: int, rows: int) -> int:
        """A forward of the draft and its choice of candidates."""
        assert self.draft is not None
        if self.draft_dtype_bytes not in (None, self.dtype_bytes):
            alone = dataclasses.replace(
                self, dtype_bytes=self.draft_dtype_bytes, draft_dtype_bytes=None
            )
            return alone._draft_step(batch, queries, rows)
        decoder, num_rows = self.draft.decoder, batch * queries
        plan = self._plan(decoder, batch, queries, rows)
        layer = self._layer(
            decoder, num_rows, gathered=batch * rows, extra_width=4 * decoder.hidden_size
        )
        in_fp32 = 0 if self.dtype_bytes == _FP32_BYTES else _FP32_BYTES
        logit = self.dtype_bytes + in_fp32 + _HASH_BYTES
        return plan + max(layer, num_rows * self.draft.draft_vocab_size * logit)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
