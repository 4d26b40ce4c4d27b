"""Launches and products that a repeated call gives to CUDA's libraries: their parameters by value,
against stand-ins that read memory as the libraries' documentation says.
"""

import ctypes
import gc
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field

import numpy
import pytest
import torch

from atomc.replay import bound
from atomc.replay.bound import Libraries
from atomc.replay.recording import Call, Recording
from atomc.replay.tape import tape_of
from atomc.torch_compat import cublaslt, cuda_driver
from atomc.torch_compat.cuda_driver import Kernel, LaunchAttribute, LaunchConfig
from atomc.torch_compat.launches import STREAM, Launch

CPU = torch.device("cpu")
AXPY = 0x7000  # handle of the kernel out = a * x + y, of float32
GRID = (4, 1, 1, 128, 1, 1, 64)


def floats(address, n):
    return numpy.frombuffer((ctypes.c_float * n).from_address(address), dtype=numpy.float32)


def axpy(x, y, out, n, a):
    floats(out, n)[:] = a * floats(x, n) + floats(y, n)


def by_launcher(*args):
    """The launcher of the kernel: grid, stream, then the arguments."""
    axpy(*args[2:])


def launch(x, y, out, a=2.0):
    axpy(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel(), a)
    return Launch(by_launcher, (4, STREAM), (x, y, out, x.numel(), a))


def parameters(*args):
    """As the kernel has them: addresses, an int32, a float32 and two absent addresses."""
    sizes = [8, 8, 8, 4]
    numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args[:4]]
    values = [x.to_bytes(size, "little") for x, size in zip(numbers, sizes, strict=True)]
    return (*values, numpy.float32(args[4]).tobytes(), bytes(8), bytes(8))


@dataclass
class StandIn(Libraries):
    """The driver, with one kernel."""

    status: int = 0
    launches: list = field(default_factory=list)
    threads: set = field(default_factory=set)
    attributes: tuple = ()
    overlaps: bool = False

    def kernel(self, launch):
        return Kernel(AXPY, GRID, parameters(*launch.args), self.attributes, self.overlaps)

    def functions(self):
        return {
            "enter_thread": self.enter_thread,
            "launch": self.launch,
            "check": cuda_driver.check,
            "multiply": Multiplier().cublasLtMatmul,
            "check_product": cublaslt.check,
        }

    def enter_thread(self):
        self.threads.add(threading.get_ident())

    def launch(self, config, function, parameters, extra):
        assert threading.get_ident() in self.threads
        config = LaunchConfig.from_buffer_copy(config._obj)
        assert (function.value, extra) == (AXPY, None)
        sizes = [8, 8, 8, 4, 4, 8, 8]
        pointers = (ctypes.c_void_p * len(sizes)).from_address(parameters.value)
        x, y, out, n, a, *absent = map(ctypes.string_at, pointers, sizes)
        assert absent == [bytes(8), bytes(8)]
        numbers = [int.from_bytes(one, "little") for one in (x, y, out, n)]
        if not self.status:
            axpy(*numbers, numpy.frombuffer(a, numpy.float32)[0])
        attributes = ctypes.cast(config.attributes, ctypes.POINTER(LaunchAttribute))
        pairs = [(one.number, one.value) for one in attributes[: config.num_attributes]]
        self.launches.append((tuple(config.dims), config.stream, pairs))
        return self.status


def recorded(program, *inputs):
    """A recording of a program of launches and ops. program: (events, *inputs) -> outputs"""
    recording = Recording(inputs)
    recording.outputs = program(recording.events, *inputs)
    return recording


def op(events, function, *args, **kwargs):
    result = function(*args, **kwargs)
    events.append(Call(function, args, kwargs, [result]))
    return result


def launched(events, *args):
    events.append(launch(*args))
    return args[2]


def inputs(seed, n=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) for _ in range(2)]


def addresses(tensors):
    return [x.data_ptr() for x in tensors]


WEIGHT = torch.arange(5.0)


def mixed(events, x, y):
    """Launches on inputs, temporaries, a constant, what an op returns, and outputs; in place too."""
    first = launched(events, x, y, torch.empty(5))
    second = launched(events, first, WEIGHT, torch.empty(5))
    returned = op(events, torch.ops.aten.sin.default, second)
    out = launched(events, returned, first, torch.empty(5))
    launched(events, out, out, out)
    launched(events, x[1:], y[:4], second[:4])
    return out, second


def tapes(program, libraries, make=inputs):
    first, second = (recorded(program, *make(seed)) for seed in (1, 2))
    both = tape_of(first, second), tape_of(first, second, libraries=libraries)
    del first, second
    gc.collect()  # a tape holds what its lines use
    return both


def test_launches_by_the_driver_give_what_launchers_give():
    driver = StandIn(CPU)
    plain, direct = tapes(mixed, driver)
    assert (plain.direct, direct.direct, direct.kernels, direct.ops) == (0, 5, 5, 1)
    results = []
    for seed, stream in ((3, 0), (4, 77), (4, 77), (5, 0)):
        tensors = inputs(seed)
        where = addresses(tensors)
        results.append((direct.run(tensors, where, stream), plain.run(tensors, where, stream)))
        assert {one[:2] for one in driver.launches[-5:]} == {(GRID, stream or None)}
    for ours, expected in results:  # all of them: no result is in memory that is used again
        for x, y in zip(ours, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_launch_has_the_attributes_of_the_captured_one(overlaps):
    cluster = (4, b"\2" + bytes(63))
    driver = StandIn(CPU, attributes=(cluster,), overlaps=overlaps)
    _, direct = tapes(mixed, driver)
    tensors = inputs(3)
    direct.run(tensors, addresses(tensors), 0)
    numbers = [number for number, _ in driver.launches[0][2]]
    assert numbers == ([4, 6] if overlaps else [4])
    assert driver.launches[0][2][0][1][:1] == b"\2"


def test_a_failed_launch_is_an_error(monkeypatch):
    driver = StandIn(CPU, status=700)
    message = ctypes.create_string_buffer(b"an illegal memory access was encountered")

    class Errors:
        def cuGetErrorString(self, status, text):
            text._obj.value = ctypes.addressof(message)

    monkeypatch.setattr(cuda_driver, "driver", Errors)
    _, direct = tapes(mixed, driver)
    tensors = inputs(3)
    with pytest.raises(RuntimeError, match=r"700: an illegal memory access"):
        direct.run(tensors, addresses(tensors), 0)


def test_threads_do_not_write_addresses_of_each_other():
    _, direct = tapes(mixed, StandIn(CPU))
    results, expected = {}, {}

    def run(seed):
        tensors = inputs(seed)
        results[seed] = [direct.run(tensors, addresses(tensors), seed) for _ in range(50)]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, calls in results.items():
        expected[seed] = mixed([], *inputs(seed))
        assert all(map(torch.equal, call, expected[seed]) for call in calls)


def test_an_address_with_two_roles_stays_with_the_launcher():
    def make(seed):
        """The second input starts where the first one does, in these calls."""
        x = inputs(seed, 6)[0]
        return [x[:5], x]

    def program(events, x, longer):
        return launched(events, x, longer, torch.empty(5))

    assert tapes(program, StandIn(CPU), make)[1].direct == 0


@pytest.mark.parametrize(
    "hidden, is_kernel",
    [((0).to_bytes(8, "little"), True), ((2**47).to_bytes(8, "little"), False)],
)
def test_a_kernel_with_an_address_of_its_own_stays_with_the_launcher(
    hidden, is_kernel, monkeypatch
):
    x, y = inputs(0)
    event = launch(x, y, torch.empty(5))
    kernel = Kernel(AXPY, GRID, (*parameters(*event.args)[:-1], hidden))
    monkeypatch.setattr(bound, "captured_kernel", lambda call, device: kernel)
    assert (Libraries(CPU).kernel(event) is not None) == is_kernel


def test_what_cannot_be_captured_stays_with_the_launcher(monkeypatch):
    def fails(call, device):
        raise RuntimeError("a launch is not one kernel")

    monkeypatch.setattr(bound, "captured_kernel", fails)
    assert Libraries(CPU).direct([launch(*inputs(0), torch.empty(5)), None]) == {}


class Multiplier:
    """cuBLASLt: matrices by columns, op(A) op(B), and a bias for each row of the result."""

    algorithms = 3  # algorithm i multiplies by kernel i

    def __init__(self):
        self.launched = None

    def cublasLtMatmulDescCreate(self, descriptor, compute, scale):
        assert (compute, scale) == (68, 0)
        return self._create(descriptor, {3: 0, 4: 0, 7: 1})

    def cublasLtMatmulDescSetAttribute(self, descriptor, attribute, value, size):
        assert ctypes.sizeof(value._obj) == size
        OBJECTS[descriptor.value][attribute] = value._obj.value or 0
        return 0

    def cublasLtMatrixLayoutCreate(self, layout, dtype, rows, columns, stride):
        return self._create(layout, (dtype, rows.value, columns.value, stride.value))

    def cublasLtMatmulPreferenceCreate(self, preference):
        return self._create(preference, {})

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def _create(self, handle, value):
        handle._obj.value = 1 + len(OBJECTS)
        OBJECTS[handle._obj.value] = value
        return 0

    def _destroy(self, handle):
        OBJECTS[handle.value] = None
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = _destroy
    cublasLtMatmulPreferenceDestroy = _destroy

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle, descriptor, a, b, c, d, preference, most, results, number
    ):
        assert OBJECTS[preference.value] == {1: 32 * 2**20, 5: 16, 6: 16, 7: 16, 8: 16}
        for i in range(self.algorithms):
            results[i].algorithm[0], results[i].workspace = i, 100 * i
        number._obj.value = self.algorithms
        return 0

    def cublasLtMatmul(
        self, handle, descriptor, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
        algorithm, workspace, workspace_bytes, stream,
    ):  # fmt: skip
        assert (alpha._obj.value, beta._obj.value, c.value) == (1.0, 0.0, d.value)
        assert workspace_bytes.value == algorithm._obj.workspace
        how = OBJECTS[descriptor.value]
        left, right = matrix(a, a_layout), matrix(b, b_layout)
        product = (left.T if how[3] else left).float() @ (right.T if how[4] else right).float()
        if how[7] == 4:
            product += matrix_at(how[8], product.shape[0], 1, 1)
        if workspace_bytes.value:
            ctypes.memset(workspace.value, 255, workspace_bytes.value)
        matrix(d, d_layout).copy_(product)
        self.launched = algorithm._obj.algorithm[0]
        return 0


OBJECTS: dict[int, object] = {}


def matrix(pointer, layout):
    dtype, rows, columns, stride = OBJECTS[layout.value]
    assert dtype == 2
    return matrix_at(pointer.value, rows, columns, stride)


def matrix_at(address, rows, columns, stride):
    size = (columns - 1) * stride + rows
    memory = (ctypes.c_uint16 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float16).as_strided((rows, columns), (1, stride))


@pytest.fixture
def multiplier(monkeypatch):
    """cuBLASLt, and CUDA's view of captures: PyTorch launches kernel 1."""
    library = Multiplier()

    def captured(call, device):
        library.launched = 1
        call()
        return Counter({(library.launched,): 1})

    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", ctypes.c_void_p)
    monkeypatch.setattr(bound, "captured_kernels", captured)
    return library


def halves(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).half()


class OnlyProducts(Libraries):
    def functions(self):
        library = cublaslt.library()
        functions = {"multiply": library.cublasLtMatmul, "check_product": cublaslt.check}
        return {"enter_thread": lambda: None, **functions}


ATEN = torch.ops.aten
PRODUCTS = {
    "mm": lambda events, x, w, bias, out: op(events, ATEN.mm.default, x, w.t()),
    "mm of columns": lambda events, x, w, bias, out: op(
        events, ATEN.mm.default, x.t(), w[:, :7].t()
    ),
    "mm of rows": lambda events, x, w, bias, out: op(events, ATEN.mm.default, x, w[:16, :7]),
    "mm into memory": lambda events, x, w, bias, out: op(events, ATEN.mm.out, x, w.t(), out=out),
    "addmm": lambda events, x, w, bias, out: op(events, ATEN.addmm.default, bias, x, w.t()),
    "addmm into memory": lambda events, x, w, bias, out: op(
        events, ATEN.addmm.out, bias, x, w.t(), out=out
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("rows", [7, 1])
def test_products_are_those_of_pytorch(name, rows, multiplier):
    if "columns" in name and rows == 1:
        pytest.skip("a column of one row is a row")

    def program(events, x, w, bias):
        """A product whose operand is a temporary, and whose result is read or returned."""
        scaled = op(events, ATEN.mul.Tensor, x, 2.0)
        product = PRODUCTS[name](events, scaled, w, bias, halves(rows, 24))
        return op(events, ATEN.add.Tensor, product, 1.0), product

    def make(seed):
        return halves(rows, 16, seed=seed), halves(24, 16, seed=seed), halves(24, seed=seed)

    _, direct = tapes(program, OnlyProducts(CPU), make)
    assert (direct.direct, direct.ops) == (1, 3)
    calls = [make(seed) for seed in (3, 4)]
    results = [direct.run(tensors, addresses(tensors), 0) for tensors in calls]
    assert multiplier.launched == 1
    for tensors, result in zip(calls, results, strict=True):
        for x, y in zip(result, program([], *tensors), strict=True):
            torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)


def test_without_an_algorithm_of_pytorchs_kernels_the_product_stays_with_pytorch(multiplier):
    multiplier.algorithms = 1

    def program(events, x, w):
        return op(events, ATEN.mm.default, x, w)

    _, direct = tapes(program, OnlyProducts(CPU), lambda seed: [halves(7, 16), halves(16, 24)])
    assert (direct.direct, direct.ops) == (0, 1)


@pytest.mark.parametrize(
    "bias, x, w, factors",
    [
        (halves(8), halves(4, 16), halves(16, 8), {"beta": 2}),
        (halves(8), halves(4, 16), halves(16, 8), {"alpha": 0.5}),
        (halves(4, 8), halves(4, 16), halves(16, 8), {}),
        (halves(16)[::2], halves(4, 16), halves(16, 8), {}),
        (halves(8), halves(4, 33)[:, 1::2], halves(16, 8), {}),
        (halves(8), halves(4, 17)[:, 1:], halves(16, 8), {}),
        (torch.randn(8), torch.randn(4, 16), torch.randn(16, 8), {}),
        (halves(8), halves(0, 16), halves(16, 8), {}),
    ],
)
def test_products_that_cublaslt_would_compute_otherwise_stay_with_pytorch(
    bias, x, w, factors, multiplier
):
    events = []
    op(events, ATEN.addmm.default, bias, x, w, **factors)
    op(events, ATEN.bmm.default, halves(2, 4, 16), halves(2, 16, 8))
    assert OnlyProducts(CPU).direct(events) == {}


def test_a_tape_holds_no_tensors_of_the_calls_that_were_recorded(multiplier):
    results = []

    def program(events, x, w):
        results.append(weakref.ref(op(events, ATEN.mm.default, x, w)))
        return op(events, ATEN.add.Tensor, results[-1](), 1.0)

    _, direct = tapes(program, OnlyProducts(CPU), lambda seed: [halves(7, 16), halves(16, 24)])
    assert direct.direct == 1
    assert [one() for one in results] == [None, None]


def test_a_bias_follows_its_input(multiplier):
    def program(events, bias, x, w):
        return op(events, ATEN.addmm.default, bias, x, w)

    x, w = halves(7, 16), halves(16, 24)
    _, direct = tapes(program, OnlyProducts(CPU), lambda seed: [halves(24, seed=seed), x, w])
    for seed in (5, 5, 6):
        tensors = [halves(24, seed=seed), x, w]
        expected = ATEN.addmm(*tensors)
        result = direct.run(tensors, addresses(tensors), 0)
        torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)


def test_a_bias_that_a_call_computes_stays_with_pytorch(multiplier):
    def program(events, bias, x, w):
        return op(events, ATEN.addmm.default, op(events, ATEN.mul.Tensor, bias, 2.0), x, w)

    def make(seed):
        return [halves(24, seed=seed), halves(7, 16), halves(16, 24)]

    assert tapes(program, OnlyProducts(CPU), make)[1].direct == 0


@pytest.mark.parametrize("has_context", [True, False])
def test_a_thread_without_a_context_gets_one_and_no_captured_stream_is_asked(
    has_context, monkeypatch
):
    asked = []

    class Driver:
        def cuCtxGetCurrent(self, context):
            context._obj.value = 1 if has_context else None
            return 0

    class Stream:
        def query(self):
            asked.append(self)

    monkeypatch.setattr(cuda_driver, "driver", Driver)
    monkeypatch.setattr(cuda_driver, "_thread", cuda_driver._Thread())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    cuda_driver.enter_thread()
    cuda_driver.enter_thread()
    assert len(asked) == (0 if has_context else 1)
