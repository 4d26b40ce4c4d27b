"""What a pass is: a name, what it does to a graph, what must run before it; what it is given, and
what it returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from atomc.graph.provenance import module_path
from atomc.ops.op import Extra, Kernel
from atomc.ops.state import StateSpec
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.rewrite import Fired, Rewrite


class Off(NamedTuple):
    """A pass that the options leave out in a module: by which pattern, and how the report says
    so.
    """

    pattern: str
    text: str


@dataclass(frozen=True)
class Context:
    """What a compile is asked for, as a pass sees it.

    paged   compiled for the runtime: attention gets a paged cache
    build   False: kernels are chosen, and nothing is built
    choose  the kernel for an op's node, None for its meaning; in lowering only
    inputs  what the graph's first placeholders are fed: the parameters among them may be packed
    keep_texts  the report gets the graph after each changing pass, not only the final one
    observers  shown the captured graph, and the graph after each pass that changed it, each with
               its name
    """

    options: Options
    platform: Platform
    paged: bool = False
    build: bool = True
    choose: Callable[[Node], Kernel | None] | None = None
    inputs: Sequence[Any] = ()
    keep_texts: bool = False
    observers: Sequence[Callable[[str, GraphModule], None]] = ()

    def off_here(self, name: str, node: Node) -> Off | None:
        """How the options leave this pass out in the module that made the node, or None."""
        patterns = self.options.passes.get(name, False)
        path = module_path(node)
        for pattern in () if isinstance(patterns, bool) else patterns:
            if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*"):
                return Off(pattern, f"off here (options={{'passes': {{{name!r}: [{pattern!r}]}}}})")
        return None


@dataclass
class Outcome:
    """What passes did and found.

    fired   the sites
    near    sites that were left alone, with the reason
    off     patterns of the options that left out a site
    notes   for the report
    state   one StateSpec per layer, in graph order
    extras  the inputs that lowering added, in order
    """

    fired: list[Fired] = field(default_factory=list)
    near: list[NearMiss] = field(default_factory=list)
    off: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    state: list[StateSpec] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        self.fired += other.fired
        self.near += other.near
        self.off |= other.off
        self.notes += other.notes
        self.state += other.state
        self.extras += other.extras


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline: rewrites that make one name, or a function over the whole graph.

    run       returns the sites that it changed, or an Outcome
    after     names of passes that must stand earlier; building the pipeline checks it
    paged     True if it only has a meaning for the runtime
    cleanup   True if it changes no meaning worth a line in the report; where it does not apply is
              not explained
    by_site   True if it asks `Context.off_here` at each site; the runner does so for rewrites
    """

    name: str
    run: Callable[[GraphModule, Context], Sequence[Fired] | Outcome] | None = None
    rewrites: tuple[Rewrite, ...] = ()
    after: tuple[str, ...] = ()
    paged: bool = False
    cleanup: bool = False
    by_site: bool = False


def rewriting(
    name: str,
    rewrites: Rewrite | Sequence[Rewrite],
    *,
    after: Sequence[str] = (),
    paged: bool = False,
    cleanup: bool = False,
) -> Pass:
    """A pass that applies a rewrite, or several in order."""
    applied = (rewrites,) if isinstance(rewrites, Rewrite) else tuple(rewrites)
    return Pass(
        name, rewrites=applied, after=tuple(after), paged=paged, cleanup=cleanup, by_site=True
    )
