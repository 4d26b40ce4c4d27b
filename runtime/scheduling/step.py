"""A scheduled step: plain values without references to live objects, which msgspec can encode for
another process.

The worker keeps state for each slot (atomc.runtime.execution.slots). A step has what this state
lacks: the request's parameters when it gets a slot, later only new tokens and blocks.
"""

from math import prod
from typing import NamedTuple

from atomc.runtime.requests.request import Pooling
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.blocks import NewBlocks

Grid = tuple[int, int, int]


class ImagePixels(NamedTuple):
    """An image to encode. length: number of its tokens; the others as in PromptImage."""

    digest: bytes
    length: int
    grid: Grid
    pixels: bytes

    @property
    def num_patches(self) -> int:
        return prod(self.grid)


class ImageRows(NamedTuple):
    """The tokens of an image in a chunk: `length` rows from `row` on, whose embeddings are those of
    the image from `first` on.
    """

    digest: bytes
    row: int
    first: int
    length: int


Copy = tuple[int, int]  # of a row of state per sequence: from, to


class Admission(NamedTuple):
    """Parameters of a request, sent when it gets a slot.

    seed      64 bits
    eos_ids   tokens that end generation, unless params.ignore_eos
    tokens    the cached prefix before the first chunk, for requests with penalties; else ()
    images    first position and grid of each image of the prompt
    lora      the number of its LoRA adapter; None: it has none
    """

    params: SamplingParams
    seed: int
    num_prompt: int
    eos_ids: frozenset[int]
    pooling: Pooling | None = None
    tokens: tuple[int, ...] = ()
    images: tuple[tuple[int, Grid], ...] = ()
    lora: int | None = None


class Chunk(NamedTuple):
    """Tokens of one request in a step, all known to the host: a prompt, a part of one, or the last
    sampled token and a draft.

    slot             row of block tables and of per-sequence state, while the request runs
    start            position of the first token; all earlier tokens are in the cache
    blocks           for each group, the blocks added since the previous chunk
    num_samples      a token is sampled after each of the last num_samples rows: 0 if the request is
                     not complete yet, else 1, plus 1 for each draft token at the end of `tokens`
    num_output_rows  logits, or hidden states, are computed for this many last rows
    scored           prompt tokens whose log-probabilities are computed, from the first len(scored)
                     output rows
    admission        set in the first chunk after the request got its slot
    next_token       the token after the chunk, if it is known: not after a sampled row
    accept           accept this many draft tokens, whatever is sampled; None: those that are equal
    images           which rows are tokens of images
    state_from       the row that has the state per sequence before the chunk; None: it is in the
                     slot, or the sequence begins
    state_kept       the row that keeps the state before the chunk, until its draft is verified
    """

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[NewBlocks, ...]
    num_samples: int = 0
    num_output_rows: int = 0
    scored: tuple[int, ...] = ()
    admission: Admission | None = None
    next_token: int = 0
    accept: int | None = None
    images: tuple[ImageRows, ...] = ()
    state_from: int | None = None
    state_kept: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """All tokens of a chunk of a prompt; 0 of the last sampled token and a draft."""
        return self.num_tokens if self.num_tokens > self.num_samples else 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def draft(self) -> tuple[int, ...]:
        return (
            self.tokens[len(self.tokens) - self.num_samples + 1 :] if self.num_samples > 1 else ()
        )

    @property
    def most_accepted(self) -> int:
        """How many draft tokens may be accepted."""
        return max(self.num_samples - 1, 0) if self.accept is None else self.accept


class DecodeRows(NamedTuple):
    """Requests of which a token is in flight, a row each: it computes the token that the previous
    step samples for its slot, and one token is sampled after it.

    slots    as in Chunk
    starts   position of each token; all earlier ones are in the cache
    blocks   the slots that got blocks since the previous step, with these as in Chunk
    """

    slots: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    blocks: tuple[tuple[int, tuple[NewBlocks, ...]], ...] = ()


class StepSize(NamedTuple):
    """The sizes by which a step is padded.

    rows      tokens
    wanted    rows whose logits are computed
    longest   the most rows of one sequence
    pooled    whether hidden states are computed instead of logits
    """

    rows: int
    sequences: int
    wanted: int
    longest: int
    pooled: bool


class ScheduledStep(NamedTuple):
    """The chunks of one step, and after their rows the decode rows: at least one of both, unless it
    is the part of a data-parallel rank.

    pooled     a pooling step: computes hidden states instead of logits
    released   slots released since the previous step; this step may reuse them
    images     encoded before the step, and held until a later step drops them
    dropped    digests of images whose embeddings are dropped before that
    parts      of data-parallel ranks, which have all that the step has; (): all ranks have the same
    size       of the largest parts of such a step, to which its ranks pad; None: of this step
    snapshots  copies of state per sequence after the step
    """

    chunks: tuple[Chunk, ...]
    pooled: bool = False
    released: tuple[int, ...] = ()
    images: tuple[ImagePixels, ...] = ()
    dropped: tuple[bytes, ...] = ()
    parts: "tuple[ScheduledStep, ...]" = ()
    size: StepSize | None = None
    decoding: DecodeRows = DecodeRows()
    snapshots: tuple[Copy, ...] = ()

    def rank_part(self, rank: int) -> "ScheduledStep":
        """The part of a data-parallel rank; the step itself if it has no parts. A rank without
        requests computes padding, because the others wait for it.
        """
        return self.parts[rank]._replace(size=self.padded_size) if self.parts else self

    @property
    def padded_size(self) -> StepSize:
        """Of a step of one rank, its own; of one with parts, the largest of each."""
        if self.size is not None:
            return self.size
        if self.parts:
            sizes = [part.padded_size for part in self.parts]
            return StepSize(*map(max, zip(*sizes, strict=True)))
        counts, rows = [chunk.num_tokens for chunk in self.chunks], self.num_decoding
        longest = max(counts, default=min(rows, 1))
        sequences = len(counts) + rows
        return StepSize(sum(counts) + rows, sequences, self.num_output_rows, longest, self.pooled)

    def sample_rows(self, rank: int) -> slice:
        """The rows of the tokens that a data-parallel rank samples, among those of all."""
        if not self.parts:
            return slice(None)
        first = sum([part.num_samples for part in self.parts[:rank]])
        return slice(first, first + self.parts[rank].num_samples)

    @property
    def has_images(self) -> bool:
        """Whether any row is a token of an image."""
        return any([chunk.images for chunk in self.chunks])

    @property
    def num_decoding(self) -> int:
        return len(self.decoding.slots)

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks]) + self.num_decoding

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of prompts; of parts, of the one with the most."""
        if self.parts:
            return max([part.num_prompt_tokens for part in self.parts])
        return sum([chunk.num_prompt_tokens for chunk in self.chunks])

    @property
    def num_output_rows(self) -> int:
        """Number of rows whose logits, or hidden states, are computed."""
        return sum([chunk.num_output_rows for chunk in self.chunks]) + self.num_decoding

    @property
    def num_samples(self) -> int:
        """Number of tokens that the step samples."""
        return sum([chunk.num_samples for chunk in self.chunks]) + self.num_decoding

    @property
    def sampled_slots(self) -> list[int]:
        """The slot of each token that the step samples."""
        of_chunks = [chunk.slot for chunk in self.chunks for _ in range(chunk.num_samples)]
        return [*of_chunks, *self.decoding.slots]

    @property
    def copies_before(self) -> list[Copy]:
        """Copies of state per sequence before the step; no row is both source and destination."""
        copies = []
        for chunk in self.chunks:
            source = chunk.slot if chunk.state_from is None else chunk.state_from
            if chunk.state_from is not None:
                copies.append((source, chunk.slot))
            if chunk.state_kept is not None:
                copies.append((source, chunk.state_kept))
        return copies
