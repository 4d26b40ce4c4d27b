"""A call of a kernel over AITER is refused or computed as its op means, whatever the strides, dtypes
and attributes of its arguments.
"""

import traceback
from dataclasses import replace

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
    "latent_attention.mla_absorbed_attention": ["3 heads of 512 + 64, prompts, as q"],
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_call_is_refused_or_computed_as_its_op_means(name: str) -> None:
    kernel, failed = KERNELS[name], []
    with stand_ins.installed("gfx950"):
        for call, make in changed_calls(kernel, HERE, *FURTHER.get(name, ())):
            try:
                REGISTRY[kernel.op].reference(**make())
            except Exception:  # of many types: the op does not take such arguments
                continue
            if refusal(kernel, HERE, make()):
                continue
            try:
                compare(kernel, make, torch.bfloat16)
            except Exception:
                failed.append(f"{call}: {traceback.format_exc(limit=-1)}")
    assert not failed, "\n".join(failed)
