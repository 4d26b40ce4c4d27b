"""Ops run by Triton kernels, on NVIDIA and AMD GPUs."""

from atomc.kernels.triton import activation, attention, few_queries, kv_write, linear, norm, rope

__all__ = ["activation", "attention", "few_queries", "kv_write", "linear", "norm", "rope"]
