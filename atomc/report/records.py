"""The records of a report as plain dataclasses: rewrites, near misses, kernels, costs."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from atomc.errors import first_line
from atomc.files.json_types import JSONLike

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped_by(key: Callable[[Item], Key], items: Iterable[Item]) -> dict[Key, list[Item]]:
    """The items by their keys, both in the order of the items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def located(module_path: str, source: str = "") -> str:
    """ "model.layers.0.mlp (model.py:12)"; "the graph" for an empty path."""
    return (module_path or "the graph") + (f" ({source})" if source else "")


def counted(counts: Mapping[str, int]) -> str:
    """ "triton x2, torch x1"."""
    return ", ".join(f"{name} x{count}" for name, count in counts.items())


@dataclass(frozen=True)
class Site:
    """One place where a rewrite fired. `source` is "file.py:12" of the user's program."""

    rewrite: str
    module_path: str
    layer: int | None
    source: str
    attrs: dict[str, JSONLike] = field(default_factory=dict)


# Why a pattern does not match: differences of structure, of values, or conditions of rewriting.
MissKind = Literal[
    "extra op", "missing op", "missing cast", "other op", "operand order", "arguments", "attribute",
    "scalar", "same value", "no reader", "dtype", "size", "view", "device", "extra user",
    "mutation", "cycle", "guard", "taken", "off", "packed",
]  # fmt: skip


@dataclass(frozen=True)
class Miss:
    """One place where a rewrite nearly fired. `depth`: the matched fraction of the pattern."""

    rewrite: str
    variant: str
    module_path: str
    layer: int | None
    source: str
    depth: float
    kind: MissKind
    expected: str
    found: str
    nodes: list[str] = field(default_factory=list)

    def text(self) -> str:
        return (
            f"{self.rewrite} in {located(self.module_path, self.source)}, {self.depth:.0%} there: "
            f"expected {self.expected}; found {self.found}"
        )


def another_kernel(provider: str) -> str:
    return f"another {provider} kernel"


INLINE = "inline"  # the kernel of an op whose reference is compiled with the ops around it


@dataclass(frozen=True)
class KernelChoice:
    """The kernel selected for one op and a range of token counts.

    refused   (provider, reason), in order of preference
    codes     the code (atomc.ops.op.Refusal) of each of these; empty in a report of an older
              version
    note      what the user should know about the chosen kernel
    made_of   the nodes of the traced graph that it computes, if a pass that runs once per range of
              token counts made the op
    """

    op: str
    module_path: str
    tokens: str
    chosen: str
    refused: list[tuple[str, str]] = field(default_factory=list)
    node: str = ""
    codes: list[str] = field(default_factory=list)
    note: str = ""
    made_of: list[str] = field(default_factory=list)

    @property
    def others(self) -> list[tuple[str, str]]:
        """`refused` for display: the op's own provider refused with another of its kernels."""
        return [
            (another_kernel(name) if name == self.chosen else name, reason)
            for name, reason in self.refused
        ]

    def refused_by(self, *codes: str) -> list[tuple[str, str]]:
        """The entries of `refused` with one of these codes."""
        return [pair for pair, code in zip(self.refused, self.codes, strict=False) if code in codes]


@dataclass(frozen=True)
class Stage:
    """One pass that changed the graph, and the printed graph after it (atomc.graph.graph_printer).

    text    "" except for the last stage, and in reports of `explain` or for a page
    before  the graph before it; "" if it equals `text` of the preceding stage
    """

    name: str
    changed: int
    text: str
    before: str = ""


@dataclass(frozen=True)
class OpCost:
    """The cost of one kernel, as formulas of T, R, S and C (see atomc.cost.cost).

    nodes    of the graph before lowering
    made_of  the nodes of the captured graph that became these
    apart    bytes if each node were a kernel of its own; "" if equal to `bytes`
    made_by  the last rewrite that produced it; "" for nodes of the program
    rate     of its matrix products, relative to the bf16 peak
    sent     bytes that each of N processes sends to others
    """

    op: str
    module_path: str
    layer: int | None
    source: str
    bytes: str
    flops: str
    nodes: list[str] = field(default_factory=list)
    made_of: list[str] = field(default_factory=list)
    apart: str = ""
    made_by: str = ""
    rate: int = 1
    sent: str = "0"


@dataclass(frozen=True)
class FusionOpportunity:
    """Memory traffic that fusing kernels would save.

    kind  "near miss": `what` is the rewrite; "neighbours": `what` is the two ops; "glue": pointwise
          ops that run one by one
    """

    kind: str
    what: str
    module_path: str
    layer: int | None
    source: str
    bytes: str


@dataclass(frozen=True)
class QuantizedWeightSize:
    """An op with a quantized weight: a linear, or the experts of a layer.

    bytes       of the weight and its scales
    full_bytes  of the weight in the dtype of the output
    form_of     the op for weights that are not quantized: a linear's is "linear"
    """

    op: str
    scheme: str
    module_path: str
    layer: int | None
    node: str
    bytes: int
    full_bytes: int
    form_of: str = ""


@dataclass(frozen=True)
class MoeLayer:
    """A mixture of experts.

    node     of its op of experts, before lowering
    router   how experts are chosen and weighted; "" if it was not recognized
    scheme   the dtype of the weights, or how they are quantized
    weights  the number of weights and biases of all experts; a token uses top_k / experts of them
    bytes    of these, with their scales
    """

    module_path: str
    layer: int | None
    node: str
    router: str
    experts: int
    top_k: int
    scheme: str
    weights: int
    bytes: int


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo ended a graph early, and why: its first line is a summary."""

    source: str
    code: str
    reason: str

    @property
    def summary(self) -> str:
        return first_line(self.reason)


@dataclass(frozen=True)
class CacheOutcome:
    """The result of the cache for a graph.

    kind      "off": the cache was not used; "": there was nothing to compile
    why       the reason for a miss or for not using it
    not_kept  why the compiled graph was not written to the cache
    """

    kind: Literal["", "hit", "miss", "off"] = ""
    why: str = ""
    not_kept: str = ""

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.kind, self.why) if part)
        return f"{text}; not kept: {self.not_kept}" if self.not_kept else text


@dataclass(frozen=True)
class Glue:
    """What compiles ops between kernels, "inductor" or "eager"; `note` is in Report.notes."""

    how: str
    note: str


# The record type of each list of a report.
PARTS: dict[str, type] = {
    "sites": Site,
    "kernels": KernelChoice,
    "stages": Stage,
    "near": Miss,
    "costs": OpCost,
    "savings": FusionOpportunity,
    "few_bits": QuantizedWeightSize,
    "moe": MoeLayer,
    "glue": Glue,
}


def spans(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)
