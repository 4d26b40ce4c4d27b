"""One layer of each kind is traced and stands for all of its kind; everything else stays as it
was.
"""

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import since
from tiny_models import SIZES
from torch import Tensor, nn
from torch._dynamo.source import AttrSource, ConstDictKeySource, DictGetItemSource, LocalSource
from torch._guards import ChainedSource

import atomc
from atomc.capture import regions
from atomc.loading.create_model import create_model
from atomc.program import compile_model
from atomc.stock.adapter import wrap_stock
from atomc.torch_compat import region_failures
from atomc.weights.parameters import allocate_buffers, fill_randomly

transformers = pytest.importorskip("transformers", reason="stock models")

EAGER = {"glue": "eager"}
TINY = dict(
    **SIZES,
    pad_token_id=0,
    hidden_act="silu",
    rms_norm_eps=1e-6,
)
ALTERNATING = [
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
]
STOCK: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {},
    "gemma3_text": {
        "sliding_window": 5,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ALTERNATING,
    },
    "gpt_oss": {
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ALTERNATING,
    },
}
IDS = torch.randint(0, 96, (1, 33), generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self, number: int, kind: str):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)
        self.number, self.kind = number, kind
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "breaks":
            torch._dynamo.graph_break()
        if self.kind == "numbered":
            x = x / (self.number + 1)
        if self.kind == "counts":
            self.calls.add_(1)
        return x + F.silu(self.gate(x)) * self.up(x)


class Stack(nn.Module):
    def __init__(self, depth: int = 4, kind: str = "plain"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(i, kind) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(depth: int = 4, kind: str = "plain") -> Stack:
    return Stack(depth, kind).eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def no_marks_left() -> Iterator[None]:
    yield
    regions.unmark(list(regions._marked))


X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


def last() -> atomc.Report:
    return atomc.reports()[-1]


def traced(report: atomc.Report) -> list[str]:
    return [note for note in report.notes if "traced" in note]


def left_off(report: atomc.Report) -> str:
    return "".join(note for note in report.notes if note.startswith("every layer was traced"))


def counts(traced: int, inlined: int, in_torch_2_11: tuple[int, int]) -> list[list[str]]:
    """What the report may note. torch 2.11 takes the first of layers that are alike for one of
    another kind, more often.
    """
    pairs = (
        {(traced, inlined), in_torch_2_11}
        if torch.__version__.startswith("2.11.")
        else {(traced, inlined)}
    )
    return [
        [f"{traced} layer{'s' * (traced != 1)} traced, {inlined} inlined"]
        for traced, inlined in pairs
    ]


def stock(model_type: str, depth: int) -> nn.Module:
    differs = dict(STOCK[model_type])
    if "layer_types" in differs:
        differs["layer_types"] = differs["layer_types"][:depth]
    config = transformers.AutoConfig.for_model(
        model_type, **(TINY | differs | {"num_hidden_layers": depth})
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="sdpa" if model_type != "gpt_oss" else "eager",
    )
    for weight in model.parameters():
        weight.data.normal_(0.0 if weight.dim() > 1 else 1.0, 0.15)
    return model.eval().requires_grad_(False)


def ours(depth: int) -> nn.Module:
    config = TINY | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": depth,
    }
    model = create_model(config, torch.float32, "meta")
    allocate_buffers(model, "cpu")
    fill_randomly(model, "cpu")
    return model.eval().requires_grad_(False)


def logits(model: Any, length: int) -> Tensor:
    ids = IDS[:, :length].clone()
    torch._dynamo.mark_dynamic(ids, 1)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def same_sites(a: atomc.Report, b: atomc.Report) -> None:
    """The same rewrites in the same layers, from the same lines."""
    assert a.matches == b.matches
    assert Counter((s.rewrite, s.module_path, s.layer, s.source) for s in a.sites) == Counter(
        (s.rewrite, s.module_path, s.layer, s.source) for s in b.sites
    )
    assert Counter((m.rewrite, m.module_path, m.found) for m in a.near) == Counter(
        (m.rewrite, m.module_path, m.found) for m in b.near
    )


@pytest.mark.covering
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "gemma3_text"])
def test_a_prepared_stock_model_computes_what_an_unprepared_one_does_from_one_layer(
    model_type: str,
) -> None:
    model = stock(model_type, 3)
    plain = torch.compile(model, backend="atom", options=EAGER)
    flat = [logits(plain, length) for length in (12, 33)]
    expected, without = logits(model, 33), last()

    torch._dynamo.reset()
    compiled = torch.compile(atomc.prepare(model), backend="atom", options=EAGER)
    for length, same in zip((12, 33), flat, strict=True):
        assert torch.equal(logits(compiled, length), same)
    torch.testing.assert_close(flat[1], expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert traced(last()) == ["1 layer traced, 3 inlined"]
    same_sites(last(), without)


@pytest.mark.rotating
@pytest.mark.parametrize("depth", [2, 7])
def test_the_program_of_a_model_is_traced_from_one_layer_and_the_classes_stay_as_they_were(
    depth: int,
) -> None:
    model = ours(depth)
    kind = type(model.model.layers[0])
    before = (
        dict(vars(kind)),
        [dict(vars(layer)) for layer in model.model.layers],
        dict(vars(kind.forward)),
    )
    program = compile_model(model, EAGER)
    assert traced(program.report) in counts(1, depth, in_torch_2_11=(2, depth))
    assert program.report.matches["qk_norm_rope_kv_write"] == depth
    assert [spec.name for spec in program.specs] == [
        f"model.layers.{i}.self_attn" for i in range(depth)
    ]
    assert (
        dict(vars(kind)),
        [dict(vars(layer)) for layer in model.model.layers],
        dict(vars(kind.forward)),
    ) == before


@pytest.mark.rotating
@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_layers_with_and_without_a_window_are_two_kinds(model_type: str) -> None:
    report = atomc.explain(wrap_stock(stock(model_type, 5)), IDS[0], torch.arange(33))
    assert traced(report) == ["2 layers traced, 5 inlined"]
    assert sorted(site.layer for site in report.sites if site.rewrite == "attention") == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_first_layer_of_another_kind_is_traced_beside_the_others() -> None:
    model = stack(5)
    model.layers[0].up = nn.Linear(16, 16, bias=False)
    report = atomc.explain(model.requires_grad_(False), X)
    assert traced(report) in counts(1, 4, in_torch_2_11=(2, 5))
    assert [site.layer for site in report.sites if site.rewrite == "silu_and_mul"] == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.rotating
def test_explaining_traces_one_layer_and_names_each() -> None:
    report = atomc.explain(ours(12))
    assert traced(report) == ["1 layer traced, 12 inlined"]
    assert {site.module_path for site in report.sites if site.rewrite == "silu_and_mul"} == {
        f"model.layers.{i}.mlp" for i in range(12)
    }
    linears = Counter(site.layer for site in report.sites if site.rewrite == "linear")
    assert linears == {None: 1, **dict.fromkeys(range(12), 7)}


@pytest.mark.rotating
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_prepared_model_works_for_every_number_of_tokens(dynamic: bool | None) -> None:
    model = atomc.prepare(ours(4))
    compiled = torch.compile(model, backend="atom", dynamic=dynamic, options=EAGER)
    for length in (9, 5, 1, 17):
        ids, positions = IDS[0, :length], torch.arange(length)
        expected = model(ids, positions)
        torch.testing.assert_close(
            compiled(ids, positions), expected, rtol=0, atol=1e-6 * float(expected.abs().max())
        )
    assert all(
        traced(report) in counts(1, 4, in_torch_2_11=(2, 4)) or left_off(report)
        for report in atomc.reports()[-2:]
    )


@pytest.mark.rotating
@pytest.mark.parametrize("backend", ["atom", "eager"])
def test_prepared_layers_that_cannot_be_regions_are_traced_one_by_one(backend: str) -> None:
    model, other = atomc.prepare(stack(kind="breaks")), atomc.prepare(stack())
    options = {"options": EAGER} if backend == "atom" else {}
    with torch.inference_mode():
        expected = model(X)
        torch.testing.assert_close(torch.compile(model, backend=backend, **options)(X), expected)
        assert not any(regions.FLAG in vars(layer) for layer in model.layers)
        torch._dynamo.reset()  # it skips a function with a graph break in a loop, for all models
        torch.compile(other, backend="atom", options=EAGER)(X)
    assert all(regions.FLAG in vars(layer) for layer in other.layers), "its layers can be regions"
    assert traced(last()) in counts(1, 4, in_torch_2_11=(2, 4)) and not left_off(last())


def test_the_report_says_why_layers_are_traced_one_by_one_until_they_are_prepared_again() -> None:
    model = atomc.prepare(stack(kind="breaks"))
    with torch.inference_mode():
        torch.compile(model, backend="atom", options=EAGER)(X)
        assert left_off(last())
        torch._dynamo.reset()
        torch.compile(atomc.unprepare(model), backend="atom", options=EAGER)(X)
        assert not left_off(last())


def test_a_failure_in_torch_to_trace_a_region_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("Freevar has no source")

    kind = region_failures._invoke_subgraph()
    monkeypatch.setattr(kind, "install_subgraph_in_output_graph", fail)
    model = atomc.prepare(stack())
    with torch.inference_mode():
        expected = model(X)
        compiled = torch.compile(model, backend="atom", options=EAGER, fullgraph=True)
        torch.testing.assert_close(compiled(X), expected)
    assert "AssertionError: Freevar has no source" in left_off(last())


@pytest.mark.rotating
def test_another_eps_in_one_layer_is_seen_under_dynamic_shapes() -> None:
    model = atomc.prepare(ours(4))
    model.model.layers[2].input_layernorm.eps = 0.5
    ids, positions = IDS[0, :9], torch.arange(9)
    expected = model(ids, positions)
    ours_now = torch.compile(model, backend="atom", dynamic=True, options=EAGER)(ids, positions)
    torch.testing.assert_close(ours_now, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.rotating
def test_inductor_gets_no_region_that_takes_python_floats() -> None:
    model = atomc.prepare(ours(2))
    disabled = torch.compile(model, backend="atom", dynamic=True, options={"disable": True})
    torch.testing.assert_close(
        disabled(IDS[0, :9], torch.arange(9)), model(IDS[0, :9], torch.arange(9))
    )


def test_layers_that_differ_by_a_constant_are_each_traced_and_right() -> None:
    model = atomc.prepare(stack(12, "numbered"))
    torch.testing.assert_close(torch.compile(model, backend="atom", options=EAGER)(X), model(X))
    assert last().matches["silu_and_mul"] == 12


def test_layers_that_write_a_buffer_are_each_traced_and_a_note_says_so() -> None:
    model = atomc.prepare(stack(kind="counts"))
    expected = model(X)
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(model, backend="atom", options=EAGER)(X), expected)
    assert [float(layer.calls) for layer in model.layers] == [2, 2, 2, 2]
    (note,) = traced(last())
    assert note.startswith("every layer was traced, because tracing regions failed: ")
    assert last().matches["silu_and_mul"] == 4


def test_a_failure_to_trace_a_region_is_a_note_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise NotImplementedError("no regions today")

    monkeypatch.setattr("atomc.capture.functional.traced_region", fail)
    model = stack()
    report = atomc.explain(model, X)
    assert traced(report) == [
        "every layer was traced, because tracing regions failed: NotImplementedError: no regions "
        "today"
    ]
    assert report.matches["silu_and_mul"] == 4 and {site.layer for site in report.sites} >= {
        0,
        1,
        2,
        3,
    }


def test_explaining_layers_with_graph_breaks_falls_back_to_tracing_each() -> None:
    before = atomc.reports()
    atomc.explain(stack(kind="breaks"), X)
    graphs = since(before)
    noted = [
        number
        for number, report in enumerate(graphs)
        if any("UncapturedHigherOrderOpError" in note for note in report.notes)
    ]
    assert len(noted) == 1
    assert any(report.matches["silu_and_mul"] for report in graphs[noted[0] :])


class ThroughMethods(Stack):
    """Calls its layers by methods that it keeps, as modules do that accelerate has put hooks on."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.kept(x)
        return x


def test_layers_that_torch_takes_for_one_another_are_an_error_when_prepared_and_a_note_otherwise() -> (
    None
):
    model = ThroughMethods().eval().requires_grad_(False)
    expected = Stack.forward(model, X)
    regions.mark(model.layers)
    for layer in model.layers:
        layer.kept = layer.forward
    compiled = torch.compile(model, backend="atom", options=EAGER)
    try:
        torch.testing.assert_close(compiled(X), expected)
    except atomc.RunError as error:
        assert "cannot tell the prepared layers apart" in str(error)
    regions.unprepare(model)
    assert atomc.explain(model, X).matches["silu_and_mul"] == 4
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="atom", options=EAGER)(X), expected)


def test_a_layer_whose_forward_was_replaced_is_not_marked() -> None:
    model = stack()
    model.layers[1].forward = MethodType(lambda self, x: -x, model.layers[1])  # type: ignore[method-assign]
    atomc.prepare(model)
    assert [regions.FLAG in vars(layer) for layer in model.layers] == [True, False, True, True]
    torch.testing.assert_close(torch.compile(model, backend="atom", options=EAGER)(X), model(X))


def test_unmarking_leaves_the_class_its_forward_and_dynamo_as_they_were() -> None:
    before, forward, chained = (
        dict(vars(Layer)),
        dict(vars(Layer.forward)),
        dict(vars(ChainedSource)),
    )
    one, two = stack(), stack()
    atomc.prepare(one)
    atomc.prepare(two)
    regions.unprepare(one)
    assert Layer.forward is not before["forward"]
    regions.unprepare(two)
    assert (dict(vars(Layer)), dict(vars(Layer.forward)), dict(vars(ChainedSource))) == (
        before,
        forward,
        chained,
    )
    assert not any(regions.FLAG in vars(layer) for layer in (*one.layers, *two.layers))


def test_a_source_is_cloned_for_the_next_layer_as_torch_does_but_shares_what_stays() -> None:
    own = vars(ChainedSource).get("clone")
    if own is None:
        pytest.skip("this torch traces every layer")
    atomc.prepare(stack())
    layers = AttrSource(LocalSource("self"), "layers")
    first, second = DictGetItemSource(layers, "0"), DictGetItemSource(layers, "1")
    weight = AttrSource(AttrSource(first, "gate"), "weight")
    for source in (
        weight,
        DictGetItemSource(layers, ConstDictKeySource(first, 0)),
        AttrSource(layers, "training"),
        layers,
    ):
        made = source.clone(lambda s: {first: second}.get(s, s))
        expected = own(source, lambda s: {first: second}.get(s, s))
        assert type(made) is type(expected) and made == expected and made.name == expected.name
        assert (made is source) == (expected == source)
    assert weight.clone(lambda s: {first: second}.get(s, s)).base.base.base is layers


class Derived(Layer):
    """Inherits its forward."""


def test_a_class_that_inherits_its_forward_goes_back_to_inheriting() -> None:
    model = nn.Module()
    model.a, model.b = (
        nn.ModuleList(Layer(i, "") for i in range(2)),
        nn.ModuleList(Derived(i, "") for i in range(2)),
    )
    own = Layer.forward
    atomc.prepare(model)
    torch.testing.assert_close(model.b[0](X), own(model.b[0], X))
    regions.unprepare(model)
    assert Layer.forward is own and "forward" not in vars(Derived)


def test_an_unprepared_model_of_a_prepared_class_is_compiled_as_before() -> None:
    atomc.prepare(stack())
    plain = stack()
    torch.testing.assert_close(torch.compile(plain, backend="atom", options=EAGER)(X), plain(X))
    assert traced(last()) == []


def test_a_prepared_model_can_be_copied_and_pickled() -> None:
    model = atomc.prepare(stack())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.layers[0].gate.weight.mul_(2)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(other, backend="atom", options=EAGER)(X), other(X))
        assert traced(last()) == ["1 layer traced, 4 inlined"]


def test_only_repeated_modules_with_parameters_are_layers_and_none_inside_another() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Stack(3), Stack(2)])
    model.activations = nn.ModuleList([nn.ReLU(), nn.ReLU()])
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    model.inner = Stack(2)
    assert regions.repeated_layers(model) == [*model.blocks, *model.inner.layers]


@pytest.mark.rotating
def test_gradients_flow_through_a_prepared_model() -> None:
    model = regions.unprepare(atomc.prepare(stack()))
    atomc.prepare(model).requires_grad_(True)
    torch.compile(model, backend="atom")(X).sum().backward()
    ours_grad = model.layers[1].up.weight.grad.clone()
    model.zero_grad()
    regions.unprepare(model)(X).sum().backward()
    torch.testing.assert_close(ours_grad, model.layers[1].up.weight.grad)
