"""Drafts of draft layers in `atomc serve`: under random mixes of requests, its answers are those of
a server without drafts.
"""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import serving
from tiny_mtp import CONFIG, tensors_of, tiny_model, write

httpx = pytest.importorskip("httpx")
tokenizers = pytest.importorskip("tokenizers")

# tests/runtime/test_mtp.py asks a server two requests per change.
pytestmark = [pytest.mark.xdist_group("mtp"), pytest.mark.slow]

LONGEST, BLOCK = 120, 16
KINDS = {
    "glm4_moe": {},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": CONFIG["num_attention_heads"],
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_group": 2,
        "topk_group": 1,
    },
}
MTP = ("--speculative", "mtp", "--speculative-tokens", 3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of each kind's checkpoint; the text of token i is w and its number."""
    folder = tmp_path_factory.mktemp("mtp")
    vocabulary = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    for kind, differs in KINDS.items():
        write(folder / kind, tensors_of(tiny_model(**differs)), **differs)
        tokenizer.save(str(folder / kind / "tokenizer.json"))
    return {kind: folder / kind for kind in KINDS}


def served(checkpoint, *flags):
    # fp64, so that rounding decides about no token.
    return serving(
        checkpoint, "--dtype", "float64", "--device", "cpu", "--options", "glue=eager",
        "--options", "layout=paged", "--max-model-len", 160, "--max-num-seqs", 6, *flags,
    )  # fmt: skip


def mix(seed, count):
    """(body of a request, seconds until it is sent, words after which the client leaves or None)."""
    rng = random.Random(seed)

    def tokens(most):
        return rng.choices(range(1, 40), k=rng.randint(1, most))

    beginnings = [tokens(80) for _ in range(4)]
    found = []
    for _ in range(count):
        shared = rng.choice(beginnings) if rng.random() < 0.6 else []
        asked = {"temperature": 0.0}
        if rng.random() < 0.4:
            asked = {"temperature": 0.9, "top_p": 0.95, "seed": rng.getrandbits(30)}
        body = {"prompt": [*shared, *tokens(LONGEST - 80)], "max_tokens": rng.randint(1, 40)}
        leaves = rng.randint(1, 6) if rng.random() < 0.15 else None
        found.append((body | {"ignore_eos": True} | asked, rng.uniform(0, 0.2), leaves))
    return found


def words_of(server, body, leaves=None):
    """The words of an answer, up to those that came before the client left."""
    words, stream = [], body | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=stream, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line in ("", "data: [DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            words += event["choices"][0]["text"].split()
            if leaves is not None and len(words) >= leaves:
                break
    return words


def metric(server, name):
    text = httpx.get(f"{server.url}/metrics").text
    return float(re.search(rf"^atomc:{name}{{.*}} (.*)$", text, re.M)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_mix_of_requests_gets_the_answers_of_a_server_without_drafts(checkpoints, kind):
    asked = mix(7, 50)
    with served(checkpoints[kind], "--no-enable-prefix-caching") as server:
        expected = [words_of(server, body) for body, *_ in asked]
        assert metric(server, "num_preemptions_total") == 0
    few = ("--num-blocks", 12, "--max-num-batched-tokens", 37)
    with served(checkpoints[kind], *MTP, *few) as server, ThreadPoolExecutor(8) as clients:

        def answer(one):
            body, seconds, leaves = one
            time.sleep(seconds)
            return words_of(server, body, leaves)

        found = list(clients.map(answer, asked))
        accepted, drafted = (
            metric(server, f"spec_decode_num_{name}_tokens_total") for name in ("accepted", "draft")
        )
        preempted = metric(server, "num_preemptions_total")
    for got, whole, (body, _, leaves) in zip(found, expected, asked, strict=True):
        assert len(whole) == body["max_tokens"]
        assert got == (whole if leaves is None else whole[: len(got)]), body
        assert leaves is None or len(got) >= min(leaves, len(whole))
    assert drafted > accepted > 0 and preempted > 0
