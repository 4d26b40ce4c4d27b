"""Repeated calls on a CPU: C++ kernels of Inductor, linears of oneDNN, arenas that stay."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.codecache import PyCodeCache

import atomc
from atomc.replay.arenas import KEPT_BYTES, Arenas, View
from atomc.replay.repeated import Repeated

CALLS = 8  # the last of which are repeated
D = 64


class Counter(nn.Module):
    """A norm and a gate (Inductor), products (PyTorch, or oneDNN), a cache that it writes."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.register_buffer("cache", torch.zeros(CALLS, D))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        y = x + self.down(F.silu(gate) * up)
        self.cache.index_copy_(0, self.steps[None] % CALLS, y[:1])
        self.steps.add_(1)
        return torch.sin(y).cumsum(-1) * torch.cos(y), self.cache.sum(0)


def counters(**options):
    """A compiled module whose calls are repeated, and an equal one whose calls are not."""
    modules = []
    for repeat in (True, False):
        torch.manual_seed(0)
        model = Counter().eval().requires_grad_(False)
        how = {"glue": "inductor", "cache": False, "repeat": repeat, **options}
        modules.append((model, torch.compile(model, backend="atom", dynamic=False, options=how)))
    return modules


def rows(number: int, seed: int = 0) -> Tensor:
    return torch.randn(number, D, generator=torch.Generator().manual_seed(seed))


def tapes(repeated):
    return [tape for one in repeated for tape in one.tapes.values() if tape is not None]


def assert_alike(modules, number=1, seeds=range(CALLS)):
    """That both give the same results for these inputs, which stay, and write the same."""
    (model, compiled), (other, plain) = modules
    inputs = [rows(number, seed) for seed in seeds]
    results = [compiled(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        for one, expected in zip(result, plain(x), strict=True):
            assert torch.equal(one, expected)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name))


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.rotating), 4])
def test_results_and_writes_are_those_of_the_graph(number, repeated):
    with torch.inference_mode():
        assert_alike(counters(), number)
    (tape,) = tapes(repeated)
    assert tape.kernels > 0 and tape.ops > 0, atomc.reports()[-1].notes


def test_kernels_are_seen_after_inductor_has_forgotten_their_modules(repeated):
    with torch.no_grad():
        modules = counters()
        assert_alike(modules, seeds=[0])
        PyCodeCache.cache_clear()
        assert_alike(modules)
    assert tapes(repeated)[0].kernels > 0


def test_modes_of_gradients_share_an_arena():
    function = Repeated(lambda x: (x + 1).mul_(2).exp(), torch.device("cpu"), False, [])
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode) * 4:
        with mode():
            x = rows(2)
            assert torch.equal(function(x), ((x + 1) * 2).exp())
    assert len(tapes([function])) == 1


def test_changed_weights_are_prepared_again_and_the_old_ones_are_freed(repeated):
    old = []
    with torch.no_grad():
        modules = counters()
        for _ in range(3):
            assert_alike(modules, number=4)
            (tape,) = tapes(repeated)
            values = tape.run.__globals__.values()
            old += [weakref.ref(x) for x in values if isinstance(x, Tensor) and x.is_mkldnn]
            for model, _ in modules:
                model.up.weight.mul_(1.5)
                model.down.weight.mul_(1.5)
        assert_alike(modules, number=4)
    del tape, values
    gc.collect()
    assert [x() is None for x in old] == [True] * 6


def test_threads_have_arenas_of_their_own(repeated):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D)) for _ in range(4)))
    layers.requires_grad_(False)
    compiled = torch.compile(layers, backend="atom", options={"cache": False, "glue": "inductor"})
    inputs = [rows(3, seed) for seed in range(4)]
    expected = [layers(x) for x in inputs]
    for x in inputs:
        compiled(x)
    failures = []

    def call(number):
        with torch.no_grad():
            for _ in range(200):
                if not torch.allclose(compiled(inputs[number]), expected[number], atol=1e-5):
                    failures.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and tapes(repeated)


def test_arenas_in_use_are_different_and_one_stays():
    arenas = Arenas(256, [View(torch.float32, (4,), (1,), 64), View(torch.uint8, (8,), (1,), 64)])
    first, second = arenas.take(), arenas.take()
    first[0].fill_(1.0)
    second[0].fill_(2.0)
    assert first[0].tolist() == [1.0] * 4 and first[1].tolist() == [0, 0, 128, 63] * 2
    address = second[0].data_ptr()
    arenas.give(second)
    arenas.give(first)
    assert arenas.take()[0].data_ptr() == address and not arenas.free
    large = Arenas(KEPT_BYTES + 1, [View(torch.uint8, (4,), (1,), 0)])
    large.give(large.take())
    assert not large.free


def test_an_op_that_runs_compiled_code_is_called_once(repeated):
    calls = []
    inner = torch.compile(
        lambda x: torch.sin(x) * 2, backend="atom", options={"cache": False, "glue": "inductor"}
    )
    with torch.library._scoped_library("replay_cpu_test", "DEF") as library, torch.no_grad():
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: calls.append(1) or inner(x), "CPU")
        library.impl("twice", torch.empty_like, "Meta")
        outer = torch.compile(
            lambda x: torch.ops.replay_cpu_test.twice(x + 1).cos() + 1,
            backend="atom",
            options={"cache": False, "glue": "inductor"},
        )
        inner(rows(2))
        for seed in range(CALLS):
            x = rows(2, seed)
            torch.testing.assert_close(outer(x), torch.cos(torch.sin(x + 1) * 2) + 1)
    assert len(calls) == CALLS and tapes(repeated)


def test_reset_frees_arenas(repeated):
    with torch.no_grad():
        modules = counters()
        assert_alike(modules)
    (tape,) = tapes(repeated)
    arenas = tape.run.__globals__["arenas"]
    memory = weakref.ref(arenas.free[0][0])
    del arenas, tape, modules
    repeated.clear()
    torch._dynamo.reset()
    gc.collect()
    assert memory() is None
