"""Convolutions of patches, as large as their kernel, are products of rows; others stay."""

import pytest
import torch
import torch.nn.functional as F

import atomc

STRICT = {"strict": True, "glue": "eager"}


def lifted(call, *inputs, dynamic=False):
    """The result of the compiled call, and how many linears it has."""
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(call, backend="atom", options=STRICT, dynamic=dynamic)(*inputs)
    return found, atomc.reports()[-1].matches["linear"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", [(2, 4, 4), (3, 5)], ids=["3 dimensions", "2 dimensions"])
def test_a_convolution_of_patches_becomes_a_product(size, bias, dtype):
    kind = torch.nn.Conv3d if len(size) == 3 else torch.nn.Conv2d
    embed = kind(3, 8, size, stride=size, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(7, 3, *size, dtype=dtype)
    found, linears = lifted(lambda x: embed(x), x)
    assert linears == 1
    assert found.shape == (7, 8, *[1] * len(size))
    assert found.stride() == embed(x).stride()
    torch.testing.assert_close(found, embed(x))


def test_the_number_of_patches_may_be_dynamic():
    weight, bias = torch.randn(8, 3, 2, 4, 4), torch.randn(8)

    def embed(x):
        return F.conv3d(x.view(-1, 3, 2, 4, 4), weight, bias).view(-1, 8)

    x = torch.randn(9, 96)
    found, linears = lifted(embed, x, dynamic=True)
    assert linears == 1
    torch.testing.assert_close(found, embed(x))


@pytest.mark.parametrize(
    ("size", "given"),
    [
        ((9, 9), {}),
        ((3, 5), {"padding": 1}),
        ((3, 5), {"padding": (0, 1)}),
        ((3, 5), {"padding": "same"}),
        ((3, 5), {"groups": 2}),
    ],
    ids=["larger input", "padding", "padding of one side", "padding by name", "groups"],
)
def test_another_convolution_stays(size, given):
    x, weight = torch.randn(2, 4, *size), torch.randn(6, 4 // given.get("groups", 1), 3, 5)

    def convolution(x):
        return F.conv2d(x, weight, **given)

    found, linears = lifted(convolution, x)
    assert linears == 0
    assert atomc.reports()[-1].near == []
    torch.testing.assert_close(found, convolution(x))
