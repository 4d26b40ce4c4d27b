"""A scheduled step: plain values without references to live objects, so that msgspec can encode it
for another process.

The worker that runs steps keeps state for each slot (atomc.runtime.slots). A step holds what this
state lacks: all that is needed of a request when the request enters a slot, later only the tokens
and blocks that are new.
"""

from typing import NamedTuple

from atomc.runtime.blocks import NewBlocks
from atomc.runtime.request import Pooling
from atomc.runtime.sampling.sampling_params import SamplingParams


class Admission(NamedTuple):
    """A request that enters a slot.

    seed      of 64 bits
    eos_ids   tokens that end generation, unless params.ignore_eos
    tokens    before the first chunk, whose keys and values come from the prefix cache; () where no
              penalty counts them
    """

    params: SamplingParams
    seed: int
    num_prompt: int
    eos_ids: frozenset[int]
    pooling: Pooling | None = None
    tokens: tuple[int, ...] = ()


class Chunk(NamedTuple):
    """The tokens of one request that a step computes: a prompt, a part of one, or the last drawn
    token and a draft.

    slot        the row of block tables and of per-sequence state that is the request's while it
                runs
    start       position of the first token; all before it are in the cache
    fed         one more token comes behind `tokens`: the one that the step before draws for this
                slot
    blocks      for each group, the blocks that its table has more than in the chunk before
    num_samples   one token is drawn after each of so many last rows: 0 if the request has more to
                compute first, else 1 and one for each token of a draft, with which `tokens` end
    num_output_rows  of so many last rows, logits or hidden states are wanted
    scored      tokens of the prompt whose log-probabilities are wanted: those after the first
                len(scored) wanted rows
    admission   with the first chunk since the request got its slot
    """

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[NewBlocks, ...]
    fed: bool = False
    num_samples: int = 0
    num_output_rows: int = 0
    scored: tuple[int, ...] = ()
    admission: Admission | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.fed

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def draft(self) -> tuple[int, ...]:
        return (
            self.tokens[len(self.tokens) - self.num_samples + 1 :] if self.num_samples > 1 else ()
        )


class ScheduledStep(NamedTuple):
    """The decision about one step; at least one chunk.

    pooled     hidden states are wanted, not logits
    released   slots that requests left since the step before; one of them may be entered again by
               this step
    """

    chunks: tuple[Chunk, ...]
    pooled: bool = False
    released: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def num_samples(self) -> int:
        """Tokens that the step draws."""
        return sum([chunk.num_samples for chunk in self.chunks])
