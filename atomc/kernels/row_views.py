"""Tensors with any leading dimensions as rows, as kernels take them, and back."""

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """x [..., D] as [rows, D]. A vector is one row."""
    return x.reshape(-1, x.shape[-1])


def as_heads(x: Tensor) -> Tensor:
    """x [..., N, D] as [rows, N, D]."""
    return x.reshape(-1, *x.shape[-2:])


def with_lead(flat: Tensor, x: Tensor) -> Tensor:
    """flat [rows, N], or [rows, heads, N], as [..., N] with the leading dimensions of x."""
    return flat.view(*x.shape[:-1], flat.shape[-1])
