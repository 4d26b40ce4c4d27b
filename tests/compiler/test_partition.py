"""A graph is cut at its kernels; equal pieces between them are compiled once."""

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import atomc
import atomc.compiler.partition
from atomc import ops
from atomc.capture import regions
from atomc.compiler.partition import structural_hash
from atomc.torch_compat import inductor
from atomc.torch_compat.inductor import kernels_at_once, num_cache_hits

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """Glue, attention (which is a kernel on every platform), glue."""

    def __init__(self, factor: float):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.rand(16)), factor

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x * self.weight) * self.factor
        heads = y.view(-1, 2, 8)
        return x + torch.cos(ops.attention(heads, heads, heads, scale=0.3).view(-1, 16))


class Stack(nn.Module):
    def __init__(self, *factors: float):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(Layer, factors))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled_pieces(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, prepare: bool = False
) -> tuple[list[str], int]:
    """What the report says of the pieces, and how often Inductor was called; the result is compared
    with eager.
    """
    calls = []
    inductor_code = atomc.compiler.partition.inductor_code

    def counted(*args: Any) -> Any:
        calls.append(args)
        return inductor_code(*args)

    monkeypatch.setattr(atomc.compiler.partition, "inductor_code", counted)
    model = atomc.prepare(model)
    if not prepare:
        regions.unprepare(model)
    compiled = torch.compile(model, backend="atom", options={"glue": "inductor"})
    torch.testing.assert_close(compiled(X), model(X))
    regions.unprepare(model)
    (note,) = [note for note in atomc.reports()[-1].notes if "pieces" in note]
    return note.split(", ")[:2], len(calls)


@pytest.mark.parametrize("prepare", [False, True])
def test_equal_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch, prepare: bool) -> None:
    note, calls = compiled_pieces(Stack(*[2.0] * 6), monkeypatch, prepare)
    assert (note, calls) == (["glue: 7 pieces", "3 unique"], 3)


def test_layers_with_another_constant_are_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    note, calls = compiled_pieces(Stack(2.0, 2.0, 2.0, 3.0, 2.0), monkeypatch)
    assert (note, calls) == (["glue: 6 pieces", "4 unique"], 4)


def test_kernels_of_all_pieces_are_compiled_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def noted(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(event)
            return function(*args)

        return call

    pieces = atomc.compiler.partition
    monkeypatch.setattr(pieces, "inductor_code", noted("piece", pieces.inductor_code))
    monkeypatch.setattr(AsyncCompile, "wait", noted("wait", AsyncCompile.wait))
    model = Stack(2.0, 2.0).requires_grad_(False)
    compiled = torch.compile(model, backend="atom", options={"glue": "inductor", "strict": True})
    torch.testing.assert_close(compiled(X), model(X))
    assert events == ["piece"] * 3 + ["wait"] * 3


def test_kernels_that_code_times_while_it_is_loaded_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda kernels, scope: waits.append(*scope))
    with kernels_at_once():
        AsyncCompile().wait({"later": 0})
        with torch._inductor.config.patch(cpp_wrapper=True):
            AsyncCompile().wait({"now": 0})
        assert waits == ["now"]
    assert waits == ["now", "later"]


def test_another_thread_waits_for_its_kernels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda kernels, scope: waits.append(*scope))
    with kernels_at_once():
        AsyncCompile().wait({"later": 0})
        other = threading.Thread(target=lambda: AsyncCompile().wait({"its own": 0}))
        other.start()
        other.join()
        assert waits == ["its own"]
    assert waits == ["its own", "later"]


def test_tritons_kernels_are_compiled_at_once_before_inductors_processes_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = threading.Barrier(2, timeout=20)
    ready = False
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: ready)
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)

    def compiled(kernels: AsyncCompile, name: str, source: str, device_str: str) -> str:
        if not ready:
            both.wait()
        settings.append(os.environ.get("TRITON_CACHE_DIR"))
        return f"{name} of {source}"

    monkeypatch.setattr(AsyncCompile, "triton", compiled)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    settings: list[str | None] = []
    scope: dict[str, Any] = {}
    with kernels_at_once():
        os.environ["TRITON_CACHE_DIR"] = "Inductor's"
        for name in ("first", "second"):
            scope[name] = AsyncCompile().triton(name, "code", device_str="cuda")
        AsyncCompile().wait(scope)
        ready = True
        assert AsyncCompile().triton("third", "code", "cuda") == "third of code"
    assert scope == {"first": "first of code", "second": "second of code"}
    assert settings == ["Inductor's"] * 3
    assert "TRITON_CACHE_DIR" not in os.environ


class Doubled(nn.Module):
    """Glue before and behind a kernel gets twice as many rows as there are, and no others."""

    def forward(self, x: Tensor) -> Tensor:
        y = attended(torch.cat((x, x)))
        y = attended(torch.sin(y) * torch.cos(y))
        return attended(y.view(2, -1, 16).sum(0))


def attended(x: Tensor) -> Tensor:
    heads = x.view(-1, 2, 8)
    return ops.attention(heads, heads, heads, scale=0.3).view(-1, 16)


@pytest.mark.parametrize("unbacked", [False, True], ids=["a size", "a size without a hint"])
def test_glue_of_twice_the_rows_knows_how_many_there_are(unbacked: bool) -> None:
    torch._dynamo.reset()
    model = Doubled()
    compiled = torch.compile(
        model,
        backend="atom",
        dynamic=None if unbacked else True,
        options={"glue": "inductor", "strict": True},
    )
    for rows in (5, 8):
        x = X.repeat(2, 1)[:rows].clone()
        if unbacked:
            torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.rotating
def test_glue_that_only_reads_a_number_computed_of_a_size_knows_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def model(heads: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        more = heads.shape[0] + 2
        heads = ops.attention(torch.sin(heads), heads, heads, scale=0.3)
        ends = torch.cat((start, start.new_zeros(more))).cumsum(0)
        return ops.attention(heads, heads, heads, scale=0.3), ends

    hits = num_cache_hits()
    for _ in ("compiled", "from Inductor's cache"):
        torch._dynamo.reset()
        compiled = torch.compile(
            model, backend="atom", dynamic=True, options={"glue": "inductor", "strict": True}
        )
        for rows in (5, 8):
            given = X.repeat(2, 1)[:rows].clone().view(rows, 2, 8), torch.ones(3)
            torch.testing.assert_close(compiled(*given), model(*given))
    assert num_cache_hits() > hits


def piece(function: Any, *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_pieces_are_alike_whatever_their_inputs_are_called() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    one = structural_hash(piece(lambda x, y: (x - y).relu(), a, b))
    assert one == structural_hash(piece(lambda left, right: (left - right).relu(), a, b))
    different = [
        structural_hash(piece(lambda x, y: (y - x).relu(), a, b)),
        structural_hash(piece(lambda x, y: (x - y).relu(), a.double(), b.double())),
        structural_hash(piece(lambda x, y: (x - y).relu(), torch.randn(3, 2), torch.randn(3, 2))),
        structural_hash(piece(lambda x, y: (x - y).relu(), a, torch.randn(3, 2).t())),
        structural_hash(piece(lambda x, y: (x - y).sigmoid(), a, b)),
        structural_hash(piece(lambda x, y: (x - 2 * y).relu(), a, b)),
    ]
    assert one not in different and len(set(different)) == len(different)


def test_zero_and_minus_zero_and_one_and_true_are_not_alike() -> None:
    a = torch.randn(3)
    made = [
        structural_hash(piece(partial(torch.full_like, fill_value=number), a))
        for number in (0.0, -0.0, 1, True)
    ]
    assert len(set(made)) == 4


def test_vectors_are_known_to_work_only_where_the_compiler_takes_their_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import cpp_builder

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for compiler, expected in (("true", True), ("false", False)):
        monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda name=compiler: name)
        assert inductor._vector_isa_works.__wrapped__() is (expected and sys.platform == "linux")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not inductor._vector_isa_works.__wrapped__()


def test_code_of_inductors_is_kept_without_imports_that_it_does_not_use() -> None:
    source = (
        "import torch\nfrom torch._inductor.hooks import run_intermediate_hooks\n"
        "from torch._inductor.codegen.memory_planning import _align as align\n"
        "from torch._inductor.async_compile import AsyncCompile\nasync_compile = "
        "AsyncCompile()\nx = align(3)\n"
    )
    expected = source.replace("from torch._inductor.hooks import run_intermediate_hooks\n", "")
    assert inductor._without_unused_imports(source) == expected


class Behind(nn.Module):
    """So many ops behind the attention of each of 20 layers."""

    def __init__(self, ops: int):
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            heads = x.view(-1, 2, 8)
            attended = ops.attention(heads, heads, heads, scale=0.3).view(-1, 16)
            x = attended.sin().abs() if self.ops > 1 else attended.abs()
        return x


@pytest.mark.parametrize("model", [Stack(2.0, 3.0), Behind(1)], ids=["few", "each alone"])
def test_inductor_is_not_started_for_a_handful_of_ops_and_those_that_it_fuses_with_nothing(
    model: nn.Module,
) -> None:
    model.eval().requires_grad_(False)
    compiled = torch.compile(model, backend="atom", options={"strict": True})
    torch.testing.assert_close(compiled(X), model(X))
    (note,) = (note for note in atomc.reports()[-1].notes if "between kernels" in note)
    assert note.startswith("glue: eager here: ")


def test_inductor_is_started_where_it_fuses_ops_of_many_layers() -> None:
    model = Behind(2).eval()
    compiled = torch.compile(model, backend="atom", options={"strict": True})
    torch.testing.assert_close(compiled(X), model(X))
    assert any("20 pieces" in note for note in atomc.reports()[-1].notes)
