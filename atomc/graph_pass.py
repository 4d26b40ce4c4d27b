"""What a pass is: a name, what it does to a graph, and what must run before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch.fx import GraphModule, Node

from atomc.graph.provenance import module_path
from atomc.matching.near_miss import NearMiss
from atomc.op import Extra, Kernel
from atomc.ops.state import StateSpec
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewrite import Fired, Rewrite


@dataclass
class Context:
    """What a pass may ask for, and where it leaves what is neither in the graph nor in the report.

    paged   compiled for the runtime: attention gets a paged cache
    choose  the kernel for an op's node, None for its meaning
    state   one StateSpec per layer, once state is bound
    extras  the inputs that lowering added, in order
    keep_texts  the report gets the graph after each changing pass, not only the final one
    inputs  what the graph's first placeholders are fed: the parameters among them may be packed
    near    the sites that a pass has just left alone, with the reason; the runner takes them
    observers  shown the captured graph, and the graph after each pass that changed it, each with its name
    used    the pass and the pattern for which `off_here` found a module
    """

    options: Options
    platform: Platform
    paged: bool = False
    choose: Callable[[Node], Kernel | None] | None = None
    notes: list[str] = field(default_factory=list)
    state: list[StateSpec] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    keep_texts: bool = False
    inputs: Sequence[Any] = ()
    near: list[NearMiss] = field(default_factory=list)
    observers: Sequence[Callable[[str, GraphModule], None]] = ()
    used: set[tuple[str, str]] = field(default_factory=set)

    def off_here(self, name: str, node: Node) -> str | None:
        """How the options leave this pass out in the module that made the node, or None."""
        patterns = self.options.passes.get(name, False)
        path = module_path(node)
        for pattern in () if isinstance(patterns, bool) else patterns:
            if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*"):
                self.used.add((name, pattern))
                return f"off here (options={{'passes': {{{name!r}: [{pattern!r}]}}}})"
        return None


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline: rewrites that make one name, or a function over the whole graph.

    after     names of passes that must stand earlier; building the pipeline checks it
    paged     True if it only has a meaning for the runtime
    cleanup   True if it changes no meaning worth a line in the report; where it does not apply is not explained
    by_site   True if it asks `Context.off_here` at each site; the runner does so for rewrites
    """

    name: str
    run: Callable[[GraphModule, Context], Sequence[Fired]] | None = None
    rewrites: tuple[Rewrite, ...] = ()
    after: tuple[str, ...] = ()
    paged: bool = False
    cleanup: bool = False
    by_site: bool = False


def rewriting(
    name: str, rewrites: Rewrite | Sequence[Rewrite], *, after: Sequence[str] = (), paged: bool = False,
    cleanup: bool = False,
) -> Pass:  # fmt: skip
    """A pass that applies a rewrite, or several in order."""
    applied = (rewrites,) if isinstance(rewrites, Rewrite) else tuple(rewrites)
    return Pass(name, rewrites=applied, after=tuple(after), paged=paged, cleanup=cleanup, by_site=True)
