"""Derivatives and batches of ops by torch.func, and grad mode that a compiled function switches."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CASES
from kernel_cases.draw import Draw
from rewriting import since
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap
from torch.testing import assert_close

import atomc
from atomc import ops
from atomc.capture import functional
from atomc.ops.op_traits import Kind

EAGER = {"glue": "eager"}
X, W = torch.randn(3, 8), torch.randn(8, 8)
SPELLINGS = {
    "linear": lambda x: F.linear(x, W),
    "rms_norm": lambda x: F.rms_norm(x, (8,), W[0], 1e-5),
    "layer_norm": lambda x: F.layer_norm(x, (8,), W[0], W[1]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "silu_and_mul": lambda x: F.silu(x) * (x @ W),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2]), x),
}
TRANSFORMS = {
    "grad": lambda f: grad(lambda x: f(x).pow(2).sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones_like(f(x)))[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda f: jacrev(f),
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, x.cos()])),
    "vmap of grad": lambda f: lambda x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, -x])),
    "grad twice": lambda f: grad(lambda x: grad(lambda y: f(y).pow(3).sum())(x).sum()),
}


# Dynamo and AOTAutograd of torch 2.13 fail on these with each backend.
BROKEN_IN_TORCH = {("layer_norm", "jvp"), ("layer_norm", "jacrev")}


@pytest.mark.rotating(each_case=3)
@pytest.mark.parametrize(
    ("spelling", "transform"),
    [
        (spelling, transform)
        for spelling in SPELLINGS
        for transform in TRANSFORMS
        if (spelling, transform) not in BROKEN_IN_TORCH
    ],
)
def test_transforms_of_a_compiled_function_are_those_of_eager(spelling, transform):
    function = TRANSFORMS[transform](SPELLINGS[spelling])
    try:
        expected = function(X)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"eager of torch {torch.__version__} cannot: {error!s:.80}")
    compiled = torch.compile(function, backend="atom", options=EAGER)
    assert_close(compiled(X), expected)


def inputs(op):
    """The arguments of the first case, and the names of those that may have derivatives."""
    arguments = next(iter(CASES[op.name].values()))(Draw(torch.float32))
    floats = [
        name
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel()
    ]
    return arguments, floats


def loss(function, arguments):
    results = function(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    return sum(result.sum() for result in results if result.is_floating_point())


PURE = [
    name
    for name, op in ops.REGISTRY.items()
    if not op.mutates and not op.kind & (Kind.COLLECTIVE | Kind.QUANTIZE)
]


@pytest.mark.parametrize("name", PURE)
def test_a_gradient_by_torch_func_is_that_of_the_reference(name):
    op = ops.REGISTRY[name]
    arguments, floats = inputs(op)
    if not floats:
        pytest.skip("no argument has derivatives")
    first = arguments.pop(floats[0])

    def gradient(function):
        try:
            return grad(lambda x: loss(function, {**arguments, floats[0]: x}))(first)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
            return type(error)

    expected, actual = gradient(op.reference), gradient(op)
    if isinstance(expected, type):
        assert actual is expected
    else:
        assert_close(actual, expected)


def test_a_failed_transform_leaves_eager_as_it_was():
    def fails(x):
        return jvp(lambda x: F.linear(x, W).nonexistent(), (x,), (x,))

    with pytest.raises(Exception, match="nonexistent"):
        torch.compile(fails, backend="atom", options=EAGER)(X)
    assert_close(jvp(torch.sin, (X,), (X,))[1], X.cos() * X)
    assert_close(grad(lambda x: x.sin().sum())(X), X.cos())


# Each enters modes, and then calls an op that fails in the trace of atomc.
ENTERED = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,))[1],
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vmap": lambda f: vmap(f),
    "no_grad": lambda f: torch.no_grad()(f),
    "inference_mode": lambda f: torch.inference_mode()(f),
    "autocast": lambda f: torch.autocast("cpu")(f),
}


def modes():
    return (
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch._C._functorch.get_inplace_requires_grad_allowed(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.fixture
def failing(monkeypatch):
    """An op that doubles its input, and fails while atomc traces it."""
    traces, trace = [], functional.functional_graph

    def doubled(x):
        if traces:
            raise RuntimeError("fails half way")
        return x * 2

    def traced(gm, fakes):
        traces.append(gm)
        try:
            return trace(gm, fakes)
        finally:
            traces.pop()

    monkeypatch.setattr(functional, "functional_graph", traced)
    with torch.library._scoped_library("failing", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", doubled, "CompositeImplicitAutograd")
        yield torch.ops.failing.doubled


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize("entered", ENTERED)
def test_a_trace_that_fails_half_way_leaves_torch_as_it_was(entered, failing):
    if entered == "inference_mode" and torch.__version__ < "2.12":
        pytest.skip("Inductor and aot_eager of torch 2.11 raise on inference_mode in a function")
    function = ENTERED[entered](lambda x: failing(F.linear(x, W)))
    expected, before = function(X), modes()
    compiled = torch.compile(function, backend="atom", options={**EAGER, "strict": False})
    assert_close(compiled(X), expected)
    assert "fails half way" in atomc.reports()[-1].why_not
    assert modes() == before
    assert_close(jvp(torch.sin, (X,), (X,))[1], X.cos() * X)


def swept(function, arguments, name):
    """The transforms of the op's results by one argument; written arguments are copies."""

    def results(x):
        copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        values = function(**{**copies, name: x})
        values = values if isinstance(values, tuple) else (values,)
        parts = [v.flatten().float() for v in values if v is not None and v.is_floating_point()]
        return torch.cat(parts) if parts else x.new_zeros(1)

    def some(x):
        y = results(x)
        return y[:: max(1, y.numel() // 3)]

    def enabled(x):
        with torch.no_grad():
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                return results(x).square().sum()

    transforms = {
        kind: transform(some if kind == "jacrev" else results)
        for kind, transform in TRANSFORMS.items()
        if kind != "grad twice"
    }
    return {**transforms, "enable_grad inside": enabled}


def outcome(function, x):
    try:
        return function(x)
    except Exception as error:  # what is compared: each backend may refuse a program
        return error


# That of fp8 casts a number in vmap, and views a sum without dimensions in grad.
FAST = {"kv_b_half"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name, op in ops.REGISTRY.items()
        if not op.kind & Kind.COLLECTIVE
    ],
)
def test_transforms_of_each_op_are_those_of_its_reference_or_fail_in_torch(name):
    op = ops.REGISTRY[name]
    arguments, floats = inputs(op)
    floats = [argument for argument in floats if argument not in op.mutates]
    if not floats:
        pytest.skip("no argument has derivatives")
    by_reference, by_op = (swept(f, arguments, floats[0]) for f in (op.reference, op))
    for kind, function in by_op.items():
        torch._dynamo.reset()
        x = arguments[floats[0]].clone()
        expected = outcome(by_reference[kind], x)
        actual = outcome(torch.compile(function, backend="atom", options=EAGER), x)
        if isinstance(actual, Exception):
            torch._dynamo.reset()
            in_torch = outcome(torch.compile(function, backend="aot_eager"), x)
            assert isinstance(in_torch, Exception), (kind, actual)
        else:
            assert not isinstance(expected, Exception), (kind, expected)
            assert_close(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True, msg=kind)
            assert actual.requires_grad == expected.requires_grad


def test_stacked_models_stay_one_product_each_layer():
    models = [nn.Linear(8, 8).requires_grad_(False) for _ in range(5)]
    params, _ = stack_module_state(models)
    params = {name: value.detach() for name, value in params.items()}
    base = nn.Linear(8, 8).to("meta")

    def ensemble(params, x):
        return vmap(lambda p, x: functional_call(base, p, (x,)), (0, None))(params, x)

    before = atomc.reports()
    compiled = torch.compile(ensemble, backend="atom", options=EAGER)
    assert_close(compiled(params, X), ensemble(params, X))
    graphs = since(before)
    assert graphs and sum(report.num_ops.get("linear", 0) for report in graphs) <= 1


# Grad mode inside the function


def grad_inside(x):
    with torch.enable_grad():
        return F.linear(x, W).sum()


def no_grad_inside(x):
    with torch.no_grad():
        return F.linear(x, W).sum()


def inference_inside(x):
    with torch.inference_mode():
        return F.linear(x, W).sum()


def last_without_grad(x):
    y = F.linear(x, W)
    with torch.no_grad():
        return y.sum()


def first_without_grad(x):
    with torch.no_grad():
        y = F.linear(x, W)
    return (y * x).sum()


@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    ("function", "treated"),
    [
        (grad_inside, {True: False, False: False}),
        (no_grad_inside, {True: True, False: True}),
        (inference_inside, {True: True, False: True}),
        (last_without_grad, {True: False, False: True}),
        (first_without_grad, {True: False, False: True}),
    ],
)
def test_grad_mode_is_read_from_the_graph(function, treated, outside):
    x = X.clone().requires_grad_()
    with outside():
        expected = function(x)
        actual = torch.compile(function, backend="atom", options=EAGER)(x)
    assert_close(actual.detach(), expected.detach())
    assert actual.requires_grad == expected.requires_grad
    assert atomc.reports()[-1].treated == treated[outside is torch.enable_grad]
    if expected.requires_grad:
        assert_close(torch.autograd.grad(actual, x), torch.autograd.grad(expected, x))


def test_a_backward_behind_a_graph_break_under_no_grad_is_that_of_eager():
    def step(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = F.linear(x, W)
            torch._dynamo.graph_break()
            y.pow(2).sum().backward()
        return x.grad

    with torch.no_grad():
        assert_close(torch.compile(step, backend="atom", options=EAGER)(X), step(X))
