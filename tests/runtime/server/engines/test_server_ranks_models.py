"""Servers of several ranks or engines: they answer with the tokens that one process generates."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
from serving import Server, serving  # noqa: E402
from test_ranks_models import (  # noqa: E402
    DELTA_NET,
    EXPERTS,
    GREEDY,
    GROUPS,
    LATENT,
    PROMPTS,
    SETTINGS,
    SHARES_EXPERTS,
    Row,
    checkpoint,
    text,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
FLAGS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "dtype")
ROWS = {
    "dense": Row("llama"),
    "experts by expert": Row("qwen3_moe", EXPERTS, SHARES_EXPERTS),
    "latent attention": Row("deepseek_v3", LATENT),
    "recurrent state": Row("qwen3_next", DELTA_NET),
    "int4": Row("llama", GROUPS, {"quantization": "int4"}),
    "stages": Row("llama", tp=1, pp=2),
    "stages of two ranks, experts by width": Row("qwen3_moe", EXPERTS, pp=2),
    "engines": Row("llama", tp=1, dp=2),
    "own requests": Row("qwen3_moe", EXPERTS, SHARES_EXPERTS, tp=1, dp=2),
}


def flags_of(row: Row) -> list[object]:
    given = {name: SETTINGS[name] for name in FLAGS} | dict(row.settings)
    given |= {name: n for name in ("tp", "pp", "dp") if (n := getattr(row, name)) > 1}
    found: list[object] = ["--options", "glue=eager", "--options", "strict=true"]  # of SETTINGS
    for name, value in given.items():
        found += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return found


def answered(server: Server, folder: Path) -> list[tuple[int, ...]]:
    """The tokens of each prompt."""
    body = {"model": folder.name, "prompt": PROMPTS, "max_tokens": GREEDY.max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    choices: Sequence[dict[str, Sequence[int]]] = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(PROMPTS)))
    return [tuple(choice["token_ids"]) for choice in choices]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_server_answers_with_the_tokens_of_one_process(row: Row, tmp_path: Path) -> None:
    checkpoint(tmp_path, row)
    expected = text(tmp_path, row, ep=False)
    ranks = row.tp * row.pp * (row.dp if row.settings.get("ep") else 1)
    with serving(tmp_path, *flags_of(row)) as server:
        assert answered(server, tmp_path) == expected
        assert ranks == 1 or f"{ranks} ranks: 0 is process" in server.log
    assert "Traceback" not in server.log
