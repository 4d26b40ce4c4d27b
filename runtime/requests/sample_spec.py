"""SampleSpec: how the next token of a request is sampled, and its random number."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from atomc.runtime.requests.sampling_params import SamplingParams

GREEDY = SamplingParams()
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


@dataclass(eq=False)
class RequestCounts:
    """Token counts of one request while it has a slot: its row in TokenCounts.

    tokens   prompt and output tokens until the first sampling counts them, then []
    row      its row in TokenCounts; None before the first sampling
    length   number of counted tokens, plus up to `pending` known only on the device; 0 before the
             first sampling
    """

    num_prompt: int
    tokens: list[int] = field(default_factory=list)
    row: int | None = None
    length: int = 0
    pending: int = 0

    @property
    def assigned_row(self) -> int:
        assert self.row is not None, "no token was sampled yet"
        return self.row


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How a token is sampled from one row of logits.

    index        number of new tokens before this one; some may be known only on the device
    num_prompt   number of prompt tokens
    eos_ids      tokens that end generation, unless params.ignore_eos
    draft        draft tokens directly before this one
    counts       token counts of the request, if params has penalties
    """

    params: SamplingParams = GREEDY
    seed: int = 0
    index: int = 0
    num_prompt: int = 0
    eos_ids: frozenset[int] = frozenset()
    draft: tuple[int, ...] = ()
    counts: RequestCounts | None = None

    @property
    def length(self) -> int:
        """Number of tokens before this one."""
        return self.num_prompt + self.index

    @property
    def banned(self) -> frozenset[int]:
        """Tokens excluded until min_tokens tokens are generated: they would end the request."""
        if self.index >= self.params.min_tokens:
            return frozenset()
        return (frozenset() if self.params.ignore_eos else self.eos_ids).union(
            self.params.stop_token_ids
        )


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Random number indices[i] of the stream seeds[i], in [0, 1), [R] f64. Depends on nothing else:
    not on the device, the batch or preemptions.
    """
    state = _mixed(np.array([seed & _MASK for seed in seeds], np.uint64))
    numbers = _mixed(state + (np.array(indices, np.uint64) + np.uint64(1)) * _GOLDEN)
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number
    Generators").
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
