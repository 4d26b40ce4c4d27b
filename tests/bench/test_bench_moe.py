"""bench/moe.py finds a kernel for each format and number of tokens, and what it times can be called:
on a CPU, where Triton's interpreter runs.
"""

import argparse
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_script import loaded
from torch.overrides import TorchFunctionMode

from atomc.platform import Platform

pytest.importorskip("triton")


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton does not interpret where there is a GPU"
)


class OnCpu(TorchFunctionMode):
    """Tensors that would be made on a GPU are made on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        return func(*args, **given | ({"device": "cpu"} if "device" in given else {}))


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    module = loaded("moe")
    for provider in ("triton", "torch"):
        assert module.kernels.load(provider) is None
    here = Platform.named("h200")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Platform, "detect", lambda device: here)
        tiny = module.Model(16, 2, 128, 128, module.SILU)
        patch.setattr(module, "MODELS", {"tiny": tiny})
        with OnCpu():
            yield module


@pytest.mark.covering
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(
    ("name", "few", "many"),
    [
        ("bf16", "experts_decode_unquantized", "experts_prefill"),
        ("bf16_transposed", "experts_prefill", "experts_prefill"),
        ("fp8_block", "experts_prefill_scaled", "experts_prefill_scaled"),
        ("mxfp4", "experts_4_bits", "experts_4_bits"),
        ("route", "route", "route"),
    ],
)
def test_each_line_is_a_call_of_the_kernel_that_is_taken(
    bench: ModuleType, name: str, few: str, many: str, tokens: int
) -> None:
    args = argparse.Namespace(
        formats=[name],
        models=["tiny"],
        tokens=[tokens],
        tiles=False,
        parts=True,
        compile_only="0/1",
    )
    lines = [call for _, call in bench.cases(args)]
    whole, parts = lines[0], [call.part for call in lines[1:]]
    assert whole.kernel == f"triton {few if tokens == 1 else many}"
    if name == "route":
        assert parts == ["linear", "choice"]
    else:
        assert parts == ([] if whole.kernel.endswith("unquantized") else list(bench.PARTS))
    for call in lines:
        call.function(**call.sets[0])


@pytest.mark.rotating
def test_tiles_of_the_kernel_that_is_taken_are_tried(bench: ModuleType) -> None:
    args = argparse.Namespace(
        formats=["bf16", "mxfp4"],
        models=["tiny"],
        tokens=[1, 9],
        tiles=True,
        parts=False,
        compile_only="0/1",
    )
    found = {(head["format"], head["tokens"], call.part) for head, call in bench.cases(args)}
    assert found == {
        ("bf16", 1, "experts"),
        *((name, tokens, part) for name, tokens in (("bf16", 9), ("mxfp4", 1), ("mxfp4", 9))
          for part in ("up", "down")),
    }  # fmt: skip
