"""What the walk from a softmax has found, and why it ends."""

from dataclasses import dataclass, field

from torch.fx import Node

from atomc.rewriting.matching.pattern import Difference


@dataclass
class Added:
    """A mask added to the scores, times `factor`; or, with `fill`, one that is True for hidden
    keys. at: the scores that it applies to.
    """

    mask: Node
    at: Node
    factor: float = 1.0
    fill: float | None = None


@dataclass
class Walk:
    """What the walk from a softmax has found so far.

    inside   the nodes that the op replaces
    scale    factor of the product of queries and keys
    sinks    the vector [N] of one more score per head
    unproven why a mask of positions stays a mask
    """

    softmax: Node
    inside: list[Node] = field(default_factory=list)
    scale: float = 1.0
    softcap: float = 0.0
    added: list[Added] = field(default_factory=list)
    sinks: Node | None = None
    unproven: list[Difference] = field(default_factory=list)
