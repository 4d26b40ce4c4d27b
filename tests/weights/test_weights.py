"""Where weights live: one table, one address a parameter, and who looks for changes of them."""

import ast
import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from merged_models import EAGER, Gated, X, compiled, fresh, live_bytes, own
from merged_models import weights as weights_of
from torch import Tensor, nn

from atomc import demo, kernels, ops
from atomc.loading import loader
from atomc.ops.op import Prepared
from atomc.program import Program, compile_model
from atomc.quantization import quantize
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.weights import inputs as weight_inputs
from atomc.weights import packed as packed_weights
from atomc.weights import registry as weights
from atomc.weights.inputs import PreparedInput, WeightInputs
from atomc.weights.registry import location_of
from atomc.weights.snapshot import Snapshot

PACKAGE = Path(weights.__file__).parents[1]
SHORT = SamplingParams(max_tokens=4, temperature=0)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape), requires_grad=False)


def halved(weight: Tensor) -> Prepared:
    return Prepared((weight.detach() / 2,))


def spans(model: nn.Module) -> list[tuple[int, int]]:
    return sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in model.parameters())


def counted(function: Callable[..., Any], name: str, found: list[str]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        found.append(name)
        return function(*args)

    return counting


# One address


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_each_parameter_has_the_one_address_that_the_table_says(scheme: str | None) -> None:
    model = loader.load(demo.PATH, progress=False, dtype=torch.float32)
    if scheme:
        quantize(model, scheme)
    compile_model(model, EAGER, owned=True)
    assert all(location_of(p).address == p.data_ptr() for p in model.parameters())
    found = spans(model)
    assert all(end <= start for (_, end), (start, _) in pairwise(found))
    packed = {location.packed for p in model.parameters() if (location := location_of(p)).packed}
    assert packed
    for pack in packed:
        parts = pack.parameters()
        whole = pack.whole()
        assert sum(part.nbytes for part in parts) == whole.nbytes
        assert [part.data_ptr() for part in parts] == [
            part.data_ptr() for part in whole.split([len(p) for p in parts])
        ]


def test_a_parameter_that_others_move_does_not_lie_at_its_address() -> None:
    made = weights.parameter_of(torch.ones(4))
    assert location_of(made).address == made.data_ptr()
    made.data = torch.zeros(4)
    assert location_of(made).address != made.data_ptr()
    a, b = parameter(2, 4), parameter(3, 4)
    packed_weights.pack([a, b])
    b.data = b.data.clone()
    assert packed_weights.packed_together(a) == [] and packed_weights.packed_together(b) == []


@pytest.mark.rotating
def test_the_table_forgets_a_parameter_with_what_was_made_of_it_and_others() -> None:
    from atomc.weights.prepared import prepared_weight

    def summed(a: Tensor, b: Tensor) -> Prepared:
        return Prepared((a + b,))

    a, b = parameter(4), parameter(4)
    key = id(b)
    entry, _ = prepared_weight([a, b], [a, b], summed)
    assert (
        list(location_of(a).prepared.values()) == list(location_of(b).prepared.values()) == [entry]
    )
    assert key in weights._table
    del b
    gc.collect()
    assert location_of(a).prepared == {} and key not in weights._table


def test_what_was_made_of_packed_parameters_is_freed_with_the_first_of_them_at_once() -> None:
    from atomc.weights.prepared import prepared_weight

    a, b = parameter(4, 4), parameter(4, 4)
    pack = packed_weights.pack([a, b])
    made = weakref.ref(prepared_weight([a, b], [pack], halved)[0].tensors[0])
    assert made() is not None
    gc.disable()
    try:
        del b
        assert made() is None
    finally:
        gc.enable()


def moving(tree: ast.AST, model: bool = False) -> list[int]:
    """The lines that make a parameter, or give one other memory. The __init__ of a layer of a model
    may make its own; the loader gives them memory.
    """
    inits = [
        node
        for node in ast.walk(tree)
        if model and isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    declared = {inside for init in inits for inside in ast.walk(init)}
    made = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node not in declared
        and ast.unparse(node.func) in ("nn.Parameter", "Parameter", "torch.nn.Parameter")
    ]
    return made + [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(to, ast.Attribute) and to.attr == "data" for to in node.targets)
    ]


def test_no_module_but_the_owner_makes_or_moves_a_parameter() -> None:
    assert len(moving(ast.parse("x.data = y\nw = nn.Parameter(y)"), model=True)) == 2
    found = {}
    for folder in (PACKAGE, *(PACKAGE / name for name in ("models", "passes", "runtime"))):
        for path in folder.rglob("*.py"):
            name = path.relative_to(PACKAGE).as_posix()
            if lines := moving(ast.parse(path.read_text()), model=name.startswith("models/")):
                found[name] = lines
    assert found.keys() == {"weights/registry.py"}


# Who makes what


@pytest.mark.rotating
def test_a_second_graph_over_the_same_parameters_reuses_what_was_made() -> None:
    model = own()
    first, second = (compile_model(model, EAGER) for _ in range(2))
    before = live_bytes()
    third = compile_model(model, EAGER)
    assert live_bytes() - before < 1024
    made = [[program._arguments[i] for i in program._made] for program in (first, second, third)]
    packed, prepared = (
        [[x for x in one if isinstance(x, kind)] for one in made] for kind in (Tensor, tuple)
    )
    assert packed[0] and [[x.data_ptr() for x in one] for one in packed] == 3 * [
        [x.data_ptr() for x in packed[0]]
    ]
    assert prepared[0] and all(
        x is y for one in prepared for x, y in zip(one, prepared[0], strict=True)
    )


def test_to_make_a_program_of_what_was_compiled_moves_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    init = Program.__init__

    def watched(self: Program, *args: Any) -> None:
        asked.append("Program")
        init(self, *args)
        asked.append("made")

    monkeypatch.setattr(Program, "__init__", watched)
    monkeypatch.setattr(weight_inputs, "pack", counted(weight_inputs.pack, "packed", asked))
    monkeypatch.setattr(
        weight_inputs, "prepared_weight", counted(weight_inputs.prepared_weight, "prepared", asked)
    )
    model = own()
    lay = spans(model)
    compile_model(model, EAGER)
    assert spans(model) != lay
    assert asked[-2:] == ["Program", "made"] and set(asked[:-2]) == {"packed", "prepared"}


@pytest.mark.rotating
def test_the_merge_pass_looks_and_moves_nothing() -> None:
    model = own()
    lay, moved = spans(model), []
    seen = [lambda name, graph: moved.append(name) if spans(model) != lay else None]
    program = compile_model(model, EAGER, observers=seen)
    assert program.report.matches["merge_qkv"] and moved == []


# Who looks for changes


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has looked for changes of weights."""
    found: list[str] = []
    watched = (
        (Snapshot, "unchanged"),
        (Snapshot, "__init__"),
        (WeightInputs, "refresh"),
        (WeightInputs, "refresh_packed"),
    )
    for owner, name in watched:
        monkeypatch.setattr(
            owner, name, counted(getattr(owner, name), f"{owner.__name__}.{name}", found)
        )
    return found


def test_the_runtime_looks_for_no_change_of_weights_that_it_owns(looks: list[str]) -> None:
    llm = LLM(options=EAGER, progress=False)
    assert llm.program._follow is None
    looks.clear()
    first = llm.generate([[1, 2, 3], [4, 5]], SHORT)
    assert llm.generate([[1, 2, 3], [4, 5]], SHORT)[0].token_ids == first[0].token_ids
    llm.program.check()
    assert looks == []


def test_the_runtime_looks_at_a_users_module_once_before_it_serves(looks: list[str]) -> None:
    model = own()
    llm = LLM(model, options=EAGER, progress=False)
    looks.clear()
    llm.generate([[1, 2, 3]], SHORT)
    assert looks.count("WeightInputs.refresh") == 1
    model.model.layers[0].mlp.up_proj.weight.data = torch.randn(96, 64)
    with pytest.raises(RuntimeError, match="given new storage after compiling"):
        llm.generate([[1, 2, 3]], SHORT)


def test_a_compiled_function_looks_at_each_call(looks: list[str]) -> None:
    run = compiled(fresh(Gated))
    run(X)
    looks.clear()
    for _ in range(3):
        run(X)
    assert looks.count("WeightInputs.refresh") == 3


# In the place of a weight


@pytest.mark.parametrize(
    "read, keeps, replaced",
    [
        ((), (False, False), [[0, 1], [2]]),
        ((), (False, True), [[0, 1]]),
        ((0,), (False, False), [[2]]),
        ((3,), (False, False), [[2]]),
    ],
)
def test_an_owner_is_told_which_weights_only_prepared_ones_stand_for(read, keeps, replaced) -> None:
    args = [
        parameter(2, 4),
        parameter(3, 4),
        parameter(5, 4),
    ]  # the first two are packed, as the fourth
    wanted = [
        PreparedInput((3,), (0, 1), halved, keeps_original=keeps[0]),
        PreparedInput((2,), (2,), halved, keeps_original=keeps[1]),
    ]
    inputs = WeightInputs({3: [0, 1]}, wanted, set(read), [])
    pack, (half,), (other,) = inputs.materialize(args)
    assert torch.equal(half, pack / 2) and torch.equal(other, args[2] / 2)
    assert inputs.replaced_groups(args) == replaced


@pytest.mark.rotating
@pytest.mark.parametrize("tokens, freed", [(ops.Tokens(), True), (ops.Tokens(1, 8), False)])
def test_a_program_reads_originals_of_replaced_weights_only_where_another_kernel_does(
    monkeypatch: pytest.MonkeyPatch, tokens: ops.Tokens, freed: bool
) -> None:
    def linear(x: Tensor, weight: tuple[Tensor], bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight[0] * 2, bias)

    kernels.load("torch")
    monkeypatch.setitem(vars(ops.linear), "kernels", list(ops.linear.kernels))
    ops.linear.kernel("mine", prepare={"weight": halved}, tokens=tokens)(linear)
    model = own()
    program = compile_model(model, {**EAGER, "providers": ("mine", "torch")}, owned=True)
    projections = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    tied = model.lm_head.weight  # the embedding reads it
    size = sum(w.nbytes for w in weights_of(*projections) if w is not tied)
    assert program.replaced_bytes == (size if freed else 0)
    assert program.prepared_bytes == size + tied.nbytes
