"""A call of a kernel over AITER is refused or computed as its op means, whatever the strides, dtypes
and attributes of its arguments.
"""

import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import KERNELS
from argument_changes import changed_calls
from compare import compare

from atomc.ops.op import REGISTRY, refusal
from atomc.platform import Platform

HERE = replace(Platform.named("gfx950"), here=True)
# Cases whose steps other functions of AITER compute than those of the smallest cases.
FURTHER = {
    "paged_attention.paged_attention": ["long prompts, window"],
    "shuffled_attention.paged_attention": ["decode, heads of 128, padding"],
    "shuffled_attention_gluon.paged_attention": ["native fp8, scales, sinks", "long prompts"],
    "norm_rope_kv_write.qk_norm_rope_kv_write": ["native fp8, 128, scales"],
    "shuffled_norm_rope_kv_write.qk_norm_rope_kv_write": ["native fp8, 128, scales"],
    "latent_attention.mla_absorbed_attention": ["3 heads of 512 + 64, prompts, as q"],
}


def arguments_of_kernels() -> Iterator[Any]:
    for name, kernel in KERNELS.items():
        for key in REGISTRY[kernel.op].signature.parameters:
            yield pytest.param(name, key, id=f"{name}-{key}", marks=pytest.mark.xdist_group(name))


@pytest.mark.rotating(each_case=5)
@pytest.mark.parametrize(("name", "key"), [*arguments_of_kernels()])
def test_a_call_is_refused_or_computed_as_its_op_means(name: str, key: str) -> None:
    kernel, failed = KERNELS[name], []
    with stand_ins.installed("gfx950"):
        for call, make in changed_calls(name, key, HERE, *FURTHER.get(name, ())):
            if refusal(kernel, HERE, make()):
                continue
            try:
                REGISTRY[kernel.op].reference(**make())
            except Exception:  # of many types: the op does not take such arguments
                continue
            try:
                compare(kernel, make, torch.bfloat16)
            except Exception:
                failed.append(f"{call}: {traceback.format_exc(limit=-1)}")
    assert not failed, "\n".join(failed)
