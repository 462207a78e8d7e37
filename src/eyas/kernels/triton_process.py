# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Penalties, logit bias and suppressed stop tokens in Triton (`speculative.sampler` and
`sampling.apply_penalties` say what they are).

Shape suffixes: B requests, N tree nodes, T = B * N rows, V vocabulary, S slots, A bias entries,
M stop ids.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs


@dataclasses.dataclass(frozen=True)
class ProcessorTensors:
    """The slots' tensors that processors read (speculative.state.SlotState)."""

    output_count_SV: Tensor
    prompt_seen_SV: Tensor
    presence_S: Tensor
    frequency_S: Tensor
    repetition_S: Tensor
    bias_id_SA: Tensor
    bias_value_SA: Tensor
    stop_ids_SM: Tensor
    emitted_S: Tensor
    min_tokens_S: Tensor

    @staticmethod
    def of(state: object) -> ProcessorTensors:
        """The tensors of these names that a state holds now."""
        names = (field.name for field in dataclasses.fields(ProcessorTensors))
        return ProcessorTensors(*(getattr(state, name) for name in names))


@triton.jit
def _penalize_kernel(
    logits_TV,
    row_stride,
    slots_B,
    token_BN,
    visible_BNN,
    count_SV,
    prompt_seen_SV,
    presence_S,
    frequency_S,
    repetition_S,
    out_TV,
    vocab_size,
    NODES: tl.constexpr,
    PENALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    request = row // NODES
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < vocab_size
    start = logits_TV + row.to(tl.int64) * row_stride
    x = tl.load(start + number, mask=inside, other=0.0).to(tl.float32)
    if PENALIZE:
        slot = tl.load(slots_B + request)
        cell = slot * vocab_size + number
        count = tl.load(count_SV + cell, mask=inside, other=0)
        # The drafted tokens on the way from the root, whose own token the slot has counted.
        for node in range(1, NODES):
            seen = tl.load(visible_BNN + row * NODES + node).to(tl.int32)
            token = tl.load(token_BN + request * NODES + node)
            count += tl.where(number == token, seen, 0)
        was_output = count > 0
        was_seen = was_output | (tl.load(prompt_seen_SV + cell, mask=inside, other=0) != 0)
        repetition = tl.load(repetition_S + slot)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
        x = tl.where(was_seen, repeated, x)
        x -= tl.load(frequency_S + slot) * count.to(tl.float32)
        x -= tl.load(presence_S + slot) * was_output.to(tl.float32)
    tl.store(out_TV + row.to(tl.int64) * vocab_size + number, x, mask=inside)


@triton.jit
def _bias_kernel(
    logits_TV,
    slots_B,
    depth_BN,
    bias_id_SA,
    bias_value_SA,
    num_biases,
    id_stride,
    value_stride,
    stop_ids_SM,
    num_stops,
    stop_stride,
    emitted_S,
    min_tokens_S,
    vocab_size,
    NODES: tl.constexpr,
    TREE: tl.constexpr,
    A: tl.constexpr,
    M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids with a bias are distinct; what pads them has none."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_B + row // NODES)
    start = logits_TV + row.to(tl.int64) * vocab_size
    entry = tl.arange(0, A)
    listed = entry < num_biases
    token = tl.load(bias_id_SA + slot * id_stride + entry, mask=listed, other=0)
    bias = tl.load(bias_value_SA + slot * value_stride + entry, mask=listed, other=0.0)
    biased = listed & (bias != 0.0)
    x = tl.load(start + token, mask=biased, other=0.0)
    tl.store(start + token, x + bias, mask=biased)
    tl.debug_barrier()  # a stop token may have a bias too
    emitted = tl.load(emitted_S + slot)
    if TREE:
        emitted += tl.load(depth_BN + row)
    if emitted < tl.load(min_tokens_S + slot):
        place = tl.arange(0, M)
        stop = tl.load(stop_ids_SM + slot * stop_stride + place, mask=place < num_stops, other=-1)
        # Padding is -1; a tokenizer may have end tokens past the model's rows.
        known = (stop >= 0) & (stop < vocab_size)
        nothing = tl.full((M,), float("-inf"), tl.float32)
        tl.store(start + tl.where(known, stop, 0), nothing, mask=known)


def process(
    tensors: ProcessorTensors,
    logits_TV: Tensor,
    slots_B: Tensor,
    *,
    penalize: bool,
    bias: bool,
    tree: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Processed logits, fp32 [T, V]. tree: (token_BN, depth_BN, visible_BNN) where the rows are its
    nodes; None: rows that follow what the slots know directly."""
    num_rows, vocab_size = logits_TV.shape
    token_BN, depth_BN, visible_BNN = tree or (slots_B, slots_B, slots_B)
    num_nodes = num_rows // len(slots_B) if tree else 1
    out_TV = torch.empty(num_rows, vocab_size, device=logits_TV.device)
    _penalize_kernel[(num_rows, triton.cdiv(vocab_size, 1024))](
        logits_TV,
        logits_TV.stride(0),
        slots_B,
        token_BN,
        visible_BNN.view(torch.int8) if tree else visible_BNN,
        tensors.output_count_SV,
        tensors.prompt_seen_SV.view(torch.int8),
        tensors.presence_S,
        tensors.frequency_S,
        tensors.repetition_S,
        out_TV,
        vocab_size,
        NODES=num_nodes,
        PENALIZE=penalize,
        BLOCK=1024,
        **launch_options(),
    )
    if bias:
        ids_SA, values_SA = tensors.bias_id_SA, tensors.bias_value_SA
        stops_SM = tensors.stop_ids_SM
        _bias_kernel[(num_rows,)](
            out_TV,
            slots_B,
            depth_BN,
            ids_SA,
            values_SA,
            ids_SA.shape[1],
            ids_SA.stride(0),
            values_SA.stride(0),
            stops_SM,
            stops_SM.shape[1],
            stops_SM.stride(0),
            tensors.emitted_S,
            tensors.min_tokens_S,
            vocab_size,
            NODES=num_nodes,
            TREE=tree is not None,
            A=triton.next_power_of_2(ids_SA.shape[1]),
            M=triton.next_power_of_2(stops_SM.shape[1]),
            **launch_options(),
        )
    return out_TV
