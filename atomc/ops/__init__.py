"""What operations mean. Each op is called like a function; `.reference` is its meaning, `.kernel` adds a way to run it."""

from atomc.op import REGISTRY, Kernel, Op, Prepared, op_of
from atomc.ops.activation import gelu_and_mul, silu_and_mul
from atomc.ops.attention import attention, kv_write, paged_attention
from atomc.ops.linear import embedding, linear
from atomc.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from atomc.ops.rope import qk_norm_rope, qk_norm_rope_kv_write, rope, rope_kv_write
from atomc.ops.state import LAYOUTS, GroupStep, Layout, StateSpec, Step, kv_state

__all__ = [
    "LAYOUTS",
    "REGISTRY",
    "GroupStep",
    "Kernel",
    "Layout",
    "Op",
    "Prepared",
    "StateSpec",
    "Step",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "embedding",
    "gelu_and_mul",
    "kv_state",
    "kv_write",
    "layer_norm",
    "linear",
    "op_of",
    "paged_attention",
    "qk_norm_rope",
    "qk_norm_rope_kv_write",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "silu_and_mul",
]
