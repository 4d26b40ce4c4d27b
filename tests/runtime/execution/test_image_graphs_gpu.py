"""Images on a GPU: in CUDA graphs the tokens are those of calls, in fp32."""

import pytest

pytest.importorskip("transformers", reason="it writes the checkpoint")

from test_mtp_images import image
from tiny_vl import IMAGE, theirs

from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SEEDS = (0, 3, 6, 9)  # images of one size


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3_vl")
    theirs("qwen3_vl").save_pretrained(path)
    return str(path)


def served(folder, *, device="cuda", enforce_eager=False):
    return LLM(
        folder,
        device=device,
        dtype="float32",
        options={"strict": True, "glue": "eager"},
        max_num_seqs=8,
        max_model_len=64,
        num_blocks=100,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        enforce_eager=enforce_eager,
        progress=False,
    )


def prompt_of(seed):
    one = image(seed, 2)
    tokens = [5, 6, *[IMAGE] * one.length, 7, 8]
    return {"prompt_token_ids": tokens, "images": [one]}


def tokens_of(llm):
    """Of prompts one after the other, and of all at once with one that has no image."""
    alone = [llm.generate([prompt_of(seed)], GREEDY)[0].token_ids for seed in SEEDS]
    together = [prompt_of(seed + 12) for seed in SEEDS] + [[3, 4, 5]]
    return alone + [completion.token_ids for completion in llm.generate(together, GREEDY)]


def test_tokens_of_prompts_with_images_are_those_of_calls_also_after_sleep(folder):
    with served(folder, enforce_eager=True) as llm:
        expected = tokens_of(llm)
    assert len(set(expected[: len(SEEDS)])) > 1
    with served(folder) as llm:
        encoder = llm.engine.executor.encoder
        for _ in range(2):
            assert tokens_of(llm) == expected
            steps = dict(llm.engine.stats().steps)
            assert steps["full graph, with images"] and not any("eager" in kind for kind in steps)
            assert (image(0, 0).grid,) in encoder.graphs.captured and not encoder.graphs.why_not
            llm.sleep()
            assert encoder.graphs is None
            llm.wake_up()
