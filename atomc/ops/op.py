"""An op is its meaning in PyTorch: schema, shape rule and test truth are one function.

`@op(...)` registers the function as `torch.ops.atom.<name>`: the meaning is the reference kernel,
the fake kernel (unless a cheaper shape rule is given) and, when gradients are wanted, what runs
instead, so that autograd differentiates it. What else the compiler must know of an op is declared
there, too: no other module lists ops by name. Kernels that compute the same thing faster are added
with `@ops.<name>.kernel(provider, ...)`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

import torch
from torch import Tensor

from atomc.ops.op_cost import CostRule, read_and_write
from atomc.ops.op_traits import Kind, QuantizedWeight, StateBinding
from atomc.platform import Platform

_library = torch.library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Tokens:
    """The numbers of tokens from first to last, both included; without a last one, all from the
    first.

    Raises ValueError if there are no such numbers.
    """

    first: int = 1
    last: int | None = None

    def __post_init__(self) -> None:
        if self.first < 1 or (self.last is not None and self.last < self.first):
            raise ValueError(
                f"no numbers of tokens from {self.first} to {self.last}: expected 1 <= first "
                "<= last"
            )

    def __contains__(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number <= self.last)

    def __str__(self) -> str:
        """ "1", "2 to 8", "9 and more"."""
        if self.first == self.last:
            return str(self.first)
        return f"{self.first} and more" if self.last is None else f"{self.first} to {self.last}"

    @classmethod
    def of(cls, spelled: str) -> "Tokens":
        """What `str` of some Tokens spelled; "any" are all."""
        first, _, rest = spelled.partition(" ")
        if first == "any":
            return cls()
        if rest == "and more":
            return cls(int(first))
        return cls(int(first), int(rest.removeprefix("to ") or first))

    def within(self, others: "Tokens") -> bool:
        """Whether all of these are among the others."""
        return self.first in others and (
            others.last is None if self.last is None else self.last in others
        )


ALL_TOKENS = Tokens()


Code = Literal[
    "hardware",
    "library",
    "dtype",
    "shape",
    "layout",
    "argument",
    "option",
    "tokens",
    "slower",
    "copy",
    "other",
]


@dataclass(frozen=True)
class Refusal:
    """Why a kernel cannot or should not run an op: a code to decide by, and a sentence for the
    user.

    hardware   the device or its instructions
    library    a library is missing, broken or too old
    dtype, shape, layout   of a tensor; the layout is how it lies in memory, or how the state does
    argument   the value of an argument, or one that is given although it may be left out
    option     an option of the user forbids it
    tokens     it is meant for other numbers of tokens
    slower     another way to run the op is as fast or faster
    copy       the copy of a weight that it wants cannot be kept
    other      a sentence of a kernel that gives no code
    """

    code: Code
    text: str


@dataclass(frozen=True)
class Prepared:
    """What a kernel made of weights.

    replaces  the tensors hold all that the kernel reads, in memory of their own: the weights'
              memory may be freed by their owner if nothing else reads it (other kernels, a second
              program, a save). False: the weights must stay
    """

    tensors: tuple[Tensor, ...]
    replaces: bool = False


class PreferInductor(Enum):
    """When Inductor's code for the meaning is preferred to a kernel, wherever the glue is
    compiled.
    """

    NEVER = auto()
    ALWAYS = auto()  # it fuses the meaning with its neighbours
    FREE_ROUNDING = (
        auto()
    )  # the same, unless rounding="hf": fused code may keep fp32 where the model rounds
    MAX_AUTOTUNE = auto()  # mode="max-autotune" asks it to time several ways to compute it


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to run an op. `function` takes the op's arguments and returns what the meaning
    returns.

    refuses:   (platform, *args) -> Refusal, or None. The args are fake tensors and numbers. A
               sentence alone has the code "other".
    tokens:    the numbers of tokens for which the kernel is meant.
    layout:    the memory layout of the state it reads or writes (atomc.ops.state.LAYOUTS), None if
               it touches none.
    prepare:   names of parameters -> function(*weights) -> Prepared; the kernel then receives the
               prepared tensors as a tuple under the first name. Runs once, after selection; not at
               all where the first parameter is None.
    plan:      (step, spec) -> tuple of tensors, once a step into static buffers, before the layers
               run; the kernel receives it as `plan=`.
    workspace: (*args) -> bytes; the kernel receives a uint8 tensor of that size as `workspace=`.
    rounds:    "as meaning", or "once" if it keeps fp32 where the meaning rounds in between.
    syncs:     the host waits for the device inside, so that no CUDA graph can hold it.
    prefer_inductor:  when Inductor's code for the meaning is preferred.
    tuned_for: the GPU architectures on which its tile sizes were measured; None if there are none
               to choose.
    """

    op: str
    provider: str
    function: Callable[..., Any]
    refuses: Callable[..., Refusal | str | None] | None = None
    tokens: Tokens = ALL_TOKENS
    layout: str | None = None
    prepare: dict[tuple[str, ...], Callable[..., Prepared]] = field(default_factory=dict)
    plan: Callable[..., tuple[Tensor, ...]] | None = None
    workspace: Callable[..., int] | None = None
    rounds: str = "as meaning"
    syncs: bool = False
    prefer_inductor: PreferInductor = PreferInductor.NEVER
    tuned_for: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Extra:
    """A graph input that the traced program did not have; whoever calls the graph fills it.

    kind      "prepared": function(*weights) -> Prepared, once; "plan": function(step, spec), once a
              step
    weights   the names of the placeholders of the weights to prepare, None where there is none
    """

    kind: str
    name: str
    function: Callable[..., Any]
    weights: tuple[str | None, ...] = ()


# Several calls on one input, each as its arguments by name (tensors are fake ones), with the same
# optional ones given -> which parameters to pack, row behind row, so that one call returns all
# results side by side in the last dimension (the other arguments must be the same in all calls); or
# why that cannot be.
Concat = Callable[[Sequence[Mapping[str, Any]]], tuple[str, ...] | str]


# These kinds compute or move something else than one number per operand and result.
COST_DIFFERS = Kind.LINEAR | Kind.BMM | Kind.ATTENTION | Kind.LOOKUP | Kind.STATE_WRITE


class Op:
    """A registered op: call it like a function; `reference` is its meaning, the other attributes
    what `op` was given.
    """

    def __init__(
        self,
        meaning: Callable[..., Any],
        kind: Kind,
        rows: str | None,
        cost: CostRule | None,
        quantized_weight: QuantizedWeight | Mapping[str, QuantizedWeight] | None,
        rounds_once: Callable[[Mapping[str, Any]], bool] | None,
        mutates: Sequence[str],
        shape: Callable[..., Any] | None,
        concat: Concat | None,
        state: StateBinding | None,
    ):
        self.name = meaning.__name__
        self.reference = meaning
        self.kind, self.rows = kind, rows
        self.cost = cost or read_and_write
        self.quantized_weight = quantized_weight
        self.rounds_once = rounds_once or (lambda _: False)
        self.mutates = tuple(mutates)
        self.concat = concat
        self.state = state
        self.signature = inspect.signature(meaning)
        self.kernels: list[Kernel] = []
        self.__doc__ = meaning.__doc__
        self._check(cost)
        schema = torch.library.infer_schema(meaning, mutates_args=self.mutates)
        _library.define(self.name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        _library.impl(self.name, meaning, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"atom::{self.name}", shape or meaning, lib=_library)
        self.overload: torch._ops.OpOverload = getattr(torch.ops.atom, self.name).default

    def _check(self, cost: CostRule | None) -> None:
        """Raises ValueError for traits that are missing, or that name no parameter."""
        parameters = self.signature.parameters
        weight = self.quantized_weight
        weights = weight.values() if isinstance(weight, Mapping) else [weight] if weight else []
        named = {
            self.rows,
            self.state and self.state.handle,
            *(name for found in weights for name in found.stored),
        }
        unknown = named - {None, *parameters}
        if unknown:
            raise ValueError(
                f"op {self.name}: no parameter {sorted(map(str, unknown))}, it has "
                f"{list(parameters)}"
            )
        if cost is None and self.kind & COST_DIFFERS:
            raise ValueError(
                f"op {self.name}: give its cost=, which has no default for "
                f"{self.kind & COST_DIFFERS}"
            )
        if not weights and Kind.LINEAR in self.kind and "weight_scale" in parameters:
            raise ValueError(f"op {self.name}: say how its weight is stored (quantized_weight=)")

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    return self.reference(*args, **kwargs)
        return self.overload(*args, **kwargs)

    def handle(self, *args: Any, **kwargs: Any) -> Any:
        """The state handle of a call; None if it has none."""
        return (
            None
            if self.state is None
            else self.signature.bind(*args, **kwargs).arguments.get(self.state.handle)
        )

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a call by parameter, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def kernel(
        self,
        provider: str,
        *,
        refuses: Callable[..., Refusal | str | None] | None = None,
        tokens: Tokens = ALL_TOKENS,
        layout: str | None = None,
        prepare: Mapping[str | tuple[str, ...], Callable[..., Prepared]] | None = None,
        plan: Callable[..., tuple[Tensor, ...]] | None = None,
        workspace: Callable[..., int] | None = None,
        rounds: str = "as meaning",
        syncs: bool = False,
        prefer_inductor: PreferInductor = PreferInductor.NEVER,
        tuned_for: tuple[str, ...] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function as a way to run this op (see Kernel for the arguments).

        Raises ValueError if `prepare` names no parameter of the op or the same function is
        registered twice for one layout, TypeError if `tokens` are no Tokens.
        """
        if not isinstance(tokens, Tokens):
            raise TypeError(
                f"kernel of {self.name}: tokens is {tokens!r}, expected atomc.ops.Tokens(1, "
                "16) or the like"
            )
        preparing = {
            (names,) if isinstance(names, str) else names: made
            for names, made in (prepare or {}).items()
        }
        unknown = {name for names in preparing for name in names} - set(self.signature.parameters)
        if unknown:
            raise ValueError(
                f"kernel of {self.name}: prepare names {sorted(unknown)}, "
                f"the op has {list(self.signature.parameters)}"
            )

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if any(known.function is function and known.layout == layout for known in self.kernels):
                raise ValueError(
                    f"kernel {function.__module__}.{function.__qualname__} of {self.name} "
                    "is registered already"
                )
            self.kernels.append(
                Kernel(
                    self.name,
                    provider,
                    function,
                    refuses,
                    tokens,
                    layout,
                    preparing,
                    plan,
                    workspace,
                    rounds,
                    syncs,
                    prefer_inductor,
                    tuned_for,
                )
            )
            return function

        return register


REGISTRY: dict[str, Op] = {}


def op(
    *,
    kind: Kind,
    rows: str | None,
    cost: CostRule | None = None,
    quantized_weight: QuantizedWeight | Mapping[str, QuantizedWeight] | None = None,
    rounds_once: Callable[[Mapping[str, Any]], bool] | None = None,
    mutates: Sequence[str] = (),
    shape: Callable[..., Any] | None = None,
    concat: Concat | None = None,
    state: StateBinding | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Make an op of its meaning, the decorated function.

    kind      what it does; decides how it is treated wherever ops are not named
    rows      the parameter [..., K] whose leading dimensions are the tokens of the step, None if
              that is no parameter's
    cost      its bytes and flops; may be left out if it reads each operand and writes each result
              once
    quantized_weight  of a linear whose weight is stored in few bits; a mapping if the argument
                      `scheme` decides
    rounds_once  (arguments by name) -> whether the meaning rounds its result only; default: it
                 rounds in between
    mutates   the parameters written in place
    shape     replaces the meaning as the fake kernel, where the meaning depends on data or is slow
              on fake tensors
    concat    how several calls on one input become one (see Concat)
    state     how it is bound for the runtime, if it takes a state handle (see StateBinding)

    Raises ValueError if a trait that this kind needs is missing, or a trait names a parameter that
    the op does not have.
    """

    def register(meaning: Callable[..., Any]) -> Op:
        made = Op(
            meaning, kind, rows, cost, quantized_weight, rounds_once, mutates, shape, concat, state
        )
        REGISTRY[made.name] = made
        return made

    return register


def register_kernel(
    op_name: str, provider: str, **protocol: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Public way to add a kernel from outside: `@atomc.register_kernel("rms_norm", "mine",
    refuses=...)`.

    Raises ValueError for an unknown op.
    """
    if op_name not in REGISTRY:
        raise ValueError(f"no op {op_name!r}; ops are {sorted(REGISTRY)}")
    return REGISTRY[op_name].kernel(provider, **protocol)


def op_of(target: object) -> Op | None:
    """The Op behind a graph node's target, or None."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "atom":
        return REGISTRY.get(target._schema.name.removeprefix("atom::"))
    return None


def refusal(kernel: Kernel, platform: Platform, arguments: dict[str, Any]) -> Refusal | None:
    """Why this kernel cannot serve these arguments on this platform, or None."""
    found = kernel.refuses(platform, **arguments) if kernel.refuses else None
    return Refusal("other", found) if isinstance(found, str) else found
