"""Functions that declare only what they read of the arguments of an op."""

import inspect
import traceback
from functools import partial
from typing import Annotated, TypedDict, Unpack

import pytest
import torch
from torch import Tensor

from atomc.kernels.checks import first_refusal, named, unlike
from atomc.ops.by_name import call_by_name, signature_of, with_signature
from atomc.ops.op import REGISTRY, Kernel, Refusal, op, refusal
from atomc.ops.op_traits import Kind
from atomc.platform import Platform

CPU = Platform.named("cpu-zen4")


class Bend(TypedDict, total=False):
    knee: Annotated[float, 0.5]
    up: Annotated[bool, True]


def bent(x: Tensor, y: Tensor | None = None, *, scale: float, **bend: Unpack[Bend]) -> Tensor:
    """scale * x bent at a knee, plus y."""
    turned = x.clamp(min=bend["knee"]) if bend["up"] else x.clamp(max=bend["knee"])
    return scale * turned if y is None else scale * turned + y


@pytest.fixture
def bent_op():
    yield op(kind=Kind.OTHER, rows=None, shape=lambda x, scale: torch.empty_like(x))(bent)
    del REGISTRY["bent"]


def test_the_keys_of_a_typed_dict_are_parameters_with_their_defaults() -> None:
    assert str(signature_of(bent)) == (
        "(x: torch.Tensor, y: torch.Tensor | None = None, *, scale: float, knee: float = 0.5, "
        "up: bool = True) -> torch.Tensor"
    )


def test_a_function_of_some_parameters_is_called_with_all() -> None:
    called = with_signature(lambda scale, up: (scale, up), signature_of(bent))
    assert called("x", None, scale=2.0) == (2.0, True)
    assert called("x", scale=2.0, up=False, knee=1.0) == (2.0, False)
    with pytest.raises(TypeError, match="scale"):
        called("x")


def test_a_typed_dict_receives_its_keys_and_other_names_all() -> None:
    def some(knee: float, **arguments: object) -> dict[str, object]:
        return {"knee": knee, **arguments}

    def keys(**bend: Unpack[Bend]) -> Bend:
        return bend

    assert call_by_name(keys, x=1, knee=2.0, up=False) == {"knee": 2.0, "up": False}
    assert call_by_name(some, x=1, knee=2.0) == {"x": 1, "knee": 2.0}
    assert with_signature(keys, signature_of(bent))(0, scale=1.0) == {"knee": 0.5, "up": True}


def test_what_is_bound_before_is_no_parameter() -> None:
    shape = partial(lambda x, dtype: x.new_empty(x.shape, dtype=dtype), dtype=torch.int8)
    called = with_signature(shape, signature_of(bent))
    assert called(torch.zeros(2), scale=1.0).dtype == torch.int8


def test_a_function_that_has_the_signature_is_called_itself() -> None:
    def same(x, weight, eps, style="after"):
        return x

    assert with_signature(same, inspect.signature(same)) is same
    assert with_signature(torch._C._nn.linear, signature_of(bent)) is torch._C._nn.linear


def test_an_unknown_parameter_without_a_default_is_refused_by_its_name() -> None:
    def optional(x, residual=None):
        return residual

    assert with_signature(optional, signature_of(bent))(1, scale=1.0) is None
    with pytest.raises(ValueError, match=r"\['bias'\], the op has \['x', 'y', 'scale'"):
        with_signature(lambda x, bias: x, signature_of(bent))


def test_an_error_in_a_kernel_is_traced_to_its_file() -> None:
    def failing(x):
        raise RuntimeError

    with pytest.raises(RuntimeError) as error:
        with_signature(failing, signature_of(bent))(1, scale=1.0)
    frames = traceback.extract_tb(error.value.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}
    assert frames[-2].lineno == failing.__code__.co_firstlineno


def test_an_op_and_its_kernels_are_called_as_they_are_declared_once(bent_op) -> None:
    refuses = first_refusal(
        named("x y", unlike, (torch.float32,)),
        lambda up: None if up else Refusal("argument", "bent down"),
    )

    @bent_op.kernel("mine", refuses=refuses)
    def bent(x: Tensor, scale: float, knee: float) -> Tensor:
        return scale * x.clamp(min=knee)

    x = torch.tensor([0.0, 1.0])
    [kernel] = bent_op.kernels
    assert isinstance(kernel, Kernel)
    assert kernel.function is bent
    assert inspect.signature(bent) == bent_op.signature
    assert bent_op(x, scale=2.0).tolist() == bent(x, scale=2.0).tolist() == [1.0, 2.0]
    assert bent_op.reference(x, None, scale=1.0, up=False).tolist() == [0.0, 0.5]
    assert refusal(kernel, CPU, {"x": x, "scale": 2.0}) is None
    assert refusal(kernel, CPU, {"x": x, "scale": 2.0, "up": False}).text == "bent down"
    assert refusal(kernel, CPU, {"x": x.half(), "y": None, "scale": 2.0}).code == "dtype"
    with pytest.raises(ValueError, match="bias"):
        bent_op.kernel("mine")(lambda x, bias: x)
