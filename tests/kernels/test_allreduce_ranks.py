"""The sum over GPUs in one launch: where it is chosen, and on two GPUs what models give with it."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_group import fake_group, without_groups

import atomc
from atomc import kernels, ops
from atomc.platform import Platform

pytest.importorskip("triton")
assert kernels.load("triton") is None
from atomc.kernels.triton.collective.allreduce_norm import NOTE, refuse_all_reduce  # noqa: E402

ROOT = Path(__file__).parents[2]
H100 = Platform.named("sm90")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")


def chosen(
    ranks: int, reason: str | None = "", platform: Platform = H100, width: int = 4096
) -> tuple[list[tuple[str, str]], list[str]]:
    """(tokens, note) of the norm behind a sum over so many ranks, and why others are refused."""
    group = fake_group(ranks)
    asked = () if reason is None else ((group, reason),)
    x, residual = torch.zeros(2, 5, width, dtype=torch.bfloat16)

    def function(x: Any, residual: Any, weight: Any) -> Any:
        return ops.allreduce_add_rms_norm(x, residual, weight, 1e-6, group)

    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(residual, 0)
    where = replace(platform, peer_groups=asked)
    report = atomc.explain(function, x, residual, x[0].clone(), platform=where)
    found = [choice for choice in report.kernels if choice.op == "allreduce_add_rms_norm"]
    return (
        [(choice.tokens, choice.note) for choice in found],
        [text for choice in found for provider, text in choice.refused if provider == "triton"],
    )


def test_few_tokens_are_one_launch_and_more_are_nccl_and_a_norm() -> None:
    assert chosen(2) == (
        [("1 to 512", NOTE), ("513 and more", "")],
        ["is meant for 1 to 512 tokens"],
    )


@pytest.mark.parametrize(
    ("ranks", "width", "most"), [(2, 1024, 512), (2, 8192, 256), (4, 8192, 128), (8, 4096, 64)]
)
def test_bytes_and_ranks_decide_how_many_tokens_are_few(ranks: int, width: int, most: int) -> None:
    assert chosen(ranks, width=width)[0][0] == (f"1 to {most}", NOTE)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"reason": None}, "ranks have no memory of each other: they did not ask for it"),
        (
            {"reason": "its ranks run on several hosts"},
            "ranks have no memory of each other: its ranks run on several hosts",
        ),
        ({"width": 16384}, "rows of 32768 bytes exceed the limit of 16384"),
    ],
)
def test_ranks_without_memory_of_each_other_use_nccl(
    settings: dict[str, Any], refusal: str
) -> None:
    (choice,), refused = chosen(2, **settings)
    assert choice[0] == "any" and NOTE not in choice[1]
    assert refused == [refusal]


def test_other_gpus_and_cpus_are_refused() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    for name in ("gfx942", "cpu"):
        where = replace(Platform.named(name), peer_groups=((fake_group(2), ""),))
        refused = refuse_all_reduce(where, x, fake_group(2))
        assert refused is not None and refused.code == "hardware"


def test_a_group_on_cpus_has_no_memory_of_its_ranks_and_says_so() -> None:
    from torch import distributed

    from atomc.torch_compat import peer_memory

    fake_group(2)
    assert distributed.group.WORLD is not None
    name = distributed.group.WORLD.group_name
    peer_memory.share(distributed.group.WORLD, torch.device("cpu"))
    assert dict(peer_memory.reasons())[name] == "its ranks have no NVIDIA GPUs"
    with pytest.raises(ValueError, match="has no memory of all ranks: its ranks have no NVIDIA"):
        peer_memory.of(name)
    peer_memory.forget()
    assert peer_memory.reasons() == ()


# On two GPUs


@pytest.fixture
def no_groups() -> Iterator[None]:
    with without_groups():
        yield


@pytest.mark.gpu
@two_gpus
def test_200_steps_of_graphs_of_several_sizes_are_right_on_both_gpus() -> None:
    command = [sys.executable, "bench/all_reduce.py", "--tokens", "1", "--width", "4096", "1000"]
    run = subprocess.run(
        [*command, "--limit", "100"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "width 4096: 200 replays of 5 graphs are right" in run.stdout
    assert "width 1000: 200 replays of 5 graphs are right" in run.stdout


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_on_two_gpus_gives_the_text_of_one(
    dtype: str, tmp_path: Path, no_groups: None
) -> None:
    transformers = pytest.importorskip("transformers")
    from tensor_parallel_ranks import fill
    from tiny_models import SIZES

    from atomc.runtime.llm import LLM, SamplingParams

    sizes = SIZES | {"num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 0}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.save_pretrained(tmp_path)
    prompts = [[1 + (7 * i + 3 * j) % 90 for j in range(1 + 5 * i)] for i in range(6)]
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

    def text(tp: int) -> tuple[list[tuple[int, ...]], set[str]]:
        with LLM(
            tmp_path,
            tp=tp,
            dtype=dtype,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            num_blocks=40,
            progress=False,
        ) as llm:
            notes = {
                choice.note
                for choice in llm.program.report.kernels
                if choice.op.startswith("allreduce")
            }
            tokens = [each.token_ids for each in llm.generate(prompts, greedy)]
            return tokens, notes

    (alone, _), (divided, notes) = text(1), text(2)
    assert NOTE in notes
    if dtype == "float32":
        assert divided == alone
    else:  # the parts of a sum are rounded: ties of logits may break otherwise, later
        assert [tokens[0] for tokens in divided] == [tokens[0] for tokens in alone]
