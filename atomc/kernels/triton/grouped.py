"""Products of rows with the weights of their experts, in Triton.

T tokens, k choices of each, P = T * k pairs; pair p is choice p % k of token p // k. E experts.
`sort_by_expert` arranges the pairs in blocks of one expert each; a product takes one block and a
tile of the rows of that expert's weight. Rows of x are gathered, and results are scattered, by the
numbers of the pairs: neither x nor a result is copied into another order. Nothing here waits for
the device, and nothing adds atomically: results do not vary from run to run, and a CUDA graph can
capture it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.triton.activation import silu
from atomc.kernels.triton.launch import (
    TRITON_DTYPE,
    begin,
    let_next_start,
    overlap,
    wait_for_last,
)
from atomc.kernels.triton.tiles import Launch

SUB = 64  # pairs that a program of the sort places at a time
# A program counts the experts of this number of pairs by itself; of more a kernel before it does.
MOST_COUNTED = 8192
CHUNKS = 128  # of pairs, each counted by one program
MAPPED = 16  # blocks that a program of the sort describes
MOST_EXPERTS = 1024


class Routing(NamedTuple):
    """The pairs, sorted by expert, in blocks of equal length that belong to one expert each.

    order   [B * block] int32: numbers of pairs, rising in each expert; P where an expert's last
            block is not full, and in blocks that are not used
    expert  [B] int32: the expert of each block, -1 behind the last
    blocks  [1] int32: the number of blocks in use
    """

    order: Tensor
    expert: Tensor
    blocks: Tensor

    @property
    def block(self) -> int:
        return len(self.order) // max(1, len(self.expert))


def most_blocks(pairs: int, num_experts: int, block: int) -> int:
    """The largest number of blocks into which so many pairs can be sorted."""
    return (pairs + min(pairs, num_experts) * (block - 1)) // block


@triton.jit
def _expert_of(ids_ptr, pair, P, E: tl.constexpr):
    """The experts of pairs; E for an unknown one, and behind the last pair."""
    expert = tl.load(ids_ptr + pair, pair < P, E)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["P"])
def _count(
    ids_ptr,
    counts_ptr,
    P,
    E: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk = tl.program_id(0)
    begin(PDL)
    expert = _expert_of(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), P, E)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["P", "capacity"])
def _place(
    ids_ptr,
    counts_ptr,
    order_ptr,
    expert_ptr,
    blocks_ptr,
    P,
    capacity,
    E: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    SUB: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs place a chunk of pairs each, the others describe blocks.

    BINS  a power of two; bin E counts the unknown
    """
    program = tl.program_id(0)
    chunks = tl.cdiv(P, CHUNK)
    first = program * CHUNK
    begin(PDL)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)  # in earlier chunks
    if counts_ptr is None:
        for start in range(0, P, SCAN):
            pair = start + tl.arange(0, SCAN)
            expert = _expert_of(ids_ptr, pair, P, E)
            total += tl.histogram(expert, BINS)
            before += tl.histogram(tl.where(pair < first, expert, E), BINS)
    else:
        for start in range(0, chunks, 16):
            chunk = start + tl.arange(0, 16)[:, None]
            counts = tl.load(
                counts_ptr + chunk * BINS + tl.arange(0, BINS)[None, :], chunk < chunks, 0
            )
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where(chunk < program, counts, 0), 0)
    length = tl.where(tl.arange(0, BINS) < E, (total + BLOCK - 1) // BLOCK, 0)
    end = tl.cumsum(length, 0)
    if program < chunks:
        free = (end - length) * BLOCK + before
        index = tl.arange(0, SUB)
        for start in range(0, CHUNK, SUB):
            pair = first + start + index
            expert = _expert_of(ids_ptr, pair, P, E)
            same = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
            at = tl.gather(free, expert, 0) + tl.sum(same.to(tl.int32), 1)
            tl.store(order_ptr + at, pair, expert < E)
            free += tl.histogram(expert, BINS)
    else:
        block = (program - chunks) * MAPPED + tl.arange(0, MAPPED)
        used = block < tl.max(end, 0)
        owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), 1)
        owner = tl.where(used, owner, E)
        tl.store(expert_ptr + block, tl.where(used, owner, -1), block < capacity)
        filled = tl.gather(total, owner, 0) - (block - tl.gather(end - length, owner, 0)) * BLOCK
        inside = tl.arange(0, BLOCK)[None, :]
        padding = (inside >= filled[:, None]) | (used[:, None] == 0)
        tl.store(
            order_ptr + block[:, None] * BLOCK + inside,
            tl.zeros((MAPPED, BLOCK), tl.int32) + P,
            padding & (block < capacity)[:, None],
        )
        if program == chunks:
            tl.store(blocks_ptr, tl.max(end, 0))


def sort_by_expert(ids: Tensor, num_experts: int, block: int) -> Routing:
    """The pairs of ids [T, k] (int32 or int64) in blocks of a power of two; those of ids outside
    0..num_experts-1 are left out. The sizes depend on the shape of ids only.
    """
    pairs = ids.numel()
    capacity = most_blocks(pairs, num_experts, block)
    order = ids.new_empty(capacity * block, dtype=torch.int32)
    expert = ids.new_empty(capacity, dtype=torch.int32)
    if not pairs:
        return Routing(order, expert, ids.new_zeros(1, dtype=torch.int32))
    blocks = ids.new_empty(1, dtype=torch.int32)
    ids = ids.contiguous()
    bins = max(32, triton.next_power_of_2(num_experts + 1))
    chunk, counts = SUB, None
    if pairs > MOST_COUNTED:
        chunk = max(SUB, triton.next_power_of_2(triton.cdiv(pairs, CHUNKS)))
        counts = ids.new_empty((triton.cdiv(pairs, chunk), bins), dtype=torch.int32)
        _count[(len(counts),)](
            ids, counts, pairs, E=num_experts, BINS=bins, CHUNK=chunk, **overlap(ids.device)
        )
    _place[(triton.cdiv(pairs, chunk) + triton.cdiv(capacity, MAPPED),)](
        ids,
        counts,
        order,
        expert,
        blocks,
        pairs,
        capacity,
        E=num_experts,
        BINS=bins,
        CHUNK=chunk,
        SUB=SUB,
        SCAN=min(1024, triton.next_power_of_2(pairs)),
        BLOCK=block,
        MAPPED=MAPPED,
        **overlap(ids.device),
    )
    return Routing(order, expert, blocks)


@triton.jit
def tile_of(blocks, across, TALL: tl.constexpr):
    """The number of the block of pairs, and that of the tile of weight rows, of this program."""
    # Programs that run at the same time share a band of TALL blocks, so that their operands stay
    # in the L2 cache.
    program = tl.program_id(0)
    top = program // (TALL * across) * TALL
    height = tl.minimum(blocks - top, TALL)
    inside_band = program % (TALL * across)
    return top + inside_band % height, inside_band // height


@triton.jit
def weight_rows(
    tile,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """The rows of the weight in a tile [BLOCK_N]; some may be behind the last.

    GATED   columns j of gate and up are in one tile: side by side if PAIRED, else in its halves
    N       columns of the result: half the rows of the weight if GATED
    """
    index = tl.arange(0, BLOCK_N)
    if INTERLEAVED or not GATED:
        return tile * BLOCK_N + index
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        part, inside = (index % 2, index // 2) if PAIRED else (index // HALF, index % HALF)
        return part * N + tile * HALF + inside


@triton.jit
def activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """atomc.ops.experts.gated of gate and up in DTYPE, in DTYPE, with the same roundings."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if limit is not None:
        gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, tl.PropagateNan.ALL)
    if ACTIVATION == "silu":
        value = silu(gate, DTYPE)
    elif ACTIVATION == "gelu":
        value = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        value = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        scaled = (gate * alpha).to(DTYPE).to(tl.float32)
        value = gate * tl.sigmoid(scaled).to(DTYPE).to(tl.float32)
        up = (up + 1.0).to(DTYPE).to(tl.float32)
    return (value.to(DTYPE).to(tl.float32) * up).to(DTYPE)


@triton.jit
def store_pairs(
    sums,
    bias_ptr,
    out_ptr,
    expert,
    bias_step,
    pair,
    P,
    row,
    tile,
    alpha,
    limit,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Store a tile of sums [BLOCK_M, BLOCK_N] fp32 plus bias, gated if there is an ACTIVATION, in
    the rows of their pairs.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: tl.constexpr = sums.shape[0]
    BLOCK_N: tl.constexpr = sums.shape[1]
    if bias_ptr is not None:
        ROWS: tl.constexpr = N if ACTIVATION is None else 2 * N
        bias = tl.load(bias_ptr + expert.to(tl.int64) * bias_step + row, row < ROWS, 0.0)
        sums += bias.to(tl.float32)[None, :]
    at = pair.to(tl.int64)[:, None] * N
    out = sums.to(DTYPE)
    if ACTIVATION is None:
        tl.store(out_ptr + at + row[None, :], out, (pair < P)[:, None] & (row < N)[None, :])
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        if PAIRED:
            gate, up = tl.split(tl.reshape(out, (BLOCK_M, HALF, 2)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(out, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        half = tile * HALF + tl.arange(0, HALF)
        tl.store(
            out_ptr + at + half[None, :],
            activated(gate, up, alpha, limit, ACTIVATION, DTYPE),
            (pair < P)[:, None] & (half < N)[None, :],
        )


@triton.jit
def square_scale(x_at, weight_at, up, in_x, in_weight, SQUARES: tl.constexpr, SWAP: tl.constexpr):
    """The products of the scales of x [BLOCK_M] and of the weight, in the shape of the sums.

    SQUARES  that the rows of the weight are in: 1; or 2, even rows (gate) in one, odd ones (up) in
             that `up` elements further; 0: a scale is read per row
    """
    of_x = tl.load(x_at, in_x, 0.0)
    if SQUARES == 1:
        scale = of_x * tl.load(weight_at)
        return scale[None, :] if SWAP else scale[:, None]
    else:
        if SQUARES == 2:
            odd = tl.arange(0, in_weight.shape[0]) % 2 == 1
            of_weight = tl.where(odd, tl.load(weight_at + up), tl.load(weight_at))
        else:
            of_weight = tl.load(weight_at, in_weight, 0.0)
        if SWAP:
            return of_weight[:, None] * of_x[None, :]
        else:
            return of_x[:, None] * of_weight[None, :]


@triton.jit(do_not_specialize=["P", "blocks"])
def _product(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    expert_ptr,
    P,
    blocks,
    per_row,
    x_row,
    x_scale_row,
    x_scale_group,
    weight_expert,
    weight_row,
    weight_column,
    scale_expert,
    scale_row,
    scale_group,
    bias_step,
    alpha,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRED: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    PDL: tl.constexpr,
):
    """x of pair p is in row p // per_row. SQUARE: the size of the squares that share a scale of the
    weight, 0 for scales of rows.
    """
    # Rows of the weight go down the tile of the tensor cores, which is 64 high.
    SWAP: tl.constexpr = BLOCK_M < 64
    wait_for_last(PDL)
    GATED: tl.constexpr = ACTIVATION is not None
    ROWS: tl.constexpr = 2 * N if GATED else N
    block, tile = tile_of(blocks, tl.cdiv(ROWS, BLOCK_N), TALL)
    expert = tl.load(expert_ptr + block)
    if expert >= 0:
        pair = tl.load(order_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        row = weight_rows(tile, N, BLOCK_N, GATED, INTERLEAVED, PAIRED)
        x_of = pair // per_row
        k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + x_of.to(tl.int64)[:, None] * x_row + k[None, :]
        weight_at = weight_ptr + expert.to(tl.int64) * weight_expert
        weight_at += row[:, None] * weight_row + k[None, :] * weight_column
        FP8: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e4nv
        WIDE: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
        sums = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), WIDE)
        scale_at = weight_scale_ptr
        # In how many squares the rows of this tile are: 1, or gate and up in one each; 0: in any.
        WHOLE: tl.constexpr = SQUARE and (INTERLEAVED or not GATED) and SQUARE % BLOCK_N == 0
        HALVES: tl.constexpr = (
            SQUARE
            and GATED
            and PAIRED
            and not INTERLEAVED
            and N % SQUARE == 0
            and 2 * SQUARE % BLOCK_N == 0
        )
        SQUARES: tl.constexpr = 1 if WHOLE else 2 if HALVES else 0
        if weight_scale_ptr is not None:
            scale_at += expert.to(tl.int64) * scale_expert
            if SQUARES:
                scale_at += tile * (BLOCK_N // SQUARES) // SQUARE * scale_row
            else:
                scale_at += (row // SQUARE if SQUARE else row) * scale_row
        for start in range(0, K, BLOCK_K):
            in_x, in_weight = (pair < P)[:, None], (row < ROWS)[:, None]
            if K % BLOCK_K:
                there = (k < K - start)[None, :]
                in_x, in_weight = in_x & there, in_weight & there
            x = tl.load(x_at + start, in_x, 0.0)
            weight = tl.load(weight_at + start * weight_column, in_weight, 0.0)
            if SQUARE:
                scale = square_scale(
                    x_scale_ptr + x_of * x_scale_row + start // SQUARE * x_scale_group,
                    scale_at + start // SQUARE * scale_group,
                    N // SQUARE * scale_row,
                    pair < P,
                    row < ROWS,
                    SQUARES,
                    SWAP,
                )
                if SWAP:
                    sums += tl.dot(weight, tl.trans(x), out_dtype=WIDE) * scale
                else:
                    sums += tl.dot(x, tl.trans(weight), out_dtype=WIDE) * scale
            elif FP8:
                # Tensor cores accumulate fp8 products with 14 bits.
                if SWAP:
                    sums += tl.dot(weight, tl.trans(x), out_dtype=WIDE)
                else:
                    sums += tl.dot(x, tl.trans(weight), out_dtype=WIDE)
            elif SWAP:
                sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee", out_dtype=WIDE)
            else:
                sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee", out_dtype=WIDE)
        let_next_start(PDL)
        out = (tl.trans(sums) if SWAP else sums).to(tl.float32)
        if weight_scale_ptr is not None and not SQUARE:
            out *= tl.load(x_scale_ptr + x_of * x_scale_row, pair < P, 0.0)[:, None]
            out *= tl.load(scale_at, row < ROWS, 0.0)[None, :]
        store_pairs(
            out,
            bias_ptr,
            out_ptr,
            expert,
            bias_step,
            pair,
            P,
            row,
            tile,
            alpha,
            limit,
            N,
            ACTIVATION,
            PAIRED,
        )


def _scale_steps(x_scale: Tensor | None, weight_scale: Tensor | None, square: int) -> list[int]:
    """The strides of x_scale along rows and groups, and of weight_scale along experts, rows and
    groups; 0 where one scale serves all.
    """
    if x_scale is None or weight_scale is None:
        return [0] * 5
    if square:
        return [*x_scale.stride(), *weight_scale.stride()]
    by_row = weight_scale.stride(1) if weight_scale.shape[1] > 1 else 0
    return [x_scale.stride(0) if x_scale.dim() > 1 else 0, 0, weight_scale.stride(0), by_row, 0]


def _multiply(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    tile: Launch,
    pairs: int,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    square: int,
    out_dtype: torch.dtype | None,
    activation: str | None = None,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
) -> Tensor:
    rows, k = weight.shape[1:]
    n = rows if activation is None else rows // 2
    out = x.new_empty((pairs, n), dtype=out_dtype or x.dtype)
    if pairs:
        blocks = len(routing.expert)
        x_row, x_group, *of_weight = _scale_steps(x_scale, weight_scale, square)
        _product[(blocks * triton.cdiv(rows, tile["BLOCK_N"]),)](
            x,
            x_scale,
            weight,
            weight_scale,
            bias,
            out,
            routing.order,
            routing.expert,
            pairs,
            blocks,
            pairs // len(x),
            x.stride(0),
            x_row,
            x_group,
            *weight.stride(),
            *of_weight,
            0 if bias is None else bias.stride(0),
            alpha,
            limit,
            N=n,
            K=k,
            ACTIVATION=activation,
            INTERLEAVED=interleaved,
            # Where neighbouring rows of the weight are neighbours in memory, they stay together.
            PAIRED=interleaved or weight.stride(2) == 1,
            SQUARE=square,
            BLOCK_M=routing.block,
            **tile,
            **overlap(x.device),
        )
    return out


def grouped_gate_up(
    x: Tensor,
    w13: Tensor,
    routing: Routing,
    tile: Launch,
    *,
    pairs: int,
    x_scale: Tensor | None = None,
    w13_scale: Tensor | None = None,
    b13: Tensor | None = None,
    square: int = 0,
    out_dtype: torch.dtype | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
) -> Tensor:
    """atomc.ops.experts.gated of the first products, [P, I] in out_dtype (None: that of x); rows of
    pairs that are not in the routing are not written.

    x        [T, H], or [P, H] with a row per pair; its last dimension is contiguous
    w13      [E, 2I, H] of the same dtype, of any strides with one of 1 in the last two dimensions
    pairs    P
    scales   of x and w13 in fp8 or int8, fp32: [1] or one per row of x, and [E, 1, 1] or
             [E, 2I, 1]; or, by squares, [.., ceil(H / square)] and [E, ceil(2I / square),
             ceil(H / square)]
    b13      [E, 2I], contiguous rows
    tile     BLOCK_N (rows of w13, of gate and up together), BLOCK_K, TALL and launch options;
             square is 0 or a multiple of BLOCK_K
    """
    return _multiply(
        x,
        w13,
        routing,
        tile,
        pairs,
        x_scale,
        w13_scale,
        b13,
        square,
        out_dtype,
        activation,
        interleaved,
        alpha,
        limit,
    )


def grouped_down(
    act: Tensor,
    w2: Tensor,
    routing: Routing,
    tile: Launch,
    *,
    act_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    b2: Tensor | None = None,
    square: int = 0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The second products, not weighted, [P, H] in out_dtype (None: that of act). act [P, I],
    w2 [E, H, I], b2 [E, H]; the rest as grouped_gate_up.
    """
    return _multiply(act, w2, routing, tile, len(act), act_scale, w2_scale, b2, square, out_dtype)


@triton.jit
def _weigh(
    products_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    E,
    H,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    PROMOTED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token.to(tl.int64) * CHOICES + choice
        expert = tl.load(ids_ptr + pair)
        known = (expert >= 0) & (expert < E)
        value = tl.load(products_ptr + pair * H + column, (column < H) & known, 0.0)
        value = value.to(tl.float32)
        if weights_ptr is not None:
            value = (value * tl.load(weights_ptr + pair).to(tl.float32)).to(PROMOTED)
        sums += tl.where(known, value.to(tl.float32), 0.0)
    tl.store(
        out_ptr + token.to(tl.int64) * H + column, sums.to(out_ptr.dtype.element_ty), column < H
    )


def weighted_sum(products: Tensor, ids: Tensor, weights: Tensor | None, num_experts: int) -> Tensor:
    """The sums over the choices [T, H] of products [P, H] times weights [T, k] (None: 1), in rising
    order of choices. ids [T, k]; products of unknown experts are not read.
    """
    hidden = products.shape[1]
    out = products.new_empty((len(ids), hidden))
    if len(ids):
        promoted = products.dtype
        if weights is not None:
            promoted = torch.promote_types(promoted, weights.dtype)
        block = min(1024, triton.next_power_of_2(hidden))
        _weigh[(len(ids), triton.cdiv(hidden, block))](
            products,
            ids.contiguous(),
            None if weights is None else weights.contiguous(),
            out,
            num_experts,
            hidden,
            CHOICES=ids.shape[1],
            BLOCK=block,
            PROMOTED=TRITON_DTYPE[promoted],
            **overlap(products.device),
        )
    return out
