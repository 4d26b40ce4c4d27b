from pathlib import Path
import pytest, torch
from test_mla_models import hub_checkpoint, served, prompts_of
from test_moe_models import EAGER
from atomc import models
from atomc.models.loader import load
from atomc.program import compile_model


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_a_checkpoint_in_blocks_of_fp8_is_served_with_its_chosen_keys(stock, tmp_path, monkeypatch):
    hub_checkpoint(tmp_path, "deepseek_v32")
    if stock:
        monkeypatch.setattr(models, "REGISTRY", {})
    program = compile_model(load(tmp_path, progress=False), {**EAGER, "cache": False})
    print(program.report.matches)
    assert (
        program.report.matches["mla_attention[fp8_block]"] == 2
        or program.report.matches["mla_attention"] == 2
    )
    assert sorted(s.kind for s in program.specs) == ["indexer", "indexer", "latent", "latent"]
    made, _ = served(load(tmp_path, progress=False), prompts_of(3, 40), 4)
    assert [len(t) for t in made] == [4] * 3
