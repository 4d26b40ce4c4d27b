"""What the table of kernels does not show of the Triton ones: where they refuse, and that asking
costs no guard.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import GARBAGE, Draw
from refusals import refusal_text
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from atomc import kernels, ops
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.platform import Platform

pytest.importorskip("triton")
assert kernels.load("triton") is None

H200, MI300 = Platform.named("h200"), Platform.named("gfx942")
# As where the ranks of the examples' group have opened memory of each other.
AMONG_PEERS = replace(H200, peer_groups=(("0", ""),))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = [
    kernel for op in ops.REGISTRY.values() for kernel in op.kernels if kernel.provider == "triton"
]


def kernel_of(op: str) -> ops.Kernel:
    return next(kernel for kernel in TRITON if kernel.op == op)


def example_of(kernel: ops.Kernel, *, rows: bool = False) -> dict[str, Any]:
    """The first of its op, of those with chosen keys, or with a weight of whole strips, if the
    kernel is for them. rows: the first of several rows.
    """
    named = CASES[kernel.op].items()
    made = (
        make(Draw(torch.bfloat16))
        for name, make in named
        if not rows or name not in ("one row", "one token")
    )
    if kernel.function.__module__.endswith("w4a16_mma"):
        return next(given for given in made if given["weight"].shape[0] % 16 == 0)
    if not kernel.function.__module__.endswith("_chosen"):
        return next(made)
    return next(given for given in made if given.get("chosen") is not None)


def an_example(op: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return next(iter(CASES[op].values()))(Draw(dtype))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("kernel", TRITON, ids=lambda kernel: kernel.op)
def test_no_triton_kernel_runs_on_a_cpu_also_where_its_interpreter_could(
    kernel: ops.Kernel,
) -> None:
    assert (
        refusal_text(kernel, Platform.named("cpu"), example_of(kernel))
        == "Triton kernels run on a GPU"
    )


@pytest.mark.parametrize("kernel", TRITON, ids=lambda kernel: kernel.op)
def test_a_gpu_takes_the_first_example_of_each_op(kernel: ops.Kernel) -> None:
    assert refusal_text(kernel, AMONG_PEERS, example_of(kernel)) is None


# A token of each of three sequences, whose caches are [3, 2, 16, 64], transposed.
SHARED_OFFSETS = {
    "slots": torch.zeros(1, dtype=torch.int64),
    **dict.fromkeys(("k", "v"), normal(3, 1, 2, 64)),
    **dict.fromkeys(("k_cache", "v_cache"), normal(3, 2, 16, 64).transpose(1, 2)),
}
ALIKE = "written for torch.bfloat16 or torch.float16 or torch.float32, all of one dtype"


@pytest.mark.parametrize(
    ("op", "changed", "sentence"),
    [
        (
            "rms_norm",
            {"x": normal(2, 64).double()},
            "x is torch.float64: supported are fp32, bf16 and fp16",
        ),
        ("rms_norm", {"x": normal(1, 1, 1, 2, 64)}, "x has 5 dimensions: written for 1 to 4"),
        ("rms_norm", {"x": normal(64, 2).t()}, "the last dimension of x is not contiguous"),
        (
            "rms_norm",
            {"x": normal(1, 70000), "weight": normal(70000)},
            "rows of 70000 exceed the limit of 65536",
        ),
        ("add_rms_norm", {"residual": normal(64)}, "residual is [64], expected [1, 64]"),
        (
            "rms_norm_add",
            {"weight": normal(64).float()},
            "the norm is torch.float32, and it adds torch.bfloat16",
        ),
        (
            "rms_norm_add",
            {"x": normal(1, 20000), "residual": normal(1, 20000), "weight": normal(20000)},
            "rows of 20000 exceed the limit of 16384",
        ),
        (
            "rms_norm_add_rms_norm",
            {"sum_style": "behind"},
            "sum_style 'behind' is not one of ('one_plus', 'after', 'before')",
        ),
        (
            "add_layer_norm",
            {"residual": normal(1, 64).float()},
            f"x is torch.bfloat16, residual is torch.float32: {ALIKE}",
        ),
        ("silu_and_mul", {"up": normal(64)}, "up is [64], expected [1, 64]"),
        ("sigmoid_and_mul", {"gate": normal(1, 2)}, "gate is [1, 2], expected [1, 64]"),
        ("sigmoid_and_mul", {"gate": normal(2, 1)}, "gate is [2, 1], expected [1, 1]"),
        ("sigmoid_and_mul", {"added": normal(64)}, "added is [64], expected [1, 64]"),
        (
            "gelu_and_mul",
            {"approximate": "sigmoid"},
            "approximate 'sigmoid' is not one of ('none', 'tanh')",
        ),
        (
            "rope",
            {"sin": normal(7, 1, 64).float()},
            f"cos is torch.bfloat16, sin is torch.float32: {ALIKE}",
        ),
        (
            "rope",
            {"cos": normal(5, 1, 64), "sin": normal(5, 1, 64)},
            "cos and sin have size 5 along a dimension of size 7",
        ),
        ("rope", {"sin": normal(7, 1, 128)[..., :64]}, "cos and sin have different strides"),
        ("qk_norm_rope", {"k": normal(7, 2, 64).float()}, "q and k differ in dtype, rank or width"),
        (
            "qk_norm_rope",
            {"k_weight": normal(64).float()},
            f"q_weight is torch.bfloat16, k_weight is torch.float32: {ALIKE}",
        ),
        (
            "kv_write",
            {"k_scale": torch.ones(1)},
            "a cache of torch.bfloat16 does not support k_scale",
        ),
        (
            "kv_write",
            {"k_cache": normal(16, 5, 2, 64).transpose(0, 1)},
            "the blocks of the cache are not contiguous",
        ),
        (
            "kv_write",
            SHARED_OFFSETS | {"k_cache": normal(6, 2, 16, 64)[::2].transpose(1, 2)},
            "the blocks of keys are not a number of slots apart",
        ),
        (
            "kv_write",
            SHARED_OFFSETS | {"v_cache": normal(3, 16, 2, 64)},
            "keys and values differ in how many slots their blocks are apart",
        ),
        (
            "linear",
            {"x": normal(1, 64).float()},
            "x is torch.float32, weight is torch.bfloat16: written for torch.bfloat16 or "
            "torch.float16, all of one dtype",
        ),
        (
            "linear",
            {"x": normal(4, 5, 64)},
            "x has more than 16 rows, for which cuBLAS is as fast",
        ),
        (
            "linear",
            {"x": normal(1, 60), "weight": normal(33, 60)},
            "the weight is not contiguous, or its rows are not a multiple of 16 bytes",
        ),
    ],
)
def test_a_refusal_says_why(op: str, changed: dict[str, Any], sentence: str) -> None:
    assert refusal_text(kernel_of(op), H200, an_example(op) | changed) == sentence


def test_few_rows_on_an_amd_gpu_are_left_to_its_library() -> None:
    assert (
        refusal_text(kernel_of("linear"), MI300, an_example("linear"))
        == "its tiles are chosen for NVIDIA GPUs"
    )


# Attention without a cache is written for few tokens, and has to see that they are few.
@pytest.mark.parametrize(
    "kernel", [k for k in TRITON if k.op != "attention"], ids=lambda kernel: kernel.op
)
def test_a_kernel_takes_any_number_of_tokens_without_a_guard(kernel: ops.Kernel) -> None:
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    fixed = {"weight", "bias", "q_weight", "k_weight", "sinks", "token", "weight_scale", "zeros"}
    fixed |= {f"{name}{part}" for name in ("w13", "w2") for part in ("", "_scale", "_zeros")}
    fixed |= {"b13", "b2", "x_weight", "y_weight", "sum_weight", "a_log", "A_log", "d", "dt_bias"}
    fixed |= {"inv_freq"}

    def fake(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or name in fixed:
            return (
                mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value
            )
        # Sizes that are equal become one symbol, as those of one graph are.
        sizes = [DimDynamic.DUCK] + [DimDynamic.STATIC] * (value.dim() - 1)
        return mode.from_tensor(
            value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
        )

    given = example_of(kernel, rows=True)
    arguments = {name: fake(name, value) for name, value in given.items()}
    assert refusal_text(kernel, AMONG_PEERS, arguments) is None
    assert not shapes.guards


@pytest.mark.parametrize("sum_style", RMS_NORM_STYLES)
@pytest.mark.parametrize("x_style", RMS_NORM_STYLES)
def test_a_norm_an_add_and_a_norm_in_one_kernel_round_as_the_two_kernels_do(
    x_style: str, sum_style: str
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    call = {kernel.op: kernel.function for kernel in TRITON}
    draw = Draw(torch.bfloat16, device)
    x, residual, x_weight = draw.normal(33, 200), draw.normal(33, 200), draw.normal(200)
    sum_weight = draw.normal(200)

    y = call["rms_norm"](x, x_weight, 1e-6, x_style)
    expected = call["add_rms_norm"](residual, y, sum_weight, 1e-2, sum_style)
    actual = call["rms_norm_add_rms_norm"](
        x, residual, x_weight, sum_weight, 1e-6, 1e-2, x_style, sum_style
    )
    assert all(map(torch.equal, actual, expected))
    total = call["rms_norm_add"](x, residual, x_weight, 1e-6, x_style)
    assert torch.equal(total, expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 100])
def test_kernels_that_start_before_the_last_one_ends_read_what_it_wrote(tokens: int) -> None:
    call = {kernel.op: kernel.function for kernel in TRITON}
    draw = Draw(torch.bfloat16, "cuda")
    width, inner, heads = 1024, 3072, (16, 8)
    layers = [
        {
            "norm": draw.normal(width),
            "qkv": draw.normal(4096, width) / 32,
            "o": draw.normal(width, 2048) / 45,
            "gate_up": draw.normal(2 * inner, width) / 32,
            "down": draw.normal(width, inner) / 55,
            "head_norm": draw.normal(128),
            "caches": draw.caches([tokens], heads[1], 128)[:2],
        }
        for _ in range(6)
    ]
    x, residual, slots = (
        draw.normal(tokens, width),
        draw.normal(tokens, width),
        torch.arange(tokens, device="cuda"),
    )
    cos, sin = draw.tables(tokens, 1, 128)

    def step(after_each: Any) -> list[Tensor]:
        now, total, seen = x, residual, []
        for layer in layers:
            for norm, linear in (("norm", "qkv"), ("norm", "gate_up")):
                row, total = call["add_rms_norm"](now, total, layer[norm], 1e-6)
                after_each()
                merged = call["linear"](row, layer[linear])
                after_each()
                if linear == "qkv":
                    q, k, v = (
                        p.unflatten(-1, (-1, 128)) for p in merged.split([2048, 1024, 1024], -1)
                    )
                    q, _ = call["qk_norm_rope_kv_write"](
                        q,
                        k,
                        v,
                        layer["head_norm"],
                        layer["head_norm"],
                        cos,
                        sin,
                        1e-6,
                        *layer["caches"],
                        slots,
                    )
                    after_each()
                    now = call["linear"](q.flatten(-2), layer["o"])
                else:
                    gate, up = merged.chunk(2, -1)
                    row = call["silu_and_mul"](gate, up)
                    after_each()
                    now = call["linear"](row, layer["down"])
                after_each()
                seen.append(now)
        return [*seen, *(cache.clone() for layer in layers for cache in layer["caches"])]

    apart = step(torch.cuda.synchronize)
    for _ in range(20):
        for layer in layers:
            for cache in layer["caches"]:
                cache.fill_(GARBAGE)
        together = step(lambda: None)
        assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


@pytest.mark.parametrize("case", ["dense", "dense, batch"])
def test_tokens_behind_the_end_of_a_cache_are_written_nowhere(case: str) -> None:
    call = CASES["kv_write"][case](Draw(torch.float32, DEVICE))
    before = call["k_cache"].clone(), call["v_cache"].clone()
    kernel_of("kv_write").function(**call | {"slots": call["slots"] * 0 + 16})
    assert torch.equal(call["k_cache"], before[0])
    assert torch.equal(call["v_cache"], before[1])
