"""Replace rotary positions by one op. The pattern is the op's reference, traced once per style, or
another spelling of it.

x * cos + cat(-x[half:], x[:half]) * sin    =>    rope(x, cos, sin, "neox"); other styles alike
x * cos + cat(x[half:], -x[:half]) * sin    =>    rope(x, cos, -sin, "neox")
x.float() * cos + pairs(x).float() * sin    =>    rope(x.float(), cos, sin, "pairs")
complex(x) * turn                           =>    rope(x, turn.real, turn.imag, "gptj")
rope(x.float(), cos, sin).to(x.dtype)       =>    rope(x, cos, sin, in_fp32=True)
rope(x, fp32 cos, fp32 sin).to(x.dtype)     =>    rope(x, cos, sin, in_fp32=True)
cat(rope(x[:r], cos, sin), x[r:])           =>    rope(x, cos, sin), partial
"""

from collections.abc import Callable

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal, spell_shape
from atomc.ops.formats import HALVES
from atomc.ops.rope import ROPE_STYLES, columns_per_angle, rotate
from atomc.passes.typed_aten import to_copy
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite

aten = torch.ops.aten
neg: Callable[[Tensor], Tensor] = aten.neg.default
clone: Callable[[Tensor], Tensor] = aten.clone.default
select: Callable[[Tensor, int, int], Tensor] = aten.select.int
view_as_real: Callable[[Tensor], Tensor] = aten.view_as_real.default


def turns_pairs(x: Tensor, cos: Tensor, sin: Tensor, **_: object) -> str | None:
    """A guard: x has an even number of columns, the tables have one rank and an angle for each
    pair, and their leading sizes broadcast to x.
    """
    if isinstance(x.shape[-1], int) and x.shape[-1] % 2:
        return f"{x.shape[-1]} columns do not form pairs"
    if cos.dim() > x.dim() or len(cos.shape) != len(sin.shape):
        return (
            f"cos {spell_shape(cos.shape)} and sin {spell_shape(sin.shape)} for x "
            f"{spell_shape(x.shape)}"
        )
    for table in (cos, sin):
        columns = table.shape[-1] if table.dim() else 1
        if not any(known_equal(n * columns, x.shape[-1]) for n in (1, 2)):
            return f"a table of {columns} columns for x {spell_shape(x.shape)}"
    for size, of_x in zip(reversed(cos.shape[:-1]), reversed(x.shape[:-1]), strict=False):
        if not (known_equal(size, 1) or known_equal(size, of_x)):
            return f"cos {spell_shape(cos.shape)} does not broadcast to x {spell_shape(x.shape)}"
    return None


def _pattern(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    return rotate(x, cos, sin, style)


def _example(style: str) -> Example:
    width = 12 // columns_per_angle(style)
    # The dtypes of x and of the tables are independent: the op promotes as PyTorch does.
    table = OneOf(*_DTYPES)
    return {
        "x": tensor_example(3, 12, dtype=OneOf(*_DTYPES)),
        "cos": tensor_example(width, dtype=table),
        "sin": tensor_example(width, dtype=table),
        "style": style,
    }


def _partial_pattern(x: Tensor, cos: Tensor, sin: Tensor, style: str, in_fp32: bool) -> Tensor:
    width = cos.shape[-1] * columns_per_angle(style)
    return torch.cat((ops.rope(x[..., :width], cos, sin, style, in_fp32), x[..., width:]), -1)


def _float_pattern(x: Tensor, cos: Tensor, sin: Tensor, style: str, widened: bool) -> Tensor:
    return ops.rope(x.to(torch.float32) if widened else x, cos, sin, style).to(x.dtype)


def _float_replacement(x: Tensor, cos: Tensor, sin: Tensor, style: str, widened: bool) -> Tensor:
    return ops.rope(x, cos, sin, style, True)


def _float_example(widened: bool) -> Example:
    table = OneOf(*_DTYPES) if widened else torch.float32
    return {
        "widened": widened,
        "x": tensor_example(3, 12),
        "cos": tensor_example(12, dtype=table),
        "sin": tensor_example(12, dtype=table),
        "style": "neox",
    }


def _has_16_bits(x: Tensor, **_: object) -> str | None:
    return None if x.dtype in HALVES else f"x is {x.dtype}, which fp32 does not widen"


def _partial_example(style: str) -> Example:
    return {
        **_example(style),
        "x": tensor_example(3, 22, dtype=OneOf(*_DTYPES)),
        "style": OneOf(style),
        "in_fp32": OneOf(False, True),
    }


def _attrs(style: str, **_: object) -> dict[str, str]:
    return {"style": style}


def _other_sign_pattern(x: Tensor, cos: Tensor, sin: Tensor, minus: bool, first: bool) -> Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    crossed = torch.cat((-b, a) if first else (b, -a), -1) * sin
    return x * cos - crossed if minus else x * cos + crossed


def _other_sign_replacement(
    x: Tensor, cos: Tensor, sin: Tensor, minus: bool, first: bool
) -> Tensor:
    return ops.rope(x, cos, sin if minus != first else neg(sin), "neox")


def _other_sign_example(minus: bool, first: bool) -> Example:
    inputs = {name: tensor for name, tensor in _example("neox").items() if name != "style"}
    return {**inputs, "minus": minus, "first": first}


def _cast_pattern(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    crossed = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x.float() * cos + crossed.float() * sin


def _cast_replacement(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ops.rope(to_copy(x, dtype=torch.float32), cos, sin, "pairs")


def _cast_example() -> Example:
    tables = {name: tensor for name, tensor in _example("pairs").items() if name in ("cos", "sin")}
    return {"x": tensor_example(3, 12), **tables}


def _complex_pattern(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def _complex_replacement(x: Tensor, turn: Tensor) -> Tensor:
    parts = view_as_real(turn)
    cos, sin = (clone(select(parts, -1, i)) for i in (0, 1))  # kernels read dense rows
    return ops.rope(x, cos, sin, "gptj")


def _complex_example() -> Example:
    return {
        "x": tensor_example(3, 12, dtype=torch.float32),
        "turn": tensor_example(6, dtype=torch.complex64),
    }


def _turns_complex_pairs(x: Tensor, turn: Tensor) -> str | None:
    if turn.is_conj():
        return "turn is a conjugate that is not computed yet"
    return turns_pairs(x, turn, turn)


_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
_STYLES = [
    Case(style, {"style": style}, {"aten::stack": {}} if style in ("gptj", "pairs") else {})
    for style in ROPE_STYLES
]
ROPE = Rewrite("rope", _pattern, ops.rope, _example, guard=turns_pairs, attrs=_attrs, cases=_STYLES)
_OTHER_SIGNS = [
    Case("cat(b, -a)", {"minus": False, "first": False}),
    Case("minus cat(b, -a)", {"minus": True, "first": False}),
    Case("minus cat(-b, a)", {"minus": True, "first": True}),
]
ROPE_OTHER_SIGN = Rewrite(
    "rope",
    _other_sign_pattern,
    _other_sign_replacement,
    _other_sign_example,
    guard=turns_pairs,
    attrs={"style": "neox"},
    needs={"aten::neg": {}},
    cases=_OTHER_SIGNS,
)
ROPE_CAST = Rewrite(
    "rope",
    _cast_pattern,
    _cast_replacement,
    _cast_example,
    guard=turns_pairs,
    variant="pairs, rotated before the cast",
    attrs={"style": "pairs"},
    needs={"aten::stack": {}, "aten::cast": {}},
)
ROPE_COMPLEX = Rewrite(
    "rope",
    _complex_pattern,
    _complex_replacement,
    _complex_example,
    guard=_turns_complex_pairs,
    variant="complex",
    attrs={"style": "gptj"},
    needs={"aten::view_as_complex": {}},
)
ROPE_IN_FP32 = Rewrite(
    "rope_in_fp32",
    _float_pattern,
    _float_replacement,
    _float_example,
    guard=_has_16_bits,
    needs={"aten::cast": {}},
    cases=[Case("", {"widened": True}), Case("fp32 tables", {"widened": False})],
)
ROPE_PARTIAL = Rewrite(
    "rope_partial",
    _partial_pattern,
    ops.rope,
    _partial_example,
    attrs=_attrs,
    cases=[Case(style, {"style": style}, {"rope": {"style": style}}) for style in ROPE_STYLES],
    needs={"aten::slice": {}},
)
