"""Triton's interpreter does once a launch what it does at each call of a function in a kernel, and
once what it does for each value.

By itself it walks over the members of triton.language at each such call, to replace those that are
replaced already: a third of its time, and half of it in kernels of many small functions. Of the
rest, a third goes into the types and the shapes of values, of which a kernel has few, and a sixth
into whether sums and products of integers overflow, which only a kernel that is debugged asserts.
"""

import inspect
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """From now on a launch in this process patches triton.language once for each function that it
    calls, looks numpy's dtypes up, shares what equal types and shapes consist of, and computes no
    overflow.
    """
    share_types()
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    numpy_dtype = interpreter._get_np_dtype
    patched: set[Any] = set()
    known: dict[str, Any] = {}
    builtins: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(package, builder, *scope):
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [(name, x) for name, x in members if core.is_builtin(x)]
        for name, member in builtins[package]:
            if getattr(package, name) is member:  # or an outer function has replaced it
                interpreter._patch_attr(package, name, member, builder, *scope)

    def patch_lang(fn):
        if fn in patched:
            return None  # only a launch restores what was there, and it is the first to ask
        patched.add(fn)
        return patch(fn)

    def launch(self, *args, **kwargs):
        patched.clear()  # the launch before has restored what it replaced
        return execute(self, *args, **kwargs)

    def get_np_dtype(dtype):
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = numpy_dtype(dtype)
        return found

    interpreter._patch_lang, interpreter._patch_builtin = patch_lang, patch_builtin
    interpreter.GridExecutor.__call__ = launch
    interpreter._get_np_dtype = get_np_dtype
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *operands: None


def share_types() -> None:
    """From now on blocks of equal sizes in this process have one shape, and so have their values:
    what is the same object is neither compared nor broadcast.
    """
    make_block, known = tl.block_type.__init__, {}
    shapes: dict[tuple[Any, ...], Any] = {}
    equal, broadcast = tl.dtype.__eq__, TritonSemantic.broadcast_impl_value
    scalar = core.tuple(()), tl.constexpr(1)

    def block_type(self, element_ty, shape):
        sizes = [core._unwrap_if_constexpr(size) for size in core._unwrap_if_constexpr(shape)]
        pointed = getattr(element_ty, "element_ty", None)
        if type(self) is not tl.block_type or type(pointed or element_ty) is not tl.dtype:
            return make_block(self, element_ty, shape)
        space = element_ty.address_space if pointed else None
        key = element_ty.name, space, *sizes
        if key not in known:
            make_block(self, element_ty, shape)
            known[key] = vars(self) | {
                "of_values": shape_of_values(self),
                "shape": shapes.setdefault((*sizes,), self.shape),
                "of_elements": {},
            }
        vars(self).update(known[key])

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar
        else:
            self.shape, self.numel = vars(type).get("of_values") or shape_of_values(type)

    def with_element_ty(self, element_ty):
        blocks = vars(self).get("of_elements")
        if blocks is None or type(element_ty) is not tl.dtype:
            return tl.block_type(element_ty, self.shape)
        if element_ty.name not in blocks:
            blocks[element_ty.name] = tl.block_type(element_ty, self.shape)
        return blocks[element_ty.name]

    def same_type(self, other):
        return self is other or equal(self, other)

    def broadcast_value(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    tl.block_type.with_element_ty = with_element_ty
    tl.dtype.__eq__, TritonSemantic.broadcast_impl_value = same_type, broadcast_value


def shape_of_values(block: Any) -> tuple[Any, Any]:
    """The shape and the number of elements of a value of this type."""
    return core.tuple([tl.constexpr(size) for size in block.shape]), tl.constexpr(block.numel)
