"""Which rows of a step belong to a sequence: sequence s has query_start[s]:query_start[s + 1]."""

import triton
import triton.language as tl


@triton.jit
def rows_of(s, query_start, seq_lens, num_rows, num_sequences):
    """The first row of sequence s, its end, and its length; for s = num_sequences of the rows after
    the last sequence, with the length 0.
    """
    start = tl.load(query_start + s)
    end = tl.load(query_start + s + 1, mask=s < num_sequences, other=num_rows)
    length = tl.load(seq_lens + s, mask=s < num_sequences, other=0)
    return start, end, length


@triton.jit
def sequence_of(tile, query_start, seq_lens, num_rows, num_sequences, BLOCK_Q: tl.constexpr):
    """The number of the sequence that has this tile of BLOCK_Q tokens, its first row, its end, and
    its length.

    Sequence s has the tiles from query_start[s] // BLOCK_Q + s on, which is enough for its rows.
    """
    SEARCH: tl.constexpr = 128
    s, start, end, length = 0, 0, 0, 0
    for lowest in range(0, num_sequences + 1, SEARCH):
        each = lowest + tl.arange(0, SEARCH)
        starts = tl.load(query_start + each, mask=each <= num_sequences, other=num_rows)
        ends = tl.load(query_start + each + 1, mask=each < num_sequences, other=num_rows)
        lengths = tl.load(seq_lens + each, mask=each < num_sequences, other=0)
        # True for exactly one sequence. The sums select its values without a second, dependent
        # load.
        owns = (starts // BLOCK_Q + each <= tile) & (tile <= ends // BLOCK_Q + each)
        s += tl.sum(tl.where(owns, each, 0))
        start += tl.sum(tl.where(owns, starts, 0))
        end += tl.sum(tl.where(owns, ends, 0))
        length += tl.sum(tl.where(owns, lengths, 0))
    return s, start, end, length
