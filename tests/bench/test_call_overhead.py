"""The benchmark of calls: each row can be built, and results print as a table."""

import json

import pytest
import torch
from bench_script import loaded

bench = loaded("call_overhead")


@pytest.mark.parametrize("name", [*bench.DECODERS, *bench.ENCODERS])
def test_each_model_exists_with_its_widths(name):
    pytest.importorskip("transformers", reason="stock models")
    build = bench.decoder if name in bench.DECODERS else bench.encoder
    with torch.device("meta"):
        model = build(name, 1)
    widths = {**bench.DECODERS.get(name, {}), **bench.EXTRA.get(name, {})}
    assert {key: getattr(model.config, key) for key in widths} == widths


def test_rows_of_a_file_are_a_table(tmp_path, capsys, monkeypatch):
    numbers = dict(zip(bench.WAYS, (6.0, 2.0, 1.0), strict=True))
    row = {"host": numbers, "all": numbers, "first": numbers, "error": numbers, "share": 0.5}
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"bert, 1 x 128, default": row, "vit, 1 x 128, default": "no GPU"}))
    monkeypatch.setattr("sys.argv", ["call_overhead.py", "--results", str(file), "--table"])
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split()[:5] == ["bert,", "1", "x", "128,", "default"]
    assert "0.50" in lines[-2] and lines[-1].endswith("no GPU")
