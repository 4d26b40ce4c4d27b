"""How a request's next token is drawn: its parameters, and one number that depends on seed and index alone."""

from dataclasses import dataclass

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """temperature 0: the largest logit. Otherwise the token at `uniform` of the mass that top_k and top_p leave.

    top_k 0 and top_p 1.0 leave everything; uniform is in [0, 1).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    uniform: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


def _mixed(value: int) -> int:
    """The output function of SplitMix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators")."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """Number `index` of the stream `seed`, in [0, 1): the same on every device, in every batch, after a preemption."""
    return (_mixed(_mixed(seed) + (index + 1) * _GOLDEN) >> 11) * 2.0**-53
