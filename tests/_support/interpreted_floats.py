"""Triton's interpreter computes with bf16 and fp8 as a GPU does: every result rounds to nearest,
ties to even. The bits of a row of a product do not depend on its place.

By itself it cuts fp32 off where bf16 rounds, rounds to fp8 without a carry, and adds and multiplies
the bits of bf16 as integers. The fp8 of gfx942 it does not know at all.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
# Half a step above the largest e4m3fn: from there on it depends on the GPU whether the code is 448
# or NaN.
E4M3FN_OVERFLOW = 464


def from_bf16(codes: Any) -> Any:
    """The fp32 numbers of bf16 codes."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(numbers: Any) -> Any:
    """The codes of the bf16 numbers nearest to numbers in fp32; of a NaN those of a quiet one."""
    words = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    odd = (words >> np.uint32(16)) & np.uint32(1)
    codes = ((words + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), codes)


def converted(values: Any, source: Any, target: Any) -> Any:
    """`values` in the dtype `target`, as numpy holds it: bf16 and fp8 as their codes."""
    given, wanted = TORCH.get(source.name), TORCH[target.name]
    if source.name == "fp32" and target.name == "bf16":
        return to_bf16(values)
    if source.name == "bf16" and target.name == "fp32":
        return from_bf16(values)
    numbers = torch.from_numpy(np.array(values, order="C"))
    if given is not None:
        numbers = numbers.view(given)
    if (
        wanted == torch.float8_e4m3fn
    ):  # torch saturates, a GPU need not: a kernel that counts on it has to say so
        numbers = numbers.float()
        numbers = numbers.masked_fill(numbers.abs() > E4M3FN_OVERFLOW, float("nan"))
    codes = (
        numbers.to(wanted).view(getattr(torch, BITS[target.primitive_bitwidth].__name__)).numpy()
    )
    return codes.view(interpreter._get_np_dtype(target))


def is_bf16(handle: Any) -> bool:
    return handle.dtype is not None and handle.dtype.scalar.name == "bf16"


def widened(handle: Any) -> Any:
    return TensorHandle(from_bf16(handle.data), tl.float32) if is_bf16(handle) else handle


def through_fp32(computed: Any) -> Any:
    """The builder's method `computed` on bf16: in fp32, and the result rounded. The last argument
    may be a function.
    """

    def rounded(self: Any, *given: Any) -> Any:
        if not any(isinstance(x, TensorHandle) and is_bf16(x) for x in given):
            return computed(self, *given)
        out = computed(self, *(widened(x) if isinstance(x, TensorHandle) else x for x in given))
        if out.data.dtype == np.bool_:  # a comparison
            return out
        return TensorHandle(to_bf16(out.data), tl.bfloat16)

    return rounded


def summed_by_halves(codes: Any, axis: int) -> Any:
    """The sum of a power of two of bf16 numbers along an axis, rounded after each addition as a
    tree of threads does.
    """
    while codes.shape[axis] > 1:
        lower, upper = np.split(codes, 2, axis)
        codes = to_bf16(from_bf16(lower) + from_bf16(upper))
    return codes


def round_to_nearest() -> None:
    """From now on interpreted kernels in this process compute as above."""
    builder, reductions = interpreter.InterpreterBuilder, interpreter.ReduceOps
    convert, cast, dot = interpreter._convert_float, builder.cast_impl, builder.create_dot
    ternary, update = builder.ternary_op, builder.create_atomic_rmw
    reduce, patch = reductions.apply_impl, interpreter._patch_lang_core

    def convert_float(values, source, target, rounding):
        cut_off = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if cut_off or source.name not in TORCH or target.name not in TORCH:
            return convert(values, source, target, rounding)
        words = np.ascontiguousarray(values).view(interpreter._get_np_dtype(source))
        return converted(words, source, target).view(BITS[target.primitive_bitwidth])

    def cast_impl(self, source, dtype):
        kinds = [kind for kind in (source.dtype.scalar, dtype.scalar) if kind.name in TORCH]
        if all(kind.name in ("fp16", "fp32", "fp64") for kind in kinds):  # numpy's own
            return cast(self, source, dtype)
        return TensorHandle(converted(source.data, source.dtype.scalar, dtype.scalar), dtype.scalar)

    def ternary_op(self, first, second, third, operation):
        if operation is np.where:  # which moves bits
            return ternary(self, first, second, third, operation)
        return through_fp32(ternary)(self, first, second, third, operation)

    def create_dot(self, a, b, d, *rest):
        # In fp64, rounded once: in fp32 the bits of a row depend on where a CPU's library finds it.
        wide = TensorHandle(np.zeros_like(d.data, dtype=np.float64), tl.float64)
        product = dot(self, widened(a), widened(b), wide, *rest)
        total = product.data + d.data
        return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    def create_atomic_rmw(self, operation, pointers, value, mask, *rest):
        if not is_bf16(value):
            return update(self, operation, pointers, value, mask, *rest)
        assert operation == interpreter._ir.ATOMIC_OP.FADD, (
            f"Triton has no atomic {operation} in bf16"
        )
        where, added, wanted = np.broadcast_arrays(pointers.data, value.data, mask.data)
        before = np.zeros(where.shape, dtype=np.uint16)
        for at in np.ndindex(where.shape):  # one after another: an address may come twice
            pointer = TensorHandle(where[at].reshape(1), pointers.dtype)
            let = TensorHandle(wanted[at].reshape(1), tl.int1)
            old = self.create_masked_load(pointer, let, None, None, None, False)
            new = self.create_fadd(old, TensorHandle(added[at].reshape(1), tl.bfloat16))
            self.create_masked_store(pointer, new, let, None, None)
            before[at] = old.data[0]
        return TensorHandle(before, tl.bfloat16)

    def reduced(self, given):
        if given[0].dtype != tl.bfloat16 or self.combine_fn != tl.standard._sum_combine:
            return reduce(self, given)
        [x], axis = self.unravel(given, self.axis)
        out = summed_by_halves(x.handle.data, axis)
        if not self.keep_dims:
            out = out.squeeze(axis)
        elif self.axis is None:
            out = out.reshape([1] * len(given[0].shape))
        return self.to_tensor(out, tl.bfloat16)

    def patched(lang, scope):
        patch(lang, scope)
        known = lang.dtype.to_ir
        scope.set_attr(
            lang.dtype,
            "to_ir",
            lambda self, builder: tl.float8e4b8 if self == tl.float8e4b8 else known(self, builder),
        )

    interpreter._convert_float = convert_float
    builder.cast_impl, builder.create_dot, builder.ternary_op = cast_impl, create_dot, ternary_op
    builder.create_atomic_rmw = create_atomic_rmw
    builder.get_bf16 = lambda self, value: TensorHandle(
        to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16
    )
    for name in ("binary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt"):
        setattr(builder, name, through_fp32(getattr(builder, name)))
    reductions.apply_impl = reduced
    interpreter._patch_lang_core = patched
