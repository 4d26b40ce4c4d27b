"""Linears of one input become one, in the memory of the originals: numbers, bytes, and weights that move."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import STRIDES_HOLD
from torch import Tensor, nn

import atomc
from atomc import models, packs
from atomc.pipeline import register_pass
from atomc.program import compile_model

EAGER = {"glue": "eager"}
UNMERGED = {**EAGER, "passes": dict.fromkeys(["merge_qkv", "merge_gate_up", "merge_linears"], False)}
WIDTHS = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              vocab_size=128, head_dim=16, max_position_embeddings=64)  # fmt: skip


class Attention(nn.Module):
    """Queries, keys and values of one input, of different widths."""

    def __init__(self, width: int = 32, bias: bool = False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, n, bias=bias) for n in (width, 16, 16))
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 8)).transpose(-2, -3) for linear in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self, width: int = 32, bias: bool = False):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=bias) for a, b in ((width, 48), (width, 48), (48, width)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.attention, self.mlp = Attention(bias=bias), Gated(bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


def ready(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


@pytest.fixture
def layer() -> nn.Module:
    torch.manual_seed(0)
    return ready(Layer())


@pytest.fixture
def mlp() -> Gated:
    torch.manual_seed(0)
    made = ready(Gated())
    assert isinstance(made, Gated)
    return made


X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="atom", options={**EAGER, **options})


def last() -> atomc.Report:
    return atomc.reports()[-1]


def merges(report: atomc.Report | None = None) -> dict[str, int]:
    return {name: count for name, count in (report or last()).matches.items() if name.startswith("merge")}


def widths() -> list[list[int]]:
    return [site.attrs["widths"] for site in last().sites if site.rewrite.startswith("merge")]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def live_bytes() -> int:
    """The bytes of all tensors that are alive, each byte counted once however many tensors lie on it."""
    gc.collect()
    spans = set()
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and item.device.type == "cpu" and item.layout == torch.strided:
            storage = item.untyped_storage()
            spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def whole(*parameters: nn.Parameter) -> Tensor:
    """The pack of these, which there must be already."""
    assert packs.partners(parameters[0]), "not packed"
    found = packs.packed(parameters)
    assert isinstance(found, Tensor)
    return found


def weights(*linears: nn.Linear) -> list[nn.Parameter]:
    return [linear.weight for linear in linears]


# What is merged


@pytest.mark.parametrize("bias", [False, True])
def test_qkv_and_gate_up_become_one_linear_each(bias: bool) -> None:
    torch.manual_seed(0)
    model = ready(Layer(bias))
    expected = model(X)
    close(compiled(model)(X), expected)
    assert merges() == {"merge_qkv": 1, "merge_gate_up": 1} and last().num_ops["linear"] == 4
    close(model(X), expected)


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
@pytest.mark.parametrize("bias", [False, True])
def test_stock_models_merge_in_every_layer_and_nothing_else_changes(kind: str, bias: bool) -> None:
    model = stock(kind, attention_bias=bias, **({"mlp_bias": bias} if kind == "Llama" else {}))
    ids = torch.randint(0, 128, (2, 9))
    expected = model(ids, use_cache=False).logits
    close(compiled(model, **UNMERGED)(ids, use_cache=False).logits, expected)
    without = last()
    close(compiled(model)(ids, use_cache=False).logits, expected)
    assert merges() == {"merge_qkv": 2, "merge_gate_up": 2}
    assert (last().num_ops["linear"], without.num_ops["linear"]) == (4 * 2 + 1, 7 * 2 + 1)
    others = {name: n for name, n in last().matches.items() if name != "lower"}
    assert others == {**{name: n for name, n in without.matches.items() if name != "lower"}, **merges()}


def stock(kind: str, **config: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**WIDTHS, **config))
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return ready(made)


def own(device: str = "cpu") -> nn.Module:
    config = {**WIDTHS, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
              "rms_norm_eps": 1e-6, "tie_word_embeddings": True}  # fmt: skip
    model = ready(models.build(config, device=device))
    if device != "meta":
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def test_programs_for_the_runtime_merge_and_share_packs_with_the_backend() -> None:
    model = own()
    ids = torch.arange(9)
    expected = model(ids, ids)
    before = live_bytes()
    programs = [compile_model(model, options=EAGER) for _ in range(2)]
    close(compiled(model)(ids, ids), expected)
    assert all(merges(program.report) == {"merge_qkv": 2, "merge_gate_up": 2} for program in programs)
    assert merges() == {"merge_qkv": 2, "merge_gate_up": 2}
    mlp = model.model.layers[0].mlp
    assert live_bytes() - before < whole(*weights(mlp.gate_proj, mlp.up_proj)).nbytes


def test_a_model_on_the_meta_device_is_counted_and_explained() -> None:
    report = atomc.explain(own("meta"))
    assert merges(report) == {"merge_qkv": 2, "merge_gate_up": 2}
    assert report.why("merge_qkv").startswith("merge_qkv: fired at 2 sites in layers 0-1")
    assert merges(compile_model(own("meta"), options=EAGER).report) == {"merge_qkv": 2, "merge_gate_up": 2}


def test_linears_that_are_neither_are_merged_too() -> None:
    a, b = (ready(nn.Linear(32, n)) for n in (7, 3))

    def both(x: Tensor) -> Tensor:
        return a(x).sum(-1) + b(x).sum(-1)

    close(compiled(both)(X), both(X))
    assert merges() == {"merge_linears": 1} and widths() == [[7, 3]]


def test_linears_with_and_without_a_bias_are_merged_among_themselves() -> None:
    model = Attention()
    model.q, model.v = nn.Linear(32, 32), nn.Linear(32, 16)
    ready(model)
    close(compiled(model)(X), model(X))
    assert merges() == {"merge_linears": 1} and widths() == [[32, 16]]


def test_linears_of_different_layers_are_left_apart() -> None:
    """The keys of an encoder's output in all layers of a decoder: merged they would be one huge result, kept to the end."""
    layers = ready(nn.ModuleList(nn.Linear(32, 8) for _ in range(3)))

    def run(x: Tensor) -> list[Tensor]:
        return [layer(x).relu() for layer in layers]

    for ours, theirs in zip(compiled(run)(X), run(X), strict=True):
        close(ours, theirs)
    assert merges() == {}


@pytest.mark.parametrize("off", ["merge_qkv", "merge_gate_up"])
def test_each_kind_can_be_left_out(layer: nn.Module, off: str) -> None:
    close(compiled(layer, passes={off: False})(X), layer(X))
    assert merges() == {name: 1 for name in ("merge_qkv", "merge_gate_up") if name != off}
    assert "the pass is off" in last().why(off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_within_its_own_rounding(layer: nn.Module, dtype: torch.dtype) -> None:
    layer.to(dtype)
    x = X.to(dtype)
    torch.testing.assert_close(compiled(layer)(x), compiled(layer, **UNMERGED)(x), rtol=0, atol=torch.finfo(dtype).eps * 4)
    assert merges() == {} and merges(atomc.reports()[-2]) == {"merge_qkv": 1, "merge_gate_up": 1}


@pytest.mark.parametrize("dynamic", [False, True])
def test_merged_linears_go_through_inductor(layer: nn.Module, dynamic: bool) -> None:
    run = torch.compile(layer, backend="atom", dynamic=dynamic, options={"glue": "inductor"})
    for x in (X, torch.cat([X, X], 1)):
        close(run(x), layer(x))
    assert merges() == {"merge_qkv": 1, "merge_gate_up": 1}


def test_each_value_of_a_python_float_is_compiled_with_the_merge(mlp: Gated) -> None:
    def run(x: Tensor, factor: float) -> Tensor:
        return mlp(x * factor)  # type: ignore[no-any-return]

    both = torch.compile(run, backend="atom", dynamic=True, options=EAGER)
    for factor in (0.5, 2.5):
        close(both(X, factor), run(X, factor))
    assert merges() == {"merge_gate_up": 1}


# What is left alone


def test_a_weight_that_is_read_elsewhere_is_left_alone() -> None:
    embedding, head, other = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False), nn.Linear(32, 8, bias=False)
    head.weight = embedding.weight
    for module in (embedding, head, other):
        ready(module)

    def run(ids: Tensor) -> tuple[Tensor, Tensor]:
        x = embedding(ids)
        return head(x) * 2, other(x) * 2

    ids = torch.arange(5)
    for ours, theirs in zip(compiled(run)(ids), run(ids), strict=True):
        close(ours, theirs)
    assert merges() == {} and "weight is read elsewhere, too" in last().why("merge_linears")


def test_weights_that_are_no_parameters_are_left_alone() -> None:
    a, b = torch.randn(8, 32), torch.randn(8, 32)

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, a) * F.linear(x, b)

    close(compiled(run)(X, a, b), run(X, a, b))
    assert merges() == {} and "it is no parameter but a Tensor" in last().why("merge_linears")


def test_a_weight_whose_memory_somebody_else_looks_at_is_left_alone(mlp: Gated) -> None:
    held = mlp.state_dict()
    close(compiled(mlp)(X), mlp(X))
    assert merges() == {} and "another tensor shares its memory" in last().why("merge_gate_up")
    held["gate.weight"].mul_(2)
    close(compiled(mlp)(X), mlp(X))
    del held
    torch._dynamo.reset()
    close(compiled(mlp)(X), mlp(X))
    assert merges() == {"merge_gate_up": 1}


def test_a_weight_that_is_part_of_a_larger_storage_is_left_alone(mlp: Gated) -> None:
    flat = torch.randn(2, 48, 32)
    mlp.gate.weight.data, mlp.up.weight.data = flat[0], flat[1]
    run = compiled(mlp)
    close(run(X), mlp(X))
    flat.mul_(2)
    close(run(X), mlp(X))
    assert merges() == {} and "part of a larger storage" in last().why("merge_gate_up")


def test_two_models_that_share_a_weight_are_right_after_every_change() -> None:
    torch.manual_seed(0)
    one, two = ready(Gated()), ready(Gated())
    two.gate.weight = one.gate.weight
    first, second = compiled(one), torch.compile(lambda x: two(x) * 1, backend="atom", options=EAGER)
    for _ in range(2):
        close(first(X), one(X))
        close(second(X), two(X))
        one.gate.weight.mul_(2)
        two.up.weight.mul_(2)
    assert merges(atomc.reports()[-2]) == {"merge_gate_up": 1} and merges() == {}
    assert "packed with others for another graph" in last().why("merge_gate_up")


class Lora(nn.Module):
    """A linear with a low-rank update beside it (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0  # type: ignore[no-any-return]


def test_linears_wrapped_by_lora_are_right_before_and_after_folding_the_update(layer: nn.Module) -> None:
    layer.attention.q = ready(Lora(layer.attention.q, 4))
    layer.mlp.gate = ready(Lora(layer.mlp.gate, 4))
    run = compiled(layer)
    close(run(X), layer(X))
    for lora in (layer.attention.q, layer.mlp.gate):
        lora.base.weight += 2.0 * lora.b.weight @ lora.a.weight
        lora.b.weight.zero_()
    close(run(X), layer(X))


# The graph


def test_every_value_has_the_strides_that_running_gives(layer: nn.Module) -> None:
    with register_pass(STRIDES_HOLD):
        close(compiled(layer)(X), layer(X))
    assert merges() == {"merge_qkv": 1, "merge_gate_up": 1}


def test_a_part_that_is_returned_is_a_tensor_of_its_own(mlp: Gated) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return mlp.gate(x), mlp.up(x).transpose(0, 1)

    ours, theirs = compiled(both)(X), both(X)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
        assert a.stride() == b.stride() and a.untyped_storage().nbytes() == a.nbytes
    assert merges() == {"merge_linears": 1}


@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x.as_strided((3, 4), (1, 2)), lambda x: x.view(10, -1)])
def test_views_of_any_kind_behind_a_part_are_right(mlp: Gated, view: Callable[[Tensor], Tensor]) -> None:
    def run(x: Tensor) -> Tensor:
        return view(mlp.gate(x)).sum() * view(mlp.up(x)).sin().sum()

    for dynamic in (False, True):
        torch._dynamo.reset()
        close(torch.compile(run, backend="atom", dynamic=dynamic, options=EAGER)(X), run(X))
        assert merges() == {"merge_linears": 1}


# Memory


def test_no_byte_is_held_twice_over_prefill_decode_recompile_and_compiling_twice(layer: nn.Module) -> None:
    def once() -> None:
        run = torch.compile(layer, backend="atom", dynamic=False, options=EAGER)
        for tokens in (5, 1, 7):
            run(X[:, :1].repeat(1, tokens, 1))

    once()
    torch._dynamo.reset()
    layer.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True)
    before = live_bytes()
    once()
    once()
    compiled(layer, rounding="hf")(X)
    assert len({report.recompile for report in atomc.reports()[-5:]}) > 1 and merges()
    assert live_bytes() - before < 1024  # a weight has 2048
    assert whole(*weights(layer.attention.q, layer.attention.k, layer.attention.v)).shape == (64, 32)


def test_ranges_of_token_counts_share_their_packs(layer: nn.Module) -> None:
    from atomc import ops

    @ops.linear.kernel("few rows", tokens=ops.Tokens(1, 4))
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        few.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    few: list[tuple[int, ...]] = []
    try:
        before = live_bytes()
        run = torch.compile(layer, backend="atom", dynamic=True, options=EAGER)
        for x in (X[0], X[0, :3]):
            close(run(x), layer(x))
        assert live_bytes() - before < 1024
    finally:
        ops.linear.kernels.remove(next(kernel for kernel in ops.linear.kernels if kernel.provider == "few rows"))
    assert few == [(64, 32), (32, 32), (96, 32), (32, 48)]


def test_a_pack_is_freed_when_its_parts_move_away(mlp: Gated) -> None:
    run = compiled(mlp)
    run(X)
    pack = weakref.ref(whole(*weights(mlp.gate, mlp.up)))
    gc.collect()
    assert pack() is not None
    mlp.to(torch.float64)
    gc.collect()
    assert pack() is None


def test_a_compiled_model_can_be_freed(mlp: Gated) -> None:
    compiled(mlp)(X)
    weight = weakref.ref(mlp.gate.weight)
    assert whole(*weights(mlp.gate, mlp.up)).shape == (96, 32)
    torch._dynamo.reset()
    for parameter in list(mlp.parameters()):
        del parameter
    mlp._modules.clear()
    gc.collect()
    assert weight() is None


# Weights that change or move


def in_place(model: Gated) -> None:
    model.gate.weight.mul_(2)
    model.up.weight.copy_(torch.randn_like(model.up.weight))


def new_data(model: Gated) -> None:
    model.gate.weight.data = torch.randn(48, 32)


def swapped(model: Gated) -> None:
    model.gate.weight.data, model.up.weight.data = model.up.weight.data, model.gate.weight.data


def new_parameter(model: Gated) -> None:
    model.up.weight = nn.Parameter(torch.randn(48, 32), requires_grad=False)


def there_and_back(model: Gated) -> None:
    model.to(torch.float64).to(torch.float32)


def loaded(model: Gated) -> None:
    model.load_state_dict({name: torch.randn_like(weight) for name, weight in model.state_dict().items()})


def assigned(model: Gated) -> None:
    model.load_state_dict({name: torch.randn_like(weight) for name, weight in model.state_dict().items()}, assign=True)


def shared_memory(model: Gated) -> None:
    model.share_memory()


CHANGES = [in_place, new_data, swapped, new_parameter, there_and_back, loaded, assigned, shared_memory]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_weights_that_change_after_the_merge_are_seen(mlp: Gated, change: Callable[[Gated], None]) -> None:
    run = compiled(mlp)
    for _ in range(3):
        close(run(X), mlp(X))
        change(mlp)
        close(run(X), mlp(X))
        close(run(X), mlp(X))
        in_place(mlp)
        close(run(X), mlp(X))


def test_weights_that_are_given_the_memory_of_another_model_follow_it(mlp: Gated) -> None:
    run, other = compiled(mlp), ready(Gated())
    close(run(X), mlp(X))
    mlp.load_state_dict(other.state_dict(), assign=True)
    close(run(X), other(X))
    other.gate.weight.mul_(2)
    close(run(X), other(X))
    assert any("joined anew in each call, which is slow: another tensor" in note for note in last().notes)


def test_a_deep_copy_has_weights_of_its_own(mlp: Gated) -> None:
    run = compiled(mlp)
    run(X)
    twin = copy.deepcopy(mlp)
    twin.gate.weight.mul_(2)
    close(compiled(twin)(X), twin(X))
    close(run(X), mlp(X))
    assert not torch.equal(mlp(X), twin(X))


def test_layers_compiled_one_by_one_share_a_graph_but_not_their_weights() -> None:
    torch.manual_seed(0)
    layers = ready(nn.ModuleList(Gated() for _ in range(3)))
    for one in layers:
        one.compile(backend="atom", options=EAGER)
    for _ in range(2):
        for one in layers:
            close(one(X), one.forward(X))
            one.up.weight.mul_(2)
    assert packs.partners(layers[2].gate.weight)


def test_a_program_of_the_runtime_refuses_weights_that_have_moved() -> None:
    model = own()
    program = compile_model(model, options=EAGER)
    program.check()
    model.model.layers[0].mlp.up_proj.weight.mul_(2)
    program.check()
    model.model.layers[0].mlp.up_proj.weight.data = torch.randn(96, 64)
    with pytest.raises(atomc.RunError, match="given new storage after compiling"):
        program.check()


def test_a_saved_checkpoint_holds_the_same_tensors_as_before(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = stock("Qwen3")
    ids = torch.arange(9)[None]
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compiled(model)(ids, use_cache=False)
    assert merges() == {"merge_qkv": 2, "merge_gate_up": 2}
    model.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 1.2 * sum(tensor.nbytes for tensor in expected.values())


# How the program runs


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made_in", [torch.enable_grad, torch.inference_mode])
def test_parameters_that_could_want_gradients_are_merged_unless_made_in_inference_mode(context: Any, made_in: Any) -> None:
    torch.manual_seed(0)
    with made_in():
        model = Gated().eval()
    run = compiled(model)
    for mode in (context, torch.no_grad, torch.inference_mode):
        with mode():
            close(run(X), model(X))
    if made_in is torch.inference_mode:
        assert merges() == {} and "made in inference mode" in last().why("merge_gate_up")
    else:
        assert merges() == {"merge_gate_up": 1} and packs.partners(model.gate.weight)


def test_a_merged_model_can_still_be_trained(mlp: Gated) -> None:
    with torch.no_grad():
        compiled(mlp)(X)
    mlp.requires_grad_(True)
    mlp(X).square().sum().backward()
    before = mlp(X).detach()
    torch.optim.SGD(mlp.parameters(), 1e-3).step()
    with torch.no_grad():
        close(compiled(mlp)(X), mlp(X))
        assert not torch.allclose(mlp(X), before)


def test_threads_that_compile_and_run_one_model_agree(mlp: Gated) -> None:
    expected, wrong = mlp(X), []

    def work() -> None:
        try:
            run = compiled(mlp)
            for _ in range(5):
                close(run(X), expected)
        except BaseException as error:  # whatever happens in a thread must reach the test
            # torch has one flag for all threads: while one traces, a first call in another is refused.
            if "using FX to symbolically trace" not in str(error):
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Packs by themselves


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int32"])
def test_a_pack_is_the_memory_of_its_parts_in_every_dtype(dtype: str) -> None:
    a, b = (nn.Parameter((torch.rand(n, 16) * 100).to(getattr(torch, dtype)), requires_grad=False) for n in (4, 8))
    expected = [a.clone(), b.clone()]
    pack = packs.packed([a, b])
    assert isinstance(pack, Tensor) and pack.shape == (12, 16)
    assert (a.data_ptr(), b.data_ptr()) == (pack.data_ptr(), pack[4:].data_ptr())
    assert a.untyped_storage().nbytes() == a.nbytes
    for part, before in zip((a, b), expected, strict=True):
        assert torch.equal(part.view(torch.uint8), before.view(torch.uint8))
    b.data[0] = b.data[1]
    assert torch.equal(pack[4].view(torch.uint8), pack[5].view(torch.uint8))
    assert packs.packed([a, b]) is pack and packs.partners(b) == [a, b]


def test_what_does_not_fit_together_is_refused_with_a_reason() -> None:
    def parameter(*shape: int, **kwargs: Any) -> nn.Parameter:
        return nn.Parameter(torch.zeros(*shape, **kwargs))

    a, b, c = parameter(4, 8), parameter(4, 8), parameter(4, 8)
    assert packs.refusal([a, parameter(4, 6)]) == "float32[4, 8] on cpu beside float32[4, 6] on cpu"
    assert packs.refusal([a, parameter(4, 8, dtype=torch.bfloat16)]) == "float32[4, 8] on cpu beside bfloat16[4, 8] on cpu"
    assert packs.refusal([a, parameter(4, 8, device="meta")]) == "float32[4, 8] on cpu beside float32[4, 8] on meta"
    assert packs.refusal([nn.Parameter(torch.zeros(8, 4).t()), a]) == "it does not lie in rows, one behind the other"
    assert isinstance(packs.packed([a, b]), Tensor)
    assert packs.packed([b, c]) == "it is packed with 1 other parameters already"
    assert packs.partners(c) == []


# On a GPU


@pytest.mark.gpu
def test_captured_graphs_follow_weights_that_change_or_move() -> None:
    torch.manual_seed(0)
    model, x = ready(Gated()).cuda(), X.cuda()
    run = torch.compile(model, backend="atom", mode="reduce-overhead")
    for change in (in_place, new_data_on_gpu, assigned, in_place, new_data_on_gpu, assigned, there_and_back):
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x), rtol=0, atol=1e-4)
        change(model)  # type: ignore[operator]
    torch.testing.assert_close(run(x), model(x), rtol=0, atol=1e-4)
    assert packs.partners(model.gate.weight)  # type: ignore[arg-type]


def new_data_on_gpu(model: Gated) -> None:
    for linear in (model.gate, model.up):
        linear.weight.data = torch.randn_like(linear.weight)


@pytest.mark.gpu
def test_memory_of_the_gpu_is_free_after_a_merged_model_has_left_it() -> None:
    model, x = ready(Gated(1024)).cuda(), torch.randn(3, 1024, device="cuda")
    model(x)  # cuBLAS keeps a workspace
    before = torch.cuda.memory_allocated()
    compiled(model)(x)
    assert torch.cuda.memory_allocated() - before < 2**16
    held = sum(weight.nbytes for weight in model.parameters())
    model.cpu()
    assert torch.cuda.memory_allocated() <= before - held + 2**16
