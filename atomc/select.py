"""Picks the state layout and a kernel per op, and keeps the reason of every refusal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from atomc import kernels
from atomc.errors import OptionsError
from atomc.graph.provenance import module_path
from atomc.op import ALL_TOKENS, REGISTRY, Kernel, Op, PreferInductor, Refusal, Tokens, op_of, refusal
from atomc.op_traits import Kind
from atomc.options import Options
from atomc.platform import Platform
from atomc.report_records import KernelChoice

INLINE = "inline"
# Of the machine's memory, for copies of weights that kernels want in a layout of their own.
MOST_COPIED = 0.25


class Selection:
    """Kernel choice for the nodes of one graph and one range of token counts.

    eager    the ops without a hand-written kernel run one by one; otherwise their meaning is left to the glue compiler
    weights  the inputs of which a kernel may keep a copy in a layout of its own (None), and why not of others
    copied   the copies that kernels have been promised, of other ranges too: (weight, function) -> bytes
    """

    def __init__(self, options: Options, platform: Platform, *, eager: bool, layout: str | None = None,
                 tokens: Tokens = ALL_TOKENS, weights: Mapping[str, str | None] | None = None,
                 copied: dict[tuple[str, Any], int] | None = None):  # fmt: skip
        self.options, self.platform, self.eager = options, replace(platform, asked=options.providers), eager
        self.layout, self.tokens = layout, tokens
        self.weights = weights or {}
        self.copied = {} if copied is None else copied
        self.choices: list[KernelChoice] = []
        self.syncing: list[str] = []  # kernels that no CUDA graph can hold
        self.absent: dict[str, Refusal] = {}
        self.order: list[str] = []
        wanted = options.providers or kernels.PROVIDERS
        for provider in (kernels.INVARIANT, *wanted) if options.batch_invariant else wanted:
            if provider not in (*kernels.PROVIDERS, kernels.INVARIANT) and provider not in _all_providers():
                raise OptionsError(f"option providers: no provider {provider!r}; providers are {list(kernels.PROVIDERS)}")
            reason = kernels.load(provider) if provider in (*kernels.PROVIDERS, kernels.INVARIANT) else None
            if reason:
                self.absent[provider] = Refusal("library", reason)
            else:
                self.order.append(provider)
        if not options.providers:
            # A kernel that somebody registered from outside is preferred to ours.
            ours = (*kernels.PROVIDERS, kernels.INVARIANT)
            self.order = [name for name in _all_providers() if name not in ours] + self.order

    def fix_layout(self, graph_nodes: list[Node]) -> str | None:
        """Choose the first layout that every reader and writer of state in the graph can use."""
        users = [node for node in graph_nodes if (op := op_of(node.target)) and any(k.layout for k in op.kernels)]
        if not users:
            return None
        users.sort(key=lambda node: bool(_op(node).mutates))  # readers first: they take the time
        candidates = list(dict.fromkeys(kernel.layout for node in users for kernel in self._ranked(_op(node))
                                        if kernel.layout and self._refuses(kernel, node) is None))  # fmt: skip
        for layout in [layout for layout in candidates if self.options.layout in (None, layout)]:
            if all(any(kernel.layout == layout and self._refuses(kernel, node) is None
                       for kernel in self._ranked(_op(node))) for node in users):  # fmt: skip
                self.layout = layout
                return layout
        if self.options.layout is not None:
            raise OptionsError(f"option layout={self.options.layout!r}: has no reader and writer on "
                               f"{self.platform.name}; of the layouts {candidates} some have")  # fmt: skip
        if self.options.batch_invariant:
            raise OptionsError("option batch_invariant=True: no such kernel reads and writes state on "
                               f"{self.platform.name}")  # fmt: skip
        raise ValueError(f"no state layout of {candidates} has a reader and a writer on {self.platform.name}")

    def choose(self, node: Node) -> Kernel | None:
        """The kernel that runs this node, None for its meaning; the choice and all refusals are remembered."""
        op = _op(node)
        refused = list(self.absent.items())
        for kernel in self._ranked(op):
            reason = self._refuses(kernel, node)
            if reason is None:
                self._remember(op, node, kernel.provider, refused)
                self._promise_copies(kernel, node)
                if kernel.syncs:
                    self.syncing.append(f"{kernel.provider} {op.name}")
                return kernel
            if (kernel.provider, reason) not in refused:
                refused.append((kernel.provider, reason))
        if self.options.batch_invariant and _joins_rows(op):
            raise OptionsError(f"option batch_invariant=True: no such kernel serves {op.name} on {self.platform.name}: "
                               f"{_spelled(refused)}")  # fmt: skip
        if op.mutates:
            raise ValueError(f"{op.name}: no kernel serves it on {self.platform.name}: {_spelled(refused)}")
        self._remember(op, node, INLINE, refused)
        return None

    def _remember(self, op: Op, node: Node, chosen: str, refused: list[tuple[str, Refusal]]) -> None:
        tokens = "any" if self.tokens == ALL_TOKENS else str(self.tokens)
        codes: list[str] = [reason.code for _, reason in refused]
        self.choices.append(KernelChoice(op.name, module_path(node), tokens, chosen, _spelled(refused), node.name, codes))

    def _ranked(self, op: Op) -> list[Kernel]:
        """The op's kernels in order of preference."""
        return sorted((kernel for kernel in op.kernels if kernel.provider in self.order),
                      key=lambda kernel: self.order.index(kernel.provider))

    def could_serve(self, node: Node) -> list[Kernel]:
        """The kernels that nothing but the number of tokens could keep from this node, up to one that takes any number."""
        found: list[Kernel] = []
        for kernel in self._ranked(_op(node)):
            if self._refuses(kernel, node, any_tokens=True) is None:
                found.append(kernel)
                if kernel.tokens == ALL_TOKENS:
                    break
        return found

    def _refuses(self, kernel: Kernel, node: Node, any_tokens: bool = False) -> Refusal | None:
        if self.layout is not None and kernel.layout is not None and kernel.layout != self.layout:
            return Refusal("layout", f"works on layout {kernel.layout!r}, the state is laid out {self.layout!r}")
        op = _op(node)
        if self.options.batch_invariant and _joins_rows(op) and kernel.provider != kernels.INVARIANT:
            return Refusal("option", "what it computes for a row depends on how many there are, and batch_invariant=True "
                           "forbids that")  # fmt: skip
        arguments, nodes = _arguments(kernel, node)
        for name in (name for names in kernel.prepare for name in names if nodes[name] is not None):
            if nodes[name].op != "placeholder":
                return Refusal("copy", f"it prepares `{name}` once, but here that is computed in the graph")
        if not self.eager and (reason := self._better_by_inductor(kernel)):
            return reason
        if self.options.rounding == "hf" and kernel.rounds == "once" and not op.rounds_once(arguments):
            return Refusal("option", "it rounds once, rounding='hf' asks for the model's own roundings")
        if reason := refusal(kernel, self.platform, arguments) or self._no_copies(kernel, nodes):
            return reason
        if not any_tokens and not self.tokens.within(kernel.tokens):
            return Refusal("tokens", f"is meant for {kernel.tokens} tokens")
        return None

    def _no_copies(self, kernel: Kernel, nodes: dict[str, Any]) -> Refusal | None:
        """Why the copies that this kernel wants of its weights cannot be kept, or None."""
        together = self.copied.copy()
        for names, prepare in kernel.prepare.items():
            for name in (name for name in names if nodes[name] is not None):
                if reason := self.weights.get(nodes[name].name, "nobody says whether it stays the same"):
                    return Refusal("copy", f"it keeps a copy of `{name}`: {reason}")
                together[nodes[name].name, prepare] = _nbytes(nodes[name])
        if kernel.prepare and self.platform.memory and sum(together.values()) > MOST_COPIED * self.platform.memory:
            return Refusal("copy", f"copies of weights would take {sum(together.values()) / 1e9:.1f} GB, more than "
                           f"{MOST_COPIED:.0%} of this machine's memory")  # fmt: skip
        return None

    def _promise_copies(self, kernel: Kernel, node: Node) -> None:
        _, nodes = _arguments(kernel, node)
        self.copied |= {(nodes[name].name, prepare): _nbytes(nodes[name]) for names, prepare in kernel.prepare.items()
                        for name in names if nodes[name] is not None}  # fmt: skip

    def _better_by_inductor(self, kernel: Kernel) -> Refusal | None:
        """Why Inductor's code for the meaning is preferred to this kernel, or None."""
        match kernel.prefer_inductor:
            case PreferInductor.MAX_AUTOTUNE if self.options.mode.startswith("max-autotune"):
                return Refusal("option", f"mode={self.options.mode!r} asks Inductor to time matrix products")
            case PreferInductor.FREE_ROUNDING if self.options.rounding == "hf":
                return None
            case PreferInductor.ALWAYS | PreferInductor.FREE_ROUNDING:
                return Refusal("slower", "its meaning is left to the glue compiler, which fuses it with its neighbours")
        return None


def _spelled(refused: Sequence[tuple[str, Refusal]]) -> list[tuple[str, str]]:
    return [(provider, reason.text) for provider, reason in refused]


def _nbytes(weight: Node) -> int:
    fake = weight.meta["val"]
    return math.prod(size for size in fake.shape if isinstance(size, int)) * int(fake.element_size())


def _joins_rows(op: Op) -> bool:
    """Whether its kernels cut their work by the number of rows."""
    return bool(op.kind & (Kind.LINEAR | Kind.ATTENTION))


def _op(node: Node) -> Op:
    op = op_of(node.target)
    assert op is not None
    return op


def _all_providers() -> list[str]:
    return list(dict.fromkeys(kernel.provider for op in REGISTRY.values() for kernel in op.kernels))


def _arguments(kernel: Kernel, node: Node) -> tuple[dict[str, Any], dict[str, Any]]:
    """The op's arguments by name: as fake tensors and numbers, and as nodes."""
    nodes = _op(node).bind(*node.args, **node.kwargs)
    fakes = {name: torch.fx.node.map_arg(given, lambda n: n.meta.get("val")) for name, given in nodes.items()}
    return fakes, nodes
