"""Provider `cuda`: what it refuses, where it is chosen, and that the library that it names is what
runs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases.attention import attended
from kernel_cases.draw import Draw
from refusals import refusal_text
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import atomc
from atomc import kernels, ops
from atomc.platform import Platform

kernels.load("cuda")
kernels.load("torch")
H200 = Platform.named("h200")
T4 = replace(H200, arch="sm75", capability=(7, 5))


def kernel_of(op: ops.Op) -> ops.Kernel:
    [found] = [kernel for kernel in op.kernels if kernel.provider == "cuda"]
    return found


def refused(op: ops.Op, platform: Platform, arguments: dict[str, Any]) -> str | None:
    return refusal_text(kernel_of(op), platform, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cublas_takes_any_rows_of_any_float(dtype: torch.dtype) -> None:
    draw = Draw(dtype)
    given = {"x": draw.normal(2, 3, 7), "weight": draw.normal(5, 7), "bias": draw.normal(5)}
    assert refused(ops.linear, H200, given) is None
    assert refused(ops.linear, Platform.named("gfx942"), given) == "cuBLAS runs on NVIDIA GPUs"


def test_cublas_converts_nothing() -> None:
    given = {"x": torch.ones(2, 8), "weight": torch.ones(4, 8, dtype=torch.int8)}
    assert refused(ops.linear, H200, given) == (
        "x is torch.float32, weight is torch.int8: "
        "written for torch.bfloat16 or torch.float16 or torch.float32 or torch.float64, all of one dtype"
    )


@pytest.mark.parametrize(
    ("dtype", "platform", "reason"),
    [
        (torch.bfloat16, H200, None),
        (torch.float16, T4, None),
        (torch.bfloat16, T4, "does not multiply bfloat16"),
        (torch.bfloat16, Platform.named("gfx942"), "cuBLAS runs on NVIDIA GPUs"),
        (torch.float32, H200, "written for torch.bfloat16 or torch.float16"),
    ],
)
def test_cublas_takes_products_to_fp32_of_16_bits(
    dtype: torch.dtype, platform: Platform, reason: str | None
) -> None:
    given = {"x": torch.ones(2, 8, dtype=dtype), "weight": torch.ones(4, 8, dtype=dtype)}
    found = refused(ops.linear_fp32, platform, given)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["triton", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(256, 7168), (160, 5120), (129, 1000)])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 300])
def test_products_to_fp32_are_summed_in_fp32(
    provider: str, dtype: torch.dtype, n: int, k: int, rows: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, k, dtype=dtype, device="cuda")
    weight = torch.randn(n, k, dtype=dtype, device="cuda") / k**0.5
    [kernel] = [each for each in ops.linear_fp32.kernels if each.provider == provider]
    if reason := refusal_text(kernel, Platform.detect("cuda"), {"x": x, "weight": weight}):
        pytest.skip(reason)
    found, exact = kernel.function(x, weight), x.double() @ weight.double().t()
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= k**0.5 * 2**-23 * exact.abs().max()


@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cudnn_takes_prompts_of_16_bits(width: int, dtype: torch.dtype) -> None:
    assert refused(ops.attention, H200, attended(Draw(dtype), 33, width=width)) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"mask": torch.ones(7, 7, dtype=torch.bool)},
            "torch's interface to cuDNN's attention does not support mask",
        ),
        ({"sinks": torch.ones(8)}, "torch's interface to cuDNN's attention does not support sinks"),
        ({"window": 5}, "torch's interface to cuDNN's attention does not support window"),
        ({"softcap": 2.0}, "torch's interface to cuDNN's attention does not support softcap"),
        (
            {"k": torch.ones(7, 2, 64)},
            "q is torch.bfloat16, k is torch.float32, v is torch.bfloat16: "
            "written for torch.bfloat16 or torch.float16, all of one dtype",
        ),
        (
            {"v": torch.ones(7, 2, 36, dtype=torch.bfloat16)},
            "heads of 64 and 36: written for multiples of 8 up to 256",
        ),
        (
            {"k": torch.ones(7, 64, 2, dtype=torch.bfloat16).transpose(1, 2)},
            "the last dimension of k is not contiguous",
        ),
        (
            {"q": torch.ones(1, 1, 7, 8, 64, dtype=torch.bfloat16)},
            "q has 5 dimensions: written for 3 or 4",
        ),
    ],
)
def test_cudnn_says_what_it_does_not_take(given: dict[str, Any], reason: str) -> None:
    assert refused(ops.attention, H200, attended(Draw(torch.bfloat16)) | given) == reason


@pytest.mark.parametrize(
    ("platform", "width", "reason"),
    [
        ("cpu", 64, "cuDNN's attention runs on NVIDIA GPUs from sm80 on"),
        ("gfx950", 64, "cuDNN's attention runs on NVIDIA GPUs from sm80 on"),
        ("sm80", 256, "heads of 256 and 256: written for multiples of 8 up to 128"),
        ("sm100", 128, None),
    ],
)
def test_cudnn_runs_on_nvidia_gpus_only(platform: str, width: int, reason: str | None) -> None:
    given = attended(Draw(torch.bfloat16), 33, width=width)
    assert refused(ops.attention, Platform.named(platform), given) == reason


class Layer(nn.Module):
    """A linear layer and causal attention of its outputs. x [T, D] -> [1, H, T, D / H]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, x.shape[0], 3, -1, 64).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def chosen(
    rows: int,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    dynamic: bool | None = None,
) -> dict[str, list[tuple[str, str]]]:
    """Op -> (tokens, provider), of a layer compiled for an H200 that need not be here."""
    torch._dynamo.reset()
    layer = Layer(128).to(dtype).requires_grad_(False)
    x = torch.randn(rows, 128, dtype=dtype)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    report = atomc.explain(layer, x, platform="h200", options=options)
    found: dict[str, list[tuple[str, str]]] = {}
    for choice in report.kernels:
        found.setdefault(choice.op, []).append((choice.tokens, choice.chosen))
    return found


def test_few_rows_run_in_triton_and_more_in_cublas() -> None:
    pytest.importorskip("triton")
    assert chosen(300, dynamic=True)["linear"] == [("1 to 16", "triton"), ("17 and more", "cuda")]
    assert [chosen(rows)["linear"] for rows in (1, 16, 17, 300)] == [
        [("1 to 16", "triton")],
        [("1 to 16", "triton")],
        [("any", "cuda")],
        [("any", "cuda")],
    ]
    assert chosen(16, dtype=torch.float32)["linear"] == [("any", "cuda")]


def test_prompts_of_a_fixed_length_run_in_cudnn_and_others_do_not() -> None:
    assert chosen(300)["attention"] == [("any", "cuda")]
    assert {provider for _, provider in chosen(300, dynamic=True)["attention"]} == {"torch"}


def test_where_inductor_times_matrix_products_they_are_left_to_it() -> None:
    autotuned = {"mode": "max-autotune", "glue": "inductor"}
    assert chosen(300, autotuned)["linear"] == [("any", "inline")]
    assert chosen(300, autotuned | {"glue": "eager"})["linear"] == [("any", "cuda")]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize(
    ("tokens", "keys", "causal"),
    [(513, 513, True), (129, 700, False), (1, 300, False), (77, 33, True)],
)
def test_cudnn_attends_as_the_meaning_does_in_a_graph_that_is_replayed(
    dtype: torch.dtype, heads: tuple[int, int], tokens: int, keys: int, causal: bool
) -> None:
    given = attended(Draw(dtype, "cuda"), tokens, keys, heads, width=128, batch=(2,), causal=causal)
    run = kernel_of(ops.attention).function
    run(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(**given)
    for x in (given["q"], given["k"], given["v"]):
        x.normal_()
    graph.replay()
    exact = ops.attention.reference(**given | {name: given[name].float() for name in "qkv"})
    assert (out.float() - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.gpu
def test_without_keys_the_result_is_zero() -> None:
    given = attended(Draw(torch.bfloat16, "cuda"), 5, 0, causal=False)
    assert torch.equal(kernel_of(ops.attention).function(**given), torch.zeros_like(given["q"]))


@pytest.mark.gpu
def test_what_runs_is_cudnn() -> None:
    given = attended(Draw(torch.bfloat16, "cuda"), 300, width=128)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kernel_of(ops.attention).function(**given)
        torch.cuda.synchronize()
    assert any("cudnn" in event.key for event in profile.key_averages())


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [197, 200])
@pytest.mark.parametrize("kind", ["rows", "bias"])
def test_a_mask_whose_columns_lie_apart_keeps_the_fused_kernels_of_torch(
    kind: str, keys: int
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, keys, 4, 64, device="cuda", dtype=torch.float16)
    mask = torch.arange(keys, device="cuda")[None, None, :, None] >= 3
    mask = mask.expand(2, 1, keys, keys)
    if kind == "bias":
        mask = torch.randn(2, keys, keys, 4, device="cuda", dtype=q.dtype).permute(0, 3, 1, 2)
    [kernel] = [each for each in ops.attention.kernels if each.provider == "torch"]
    fused = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(fused):
        out = kernel.function(q, k, v, None, mask, scale=0.125, causal=False)
    wide = (mask if kind == "rows" else mask.double()).contiguous()
    heads = (x.double().transpose(1, 2) for x in (q, k, v))
    exact = F.scaled_dot_product_attention(*heads, wide, scale=0.125).transpose(1, 2)
    seen = slice(3, None)  # rows before see no key in one of both
    torch.testing.assert_close(out[:, seen].double(), exact[:, seen], rtol=2e-3, atol=2e-3)
