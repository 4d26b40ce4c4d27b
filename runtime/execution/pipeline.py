"""What the stages of a pipeline send each other in a step, outside of their programs: states [T, D]
to the next stage, and sampled tokens from the last one to the first. A step is cut into
micro-batches: while a stage computes one, the stage before it computes the next.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from atomc.parallel.process_group import PipelineStage
from atomc.runtime.scheduling.step import Chunk, DecodeRows, ScheduledStep

ALL_LAYERS = PipelineStage(0, (0,))
# With m micro-batches, p stages are idle for (p - 1) / (m + p - 1) of a step.
PER_STAGE = 4
# A smaller one reads the weights for too few rows.
LEAST_ROWS = {"cpu": 16, "cuda": 256}


class PipelineLinks:
    """The place of this process between its neighbors; by default, it has all layers. Nothing waits
    for a send: a stage computes its next micro-batch meanwhile.

    width, dtype  of the states
    """

    def __init__(
        self,
        stage: PipelineStage = ALL_LAYERS,
        width: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.stage = stage
        self.width, self.dtype, self.device = width, dtype, device or torch.device("cpu")
        stages = len(stage.ranks)
        self.most_micro_batches = PER_STAGE * stages if stages > 1 else 1
        self._sends: deque[tuple[distributed.Work, Tensor]] = deque()
        self._expected: tuple[distributed.Work, Tensor, Tensor] | None = None
        self._filled = 0

    def micro_batches(self, step: ScheduledStep) -> list[ScheduledStep]:
        least = LEAST_ROWS.get(self.device.type, LEAST_ROWS["cuda"])
        return micro_batches(step, self.most_micro_batches, least)

    def receive(self, states: Tensor, rows: int) -> None:
        """Fill so many rows of the static states of this stage, which is not the first. Rows behind
        them, which are padding, are zero.
        """
        states[rows : self._filled].zero_()
        self._filled = rows
        _wait(distributed.irecv(states[:rows], self.stage.ranks[self.stage.index - 1]))

    def send(self, states: Tensor) -> None:
        """Send states [T, D] to the next stage. They may be overwritten then."""
        if states.shape[1:] != (self.width,) or states.dtype != self.dtype:
            raise ValueError(
                f"the layers of a stage give states {states.dtype} {list(states.shape)}, and the "
                f"embedding gives {self.dtype} [{len(states)}, {self.width}]: pp cannot cut this "
                "model"
            )
        self._send(states.clone(), self.stage.ranks[self.stage.index + 1])

    def send_tokens(self, tokens: Tensor) -> None:
        """Send the tokens sampled in a step to the first stage."""
        self._send(tokens.clone(), self.stage.ranks[0])

    def expect_tokens(self, slots: Sequence[int]) -> None:
        """The last stage samples a token for each of these slots."""
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self.device)
        received = distributed.irecv(tokens, self.stage.ranks[-1])
        assert received is not None
        self._expected = received, tokens, torch.tensor(slots, device=self.device)

    def expected_tokens(self) -> tuple[Tensor, Tensor] | None:
        """The tokens that are expected, and their slots; waits for them. Once, then None."""
        if self._expected is None:
            return None
        (received, tokens, slots), self._expected = self._expected, None
        _wait(received)
        return tokens, slots

    def _send(self, tensor: Tensor, rank: int) -> None:
        while len(self._sends) >= self.most_micro_batches:
            _wait(self._sends.popleft()[0])
        sent = distributed.isend(tensor, rank)
        assert sent is not None
        self._sends.append((sent, tensor))


def _wait(work: distributed.Work | None) -> None:
    assert work is not None, "this process has a stage"
    work.wait()


def micro_batches(step: ScheduledStep, most: int, least_rows: int) -> list[ScheduledStep]:
    """The rows of a step in equal parts, `most` at most, in their order; the step itself if it is
    small. A chunk may continue in the next part, which reads its keys from the cache.
    """
    count = min(most, step.num_tokens // least_rows) if most > 1 else 1
    if count <= 1:
        return [step]
    size = -(-step.num_tokens // count)
    return [_part(step, first, first + size) for first in range(0, step.num_tokens, size)]


def _part(step: ScheduledStep, first: int, end: int) -> ScheduledStep:
    """The rows first to end - 1 of a step. The first part brings the blocks of all decode rows."""
    pieces, row = [], 0
    for chunk in step.chunks:
        start, stop = max(first - row, 0), min(end - row, chunk.num_tokens)
        pieces += [_piece(chunk, start, stop)] if start < stop else []
        row += chunk.num_tokens
    rows = slice(max(first - row, 0), max(end - row, 0))
    slots, starts, blocks = step.decoding
    decoding = DecodeRows(slots[rows], starts[rows], () if first else blocks)
    return step._replace(chunks=tuple(pieces), decoding=decoding)


def _piece(chunk: Chunk, start: int, stop: int) -> Chunk:
    """The tokens start:stop of a chunk. The first piece brings the blocks of all."""
    is_last = stop == chunk.num_tokens
    first_output = max(start, chunk.num_tokens - chunk.num_output_rows)
    return chunk._replace(
        tokens=chunk.tokens[start:stop],
        start=chunk.start + start,
        blocks=chunk.blocks if start == 0 else tuple((0, ()) for _ in chunk.blocks),
        num_output_rows=max(0, stop - first_output),
        num_samples=chunk.num_samples if is_last else 0,
    )
