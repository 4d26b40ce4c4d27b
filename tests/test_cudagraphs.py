"""CUDA graphs of the backend and of the runtime's decode step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc
from atomc.models import build
from atomc.models.loader import fill_randomly, ready
from atomc.runtime.graphs import decode_sizes, step_shapes
from atomc.runtime.llm import LLM
from atomc.runtime.sampling_params import SamplingParams

TINY = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 10000.0, "tie_word_embeddings": True}  # fmt: skip


def test_the_sizes_to_capture_grow_with_the_batch_and_end_at_its_bound() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(6) == [1, 2, 4, 6]
    sizes = decode_sizes(300)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 300 and 64 in sizes and 256 in sizes


def test_mixed_steps_are_captured_up_to_the_token_budget() -> None:
    assert [shape[:3] for shape in step_shapes(4, 100, 9)] == [(4, 4, 4), (2, 2, 2), (1, 1, 1), (100, 6, 4), (64, 5, 4)]
    assert step_shapes(1, 10_000, 9)[1] == (2048, 3, 1, 9)
    assert (8, 2, 8, 9) in step_shapes(4, 100, 9, drafts=3)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


@pytest.mark.gpu
def test_the_backend_replays_a_graph_per_shape_and_results_may_be_kept() -> None:
    model = Mlp().cuda().requires_grad_(False)
    compiled = torch.compile(model, backend="atom", mode="reduce-overhead", dynamic=False)
    inputs = [torch.randn(n, 64, device="cuda") for n in (3, 5, 3)]
    results = [compiled(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, model(x))
    graphs = [graph for report in atomc.reports()[-2:] for graph in report.cuda_graphs]
    assert [graph["inputs"] for graph in graphs] == [[[3, 64]], [[5, 64]]]


@pytest.mark.gpu
def test_a_graph_sees_weights_that_were_updated_in_place() -> None:
    model = Mlp().cuda().requires_grad_(False)
    compiled = torch.compile(model, backend="atom", mode="reduce-overhead")
    x = torch.randn(3, 64, device="cuda")
    compiled(x)
    model.up.weight.mul_(2)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_as_it_is_with_a_note() -> None:
    def mixed(x: Tensor, y: Tensor) -> Tensor:
        return F.silu(x) * x + y.cuda()

    x, y = torch.randn(3, 4, device="cuda"), torch.randn(3, 4)
    compiled = torch.compile(mixed, backend="atom", mode="reduce-overhead")
    torch.testing.assert_close(compiled(x, y), mixed(x, y))
    assert any("no CUDA graph" in note for note in atomc.reports()[-1].notes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_runtime_generates_the_same_tokens_with_and_without_graphs(dtype: torch.dtype) -> None:
    model = build(TINY, dtype=dtype, device="cuda")
    fill_randomly(model, "cuda")
    ready(model)
    prompts = [[5, 6, 7], [1] * 40, [9, 8], [3] * 17, [2, 4, 6, 8, 10]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    found = {}
    for eager in (False, True):
        llm = LLM(model, max_num_seqs=8, max_model_len=96, num_blocks=64, enforce_eager=eager, progress=False,
                  options={"glue": "eager"})  # fmt: skip
        found[eager] = [completion.token_ids for completion in llm.generate(prompts, params)]
        assert (llm.engine.runner.steps["full graph"] > 0) is not eager
        assert bool(llm.program.report.cuda_graphs) is not eager
    assert found[False] == found[True]
