"""Budgets of reasoning: the bits of masks, and outputs of the demo model."""

from dataclasses import replace

import numpy as np
import pytest

from atomc import LLM, SamplingParams
from atomc.runtime.constrained.reasoning_budget import ReasoningBudget, ends_sentence
from atomc.runtime.requests.request import Request
from atomc.runtime.requests.sampling_params import ParameterError, Structured

pytest.importorskip("tokenizers")
from tagged_demo import CLOSE, OPEN, tagged_demo

pytestmark = [pytest.mark.xdist_group("reasoning_budget"), pytest.mark.usefixtures("compiled_once")]
# Tokens of the tests without a model: letters, and those of TEXTS.
TEXTS = {1: "<think>", 2: "</think>", 3: ".", 4: "\n"}
SETTINGS = dict(
    progress=False,
    dtype="float32",
    max_model_len=256,
    max_num_seqs=32,
    num_blocks=512,
    options={"glue": "eager"},
)
PROMPT = "She looked at him and said <think>"
LIMIT = 40


def budget_of(limit, is_open):
    return ReasoningBudget(limit, 1, 2, is_open, lambda token: TEXTS.get(token, "x"))


def forced(budget, output, draft=()):
    """Whether the closing tag is the only token, after the output and after each draft token."""
    mask = np.full((1 + len(draft), 3), 2**32 - 1, np.uint32)
    request = Request("a", [7])
    request.tokens += output
    budget.restrict(mask, request, draft)
    whole, closing = [2**32 - 1] * 3, [1 << 2, 0, 0]
    assert all(row in (whole, closing) for row in mask.tolist())
    return [row == closing for row in mask.tolist()]


@pytest.mark.parametrize(
    ("limit", "is_open", "output", "at_end"),
    [
        (6, True, [9] * 5, True),
        (6, True, [9] * 4, False),
        (6, True, [9, 3], True),  # within the margin, which is 3 here
        (6, True, [3], False),
        (6, True, [9, 9, 9, 4], True),
        (6, True, [9, 2, 9, 9, 9, 9, 9], False),
        (6, False, [1, 9, 9, 9, 9], True),
        (6, False, [4, 4, 1, 9, 9, 9, 9], True),
        (6, False, [4, 4, 1, 9, 9, 9], False),
        (6, False, [9, 1, 9, 9, 9, 9, 9], False),  # an answer that has a tag
        (6, True, [9, 2, 1, 9, 9, 9, 9, 9], False),
        (0, True, [], True),
        (1, True, [], True),
        (0, False, [1], True),
        (0, False, [], False),
        (100, True, [9] * 82 + [3], True),
        (100, True, [9] * 81 + [3], False),
    ],
)
def test_the_closing_tag_is_forced_at_the_budget_or_at_a_sentence_before(
    limit, is_open, output, at_end
):
    budget = budget_of(limit, is_open)
    assert forced(budget, output) == [at_end]
    assert not at_end or budget_of(limit, is_open).may_apply(len(output))
    steps = budget_of(limit, is_open)
    assert [forced(steps, output[:n]) for n in range(len(output) + 1)][-1] == [at_end]


def test_each_token_of_a_draft_counts():
    assert forced(budget_of(4, True), [9], [9, 9, 2, 9]) == [False, False, True, False, False]
    budget = budget_of(4, True)
    assert forced(budget, [9], [9, 9]) == [False, False, True]
    assert forced(budget, [9, 9]) == [False]  # the draft was rejected
    assert forced(budget, [9, 9, 9]) == [True]


def test_a_budget_applies_from_its_margin_to_the_closing_tag():
    budget = budget_of(100, True)
    assert [budget.may_apply(n) for n in (0, 82, 83, 1000)] == [False, False, True, True]
    forced(budget, [9, 2])
    assert not budget.may_apply(1000)


@pytest.mark.parametrize(
    ("text", "ends"),
    [("a.", True), ('a!" ', True), ("\n\n", True), ("a\n ", True), ("\u3002", True), ("a", False), ("", False), (",", False)],
)  # fmt: skip
def test_sentences_end_at_punctuation_and_lines(text, ends):
    assert ends_sentence(text) == ends


def test_a_budget_is_refused_with_a_grammar_and_below_zero():
    with pytest.raises(ParameterError, match=r"thinking_token_budget is -1, .* at least 0"):
        SamplingParams(thinking_token_budget=-1)
    with pytest.raises(ParameterError, match=r"thinking_token_budget is 5, .* with structured"):
        SamplingParams(thinking_token_budget=5, structured=Structured(regex="a"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tagged_demo(tmp_path_factory.mktemp("models") / "tagged")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **SETTINGS)


def test_the_reasoning_of_100_seeds_ends_within_16_tokens_of_the_budget(llm):
    random = SamplingParams(
        max_tokens=44,
        temperature=1.0,
        ignore_eos=True,
        logit_bias={CLOSE: -100.0},  # the model does not end its reasoning by itself
    )
    params = [replace(random, seed=seed) for seed in range(100)]
    free = llm.generate([PROMPT] * 100, params)
    params = [replace(each, thinking_token_budget=LIMIT) for each in params]
    limited = llm.generate([PROMPT] * 100, params)
    lengths = []
    for with_budget, without in zip(limited, free, strict=True):
        tokens = with_budget.token_ids
        lengths.append(tokens.index(CLOSE) + 1)
        before = tokens[: lengths[-1] - 1]
        assert before == without.token_ids[: len(before)]  # the budget changes no token before
        assert lengths[-1] == LIMIT or ends_sentence(llm.tokenizer.decode([before[-1]]))
        assert len(tokens) == 44 and tokens.count(CLOSE) == 1  # the answer follows
    assert all(LIMIT - 16 <= length <= LIMIT for length in lengths), lengths
    assert LIMIT in lengths and min(lengths) < LIMIT


def test_drafts_keep_to_the_budget(llm, folder):
    guessing = LLM(folder, **SETTINGS, speculative_tokens=3, ngram_min=1)
    params = [
        SamplingParams(max_tokens=60, ignore_eos=True, thinking_token_budget=limit)
        for limit in (0, 5, 33)
    ]
    plain, guessed = (each.generate([PROMPT] * 3, params) for each in (llm, guessing))
    assert [each.token_ids for each in plain] == [each.token_ids for each in guessed]
    assert plain[0].token_ids[0] == CLOSE
    assert 16 <= plain[2].token_ids.index(CLOSE) < 33
    assert guessing.engine.stats().accepted > 0


def test_the_last_tag_of_a_prompt_opens_the_reasoning(llm):
    limit = SamplingParams(
        max_tokens=20,
        ignore_eos=True,
        thinking_token_budget=4,
        logit_bias={OPEN: -100.0, CLOSE: -100.0},
    )
    prompts = ["<think>", "<think>a</think>", "a</think>b<think>c", "No tag"]
    completions = llm.generate(prompts, limit)
    assert [CLOSE in each.token_ids[:4] for each in completions] == [True, False, True, False]
    closed = llm.generate(
        "<think>",
        SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            thinking_token_budget=4,
            thinking_is_open=False,
            logit_bias={CLOSE: -100.0},
        ),
    )
    assert CLOSE not in closed[0].token_ids


def test_requests_beside_a_budget_keep_their_tokens(llm):
    plain = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    alone = llm.generate([PROMPT], plain)[0]
    limited, beside = llm.generate(
        [PROMPT] * 2, [SamplingParams(max_tokens=24, thinking_token_budget=6), plain]
    )
    assert limited.token_ids.index(CLOSE) < 6 and beside.token_ids == alone.token_ids


def test_steps_before_the_margin_have_no_mask_and_overlap(llm):
    engine = llm.engine
    params = SamplingParams(max_tokens=60, ignore_eos=True, thinking_token_budget=50)
    engine.add(engine.request("a", llm.tokenizer.encode(PROMPT).ids, params))
    masks, in_flight = [], []
    mask = engine._mask

    def recorded():
        masks.append(mask() is not None)
        in_flight.append(len(engine._in_flight))
        return None if not masks[-1] else mask()

    engine._mask = recorded
    try:
        while engine.has_work:
            engine.step()
    finally:
        del engine._mask
    first = masks.index(True)
    assert 25 < first <= 34 and set(in_flight[1:first]) == {1}  # the step before still runs
    assert not masks[-1] and in_flight[-1] == 1  # and so it does after the reasoning


def test_a_model_without_tokens_for_the_tags_refuses_a_budget():
    with pytest.raises(
        ValueError, match="has <think> and </think> as tokens, this model's has not"
    ):
        LLM(**SETTINGS).generate(PROMPT, SamplingParams(thinking_token_budget=5))
