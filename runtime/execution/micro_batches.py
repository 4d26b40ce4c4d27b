"""Cuts a step into micro-batches: while a stage of a pipeline computes one, the stage before it
computes the next.
"""

from collections.abc import Iterator

from atomc.runtime.scheduling.step import Chunk, ScheduledStep

# With m micro-batches, p stages are idle for (p - 1) / (m + p - 1) of a step.
PER_STAGE = 4
# A smaller one reads the weights for too few rows.
LEAST_ROWS = {"cpu": 16, "cuda": 256}


def micro_batches(step: ScheduledStep, most: int, least_rows: int) -> list[ScheduledStep]:
    """The rows of a step in equal parts, `most` at most, in their order; the step itself if it is
    small. A chunk may continue in the next part, which reads its keys from the cache.
    """
    count = min(most, step.num_tokens // least_rows) if most > 1 else 1
    if count <= 1:
        return [step]
    size = -(-step.num_tokens // count)
    parts: list[list[Chunk]] = [[]]
    room = size
    for chunk in step.chunks:
        for piece in _pieces(chunk, room, size):
            if not room:
                parts.append([])
                room = size
            parts[-1].append(piece)
            room -= piece.num_tokens
    return [step._replace(chunks=tuple(chunks)) for chunks in parts]


def _pieces(chunk: Chunk, room: int, size: int) -> Iterator[Chunk]:
    """A chunk in pieces of `size` tokens; `room` tokens are left for the first one, if any."""
    start, stop = 0, min(room or size, chunk.num_tokens)
    while start < stop:
        yield _piece(chunk, start, stop)
        start, stop = stop, min(stop + size, chunk.num_tokens)


def _piece(chunk: Chunk, start: int, stop: int) -> Chunk:
    """The tokens start:stop of a chunk. The first piece brings the blocks of all."""
    is_last = stop == chunk.num_tokens
    first_output = max(start, chunk.num_tokens - chunk.num_output_rows)
    return chunk._replace(
        tokens=chunk.tokens[start:stop],
        start=chunk.start + start,
        blocks=chunk.blocks if start == 0 else tuple((0, ()) for _ in chunk.blocks),
        has_placeholder=chunk.has_placeholder and is_last,
        num_output_rows=max(0, stop - first_output),
        num_samples=chunk.num_samples if is_last else 0,
    )
