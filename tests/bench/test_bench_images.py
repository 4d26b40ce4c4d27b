"""bench/images.py: a small model from an image to the first token, beside transformers."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_script import loaded

pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("runtime")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return loaded("images")


@pytest.mark.rotating
def test_both_ways_choose_tokens_and_their_times_are_written(
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "images.json"
    asked = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--glue",
        "eager",
        "--rounds",
        "2",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", ["bench/images.py", *asked])
    bench.main()
    (line,) = file.read_text().splitlines()
    found = json.loads(line)
    # 64 x 64 pixels: 4 x 4 patches of 16 x 16, of which four are a token.
    assert found["image_tokens"] == 4
    assert found["prompt_tokens"] == 4 + bench.TEXT
    assert found["rounds"] == 2 and 0 <= found["same_token"] <= 2
    for part in ("atomc", "encoder", "prompt", "eager"):
        assert found[f"{part}_ms"] > 0
    assert found["speedup"] == pytest.approx(found["eager_ms"] / found["atomc_ms"])
    assert "speedup=" in capsys.readouterr().out


def test_patches_are_made_without_pillow_too(bench: ModuleType) -> None:
    made, milliseconds = bench.prepared(None, bench.TINY, 64, 3)
    width = 3 * 2 * 16 * 16
    pixels = torch.frombuffer(bytearray(made.pixels), dtype=torch.float32)
    assert milliseconds is None
    assert (made.length, made.grid, pixels.numel()) == (4, (1, 4, 4), 16 * width)
    assert made.digest != bench.prepared(None, bench.TINY, 64, 4)[0].digest
