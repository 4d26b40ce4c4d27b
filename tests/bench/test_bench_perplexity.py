"""bench/perplexity.py: each scheme of an untrained mixture of experts, and of its reference."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_script import loaded
from safetensors.torch import save_file

from atomc.demo import PATH
from atomc.loading.create_model import create_model

pytest.importorskip("tokenizers")

pytestmark = pytest.mark.xdist_group("perplexity")
DENSE = json.loads((PATH / "config.json").read_text())
CONFIG = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
SHORT = ["--tokens", "96", "--context", "64"]
SCHEMES = ["fp8", "int8", "int4", "mxfp4"]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return loaded("perplexity")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the tokenizer and text of the demo model, and experts that matter."""
    made = tmp_path_factory.mktemp("moe")
    (made / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "held_out.txt"):
        shutil.copy(PATH / name, made)
    torch.manual_seed(0)
    model = create_model(CONFIG, torch.float32).requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.1)
    tensors = {name: x.to(torch.bfloat16) for name, x in model.named_parameters()}
    save_file(tensors, made / "model.safetensors")
    return made


@pytest.mark.rotating
def test_schemes_of_a_mixture_are_measured_within_their_bounds(
    bench: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = ["--schemes", ",".join(SCHEMES), "--text", str(tmp_path / "table.txt")]
    bench.main([str(folder), *SHORT, *table])
    text = (tmp_path / "table.txt").read_text()
    assert text == capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in text.splitlines()[3:]}
    assert list(rows) == ["fp32", "bf16", *SCHEMES]
    assert len({row[1] for row in rows.values()}) == len(rows), "some scheme changes nothing"
    # The reference, too, has the weights of the scheme and not those of the model.
    assert all(rows[name][-3] != rows["fp32"][1] for name in ("int4", "mxfp4"))


def test_a_scheme_that_exceeds_its_bound_ends_with_an_exit_code(
    bench: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exact = bench.ReferenceExperts.forward
    monkeypatch.setattr(bench.ReferenceExperts, "forward", lambda *given: 3 * exact(*given))
    with pytest.raises(SystemExit) as ended:
        bench.main([str(folder), *SHORT, "--schemes", "int4"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("0.5%  MISSED")
