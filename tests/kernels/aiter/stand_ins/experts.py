"""Mixtures of experts: fused_moe, and the functions that it is made of, for those who sort and
quantize themselves. CK for AMD's matrix cores, and assembly.

w1 [E, 2I, H] is gate over up, w2 [E, H, I]; weights of choices are fp32, ids int32.
"""

import enum

import torch
import torch.nn.functional as F
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.formats import (
    e2m1_numbers,
    native_fp8,
    scale_place,
    to_codes,
    unshuffled_scale,
)
from stand_ins.memory import check, contiguous_view, fp32

HALVES = (torch.bfloat16, torch.float16)


class _Quant(enum.IntEnum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class _Activation(enum.IntEnum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


@stands_for("aiter")
def QuantType(value: int) -> _Quant:
    return _Quant(value)


@stands_for("aiter")
def ActivationType(value: int) -> _Activation:
    return _Activation(value)


def _plain(weight: Tensor) -> Tensor:
    """Weights [E, N, K], or of two codes a byte, back in rows: tiles of 16 rows and 32 columns, tile behind tile along a
    row; in a tile, pieces of 16 bytes, of one place in all rows before those of the next one.
    """
    n_size, k_size = weight.shape[1:]
    check(n_size % 16 == 0 and k_size % 32 == 0, f"{n_size} x {k_size} do not fill tiles")
    if not getattr(weight, "is_shuffled", False):
        return weight  # kernels for plain weights are chosen
    check(weight.is_contiguous(), "a shuffled weight is contiguous")
    piece = 16 // weight.element_size()
    n, k = torch.arange(n_size)[:, None], torch.arange(k_size)
    place = ((n // 16) * (k_size // 32) + k // 32) * 512
    place = place + (k % 32 // piece) * 16 * piece + (n % 16) * piece + k % piece
    bits = weight if weight.element_size() > 1 else weight.view(torch.uint8)
    return bits.flatten(1)[:, place].view(weight.dtype)


def _act(h: Tensor, activation: _Activation) -> Tensor:
    """In fp32; GELU is the one by erf."""
    check(activation in (_Activation.Silu, _Activation.Gelu), "Unsupported activation")
    gate, up = h.chunk(2, -1)
    return (F.silu(gate) if activation == _Activation.Silu else F.gelu(gate)) * up


def _check_tiles(hidden: int, inner: int, codes: bool) -> None:
    """Tiles that divide the sizes, of CK's kernels for every number of tokens."""
    columns = 64 if inner <= 192 else 128
    if codes and ARCH.get() == "gfx950":
        columns = 256
    check(hidden % 128 == 0 and inner % columns == 0, "does not support this GEMM problem")


def _numbers(weight: Tensor, scale: Tensor | None, quant: _Quant) -> Tensor:
    """The weights [E, N, K] in fp32."""
    experts, n, k = weight.shape
    if quant == _Quant.per_1x32:
        assert scale is not None
        check(scale.dtype == torch.float8_e8m0fnu, "weight scales are read as e8m0")
        of_groups = unshuffled_scale(scale, experts * n, k // 16).view(experts, n, -1)
        return e2m1_numbers(_plain(weight)) * of_groups.repeat_interleave(32, 2)
    plain = _plain(weight).float()
    if quant == _Quant.No:
        return plain
    assert scale is not None
    if quant == _Quant.per_Tensor:
        return plain * fp32(scale, "weight scale", experts, 1, 1)
    if quant == _Quant.per_Token:
        return plain * fp32(scale, "weight scale", experts, n, 1)
    of_blocks = fp32(scale, "weight scale", experts, n // 128, k // 128)
    return plain * of_blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)


def _codes(h: Tensor, dtype: torch.dtype, quant: _Quant, static: Tensor | None) -> Tensor:
    """h [n, I] of 16 bits as the numbers of its codes, which the second product gets."""
    if quant == _Quant.per_Tensor and static is not None:
        scale = fp32(static, "a2_scale", 1)
    elif quant == _Quant.per_Token:
        check(static is None, "unsupported: static per token quant")
        scale = h.float().abs().amax(-1, keepdim=True) * (1.0 / torch.finfo(dtype).max)
    else:
        raise NotImplementedError("one scale for all that is computed here: not played")
    return to_codes(h, 1.0 / scale, dtype).float() * scale


def _local(ids: Tensor, mask: Tensor | None, experts: int) -> Tensor:
    """The numbers among the experts here, -1 for masked ones. Ids are read as int32, and unmasked
    ones are not looked up.
    """
    read = ids.flatten().view(torch.int32)[: ids.numel()].view(ids.shape).long()
    count = experts if mask is None else mask.numel()
    check(bool(((read >= 0) & (read < count)).all()), "memory access fault: an id of no expert")
    if mask is None:
        return read
    check(mask.dtype == torch.int32, "expert_mask is read as int32")
    check(int(mask.sum()) == experts, "as many experts are unmasked as have weights")
    return torch.where(mask.bool(), mask.cumsum(0) - 1, -1)[read]


@stands_for("aiter.fused_moe")
def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: _Activation = _Activation.Silu,
    quant_type: _Quant = _Quant.No,
    doweight_stage1: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    splitk: int = 0,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str | None = "separated",
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_w1_scale: Tensor | None = None,
    shared_w2_scale: Tensor | None = None,
    shared_expert_id: int = -1,
    stage2_scatter: object = None,
) -> Tensor:
    """16 bits, or fp8 under one scale a tensor or a token, with x in codes. Biases and the limit are
    for MXFP4: other kernels do not get them.
    """
    given = (block_size_M, num_local_tokens, shared_w1, stage2_scatter)
    check(all(x is None for x in given) and hidden_pad == intermediate_pad == 0, "not played")
    quant = _Quant(quant_type.value)
    out_dtype = dtype or hidden_states.dtype
    check(out_dtype in HALVES, f"Fused_moe unsupported out dtype: {out_dtype}")
    (tokens, k), (experts, hidden, inner) = topk_ids.shape, w2.shape
    check(w1.shape == (experts, 2 * inner, hidden), "Invalid MoE weight")
    check(quant in (_Quant.No, _Quant.per_Tensor, _Quant.per_Token), "not played")
    check(hidden_states.dtype == w1.dtype == w2.dtype, "x that is quantized here: not played")
    check(w1.dtype in (HALVES if quant == _Quant.No else (native_fp8(),)), f"{w1.dtype}")
    check(
        a1_scale is not None or quant == _Quant.No,
        "a1_scale must be provided for quantized input for fused_moe",
    )
    check(activation == _Activation.Silu or quant != _Quant.per_Token, "a GELU that is not known")
    _check_tiles(hidden, inner, quant != _Quant.No)
    x = contiguous_view(hidden_states, tokens, hidden).float()
    if a1_scale is not None:
        x = x * (
            fp32(a1_scale, "a1_scale", 1)
            if quant == _Quant.per_Tensor
            else fp32(a1_scale, "a1_scale", tokens, 1)
        )
    weights = fp32(topk_weight, "topk_weight", tokens, k)
    local = _local(topk_ids, expert_mask, experts)
    first, second = _numbers(w1, w1_scale, quant), _numbers(w2, w2_scale, quant)
    out = x.new_zeros(tokens, hidden, dtype=out_dtype)
    for slot in range(k):
        for e in range(experts):
            rows = (local[:, slot] == e).nonzero().flatten()
            if not len(rows):
                continue
            h, weight = x[rows] @ first[e].t(), weights[rows, slot].unsqueeze(-1)
            h = _act(h * weight if doweight_stage1 else h, activation).to(out_dtype)
            h = h.float() if quant == _Quant.No else _codes(h, w1.dtype, quant, a2_scale)
            y = (h @ second[e].t()) * (1 if doweight_stage1 else weight)
            out[rows] = (out[rows].float() + y.to(out_dtype).float()).to(out_dtype)
    return out


@stands_for("aiter.fused_moe")
def moe_sorting(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int = 32,
    expert_mask: Tensor | None = None,
    num_local_tokens: Tensor | None = None,
    dispatch_policy: int = 0,
    return_local_topk_ids: bool = False,
    accumulate: bool = True,
    flat: bool = False,
    output_aux: bool = False,
) -> tuple[Tensor, ...]:
    """The choices expert by expert, each expert's up to whole blocks: (token in the low 24 bits and
    the choice's number above; their weights; the expert here of each block; how many there are; an
    output of zeros).
    """
    given = (num_local_tokens, dispatch_policy, return_local_topk_ids, flat, output_aux)
    check(not any(given) and accumulate, "not played")
    tokens, k = topk_ids.shape
    check(expert_mask is None or expert_mask.numel() == num_experts, "num_experts counts all")
    experts = num_experts if expert_mask is None else int(expert_mask.sum())
    local = _local(topk_ids, expert_mask, experts)
    weights = fp32(topk_weights, "topk_weights", tokens, k)
    length = topk_ids.numel() + num_experts * block_size - k
    ids = torch.full((length,), tokens | k << 24, dtype=torch.int32)
    of_id, of_block = torch.zeros(length), torch.zeros(-(-length // block_size), dtype=torch.int32)
    start = 0
    for e in range(experts):
        token, slot = (local == e).nonzero(as_tuple=True)
        end = start + len(token)
        ids[start:end], of_id[start:end] = (
            (token | slot << 24).to(torch.int32),
            weights[token, slot],
        )
        blocks = -(-len(token) // block_size)
        of_block[start // block_size : start // block_size + blocks] = e
        start += blocks * block_size
    count = torch.tensor([start, tokens], dtype=torch.int32)
    return ids, of_id, of_block, count, torch.zeros(tokens, model_dim, dtype=moebuf_dtype)


def _sorted(
    ids: Tensor, of_block: Tensor, count: Tensor, block: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(places among the sorted, tokens, numbers of choices, experts here), padding left out."""
    check(ids.dtype == of_block.dtype == count.dtype == torch.int32, "sorted ids are int32")
    place = torch.arange(int(count[0]))
    token, slot, expert = ids[place] & 0xFFFFFF, ids[place] >> 24, of_block[place // block]
    real = token < tokens
    return place[real], token[real].long(), slot[real].long(), expert[real].long()


def _check_stage(hidden: int, inner: int, block_m: int | None, quant: _Quant, w: Tensor) -> None:
    check(quant in (_Quant.per_1x128, _Quant.per_1x32), "other scales: not played")
    check(block_m in (32, 64), f"Unsupported block_m value for moe heuristic dispatch: {block_m}")
    whole, dtype = 128, native_fp8()
    if quant == _Quant.per_1x32:
        check(ARCH.get() == "gfx950", "Unsupported kernel config for moe heuristic dispatch")
        check(getattr(w, "is_shuffled", False), "another kernel, for plain weights: not played")
        whole, dtype = 256, torch.float4_e2m1fn_x2
    check(hidden % whole == 0 and inner % whole == 0, "does not support this GEMM problem")
    check(w.dtype == dtype, "Unsupported kernel config for moe heuristic dispatch")


@stands_for("aiter")
def mxfp4_moe_sort_fwd(
    scale: Tensor, sorted_ids: Tensor, num_valid_ids: Tensor, token_num: int, cols: int
) -> Tensor:
    """The e8m0 scales of rows [tokens, cols] or [tokens, k, cols] in the order of the sorted ids, in
    tiles; as many rows a token as there are scales for.
    """
    check(cols <= 16384, "input last dim has exceeded the maximum value 16384")
    groups = -(-cols // 32)
    rows = scale.numel() // groups // token_num  # of a token
    read = contiguous_view(scale.view(torch.uint8), token_num * rows, groups)
    padded = (-(-sorted_ids.shape[0] // 32) * 32, -(-groups // 8) * 8)
    out = torch.full(padded, 0xFF, dtype=torch.uint8)
    place = torch.arange(int(num_valid_ids[0]))
    token, slot = sorted_ids[place] & 0xFFFFFF, sorted_ids[place] >> 24
    real = (token < token_num) & ((slot < rows) | (rows == 1))
    row = (token * rows + (slot if rows > 1 else 0))[real].long()
    to = scale_place(place[real][:, None], torch.arange(groups), padded[1])
    out.view(-1)[to] = read[row]
    return out.view(torch.float8_e8m0fnu)


def _rows_of_places(
    codes: Tensor, scale: Tensor | None, quant: _Quant, row: Tensor, place: Tensor, columns: int
) -> Tensor:
    """The numbers [n, columns] of these rows: fp8 under scales by row and block of 128 columns, or
    e2m1 under scales by place and group of 32 columns.
    """
    assert scale is not None
    if quant == _Quant.per_1x128:
        of_blocks = fp32(scale, "activation scale", codes.numel() // columns, columns // 128)
        x = contiguous_view(codes, codes.numel() // columns, columns).float()
        return (x * of_blocks.repeat_interleave(128, 1))[row]
    check(scale.dtype == torch.float8_e8m0fnu, "activation scales are read as e8m0")
    x = e2m1_numbers(contiguous_view(codes, 2 * codes.numel() // columns, columns // 2))
    of_groups = unshuffled_scale(scale, scale.shape[0], columns // 32)[place]
    return x[row] * of_groups.repeat_interleave(32, 1)


@stands_for("aiter")
def ck_moe_stage1_fwd(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str = "",
    w1_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: _Quant = _Quant.No,
    activation: _Activation = _Activation.Silu,
    splitk: int | None = 1,
    use_non_temporal_load: bool | None = False,
    dst_type: torch.dtype | None = None,
) -> Tensor:
    """fp8 by blocks and MXFP4: x [T, H] by its gate and up, and their activation, into out
    [T, k, I].
    """
    check(sorted_weights is None and kernelName == "" and (splitk or 0) <= 1, "not played")
    quant, tokens = _Quant(quant_type.value), hidden_states.shape[0]
    hidden, inner = w2.shape[1], w1.shape[1] // 2
    _check_stage(hidden, inner, block_m, quant, w1)
    check(out.dtype in HALVES, "Out dtype only support BFloat16/Float16!")
    check(hidden_states.dtype == w1.dtype, "Unsupported kernel config for moe heuristic dispatch")
    assert block_m is not None
    weight = _numbers(w1, w1_scale, quant)
    written = contiguous_view(out, tokens, topk, inner)
    place, token, slot, expert = _sorted(
        sorted_token_ids, sorted_expert_ids, num_valid_ids, block_m, tokens
    )
    x = _rows_of_places(hidden_states, a1_scale, quant, token, place, hidden)
    for e in expert.unique().tolist():
        of = expert == e
        written[token[of], slot[of]] = _act(x[of] @ weight[e].t(), activation).to(out.dtype)
    return out


@stands_for("aiter")
def ck_moe_stage2_fwd(
    inter_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str = "",
    w2_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: _Quant = _Quant.No,
    activation: _Activation = _Activation.Silu,
    use_non_temporal_load: bool | None = False,
) -> Tensor:
    """fp8 by blocks and MXFP4: adds each choice's weight times its result to out [T, H], in its
    dtype.
    """
    quant, tokens = _Quant(quant_type.value), inter_states.shape[0]
    hidden, inner = w2.shape[1], w1.shape[1] // 2
    _check_stage(hidden, inner, block_m, quant, w2)
    check(out.dtype in HALVES, "Out dtype only support BFloat16/Float16!")
    check(inter_states.dtype == w2.dtype, "Unsupported kernel config for moe heuristic dispatch")
    check(kernelName == "", "not played")
    assert block_m is not None
    weight = _numbers(w2, w2_scale, quant)
    places, token, slot, expert = _sorted(
        sorted_token_ids, sorted_expert_ids, num_valid_ids, block_m, tokens
    )
    x = _rows_of_places(inter_states, a2_scale, quant, token * topk + slot, places, inner)
    for row, place, t, e in zip(x, *(x.tolist() for x in (places, token, expert)), strict=True):
        y = row @ weight[e].t()
        y = y if sorted_weights is None else y * fp32(sorted_weights, "sorted_weights")[place]
        out[t] = (out[t].float() + y.to(out.dtype).float()).to(out.dtype)
    return out
