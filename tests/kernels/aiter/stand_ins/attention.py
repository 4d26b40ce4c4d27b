"""Attention in CK and assembly, over what is given.

Queries [.., N heads, D] see keys [.., K heads, D]; N is a multiple of K, and query head n reads
key head n // (N // K). A causal mask and a window are aligned to the last key.
"""

from itertools import pairwise

import torch
from torch import Tensor

from stand_ins import stands_for

WINDOW = (-1, -1, 0)  # keys to the left, to the right (-1: all), and of the beginning


def checked(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if max(q.shape[-1], v.shape[-1]) > 256:
        raise RuntimeError("CK only supports head dimension at most 256")
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    if k.shape[-1] != q.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise RuntimeError("k and v do not have the shapes that q asks for")
    if any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled():
        raise AssertionError("it wants to save for backward, and return_lse is False")


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, ...],
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, N, D], k and v [S, K, D] of one sequence -> [T, N, D of v]. A row without keys is 0.

    sinks  [N], the logit of a key of each head that has no value
    """
    left, right, *of_beginning = window
    if causal and left == 0:
        raise RuntimeError("a window of one key is taken for none, and its kernel refuses it")
    if any(of_beginning):
        raise NotImplementedError("a window that keeps the beginning")
    if causal:
        right = 0
    group = q.shape[1] // k.shape[1]
    row = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    column = torch.arange(k.shape[0])[None, :]
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    if left >= 0:
        hidden |= column < row - left
    if right >= 0:
        hidden |= column > row + right
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for head in range(q.shape[1]):
        scores = scale * (q[:, head].double() @ k[:, head // group].double().T)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks[head].double().expand(q.shape[0], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1).nan_to_num(0.0)[:, : k.shape[0]]
        out[:, head] = (weights @ v[:, head // group].double()).to(q.dtype)
    return out


def unserved(**arguments: object) -> None:
    """Raises for arguments of AITER's that no lowering of atomc gives, and that mean something."""
    for name, value in arguments.items():
        if value is not None and value != 0:
            raise NotImplementedError(f"{name}={value!r}")


@stands_for("aiter")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, ...] = WINDOW,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    num_splits: int = 0,
) -> Tensor:
    """q [B, T, N, D], k and v [B, S, K, D] -> [B, T, N, D of v]."""
    unserved(
        dropout_p=dropout_p,
        bias=bias,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        return_attn_probs=return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        sink_ptr=sink_ptr,
        num_splits=num_splits,
    )
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError("not enough values to unpack")
    checked(q, k, v)
    if not q.shape[0]:
        raise RuntimeError("batch size must be positive")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return torch.stack(
        [
            attended(*of_sequence, scale, causal, window_size)
            for of_sequence in zip(q, k, v, strict=True)
        ]
    )


@stands_for("aiter")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = WINDOW,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    sink_ptr: Tensor | None = None,
) -> Tensor:
    """Sequence s has rows cu_seqlens_q[s] to [s + 1] of q [rows, N, D], and those of cu_seqlens_k
    of k and v; rows of none are not written. No sequence is longer than the max_seqlen.
    """
    unserved(
        min_seqlen_q=min_seqlen_q,
        dropout_p=dropout_p,
        bias=bias,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        return_attn_probs=return_attn_probs,
        block_table=block_table,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_k_padded=cu_seqlens_k_padded,
        sink_ptr=sink_ptr,
    )
    checked(q, k, v)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts.dtype != torch.int32:
            raise RuntimeError(f"{name} must have dtype int32")
        if not starts.is_contiguous() or starts.shape != cu_seqlens_q.shape:
            raise RuntimeError(f"{name} must be contiguous, and have shape [batch + 1]")
    if len(cu_seqlens_q) < 2:
        raise RuntimeError("batch size must be positive")
    if out is None:
        out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    if out.dtype != q.dtype or out.stride(-1) != 1:
        raise RuntimeError("out must have the dtype of q and a contiguous last dimension")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rows, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if max(b - a for a, b in pairwise(rows)) > max_seqlen_q:
        raise ValueError("rows beyond max_seqlen_q get no program")
    if max(b - a for a, b in pairwise(keys)) > max_seqlen_k:
        raise ValueError("a window is left out by max_seqlen_k")
    for (a, b), (c, d) in zip(pairwise(rows), pairwise(keys), strict=True):
        out[a:b] = attended(q[a:b], k[c:d], v[c:d], scale, causal, window_size, logits_soft_cap)
    return out
