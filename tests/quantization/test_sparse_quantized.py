"""DeepSeek-V3.2 from a checkpoint in fp8: sparse attention over a quantized kv_b_proj."""

from pathlib import Path

import pytest
from test_mla_models import hub_checkpoint, prompts_of, served
from test_moe_models import EAGER

from atomc import models
from atomc.loading.loader import load
from atomc.program import compile_model


@pytest.mark.rotating
def test_a_checkpoint_in_blocks_of_fp8_is_served_alike_by_our_file_and_the_stock_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_checkpoint(tmp_path, "deepseek_v32")
    texts = []
    for registry in (models.REGISTRY, {}):
        monkeypatch.setattr(models, "REGISTRY", registry)
        program = compile_model(load(tmp_path, progress=False), {**EAGER, "cache": False})
        assert program.report.matches["mla_attention[fp8_block]"] == 2
        assert sorted(s.kind for s in program.specs) == ["indexer", "indexer", "latent", "latent"]
        texts.append(served(load(tmp_path, progress=False), prompts_of(3, 40), 4)[0])
    assert texts[0] == texts[1] and [len(text) for text in texts[0]] == [4] * 3
