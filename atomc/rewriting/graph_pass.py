"""A pass: a named change of a graph, with the passes that must run before it; its context and its
outcome.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch.fx import GraphModule, Node

from atomc.graph.provenance import module_path
from atomc.ops.inputs import LoraShape
from atomc.ops.op import Extra, Kernel
from atomc.ops.state import StateSpec
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired, Rewrite
from atomc.torch_compat.core import Input


class Off(NamedTuple):
    """The pattern of an option that turns a pass off in a module, and the text for the report."""

    pattern: str
    text: str


@dataclass(frozen=True)
class Context:
    """The settings of one compilation, for passes.

    paged       compile for the runtime: attention uses a paged cache
    lora        add LoRA adapters of this shape to linear layers; only for the runtime
    owned       the runtime owns the weights: originals that no kernel reads are freed
    build       False: kernels are selected, but nothing is compiled
    choose      returns the kernel for an op's node, None for its reference; only for lowering
    first       returns the kernel that would serve an op's node, or None: in the range of token
                counts while a graph is lowered, before that with any number of tokens and without
                prepared weights. None for Dynamo's graph
    inputs      the values of the graph's first placeholders; parameters among them may be packed
    keep_texts  the report gets the graph after each pass that changed it, not only the final one
    observers   called with a name and the graph: as captured, and after each pass that changed it
    """

    options: Options
    platform: Platform
    paged: bool = False
    lora: LoraShape | None = None
    owned: bool = False
    build: bool = True
    choose: Callable[[Node], Kernel | None] | None = None
    first: Callable[[Node], Kernel | None] | None = None
    inputs: Sequence[Input] = ()
    keep_texts: bool = False
    observers: Sequence[Callable[[str, GraphModule], None]] = ()

    def off_here(self, name: str, node: Node) -> Off | None:
        """Whether an option turns this pass off in the module of the node: how, or None."""
        patterns = self.options.passes.get(name, False)
        path = module_path(node)
        for pattern in () if isinstance(patterns, bool) else patterns:
            if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*"):
                return Off(pattern, f"off here (options={{'passes': {{{name!r}: [{pattern!r}]}}}})")
        return None


@dataclass(frozen=True)
class Change:
    """A change that a pass can make at one place.

    node   its module decides whether an option turns the pass off here
    miss   the near miss with a reason why it is not made
    apply  makes it; or returns why it cannot be made
    """

    node: Node
    miss: Callable[[Difference], NearMiss]
    apply: Callable[[], Fired | NearMiss]


@dataclass
class Outcome:
    """The result of passes.

    fired   the changed sites
    near    sites that nearly matched, with the reason
    off     patterns of options that turned a pass off at a site
    notes   for the report
    state   one StateSpec per layer, in graph order
    extras  the inputs that lowering added, in order
    floats  the float inputs whose values changed sites depend on
    """

    fired: list[Fired] = field(default_factory=list)
    near: list[NearMiss] = field(default_factory=list)
    off: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    state: list[StateSpec] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    floats: set[str] = field(default_factory=set)

    def add(self, other: "Outcome") -> None:
        self.fired += other.fired
        self.near += other.near
        self.off |= other.off
        self.notes += other.notes
        self.state += other.state
        self.extras += other.extras
        self.floats |= other.floats


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline: rewrites of one name, or a function of the whole graph.

    run       yields the changes to make, each of which is made, or is a near miss where it is off,
              before the next one is asked for; sites that it has changed; and near misses. Nodes
              without readers are removed after a change. Or it returns an Outcome.
    after     names of passes that must come earlier in the pipeline, which is checked
    paged     runs only for the runtime
    cleanup   its sites are not in the report, and where it does not match is not explained
    by_site   can be turned off for single modules: `Context.off_here` is checked at each site, for
              rewrites and for each Change by the runner
    lifts     names of its sites in the report, if not `name`
    off_by_default  runs only if the option passes names it: {name: True}, or the modules in which
              it is off
    """

    name: str
    run: Callable[[GraphModule, Context], Iterable[Change | Fired | NearMiss] | Outcome] | None = (
        None
    )
    rewrites: tuple[Rewrite, ...] = ()
    after: Sequence[str] = ()
    paged: bool = False
    cleanup: bool = False
    by_site: bool = False
    lifts: Sequence[str] = ()
    off_by_default: bool = False


def rewriting(
    *rewrites: Rewrite,
    after: Sequence[str] = (),
    paged: bool = False,
    cleanup: bool = False,
    off_by_default: bool = False,
) -> Pass:
    """The pass that applies rewrites of one name, in order."""
    return Pass(
        rewrites[0].name,
        rewrites=rewrites,
        after=after,
        paged=paged,
        cleanup=cleanup,
        by_site=True,
        off_by_default=off_by_default,
    )
