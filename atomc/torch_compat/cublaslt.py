"""Products of matrices by cuBLASLt, with an algorithm that is chosen once.

Row-major matrices are the transposed ones of cuBLAS, which are column-major: out.T = b.T @ a.T.
"""

import ctypes
import functools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# cublasComputeType_t, cudaDataType and attributes of descriptors, by the names in cublasLt.h.
_COMPUTE_32F, _REAL_32F = 68, 0
_REAL = {torch.float16: 2, torch.bfloat16: 14}
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_EPILOGUE_BIAS = 4
_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
MOST_WORKSPACE = 32 * 2**20  # bytes; what PyTorch gives cuBLAS on Hopper
MOST_ALGORITHMS = 8
ALIGNMENT = 16  # of addresses; algorithms need no more
_ONE, _ZERO = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and the bytes of its workspace."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Operands(NamedTuple):
    """Tensors, or their addresses, of out = a @ b (+ bias)."""

    a: Any
    b: Any
    out: Any
    bias: Any = None


@functools.cache
def library() -> ctypes.CDLL:
    """cuBLASLt as PyTorch has loaded it. Raises OSError if there is none."""
    version = (torch.version.cuda or "0").split(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{version}")


class Product:
    """out = a @ b (+ bias), for matrices with the layouts of an example.

    a [M, K], b [K, N], out [M, N]: fp16 or bf16, rows or columns contiguous, out by rows;
    bias [N], contiguous. All addresses are multiples of 16. Raises RuntimeError if cuBLAS refuses
    it, OSError without cuBLAS.
    """

    def __init__(self, example: Operands):
        self._library = library()
        self.descriptor = ctypes.c_void_p()
        self.layouts: list[ctypes.c_void_p] = []  # of b, a and out
        a, b, out, bias = example
        create = self._library.cublasLtMatmulDescCreate
        check(create(ctypes.byref(self.descriptor), _COMPUTE_32F, _REAL_32F))
        self._describe(_TRANSA, ctypes.c_int(not is_by_rows(b)))
        self._describe(_TRANSB, ctypes.c_int(not is_by_rows(a)))
        if bias is not None:
            self._describe(_EPILOGUE, ctypes.c_int(_EPILOGUE_BIAS))
            self.set_bias(bias.data_ptr())
        self.layouts += [_layout(x) for x in (b, a, out)]

    def __del__(self) -> None:
        for layout in self.layouts:
            self._library.cublasLtMatrixLayoutDestroy(layout)
        if self.descriptor:
            self._library.cublasLtMatmulDescDestroy(self.descriptor)

    def set_bias(self, address: int) -> None:
        self._describe(_BIAS_POINTER, ctypes.c_void_p(address))

    def algorithms(self) -> list[Algorithm]:
        """Those that cuBLAS deems the best, the best one first."""
        preference, number = ctypes.c_void_p(), ctypes.c_int()
        check(self._library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        prefer = partial(_set, self._library.cublasLtMatmulPreferenceSetAttribute, preference)
        prefer(_MAX_WORKSPACE_BYTES, ctypes.c_size_t(MOST_WORKSPACE))
        for attribute in _MIN_ALIGNMENTS:
            prefer(attribute, ctypes.c_uint32(ALIGNMENT))
        results = (Algorithm * MOST_ALGORITHMS)()
        b, a, out = self.layouts
        where = (preference, MOST_ALGORITHMS, results, ctypes.byref(number))
        choose = self._library.cublasLtMatmulAlgoGetHeuristic
        status = choose(_handle(), self.descriptor, b, a, out, out, *where)
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        check(status)
        return list(results[: number.value])

    def arguments(
        self, operands: Operands, algorithm: Algorithm, workspace: Any, stream: Any
    ) -> tuple[Any, ...]:
        """Arguments of cublasLtMatmul. operands, workspace, stream: addresses and a handle, of
        ctypes, read at each call.
        """
        b, a, out = self.layouts
        sources = (_ONE, operands.b, b, operands.a, a)
        results = (_ZERO, operands.out, out, operands.out, out)
        how = (ctypes.byref(algorithm), workspace, ctypes.c_size_t(algorithm.workspace), stream)
        return (_handle(), self.descriptor, *sources, *results, *how)

    def _describe(self, attribute: int, value: Any) -> None:
        _set(self._library.cublasLtMatmulDescSetAttribute, self.descriptor, attribute, value)


def is_product(operands: Operands) -> bool:
    """Whether a Product takes these tensors."""
    *matrices, bias = operands
    out, tensors = operands.out, [x for x in operands if x is not None]
    return (
        all(_is_matrix(x) for x in matrices)
        and is_by_rows(out)
        and (bias is None or (bias.shape == out.shape[1:] and bias.is_contiguous()))
        and len({x.dtype for x in tensors}) == 1
        and all(x.data_ptr() % ALIGNMENT == 0 for x in tensors)
    )


def _is_matrix(x: Tensor) -> bool:
    by_columns = x.dim() == 2 and is_by_rows(x.t())
    return x.dim() == 2 and x.dtype in _REAL and x.numel() > 0 and (is_by_rows(x) or by_columns)


def check(status: int) -> None:
    """Raise RuntimeError for what a call of cuBLASLt returns if it failed."""
    if status:
        raise RuntimeError(f"cuBLASLt: error {status}")


def is_by_rows(x: Tensor) -> bool:
    """Whether the elements of a row of a matrix are next to each other."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _layout(x: Tensor) -> ctypes.c_void_p:
    """Of a matrix, or of its transpose, in memory by columns."""
    rows = x if is_by_rows(x) else x.t()
    layout, sizes = ctypes.c_void_p(), (rows.shape[1], rows.shape[0], rows.stride(0))
    create = library().cublasLtMatrixLayoutCreate
    check(create(ctypes.byref(layout), _REAL[x.dtype], *map(ctypes.c_uint64, sizes)))
    return layout


def _set(function: Any, what: ctypes.c_void_p, attribute: int, value: Any) -> None:
    check(function(what, attribute, ctypes.byref(value), ctypes.sizeof(value)))


def _handle() -> ctypes.c_void_p:
    """A handle of cuBLAS is one of cuBLASLt."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
