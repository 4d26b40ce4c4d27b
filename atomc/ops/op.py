"""An op is defined by its reference, a function in PyTorch that gives schema, shapes and results.

`@op(...)` registers the function as `torch.ops.atom.<name>`. The reference is the default kernel,
the fake kernel (unless a cheaper shape function is given), and what runs while gradients are
recorded, so that autograd differentiates it. All other properties that the compiler uses are
declared there, too: no other module lists ops by name. Faster kernels are registered with
`@ops.<name>.kernel(provider, ...)`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum, auto
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from atomc.ops.by_name import call_by_name, signature_of, with_signature
from atomc.ops.op_cost import CostRule, SentRule, read_and_write
from atomc.ops.op_traits import Arguments, Kind, QuantizedWeight, StateBinding
from atomc.platform import Platform
from atomc.token_range import ALL_TOKENS, Tokens
from atomc.torch_compat.core import derivatives_recorded, redispatch_below_autograd

P = ParamSpec("P")
Fields = ParamSpec("Fields")  # the arguments of a decorator
Results = Tensor | tuple[Tensor, ...]
R = TypeVar("R", bound=Results, covariant=True)
T = TypeVar("T")
# A number, a name or a dtype that an op is called with.
Attribute = int | str | torch.dtype | None

_library = torch.library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]


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
    """Why a kernel cannot or should not run an op: a code for the compiler, and a sentence for the
    user.

    hardware   the device or its instructions
    library    a library is missing, broken or too old
    dtype, shape, layout   of a tensor; layout: its strides, or the memory layout of the state
    argument   the value of an argument, or an optional argument that the kernel does not support
    option     an option of the user excludes it
    tokens     the kernel is for other numbers of tokens
    slower     another way to run the op is as fast or faster
    copy       the prepared weight that the kernel needs cannot be kept
    other      a refusal without a code
    """

    code: Code
    text: str


@dataclass(frozen=True)
class Prepared:
    """What a kernel computed from weights, and reads instead of them."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Shared:
    """What a kernel computes from arguments that the calls of several layers have in common.

    function   (*inputs, *constants) -> tensors
    inputs     names of parameters of the op
    constants  of the kernel's arguments that it declares, as fake tensors -> numbers and dtypes
    """

    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    constants: Callable[..., tuple[int | torch.dtype, ...]]

    def of(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """What the kernel receives in a call with these arguments, by name."""
        constants = call_by_name(self.constants, **arguments)
        return self.function(*(arguments[name] for name in self.inputs), *constants)


class PreferInductor(Enum):
    """When Inductor's code for the reference is preferred to a kernel, if the glue is compiled."""

    NEVER = auto()
    ALWAYS = auto()  # Inductor fuses the reference with its neighbours
    # ALWAYS, except for rounding="hf": fused code may keep fp32 where the model rounds.
    FREE_ROUNDING = auto()
    MAX_AUTOTUNE = auto()  # with mode="max-autotune", where Inductor times several templates


@dataclass(frozen=True, eq=False)
class Kernel:
    """An implementation of an op. The fields after `function` are the arguments of `Op.kernel`.

    Raises TypeError if `tokens` are no Tokens.
    """

    op: str
    provider: str
    # With the arguments and results of the reference, of which it declares what it reads.
    function: Callable[..., Results]
    _: KW_ONLY
    # Of the platform and the arguments, by name, what it declares (tensors are fake) -> why it
    # cannot run; a sentence alone has the code "other".
    refuses: Callable[..., Refusal | str | None] | None = None
    # The numbers of tokens that it is for; `limit` of (platform, arguments by name) is the largest
    # of them that it is for with such arguments.
    tokens: Tokens = ALL_TOKENS
    limit: Callable[..., int] | None = None
    # Of the state it reads or writes (atomc.ops.state.LAYOUTS); None: it uses no state.
    layout: str | None = None
    # A parameter, or several -> function(*weights) -> Prepared. The kernel then receives the
    # prepared tensors as a tuple for the first name. Runs once, after selection, and not if the
    # first parameter is None.
    prepare: Mapping[str | tuple[str, ...], Callable[..., Prepared]] = field(default_factory=dict)
    # The parameters, no tensors, that the functions of `prepare` take as well, by name.
    attributes: tuple[str, ...] = ()
    # The prepared tensors share memory with the weights, of which the kernel's library keeps a form
    # of its own. False: the weights may be freed if nothing else reads them.
    keeps_original: bool = False
    # (step, spec) -> tensors, computed once per step into static buffers, before the layers run;
    # the kernel receives them as `plan=`.
    plan: Callable[..., tuple[Tensor, ...]] | None = None
    # (arguments by name) -> bytes; the kernel receives a uint8 tensor of that size as `workspace=`.
    workspace: Callable[..., int] | None = None
    # What is computed once for all calls with equal inputs and constants, in the graph, before the
    # first of them; the kernel receives it as `shared=`.
    shared: Shared | None = None
    # "as meaning": like the reference; "once": in fp32 where the reference rounds in between.
    rounds: str = "as meaning"
    # The host waits for the device, so that it cannot be captured in a CUDA graph.
    syncs: bool = False
    prefer_inductor: PreferInductor = PreferInductor.NEVER
    # The GPU architectures on which its tile sizes were measured; None if there are none to choose.
    tuned_for: tuple[str, ...] | None = None
    # What the report says of it beside its provider.
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tokens):
            raise TypeError(
                f"kernel of {self.op}: tokens is {self.tokens!r}, expected atomc.ops.Tokens(1, "
                "16) or the like"
            )

    @property
    def prepares(self) -> dict[tuple[str, ...], Callable[..., Prepared]]:
        """`prepare` by tuples of parameters."""
        return {
            (names,) if isinstance(names, str) else names: function
            for names, function in self.prepare.items()
        }

    def tokens_for(self, platform: Platform, arguments: Arguments) -> Tokens:
        """The numbers of tokens that it is for, with arguments that it does not refuse."""
        if self.limit is None:
            return self.tokens
        most = call_by_name(self.limit, platform=platform, **arguments)
        return Tokens(self.tokens.first, most)

    def prepared(self, arguments: Arguments) -> dict[str, tuple[Tensor, ...]]:
        """The prepared weights that the kernel receives in the place of some of these arguments."""
        attributes = {name: arguments[name] for name in self.attributes if name in arguments}
        return {
            names[0]: prepare(*map(arguments.get, names), **attributes).tensors
            for names, prepare in self.prepares.items()
            if arguments.get(names[0]) is not None
        }


@dataclass(frozen=True)
class Extra:
    """A graph input that the traced program does not have; the caller of the graph passes it.

    kind      "prepared": function(*weights, **attributes) -> Prepared, once; "plan": function(step,
              spec), once per step
    weights   the names of the placeholders of the weights to prepare; None for an absent one
    attributes      (name, value) of those that the function takes
    bytes     of the prepared tensors; None: about those of the weights
    keeps_original  as in Kernel
    """

    kind: str
    name: str
    function: Callable[..., Any]
    weights: tuple[str | None, ...] = ()
    attributes: tuple[tuple[str, Attribute], ...] = ()
    bytes: int | None = None
    keeps_original: bool = False


# Several calls with the same input and the same optional arguments, as arguments by name (tensors
# are fake ones) -> the parameters to concatenate along rows, so that one call returns all results
# concatenated in the last dimension (the other arguments must be equal in all calls); or the reason
# why they cannot be merged.
Concat = Callable[[Sequence[Arguments]], tuple[str, ...] | str]


def _kernel_decorator(
    create: Callable[Concatenate[str, str, Callable[..., Results], Fields], Kernel],
) -> Callable[
    Concatenate["OpFunction[P, R]", str, Fields], Callable[[Callable[..., R]], Callable[P, R]]
]:
    def kernel(
        op: "OpFunction[P, R]", provider: str, /, *args: Fields.args, **fields: Fields.kwargs
    ) -> Callable[[Callable[..., R]], Callable[P, R]]:
        """Register the decorated function as a kernel of this op, with the fields of Kernel.

        Raises ValueError if `prepare`, `attributes` or the function name no parameter of the op, or
        the same function is registered twice for one layout, TypeError if `tokens` are no Tokens.
        """

        # Checked before there is a function: the reference holds its place.
        described = create(op.name, provider, op.reference, *args, **fields)
        op._check_names(described)

        def register(function: Callable[..., R]) -> Callable[P, R]:
            called = with_signature(function, _with_extras(op.signature, described))
            op._add(replace(described, function=called))
            return called

        return register

    return kernel


def _with_extras(signature: inspect.Signature, kernel: Kernel) -> inspect.Signature:
    """The signature of an op, and what its kernel receives besides."""
    extras = [x for x in ("plan", "workspace", "shared") if getattr(kernel, x) is not None]
    added = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in extras]
    return signature.replace(parameters=[*signature.parameters.values(), *added])


# Kinds whose cost is not that of one operation per element.
COST_DIFFERS = (
    Kind.LINEAR | Kind.BMM | Kind.ATTENTION | Kind.LOOKUP | Kind.STATE_WRITE | Kind.EXPERTS
)


@dataclass(frozen=True, eq=False, repr=False)
class Op:
    """A registered op as the compiler sees it. The fields after `reference` are the arguments of
    `op`.

    Raises ValueError if a trait that its kind requires is missing, or a trait names a parameter
    that the op does not have.
    """

    # Its definition in PyTorch.
    reference: Callable[..., Results]
    _: KW_ONLY
    # What it computes; passes and kernel selection decide by it.
    kind: Kind
    # The parameter [..., K] whose leading dimensions are the tokens of the step; None if no
    # parameter has them.
    rows: str | None
    # Its bytes and FLOPs; default: each operand is read and each result written once.
    cost: CostRule = read_and_write
    # Of a linear whose weight is quantized; a mapping if it depends on the argument `scheme`.
    quantized_weight: QuantizedWeight | Mapping[str, QuantizedWeight] | None = None
    # (arguments by name) -> whether the reference rounds only its result; default: it also rounds
    # intermediate results.
    rounds_once: Callable[[Arguments], bool] = lambda arguments: False
    # The parameters written in place.
    mutates: tuple[str, ...] = ()
    # The fake kernel of the arguments that it declares, if the reference depends on data or is slow
    # on fake tensors.
    shape: Callable[..., Results] | None = None
    # How several calls with one input become one.
    concat: Concat | None = None
    # How it is bound for the runtime, if it takes a state handle.
    state: StateBinding | None = None
    # Of experts: (arguments by name) -> the op that multiplies as each of them does.
    linear: "Callable[[Arguments], Op] | None" = None
    # Of collectives: the bytes that each process sends.
    sent: SentRule | None = None
    # The parameter that gets a result of another op: the two are halves of one exchange, so that
    # one provider serves both.
    half_of: str | None = None
    name: str = field(init=False)
    signature: inspect.Signature = field(init=False)
    overload: torch._ops.OpOverload = field(init=False)
    kernels: list[Kernel] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        name, signature = self.reference.__name__, signature_of(self.reference)
        reference = with_signature(self.reference, signature)
        vars(self).update(
            name=name, signature=signature, reference=reference, __doc__=reference.__doc__
        )
        self._check()
        schema = torch.library.infer_schema(reference, mutates_args=self.mutates)
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        _library.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        _library.impl(name, self._differentiated, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        _library.impl(name, reference, "FuncTorchBatched")  # type: ignore[no-untyped-call]
        shape = with_signature(self.shape or reference, signature)
        torch.library.register_fake(f"atom::{name}", shape, lib=_library)
        vars(self).update(overload=getattr(torch.ops.atom, name).default)

    def _differentiated(
        self, keys: torch._C.DispatchKeySet, *args: object, **kwargs: object
    ) -> Results:
        """The reference while derivatives are recorded, so that they are its own; else the op."""
        if derivatives_recorded((*args, *kwargs.values())):
            return self.reference(*args, **kwargs)
        results: Results = redispatch_below_autograd(self.overload, keys, args, kwargs)
        return results

    def _check(self) -> None:
        """Raises ValueError for a missing trait, or one that names an unknown parameter."""
        parameters = self.signature.parameters
        weight = self.quantized_weight
        weights = weight.values() if isinstance(weight, Mapping) else [weight] if weight else []
        named = {
            self.rows,
            self.half_of,
            self.state and self.state.handle,
            *(name for stored_weight in weights for name in stored_weight.stored),
        }
        unknown = named - {None, *parameters}
        if unknown:
            raise ValueError(
                f"op {self.name}: no parameter {sorted(map(str, unknown))}, it has "
                f"{list(parameters)}"
            )
        costly = self.kind & COST_DIFFERS
        quantized = Kind.LINEAR in self.kind and "weight_scale" in parameters
        for is_missing, text in (
            (
                self.cost is read_and_write and costly,
                f"give its cost=, which has no default for {costly}",
            ),
            (
                self.linear is None and Kind.EXPERTS in self.kind,
                "say which linear each expert is (linear=)",
            ),
            (
                self.sent is None and Kind.COLLECTIVE in self.kind,
                "say how many bytes a process sends (sent=)",
            ),
            (quantized and not weights, "say how its weight is stored (quantized_weight=)"),
        ):
            if is_missing:
                raise ValueError(f"op {self.name}: {text}")

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def handle(self, *args: T, **kwargs: T) -> T | None:
        """The state handle of a call, or None."""
        return (
            None
            if self.state is None
            else self.signature.bind(*args, **kwargs).arguments.get(self.state.handle)
        )

    def bind(self, *args: T, **kwargs: T) -> dict[str, T]:
        """The arguments of a call by parameter, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def weight_of(self, arguments: Arguments) -> QuantizedWeight | None:
        """How a call with these arguments, by name, stores its weight; None: not quantized."""
        declared = self.quantized_weight
        if isinstance(declared, Mapping):
            return declared[arguments["scheme"]]
        return declared

    def _check_names(self, kernel: Kernel) -> None:
        named = {*kernel.attributes, *(name for names in kernel.prepares for name in names)}
        if unknown := named - set(self.signature.parameters):
            raise ValueError(
                f"kernel of {self.name}: prepare names {sorted(unknown)}, "
                f"the op has {list(self.signature.parameters)}"
            )

    def _add(self, kernel: Kernel) -> None:
        function = inspect.unwrap(kernel.function)
        same = (x for x in self.kernels if inspect.unwrap(x.function) is function)
        if any(other.layout == kernel.layout for other in same):
            raise ValueError(
                f"kernel {function.__module__}.{function.__qualname__} of {self.name} "
                "is registered already"
            )
        self.kernels.append(kernel)


class OpFunction(Op, Generic[P, R]):
    """An op as its callers see it: a function with the signature of its reference."""

    reference: Callable[P, R]
    kernel = _kernel_decorator(Kernel)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.overload(*args, **kwargs)
        return result


REGISTRY: dict[str, OpFunction[..., Results]] = {}


def _op_decorator(
    create: Callable[Concatenate[Callable[..., Results], Fields], Op],
) -> Callable[Fields, Callable[[Callable[P, R]], OpFunction[P, R]]]:
    def op(
        *args: Fields.args, **fields: Fields.kwargs
    ) -> Callable[[Callable[P, R]], OpFunction[P, R]]:
        """Define an op by its reference, the decorated function, and the fields of Op."""

        def define(reference: Callable[P, R]) -> OpFunction[P, R]:
            defined = cast(OpFunction[P, R], create(reference, *args, **fields))
            REGISTRY[defined.name] = defined
            return defined

        return define

    return op


op = _op_decorator(OpFunction)


def register_kernel(
    op_name: str, provider: str, **protocol: Any
) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Register a kernel from another package: `@atomc.register_kernel("rms_norm", "mine",
    refuses=...)`. protocol: the arguments of `Op.kernel`.

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


def refusal(kernel: Kernel, platform: Platform, arguments: Arguments) -> Refusal | None:
    """Why this kernel cannot run with these arguments on this platform, or None. The op's defaults
    stand for arguments that are not given.
    """
    bound = REGISTRY[kernel.op].bind(**arguments)
    reason = kernel.refuses and call_by_name(kernel.refuses, platform=platform, **bound)
    return Refusal("other", reason) if isinstance(reason, str) else reason
