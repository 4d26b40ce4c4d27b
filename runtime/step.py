"""A scheduled step: plain values without references to live objects, which msgspec can encode for
another process.

The worker keeps state for each slot (atomc.runtime.slots). A step has what this state lacks: the
request's parameters when it gets a slot, later only new tokens and blocks.
"""

from math import prod
from typing import NamedTuple

from atomc.runtime.blocks import NewBlocks
from atomc.runtime.request import Pooling
from atomc.runtime.sampling.sampling_params import SamplingParams

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
    """The tokens of one request in a step: a prompt, a part of one, or the last sampled token and a
    draft.

    slot             row of block tables and of per-sequence state, while the request runs
    start            position of the first token; all earlier tokens are in the cache
    blocks           for each group, the blocks added since the previous chunk
    has_placeholder  one more token follows `tokens`: the one that the previous step samples for
                     this slot
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
    snapshot         the row that gets a copy of the state after the chunk
    """

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[NewBlocks, ...]
    has_placeholder: bool = False
    num_samples: int = 0
    num_output_rows: int = 0
    scored: tuple[int, ...] = ()
    admission: Admission | None = None
    next_token: int = 0
    accept: int | None = None
    images: tuple[ImageRows, ...] = ()
    state_from: int | None = None
    state_kept: int | None = None
    snapshot: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.has_placeholder

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


class ScheduledStep(NamedTuple):
    """The chunks of one step, at least one.

    pooled     a pooling step: computes hidden states instead of logits
    released   slots released since the previous step; this step may reuse them
    images     encoded before the step, and held until a later step drops them
    dropped    digests of images whose embeddings are dropped before that
    """

    chunks: tuple[Chunk, ...]
    pooled: bool = False
    released: tuple[int, ...] = ()
    images: tuple[ImagePixels, ...] = ()
    dropped: tuple[bytes, ...] = ()

    @property
    def has_images(self) -> bool:
        """Whether any row is a token of an image."""
        return any([chunk.images for chunk in self.chunks])

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def num_samples(self) -> int:
        """Number of tokens that the step samples."""
        return sum([chunk.num_samples for chunk in self.chunks])

    @property
    def sampled_slots(self) -> list[int]:
        """The slot of each token that the step samples."""
        return [chunk.slot for chunk in self.chunks for _ in range(chunk.num_samples)]

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

    @property
    def copies_after(self) -> list[Copy]:
        return [(chunk.slot, chunk.snapshot) for chunk in self.chunks if chunk.snapshot is not None]
