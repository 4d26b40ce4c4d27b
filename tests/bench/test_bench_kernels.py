"""bench/kernels.py times kernels where there is no GPU, too, and says why a provider has none for a
case.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from bench_script import loaded


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return loaded("kernels")


def test_a_kernel_for_other_numbers_of_tokens_is_named_as_the_reason(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    assert bench.kernels.load("triton") is None
    [few] = [kernel for kernel in bench.ops.linear.kernels if kernel.provider == "triton"]
    case = next(case for case in bench.cases(64, 1024) if case.op == "linear")
    arguments = case.make() | {"x": bench.normal(2, 1024)}
    monkeypatch.setattr(bench.Platform, "detect", lambda device: bench.Platform.named("h200"))
    assert bench.serving(case, arguments, 2, "triton") is few
    assert bench.serving(case, arguments, 64, "triton") == "is meant for 1 to 16 tokens"
    assert bench.serving(case, arguments, 2, "zentorch") == "zentorch has no linear"


def test_a_small_selection_is_timed(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "ROTATED_BYTES", 1)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "kernels.py",
            "--provider",
            "torch",
            "--ops",
            "rms_norm",
            "kv_write",
            "--tokens",
            "3",
            "--hidden",
            "1024",
            "--json",
            str(tmp_path / "times.json"),
        ],
    )
    bench.main()
    lines = {
        line["op"]: line for line in json.loads((tmp_path / "times.json").read_text())["lines"]
    }
    assert set(lines) == {"rms_norm", "kv_write"}
    assert all("us" in line or "refused" in line for line in lines.values())
    assert (
        lines["rms_norm"]["bytes"] == 2 * (3 * 1024 + 1024 + 3 * 1024)
        and "library_us" in lines["rms_norm"]
    )
