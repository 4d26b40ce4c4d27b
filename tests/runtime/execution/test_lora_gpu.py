"""LoRA adapters in CUDA graphs: the tokens of merged weights, in fp32, whatever is loaded."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="it computes what is expected")

from test_lora import GREEDY, LONG, NAMES, PROMPTS, check_mixed_batch, checkpoints, expected, served

from atomc.runtime.llm import LLM

__all__ = ["checkpoints"]  # the fixture
pytestmark = pytest.mark.gpu
SETTINGS = {"device": "cuda", "options": {"glue": "eager", "strict": True}, "max_num_seqs": 8}
IN_GRAPHS = "full graph, with adapters"


@pytest.fixture(scope="module")
def llm(checkpoints):
    with served(checkpoints, "Llama", max_loras=2, **SETTINGS) as llm:
        yield llm


def steps(llm: LLM) -> dict[str, int]:
    return dict(llm.engine.stats().steps)


def test_the_kernel_of_adapters_is_triton_and_their_program_is_captured(llm) -> None:
    report = llm.engine.executor.programs.lora.program.report
    chosen = {choice.chosen for choice in report.kernels if choice.op == "lora_linear"}
    assert chosen == {"triton"} and report.cuda_graphs


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_two_adapters_and_none_in_a_batch_are_merged_weights(checkpoints, llm, kind) -> None:
    if kind == "Llama":
        before = steps(llm).get(IN_GRAPHS, 0)
        check_mixed_batch(checkpoints, kind, llm)
        assert steps(llm)[IN_GRAPHS] - before >= GREEDY.max_tokens - 1
        return
    with served(checkpoints, kind, **SETTINGS) as other:
        check_mixed_batch(checkpoints, kind, other)
        assert steps(other)[IN_GRAPHS] >= GREEDY.max_tokens - 1


def test_a_graph_reads_the_adapter_that_is_loaded_now(checkpoints, llm) -> None:
    root: Path = checkpoints[0]

    def tokens(name: str | None) -> tuple[int, ...]:
        (completion,) = llm.generate([LONG], GREEDY, lora=name)
        return completion.token_ids

    wanted = {name: expected(checkpoints, "Llama", name, LONG) for name in NAMES}
    assert len(set(wanted.values())) == 3
    assert {name: tokens(name) for name in NAMES} == wanted
    for name in ("all", "queries"):
        llm.unload_adapter(name)
    for name in ("queries", "all"):  # each gets the place of the other
        llm.load_adapter(name, root / name)
    assert {name: tokens(name) for name in NAMES} == wanted
    check_mixed_batch(checkpoints, "Llama", llm)


def test_graphs_that_are_captured_again_after_sleep_read_the_adapters(checkpoints, llm) -> None:
    for _ in range(2):
        llm.sleep()
        llm.wake_up()
        before = steps(llm).get(IN_GRAPHS, 0)
        check_mixed_batch(checkpoints, "Llama", llm)
        assert steps(llm)[IN_GRAPHS] > before
    plain = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    assert plain == [expected(checkpoints, "Llama", None, prompt) for prompt in PROMPTS]
