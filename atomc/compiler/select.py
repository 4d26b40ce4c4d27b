"""Selects the layout of the state and a kernel per op, and records the reason of every refusal."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch.fx import Node
from torch.fx.node import Argument

from atomc import kernels
from atomc.compiler.weight_forms import WeightForms
from atomc.errors import OptionsError, suggestion
from atomc.graph.node_record import origins_of, record_of
from atomc.graph.op_call import arguments_of, called_op
from atomc.graph.provenance import module_path
from atomc.ops.op import (
    REGISTRY,
    Kernel,
    Op,
    PreferInductor,
    Refusal,
    op_of,
    refusal,
)
from atomc.ops.op_traits import Kind
from atomc.ops.state import LAYOUTS
from atomc.options import Options
from atomc.platform import Platform
from atomc.report.records import INLINE, KernelChoice
from atomc.token_range import ALL_TOKENS, Tokens

Arguments = Mapping[str, Argument]


class Selection:
    """Kernel choice for the nodes of one graph and one range of token counts.

    eager    ops without a kernel run eagerly; otherwise Inductor compiles their references
    weights  input -> why a kernel cannot have a form of its own of it, or None
    forms    the forms of weights that are held; None: any
    unfit    (kernel, name of a node) -> why it cannot run it for any number of tokens, as far as it
             is known: the same for all ranges whose graphs are equal
    common   names of the nodes that the graphs of all ranges have; None: of all nodes
    """

    def __init__(
        self,
        options: Options,
        platform: Platform,
        *,
        eager: bool,
        layout: str | None = None,
        tokens: Tokens = ALL_TOKENS,
        weights: Mapping[str, str | None] | None = None,
        forms: WeightForms | None = None,
        unfit: dict[tuple[Kernel, str], Refusal | None] | None = None,
        common: Collection[str] | None = None,
    ):
        self.options, self.platform, self.eager = (
            options,
            replace(platform, asked=options.providers),
            eager,
        )
        self.layout, self.tokens = layout, tokens
        self.weights = weights or {}
        self.forms = WeightForms(platform) if forms is None else forms
        self.unfit = {} if unfit is None else unfit
        self.common = common
        self.choices: list[KernelChoice] = []
        self.syncing: list[str] = []  # kernels that no CUDA graph can hold
        self.absent: dict[str, Refusal] = {}
        self.order: list[str] = []
        check_providers(options.providers)
        missing = kernels.missing(options)
        for provider in kernels.providers_of(options):
            if provider in missing:
                self.absent[provider] = Refusal("library", missing[provider])
            else:
                self.order.append(provider)
        if not options.providers:
            # Kernels registered from outside come first.
            ours = (*kernels.PROVIDERS, kernels.INVARIANT)
            self.order = [name for name in _all_providers() if name not in ours] + self.order

    def fix_layout(self, graph_nodes: list[Node]) -> str | None:
        """Choose the layout in which all readers and writers of state in the graph have kernels; of
        several the one that the kernels of the first reader prefer.

        An audit compares with references, so that its layout is one that they read.
        """
        users = [
            node
            for node in graph_nodes
            if (op := op_of(node.target)) and any(k.layout for k in op.kernels)
        ]
        if not users:
            return None
        users.sort(
            key=lambda node: bool(called_op(node).mutates)
        )  # readers first: they take most time
        supported = [self._layouts(node) for node in users]
        candidates = list(dict.fromkeys(chain.from_iterable(supported)))
        for layout in filter(self._may_have, candidates):
            if all(layout in of_node for of_node in supported):
                self.layout = layout
                return layout
        raise self._without_layout(candidates)

    def _may_have(self, layout: str) -> bool:
        if self.options.layout is not None:
            return layout == self.options.layout
        return not (self.options.audit and _is_shuffled(layout))

    def _without_layout(self, candidates: list[str]) -> Exception:
        where = self.platform.name
        if self.options.layout is not None:
            return OptionsError(
                f"option layout={self.options.layout!r}: no kernel reads and writes it on "
                f"{where}; available layouts are {candidates}"
            )
        if self.options.batch_invariant:
            return OptionsError(
                f"option batch_invariant=True: no such kernel reads and writes state on {where}"
            )
        return ValueError(f"no state layout of {candidates} has a reader and a writer on {where}")

    def _layouts(self, node: Node) -> list[str]:
        """The layouts of state that kernels for this node support, in order of preference."""
        layouts = (
            kernel.layout
            for kernel in self._ranked(called_op(node))
            if kernel.layout and not self._refuses(kernel, node)
        )
        return list(dict.fromkeys(layouts))

    def choose(self, node: Node) -> Kernel | None:
        """The kernel for this node, None for the op's reference. Records the choice and all
        refusals.
        """
        op = called_op(node)
        refused = list(self.absent.items())
        for kernel in self._ranked(op):
            reason = self._refuses(kernel, node)
            if reason is None:
                self._remember(op, node, kernel.provider, refused, self._note(kernel))
                if kernel.syncs:
                    self.syncing.append(f"{kernel.provider} {op.name}")
                return kernel
            if (kernel.provider, reason) not in refused:
                refused.append((kernel.provider, reason))
        if self.options.batch_invariant and _joins_rows(op):
            raise OptionsError(
                f"option batch_invariant=True: no such kernel serves {op.name} on "
                f"{self.platform.name}: "
                f"{_spelled(refused)}"
            )
        if op.mutates or (
            _is_shuffled(self.layout) and any(kernel.layout for kernel in op.kernels)
        ):
            raise ValueError(
                f"{op.name}: no kernel serves it on {self.platform.name}: {_spelled(refused)}"
            )
        self._remember(op, node, INLINE, refused)
        return None

    def _remember(
        self,
        op: Op,
        node: Node,
        chosen: str,
        refused: list[tuple[str, Refusal]],
        note: str = "",
    ) -> None:
        tokens = "any" if self.tokens == ALL_TOKENS else str(self.tokens)
        codes: list[str] = [reason.code for _, reason in refused]
        self.choices.append(
            KernelChoice(
                op.name,
                module_path(node),
                tokens,
                chosen,
                _spelled(refused),
                node.name,
                codes,
                note,
                [] if self.common is None or node.name in self.common else sorted(origins_of(node)),
            )
        )

    def _note(self, kernel: Kernel) -> str:
        measured = kernel.tuned_for is None or self.platform.arch in kernel.tuned_for
        return "; ".join(
            filter(None, (kernel.note, "" if measured else "tiles not measured on this GPU"))
        )

    def _ranked(self, op: Op) -> list[Kernel]:
        """The op's kernels in order of preference."""
        return sorted(
            (kernel for kernel in op.kernels if kernel.provider in self.order),
            key=lambda kernel: self.order.index(kernel.provider),
        )

    def first(self, node: Node) -> Kernel | None:
        """The kernel that `choose` would return now; nothing is recorded."""
        return next((k for k in self._ranked(called_op(node)) if not self._refuses(k, node)), None)

    def could_serve(self, node: Node) -> list[Tokens]:
        """The numbers of tokens of the kernels that refuse this node at most for its number of
        tokens, up to the first for any number.
        """
        ranges: list[Tokens] = []
        for kernel in self._ranked(called_op(node)):
            if self._refuses(kernel, node, any_tokens=True) is None:
                ranges.append(self._tokens_for(kernel, node))
                if ranges[-1] == ALL_TOKENS:
                    break
        return ranges

    def _tokens_for(self, kernel: Kernel, node: Node) -> Tokens:
        """The numbers of tokens that a kernel which does not refuse this node is for."""
        if kernel.limit is None:
            return kernel.tokens
        return kernel.tokens_for(self.platform, _arguments(kernel, node)[0])

    def _refuses(self, kernel: Kernel, node: Node, any_tokens: bool = False) -> Refusal | None:
        """Why this kernel cannot run this node: the first reason below, or None."""
        op = called_op(node)
        if reason := self._other_layout(kernel) or self._batch_dependent(kernel, op):
            return reason
        if (kernel, node.name) not in self.unfit:
            self.unfit[kernel, node.name] = self._unfit(kernel, node)
        return (
            self.unfit[kernel, node.name]
            or self.forms.refuses(kernel, node)
            or self._other_half(kernel, node)
            or (None if any_tokens else self._other_tokens(kernel, node))
        )

    def _other_half(self, kernel: Kernel, node: Node) -> Refusal | None:
        """Unless the provider of this kernel serves the other half of an exchange, too."""
        op = called_op(node)
        if Kind.COLLECTIVE not in op.kind:
            return None
        if op.half_of is not None:
            first = _first_half(node)
            # Lowered before this node, or still a call of its op.
            provider = record_of(first).kernel
            if op_of(first.target) and (served := self.first(first)):
                provider = served.provider
            if provider == kernel.provider:
                return None
            return Refusal(
                "other", f"it does not serve the other half of the exchange, {first.name}"
            )
        for second in _second_halves(node):
            kernels_of_provider = (
                other
                for other in self._ranked(called_op(second))
                if other.provider == kernel.provider
            )
            reasons = [self._unfit(other, second) for other in kernels_of_provider]
            if None not in reasons:
                texts = [reason.text for reason in reasons if reason is not None]
                return Refusal("other", "; ".join([f"it has no {called_op(second).name}", *texts]))
        return None

    def _unfit(self, kernel: Kernel, node: Node) -> Refusal | None:
        """Why this kernel cannot run this node for any number of tokens, or None."""
        arguments, nodes = _arguments(kernel, node)
        return (
            _computed_weight(kernel, nodes)
            or self._better_by_inductor(kernel)
            or self._other_rounding(kernel, called_op(node), arguments)
            or refusal(kernel, self.platform, arguments)
            or self._unpreparable(kernel, nodes)
        )

    def _other_layout(self, kernel: Kernel) -> Refusal | None:
        if self.layout is None or kernel.layout in (None, self.layout):
            return None
        return Refusal(
            "layout", f"supports layout {kernel.layout!r}, the state has layout {self.layout!r}"
        )

    def _batch_dependent(self, kernel: Kernel, op: Op) -> Refusal | None:
        if (
            not self.options.batch_invariant
            or not _joins_rows(op)
            or kernel.provider == kernels.INVARIANT
        ):
            return None
        return Refusal(
            "option",
            "its result for a row depends on the number of rows, which batch_invariant=True "
            "forbids",
        )

    def _other_rounding(self, kernel: Kernel, op: Op, arguments: Arguments) -> Refusal | None:
        if self.options.rounding != "hf" or kernel.rounds != "once" or op.rounds_once(arguments):
            return None
        return Refusal("option", "it rounds once, rounding='hf' asks for the model's own roundings")

    def _other_tokens(self, kernel: Kernel, node: Node) -> Refusal | None:
        meant = self._tokens_for(kernel, node)
        if self.tokens.within(meant):
            return None
        return Refusal("tokens", f"is meant for {meant} tokens")

    def _unpreparable(self, kernel: Kernel, nodes: Arguments) -> Refusal | None:
        """Why the weights that this kernel prepares cannot be prepared once, or None."""
        for name, weight in _prepared(kernel, nodes):
            if reason := self.weights.get(weight.name, "it is not known to be constant"):
                return Refusal("copy", f"it keeps a copy of `{name}`: {reason}")
        return None

    def _better_by_inductor(self, kernel: Kernel) -> Refusal | None:
        """Why Inductor's code for the reference is preferred to this kernel, or None."""
        if self.eager:
            return None
        match kernel.prefer_inductor:
            case PreferInductor.MAX_AUTOTUNE if self.options.mode.startswith("max-autotune"):
                return Refusal(
                    "option", f"mode={self.options.mode!r} asks Inductor to time matrix products"
                )
            case PreferInductor.FREE_ROUNDING if self.options.rounding == "hf":
                return None
            case PreferInductor.ALWAYS | PreferInductor.FREE_ROUNDING:
                return Refusal(
                    "slower",
                    "Inductor compiles its reference, which it can fuse with other ops",
                )
        return None


def _first_half(node: Node) -> Node:
    """The call whose result this second half of an exchange gets."""
    half_of = called_op(node).half_of
    assert half_of is not None
    result = arguments_of(node)[half_of]
    assert isinstance(result, Node)
    [first] = result.all_input_nodes
    return first


def _second_halves(node: Node) -> list[Node]:
    """The calls that get a result of this one as the first half of an exchange."""
    readers = [reader for result in node.users for reader in result.users]
    return [
        reader
        for reader in dict.fromkeys(readers)
        if (op := op_of(reader.target)) and op.half_of and _first_half(reader) is node
    ]


def _is_shuffled(layout: str | None) -> bool:
    """Whether the references of ops cannot read the state."""
    return layout in LAYOUTS and LAYOUTS[layout].shuffled


def _spelled(refused: Sequence[tuple[str, Refusal]]) -> list[tuple[str, str]]:
    return [(provider, reason.text) for provider, reason in refused]


def _prepared(kernel: Kernel, nodes: Arguments) -> Iterator[tuple[str, Node]]:
    """The weights that the kernel prepares: (argument, node)."""
    for names in kernel.prepares:
        for name in names:
            if isinstance(weight := nodes[name], Node):
                yield name, weight


def _computed_weight(kernel: Kernel, nodes: Arguments) -> Refusal | None:
    for name, weight in _prepared(kernel, nodes):
        if weight.op != "placeholder":
            return Refusal(
                "copy", f"it prepares `{name}` once, but the graph computes it in each call"
            )
    return None


def _joins_rows(op: Op) -> bool:
    """Whether the work split of its kernels depends on the number of rows."""
    return bool(op.kind & (Kind.LINEAR | Kind.BMM | Kind.ATTENTION | Kind.EXPERTS))


def check_providers(providers: Sequence[str]) -> None:
    """Raise OptionsError for a name of the option providers that is none."""
    for provider in providers:
        if (
            provider not in (*kernels.PROVIDERS, kernels.INVARIANT)
            and provider not in _all_providers()
        ):
            raise OptionsError(
                f"option providers: no provider {provider!r}"
                f"{suggestion(provider, kernels.PROVIDERS)}; providers are "
                f"{', '.join(kernels.PROVIDERS)}"
            )


def _all_providers() -> list[str]:
    return list(dict.fromkeys(kernel.provider for op in REGISTRY.values() for kernel in op.kernels))


def _arguments(kernel: Kernel, node: Node) -> tuple[dict[str, Argument], Arguments]:
    """The op's arguments by name: as fake tensors and numbers, and as nodes."""
    nodes = arguments_of(node)
    fakes = {
        name: torch.fx.node.map_arg(argument, lambda n: n.meta.get("val"))
        for name, argument in nodes.items()
    }
    return fakes, nodes
