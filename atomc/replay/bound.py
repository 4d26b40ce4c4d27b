"""Launches and products of matrices of a recorded call that go to CUDA's libraries directly.

What a launch gives CUDA's driver is seen in a capture of it. Its parameters lie in one array, in
which a call writes the addresses that have changed; the driver is called with pointers to them.
A product is computed by cuBLASLt, with the algorithm that launches the kernels that PyTorch has
launched.
"""

import ctypes
import struct
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from atomc.replay.recording import Call, Event
from atomc.torch_compat import cublaslt
from atomc.torch_compat.captured_kernels import captured_kernel, captured_kernels
from atomc.torch_compat.cublaslt import Algorithm, Operands, Product, is_product
from atomc.torch_compat.cuda_driver import (
    Kernel,
    LaunchConfig,
    check,
    driver,
    enter_thread,
    launch_config,
)
from atomc.torch_compat.launches import Launch, current_stream, launch_again

NDArray = numpy.typing.NDArray[numpy.int64]
_BYTES = 8  # of an address, and of the memory for any other parameter


class ProductChoice(NamedTuple):
    """A product of matrices, its tensors and the algorithm that PyTorch uses."""

    product: Product
    operands: Operands
    algorithm: Algorithm


@dataclass
class Libraries:
    """What CUDA's libraries know about events of recorded calls on a device."""

    device: torch.device
    algorithms: dict[Hashable, Algorithm | None] = field(default_factory=dict)

    def direct(self, events: Sequence[Event | None]) -> dict[int, Kernel | ProductChoice]:
        """What libraries know of these events, by number."""
        results: dict[int, Kernel | ProductChoice] = {}
        for number, event in enumerate(events):
            one: Kernel | ProductChoice | None = None
            if isinstance(event, Launch) and event.addresses:
                one = self.kernel(event)
            elif isinstance(event, Call):
                one = self.product(event)
            if one is not None:
                results[number] = one
        return results

    def functions(self) -> dict[str, Callable[..., object]]:
        """Those that lines of a tape call."""
        checks = {"check": check, "check_product": cublaslt.check}
        functions: dict[str, Callable[..., object]] = {"enter_thread": enter_thread, **checks}
        functions["launch"] = driver().cuLaunchKernelEx
        with suppress(OSError):  # then there are no products
            functions["multiply"] = cublaslt.library().cublasLtMatmul
        return functions

    def kernel(self, launch: Launch) -> Kernel | None:
        """The kernel of a launch, if all of its parameters are numbers or addresses that the launch
        gets, so that no other address is in it.
        """
        with suppress(RuntimeError):
            kernel = captured_kernel(lambda: launch_again(launch, self.device), self.device)
            values = _values(launch)
            if all(len(one) < _BYTES or _number(one) in values for one in kernel.parameters):
                return kernel
        return None

    def product(self, call: Call) -> ProductChoice | None:
        """The product of matrices that a call is, if an algorithm launches the same kernels."""
        if (operands := _operands(call)) is None:
            return None
        with suppress(RuntimeError, OSError):
            product = Product(operands)
            key = (
                call.function,
                *((x.shape, x.stride(), x.dtype) for x in operands if x is not None),
            )
            if key not in self.algorithms:
                self.algorithms[key] = self._algorithm(call, product, operands)
            if algorithm := self.algorithms[key]:
                return ProductChoice(product, operands, algorithm)
        return None

    def _algorithm(self, call: Call, product: Product, operands: Operands) -> Algorithm | None:
        """The one that launches what PyTorch launches."""
        expected = captured_kernels(lambda: call.function(*call.args, **call.kwargs), self.device)
        addresses = Operands(*(_pointer(x) for x in operands))
        for algorithm in product.algorithms():
            if self._launched(product, addresses, algorithm) == expected:
                return algorithm
        return None

    def _launched(
        self, product: Product, operands: Operands, algorithm: Algorithm
    ) -> Counter[tuple[int, ...]]:
        memory = torch.empty(algorithm.workspace, dtype=torch.uint8, device=self.device)

        def multiply() -> None:
            stream = ctypes.c_void_p(current_stream(self.device))
            arguments = product.arguments(operands, algorithm, _pointer(memory), stream)
            cublaslt.check(cublaslt.library().cublasLtMatmul(*arguments))

        return captured_kernels(multiply, self.device)


# Where an address comes from, and what is added to it: the number of an input, the name of a tensor
# of the tape, or nothing, if it is the same in each call.
Slot = tuple[int | str | None, int]


class Bound:
    """Lines of a tape that call CUDA's libraries, and the array of their parameters.

    functions  of the libraries, for the lines
    slot       of a tensor
    constants  of the tape; `finish` adds what the lines use: begin(addresses of inputs, stream),
               and at_NAME(address) for each tensor of the tape whose address a line needs
    """

    def __init__(
        self,
        functions: Callable[[], Mapping[str, Callable[..., object]]],
        slot: Callable[[Tensor], Slot],
        constants: dict[str, Any],
    ):
        self.functions, self.slot, self.constants = functions, slot, constants
        self.values: list[int] = []
        self.slots: list[Slot] = []
        self.configs: list[LaunchConfig] = []
        self.biases: list[_Bias] = []
        self.stream = ctypes.c_void_p()
        # Called with the addresses of the array and of pointers to its elements.
        self.unfinished: list[Callable[[int, int], None]] = []

    def launch(self, kernel: Kernel, launch: Launch) -> str | None:
        """The line of a launch. None if one address in it has two roles."""
        slots: dict[int, Slot] = {}
        for x in _tensors(launch):
            if slots.setdefault(x.data_ptr(), self.slot(x)) != self.slot(x):
                return None
        first, config, parameters = len(self.values), launch_config(kernel), ctypes.c_void_p()
        for parameter in kernel.parameters:
            is_address = len(parameter) == _BYTES
            value = _number(parameter)
            self._add(value, slots.get(value, _FIXED) if is_address else _FIXED)
        self.configs.append(config)
        number = len(self.configs)
        self.constants |= {
            f"config{number}": ctypes.byref(config),
            f"function{number}": ctypes.c_void_p(kernel.function),
            f"parameters{number}": parameters,
            f"launcher{number}": launch.function,  # stays alive, and its kernel with it
        }

        def point(_: int, pointers: int) -> None:
            parameters.value = pointers + first * _BYTES

        self.unfinished.append(point)
        arguments = f"config{number}, function{number}, parameters{number}, None"
        return f"if status := launch({arguments}): check(status)"

    def product(self, choice: ProductChoice, workspace: Slot) -> str:
        """The line of a product of matrices."""
        product, operands, algorithm = choice
        first, name = len(self.values), f"product{len(self.unfinished)}"
        for x in operands[:3]:
            self._add(x.data_ptr(), self.slot(x))
        self._add(0, workspace)
        if operands.bias is not None:
            self.biases.append(_Bias(product, self.slot(operands.bias), operands.bias.data_ptr()))

        def point(values: int, _: int) -> None:
            places = [values + number * _BYTES for number in range(first, first + 4)]
            *addresses, memory = map(ctypes.c_void_p.from_address, places)
            where = Operands(*addresses)
            self.constants[name] = product.arguments(where, algorithm, memory, self.stream)
            self.constants[f"{name}_is"] = product  # stays alive, and what it describes with it

        self.unfinished.append(point)
        return f"if status := multiply(*{name}): check_product(status)"

    def bases(self) -> set[str]:
        """The tensors of the tape whose addresses lines need."""
        return {base for base, _ in self.slots if isinstance(base, str)}

    def finish(self) -> int:
        """Allocate the array, and add all that the lines use to the constants. Returns the number
        of lines.
        """
        if not self.unfinished:
            return 0
        values = numpy.array(self.values, dtype=numpy.uint64).view(numpy.int64)
        start = values.ctypes.data
        pointers = start + _BYTES * numpy.arange(len(values), dtype=numpy.int64)
        for point in self.unfinished:
            point(start, pointers.ctypes.data)
        bases: dict[int | str | None, list[tuple[int, int]]] = defaultdict(list)
        for number, (base, offset) in enumerate(self.slots):
            bases[base].append((number, offset))
        for base, numbers in bases.items():
            if isinstance(base, str):
                self.constants[f"at_{base}"] = _Base(values, numbers).write
        of_inputs = {base: numbers for base, numbers in bases.items() if isinstance(base, int)}
        inputs = _Inputs(values, of_inputs, self.biases, self.configs, self.stream)
        self.constants |= {"begin": inputs.write, "pointers": pointers, "lock": threading.Lock()}
        self.constants |= self.functions()
        return len(self.unfinished)

    def _add(self, value: int, slot: Slot) -> None:
        self.values.append(value)
        self.slots.append(slot)


_FIXED: Slot = (None, 0)


class _Base:
    """The elements of the array that follow the address of one tensor."""

    def __init__(self, values: NDArray, numbers: Sequence[tuple[int, int]]):
        self.values, self.last = values, -1
        self.numbers, self.offsets = numpy.array(numbers, dtype=numpy.int64).T

    def write(self, address: int) -> None:
        if address != self.last:
            self.last = address
            self.values[self.numbers] = self.offsets + address


@dataclass
class _Bias:
    """A product whose description has the address of a bias: that of an input, or a fixed one."""

    product: Product
    slot: Slot
    last: int

    def write(self, addresses: Sequence[int]) -> None:
        base, offset = self.slot
        address = addresses[base] + offset if isinstance(base, int) else self.last
        if address != self.last:
            self.last = address
            self.product.set_bias(address)


class _Inputs:
    """What follows the addresses of inputs, and the stream."""

    def __init__(
        self,
        values: NDArray,
        numbers: Mapping[int, Sequence[tuple[int, int]]],
        biases: Sequence[_Bias],
        configs: Sequence[LaunchConfig],
        stream: ctypes.c_void_p,
    ):
        self.values, self.biases = values, biases
        self.configs, self.stream = configs, stream
        rows = [(number, base, offset) for base in numbers for number, offset in numbers[base]]
        self.numbers, self.bases, self.offsets = numpy.array(rows, numpy.int64).reshape(-1, 3).T
        self.last: Sequence[int] = []

    def write(self, addresses: Sequence[int], stream: int) -> None:
        if addresses != self.last:
            self.last = addresses
            all_of_them = numpy.frombuffer(array("q", addresses), numpy.int64)
            self.values[self.numbers] = all_of_them[self.bases] + self.offsets
            for bias in self.biases:
                bias.write(addresses)
        if stream != (self.stream.value or 0):
            self.stream.value = stream
            for config in self.configs:
                config.stream = stream


def _operands(call: Call) -> Operands | None:
    """Those of a product of matrices, if a call is one."""
    if call.function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
        (a, b), bias = call.args, None
    elif call.function in (torch.ops.aten.addmm.default, torch.ops.aten.addmm.out):
        bias, a, b = call.args
    else:
        return None
    operands = Operands(a, b, call.results[0], bias)
    factors = [call.kwargs.get(factor, 1) for factor in ("beta", "alpha")]
    return operands if factors == [1, 1] and is_product(operands) else None


def _tensors(launch: Launch) -> list[Tensor]:
    return [x for x in tree_leaves((launch.args, launch.kwargs)) if isinstance(x, Tensor)]


def _values(launch: Launch) -> set[int]:
    """The integers and addresses that a launch gets, as parameters of eight bytes; 0 stands for
    what is absent.
    """
    leaves = tree_leaves((launch.args, launch.kwargs))
    numbers = {x % 2**64 for x in leaves if isinstance(x, int)}
    doubles = {_number(struct.pack("<d", x)) for x in leaves if isinstance(x, float)}
    return {0} | numbers | doubles | {x.data_ptr() for x in _tensors(launch)}


def _number(parameter: bytes) -> int:
    return int.from_bytes(parameter, "little")


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if x is None else x.data_ptr())
