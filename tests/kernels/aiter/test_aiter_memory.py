"""AITER's layouts of weights: in the runtime instead of the originals, one layer at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from tiny_experts import CONFIGS
from tiny_models import SIZES
from torch import Tensor, nn
from tracked_bytes import TrackedBytes

import atomc
from atomc import ops
from atomc import program as programs
from atomc.loading import loader
from atomc.platform import Platform
from atomc.program import compile_model

SIZED = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
DENSE = SIZES | SIZED | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MODELS = {
    "dense, fp8 per token": (DENSE, "fp8_per_token"),
    "dense, MXFP4": (DENSE, "mxfp4"),
    "experts, bf16": (CONFIGS["qwen3_moe"] | SIZED, None),
    "experts, fp8": (CONFIGS["qwen3_moe"] | SIZED, "fp8"),
    "experts, fp8 in blocks": (CONFIGS["qwen3_moe"] | SIZED, "fp8_block"),
}


@pytest.mark.covering
@pytest.mark.parametrize(
    "name",
    # Per change, other rows have experts, and fp8 with a scale for each of some weights.
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "experts, fp8")) for name in MODELS],
)
def test_shuffled_weights_replace_the_originals(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, scheme = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = loader.load(tmp_path, load_format="dummy", quantization=scheme, progress=False)
    total = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    tracked: list[TrackedBytes] = []
    made = programs._made

    def inside(*args: Any, **kwargs: Any) -> Any:
        tracked.append(TrackedBytes())
        with tracked[0]:
            return made(*args, **kwargs)

    monkeypatch.setattr(programs, "_made", inside)
    with stand_ins.installed("gfx950"):
        program = compile_model(
            model,
            {"glue": "eager", "cache": False},
            platform=Platform.named("gfx950"),
            owned=True,
        )
    assert "aiter" in {
        choice.chosen
        for choice in program.report.kernels
        if choice.op.startswith(("moe_experts", "scaled_linear", "linear_mxfp4"))
    }
    [found] = tracked
    assert program.replaced_bytes == program.prepared_bytes > 0.4 * total
    # The linears of one input are one weight.
    assert found.peak - found.before < 4.5 * largest
    # Scales of MXFP4 are padded to whole tiles.
    assert abs(found.held() - found.before) < (0.1 * total if scheme == "mxfp4" else 2**12)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(8, 512, 256).bfloat16())
        self.w2 = nn.Parameter(torch.randn(8, 256, 256).bfloat16())

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.moe_experts(x, ids, weights, self.w13, self.w2)


def test_under_torch_compile_experts_keep_the_layout_of_the_module() -> None:
    layer = Layer().requires_grad_(False)
    ids = torch.randint(8, (4, 2), dtype=torch.int32)
    given = (torch.randn(4, 256).bfloat16(), ids, torch.rand(4, 2))
    report = atomc.explain(layer, *given, options={"glue": "eager"}, platform="gfx950")
    [choice] = [choice for choice in report.kernels if choice.op == "moe_experts"]
    [reason, *_] = [reason for provider, reason in choice.refused if provider == "aiter"]
    assert "experts are held once, as the owner of the module has them" in reason
    assert choice.chosen in ("aiter", "triton")  # one that reads them as they are
