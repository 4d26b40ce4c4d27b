"""Merged weights lie in the memory of the originals: bytes, weights that change or move, threads
and gradients.
"""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from merged_models import (
    EAGER,
    Gated,
    Layer,
    X,
    close,
    compiled,
    fresh,
    last,
    live_bytes,
    merges,
    own,
    ready,
    stock,
    weights,
    whole,
)
from torch import Tensor, nn

import atomc
from atomc.program import compile_model
from atomc.weights.packed import pack, packed_together, packing_problem


@pytest.fixture
def layer() -> Layer:
    return fresh(Layer)


@pytest.fixture
def mlp() -> Gated:
    return fresh(Gated)


# Memory


@pytest.mark.rotating
def test_no_byte_is_held_twice_over_prefill_decode_recompile_and_compiling_twice(
    layer: nn.Module,
) -> None:
    options = EAGER | {"repeat": False}  # recordings of calls hold their temporaries for a time

    def once() -> None:
        run = torch.compile(layer, backend="atom", dynamic=False, options=options)
        for tokens in (5, 1, 7):
            run(X[:, :1].repeat(1, tokens, 1))

    once()
    torch._dynamo.reset()
    layer.load_state_dict(
        {name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True
    )
    before = live_bytes()
    once()
    once()
    compiled(layer, rounding="hf")(X)
    assert len({report.recompile for report in atomc.reports()[-5:]}) > 1 and merges()
    assert live_bytes() - before < 1024  # a weight has 2048
    assert whole(*weights(layer.attention.q, layer.attention.k, layer.attention.v)).shape == (
        64,
        32,
    )


@pytest.mark.rotating
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
        ops.linear.kernels.remove(
            next(kernel for kernel in ops.linear.kernels if kernel.provider == "few rows")
        )
    assert few == [(64, 32), (32, 32), (96, 32), (32, 48)]


@pytest.mark.rotating
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
    model.load_state_dict(
        {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}
    )


def assigned(model: Gated) -> None:
    model.load_state_dict(
        {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}, assign=True
    )


def shared_memory(model: Gated) -> None:
    model.share_memory()


CHANGES = [
    in_place,
    new_data,
    swapped,
    new_parameter,
    there_and_back,
    loaded,
    assigned,
    shared_memory,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_weights_that_change_after_the_merge_are_seen(
    mlp: Gated, change: Callable[[Gated], None]
) -> None:
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
    assert any(
        "concatenated in each call, which is slow: another tensor" in note for note in last().notes
    )


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
    assert packed_together(layers[2].gate.weight)


def test_a_program_of_the_runtime_refuses_weights_that_have_moved() -> None:
    model = own()
    program = compile_model(model, options=EAGER)
    program.check()
    model.model.layers[0].mlp.up_proj.weight.mul_(2)
    program.check()
    model.model.layers[0].mlp.up_proj.weight.data = torch.randn(96, 64)
    with pytest.raises(atomc.RunError, match="given new storage after compiling"):
        program.check()


@pytest.mark.rotating
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
    assert (tmp_path / "state.pt").stat().st_size < 1.2 * sum(
        tensor.nbytes for tensor in expected.values()
    )


# How the program runs


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made_in", [torch.enable_grad, torch.inference_mode])
def test_parameters_that_could_want_gradients_are_merged_unless_made_in_inference_mode(
    context: Any, made_in: Any
) -> None:
    torch.manual_seed(0)
    with made_in():
        model = Gated().eval()
    run = compiled(model)
    for mode in (context, torch.no_grad, torch.inference_mode):
        with mode():
            close(run(X), model(X))
    if made_in is torch.inference_mode:
        assert merges() == {} and "created in inference mode" in last().why("merge_gate_up")
    else:
        assert merges() == {"merge_gate_up": 1} and packed_together(model.gate.weight)


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
    # torch registers a backend twice, and fails, if two threads are the first that use its name.
    torch._dynamo.lookup_backend("atom")
    expected, wrong = mlp(X), []

    def work() -> None:
        try:
            run = compiled(mlp)
            for _ in range(5):
                close(run(X), expected)
        except BaseException as error:  # whatever happens in a thread must reach the test
            # torch has one flag for all threads: while one traces, a first call in another is
            # refused.
            if "using FX to symbolically trace" not in str(error):
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Packs by themselves


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int32"]
)
def test_a_pack_is_the_memory_of_its_parts_in_every_dtype(dtype: str) -> None:
    a, b = (
        nn.Parameter((torch.rand(n, 16) * 100).to(getattr(torch, dtype)), requires_grad=False)
        for n in (4, 8)
    )
    expected = [a.clone(), b.clone()]
    whole = pack([a, b])
    assert isinstance(whole, Tensor) and whole.shape == (12, 16)
    assert (a.data_ptr(), b.data_ptr()) == (whole.data_ptr(), whole[4:].data_ptr())
    assert a.untyped_storage().nbytes() == a.nbytes
    for part, before in zip((a, b), expected, strict=True):
        assert torch.equal(part.view(torch.uint8), before.view(torch.uint8))
    b.data[0] = b.data[1]
    assert torch.equal(whole[4].view(torch.uint8), whole[5].view(torch.uint8))
    assert pack([a, b]) is whole and packed_together(b) == [a, b]


def test_what_does_not_fit_together_is_refused_with_a_reason() -> None:
    def parameter(*shape: int, **kwargs: Any) -> nn.Parameter:
        return nn.Parameter(torch.zeros(*shape, **kwargs))

    a, b, c = parameter(4, 8), parameter(4, 8), parameter(4, 8)
    assert (
        packing_problem([a, parameter(4, 6)])
        == "float32[4, 8] on cpu and float32[4, 6] on cpu differ"
    )
    assert (
        packing_problem([a, parameter(4, 8, dtype=torch.bfloat16)])
        == "float32[4, 8] on cpu and bfloat16[4, 8] on cpu differ"
    )
    assert (
        packing_problem([a, parameter(4, 8, device="meta")])
        == "float32[4, 8] on cpu and float32[4, 8] on meta differ"
    )
    assert (
        packing_problem([nn.Parameter(torch.zeros(8, 4).t()), a])
        == "it is not contiguous, or has no rows"
    )
    assert isinstance(pack([a, b]), Tensor)
    assert pack([b, c]) == "it is already packed with 1 other parameters"
    assert packed_together(c) == []


# On a GPU


@pytest.mark.gpu
def test_captured_graphs_follow_weights_that_change_or_move() -> None:
    torch.manual_seed(0)
    model, x = ready(Gated()).cuda(), X.cuda()
    run = torch.compile(model, backend="atom", mode="reduce-overhead")
    for change in (
        in_place,
        new_data_on_gpu,
        assigned,
        in_place,
        new_data_on_gpu,
        assigned,
        there_and_back,
    ):
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x), rtol=0, atol=1e-4)
        change(model)  # type: ignore[operator]
    torch.testing.assert_close(run(x), model(x), rtol=0, atol=1e-4)
    assert packed_together(model.gate.weight)  # type: ignore[arg-type]


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
