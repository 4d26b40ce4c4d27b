"""Which rows of a step belong to a sequence: sequence s has query_start[s]:query_start[s + 1].

The rows after the last sequence form one more sequence, whose length is 0.
"""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def tokens_of(
    tile,
    query_start,
    seq_lens,
    num_rows,
    num_sequences,
    BLOCK_Q: constexpr,
    BY_SEQUENCE: constexpr = False,
):
    """The number of the sequence that has this tile of BLOCK_Q tokens, its first row, its end, its
    length, and the first of its new tokens in this tile and their end, which may be beyond the last
    one. With BY_SEQUENCE, `tile` is the number of a sequence, and has all of its new tokens.
    """
    if BY_SEQUENCE:
        start = tl.load(query_start + tile)
        end = tl.load(query_start + tile + 1, mask=tile < num_sequences, other=num_rows)
        length = tl.load(seq_lens + tile, mask=tile < num_sequences, other=0)
        return tile, start, end, length, 0, end - start
    else:
        s, start, end, length = _searched(
            tile, query_start, seq_lens, num_rows, num_sequences, BLOCK_Q
        )
        first = (tile - start // BLOCK_Q - s) * BLOCK_Q
        return s, start, end, length, first, first + BLOCK_Q


@triton.jit
def _of_owner(owns, values):
    return tl.sum(tl.where(owns, values, 0))


@triton.jit
def _searched(tile, query_start, seq_lens, num_rows, num_sequences, BLOCK_Q: constexpr):
    """The number of the sequence of a tile, its first row, its end, and its length.

    Sequence s has the tiles from query_start[s] // BLOCK_Q + s on, which is enough for its rows.
    """
    SEARCH: constexpr = 128
    # Sums over all rounds at once: most tiles of a captured step that is padded to 1,024 sequences
    # have no tokens. The values are summed, too, without a second, dependent load.
    zeros = tl.zeros([SEARCH], tl.int32)
    owners, owned_starts, owned_ends, owned_lengths = zeros, zeros, zeros, zeros
    for lowest in range(0, num_sequences + 1, SEARCH):
        each = lowest + tl.arange(0, SEARCH)
        starts = tl.load(query_start + each, mask=each <= num_sequences, other=num_rows)
        ends = tl.load(query_start + each + 1, mask=each < num_sequences, other=num_rows)
        lengths = tl.load(seq_lens + each, mask=each < num_sequences, other=0)
        # True for exactly one sequence.
        owns = (starts // BLOCK_Q + each <= tile) & (tile <= ends // BLOCK_Q + each)
        owners += tl.where(owns, each, 0)
        owned_starts += tl.where(owns, starts, 0)
        owned_ends += tl.where(owns, ends, 0)
        owned_lengths += tl.where(owns, lengths, 0)
    return tl.sum(owners), tl.sum(owned_starts), tl.sum(owned_ends), tl.sum(owned_lengths)


@triton.jit
def _tiles_with_prefix(each, query_start, seq_lens, num_sequences, BLOCK_Q: constexpr):
    """Of the sequences with these numbers: how many tiles of BLOCK_Q new tokens they have, 0 for
    sequences without tokens from before the step, their first rows, their ends, and their lengths.
    """
    there = each < num_sequences
    starts = tl.load(query_start + each, mask=there, other=0)
    ends = tl.load(query_start + each + 1, mask=there, other=0)
    lengths = tl.load(seq_lens + each, mask=there, other=0)
    tiles = tl.where(lengths > ends - starts, tl.cdiv(ends - starts, BLOCK_Q), 0)
    return tiles, starts, ends, lengths


@triton.jit
def num_tiles_with_prefix(query_start, seq_lens, num_sequences, BLOCK_Q: constexpr):
    """How many tiles of BLOCK_Q new tokens the sequences have that have tokens from before the
    step.
    """
    SEARCH: constexpr = 128
    count = 0
    for lowest in range(0, num_sequences, SEARCH):
        each = lowest + tl.arange(0, SEARCH)
        tiles, _, _, _ = _tiles_with_prefix(each, query_start, seq_lens, num_sequences, BLOCK_Q)
        count += tl.sum(tiles)
    return count


@triton.jit
def tokens_with_prefix(tile, query_start, seq_lens, num_sequences, BLOCK_Q: constexpr):
    """The number of the sequence that has this one of num_tiles_with_prefix, its first row, its
    end, its length, and the first of its new tokens in this tile.
    """
    SEARCH: constexpr = 128
    s, start, end, length, first, passed = 0, 0, 0, 0, 0, 0
    for lowest in range(0, num_sequences, SEARCH):
        each = lowest + tl.arange(0, SEARCH)
        tiles, starts, ends, lengths = _tiles_with_prefix(
            each, query_start, seq_lens, num_sequences, BLOCK_Q
        )
        through = passed + tl.cumsum(tiles, 0)
        owns = (through - tiles <= tile) & (tile < through)
        s += _of_owner(owns, each)
        start += _of_owner(owns, starts)
        end += _of_owner(owns, ends)
        length += _of_owner(owns, lengths)
        first += tl.sum(tl.where(owns, tile - through + tiles, 0)) * BLOCK_Q
        passed += tl.sum(tiles)
    return s, start, end, length, first


@triton.jit
def some_have_prefix(first, last, query_start, seq_lens, num_sequences):
    """Whether any of the rows from `first` to `last` is of a sequence that has tokens from before
    the step.
    """
    SEARCH: constexpr = 128
    count = 0
    for lowest in range(0, num_sequences, SEARCH):
        each = lowest + tl.arange(0, SEARCH)
        tiles, starts, ends, _ = _tiles_with_prefix(each, query_start, seq_lens, num_sequences, 1)
        count += tl.sum(tl.where((starts < last) & (first < ends), tiles, 0))
    return count > 0
