"""Checkpoints served by two GPUs, over NCCL and in CUDA graphs: the text is that of one."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("transformers")

import torch
from fake_group import without_groups
from test_ranks_models import (
    ALTERNATING,
    DELTA_NET,
    EXPERTS,
    GREEDY,
    LATENT,
    LOGITS_APART,
    MIXED,
    PROMPTS,
    SETTINGS,
    SHARES_EXPERTS,
    Row,
    checkpoint,
)

from atomc.runtime.llm import LLM, SamplingParams
from atomc.runtime.ranks.rank_failed import RankFailed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ON_GPUS = SETTINGS | {"device": "cuda", "options": {"strict": True}}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
ROWS = {
    "dense": Row("qwen3"),
    "a class of transformers": Row("olmo2"),
    "drafts": Row("qwen3", {}, {"speculative": "ngram"}),
    "experts by width": Row("qwen3_moe", EXPERTS),
    "experts by expert": Row("qwen3_moe", EXPERTS, SHARES_EXPERTS),
    "sinks and windows": Row("gpt_oss", {"num_local_experts": 4, "sliding_window": 8}),
    "latent attention": Row("deepseek_v3", LATENT),
    "recurrent state": Row("qwen3_next", DELTA_NET),
    "4 bits": Row("llama", WIDE, {"quantization": "mxfp4_a16"}),
    "4 bits, experts": Row(
        "qwen3_moe", EXPERTS | {"moe_intermediate_size": 64}, {"quantization": "mxfp4_a16"}
    ),
    "fp8 in blocks": Row("llama", WIDE | {"head_dim": 128}, {"quantization": "fp8_block"}),
    "stages": Row("qwen3", tp=1, pp=2),
    "stages, windows in some": Row("gpt_oss", MIXED, tp=1, pp=2),
    "stages, recurrent state": Row("qwen3_next", ALTERNATING, tp=1, pp=2),
    "own requests": Row("qwen3_moe", EXPERTS, SHARES_EXPERTS, tp=1, dp=2),
    "own requests, latent attention": Row("deepseek_v3", LATENT, SHARES_EXPERTS, tp=1, dp=2),
}


@pytest.fixture(scope="module", autouse=True)
def no_groups_of_other_tests() -> Iterator[None]:
    with without_groups():
        yield


def text(folder: Path, row: Row, **settings: Any) -> list[tuple[int, ...]]:
    """The tokens of each prompt."""
    with LLM(str(folder), **(ON_GPUS | dict(row.settings) | settings)) as llm:
        if settings.get("tp", 1) > 1 and settings.get("pp", 1) == 1:
            assert any(LOGITS_APART in note for note in llm.program.report.notes)
        assert llm.program.report.cuda_graphs
        return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])
def test_two_gpus_give_the_text_of_one(row: Row, tmp_path: Path) -> None:
    checkpoint(tmp_path, row)
    expected = text(tmp_path, row, ep=False)
    assert len(set(expected)) == len(PROMPTS)
    assert text(tmp_path, row, tp=row.tp, pp=row.pp, dp=row.dp) == expected


def test_each_of_two_engines_serves_the_text_of_one_on_its_own_gpu() -> None:
    pytest.importorskip("fastapi")
    dp = pytest.importorskip("test_server_dp")
    texts = []
    for engines in (1, 2):
        with dp.serving("--dp", engines, "--dtype", "float32") as server:
            choices = dp.post(server, "/v1/completions", prompt=dp.PROMPTS, **dp.GREEDY)["choices"]
            texts.append([choice["text"] for choice in choices])
            if engines == 2:
                assert min(dp.per_engine(server, dp.GENERATED)) > 0
    assert texts[0] == texts[1] and len(set(texts[0])) == len(dp.PROMPTS)


def test_two_gpus_sleep_and_go_on(tmp_path: Path) -> None:
    row = ROWS["dense"]
    with LLM(str(checkpoint(tmp_path, row)), **(ON_GPUS | {"tp": 2})) as llm:
        before = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
        llm.sleep()
        llm.wake_up()
        assert [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)] == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_ends_under_load_ends_the_group_within_ten_seconds(
    number: int, tmp_path: Path
) -> None:
    long = SamplingParams(max_tokens=60_000, temperature=0.0, ignore_eos=True)
    settings = ON_GPUS | {"tp": 2, "max_model_len": 65_536, "max_num_seqs": 8, "num_blocks": 40_000}
    row = Row("qwen3", {"max_position_embeddings": 65_536})
    llm = LLM(str(checkpoint(tmp_path, row)), **settings)
    (pid,) = llm.engine.executor.pids.values()
    ended: list[float] = []

    def end() -> None:
        ended.append(time.monotonic())
        os.kill(pid, number)

    timer = threading.Timer(2.0, end)
    timer.start()
    try:
        with pytest.raises(RankFailed, match="rank 1"):
            llm.generate([[1, 2, 3]] * 8, long)
        assert time.monotonic() - ended[0] < 10
    finally:
        timer.join()
        llm.close()
    # The memory of rank 1 is free again: its process has ended, even one that was stopped.
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
