"""Sampling parameters end to end on the demo model: stop strings, n, log-probabilities, grammars,
penalties, drafts.
"""

import json
import math
import re
from dataclasses import replace

import pytest

from atomc import LLM, SamplingParams
from atomc.runtime.requests.sampling_params import Structured

pytest.importorskip("tokenizers")
# Otherwise each worker compiles the model.
pytestmark = [pytest.mark.xdist_group("generate_params"), pytest.mark.usefixtures("compiled_once")]

PROMPTS = [
    "Once upon a time",
    "She looked at him and said",
    "In the beginning",
    "The king of the country was a",
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


# In bf16 the logits of a row, and sometimes its token, depend on the number of rows in a step.
SETTINGS = dict(
    progress=False,
    dtype="float32",
    max_model_len=256,
    max_num_seqs=16,
    num_blocks=128,
    options={"glue": "eager"},
)


@pytest.fixture(scope="module")
def llm():
    return LLM(**SETTINGS)


@pytest.fixture(scope="module")
def guessing():
    return LLM(**SETTINGS, speculative_tokens=3, ngram_min=1)


def one(llm, prompt=PROMPTS[0], **params):
    (completion,) = llm.generate(prompt, SamplingParams(**{"max_tokens": 24, **params}))
    return completion


def test_a_stop_string_ends_the_text_where_it_appears(llm):
    whole = one(llm, ignore_eos=True)
    # Across two tokens.
    middle = len(llm.tokenizer.decode(list(whole.token_ids[:10])))
    stop = whole.text[middle - 3 : middle + 3]
    stopped = one(llm, ignore_eos=True, stop=(stop,))
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert (
        stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        and len(stopped.token_ids) < 24
    )
    kept = one(llm, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True)
    assert kept.text == stopped.text + stop
    assert (
        "".join(
            llm.stream(PROMPTS[0], SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,)))
        )
        == stopped.text
    )
    assert not llm.engine.scheduler.requests


@pytest.mark.rotating
def test_min_tokens_delays_stop_tokens_and_strings(llm):
    whole = one(llm, ignore_eos=True)
    token = whole.token_ids[2]
    assert len(one(llm, stop_token_ids=(token,)).token_ids) <= 3
    later = one(llm, stop_token_ids=(token,), min_tokens=10)
    assert len(later.token_ids) >= 10 and token not in later.token_ids[:10]
    letter = whole.text.strip()[0]
    assert (
        len(one(llm, stop=(letter,)).token_ids)
        < 10
        <= len(one(llm, stop=(letter,), min_tokens=10).token_ids)
    )


def test_each_of_n_answers_is_that_of_its_own_seed(llm):
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    answers = llm.generate(PROMPTS[0], params)
    assert len({answer.token_ids for answer in answers}) == 3
    for i, answer in enumerate(answers):
        assert (
            llm.generate(PROMPTS[0], replace(params, n=1, seed=5 + i))[0].token_ids
            == answer.token_ids
        )


def test_logprobs_come_with_each_token_and_agree_with_those_of_the_prompt(llm):
    answer = one(llm, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    assert [each.token for each in answer.logprobs] == list(answer.token_ids)
    for each in answer.logprobs:
        # Greedy: the sampled token is the most likely one.
        assert each.rank == 1 and each.top[0] == (each.token, each.logprob) and len(each.top) == 3
        assert sum(math.exp(value) for _, value in each.top) <= 1.0
    prompt = answer.prompt_token_ids
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(prompt)
    assert [each.token for each in answer.prompt_logprobs[1:]] == list(prompt[1:])
    # The output as a prompt: the same tokens at the same positions, computed in one step.
    (again,) = llm.generate(
        [[*prompt, *answer.token_ids]], SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    for a, b in zip(answer.logprobs, again.prompt_logprobs[len(prompt) :], strict=True):
        assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-3


def test_a_penalty_ends_repetition(llm):
    params = {"max_tokens": 60, "ignore_eos": True}
    plain = one(llm, **params).token_ids
    penalized = one(llm, **params, frequency_penalty=2.0, presence_penalty=2.0).token_ids
    assert len(set(penalized)) > len(set(plain))
    banned = one(llm, **params, logit_bias=dict.fromkeys(set(plain), -100.0)).token_ids
    assert not set(banned) & set(plain)


@pytest.mark.rotating
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_form_is_kept_by_each_answer_of_a_batch(llm, temperature):
    forms = [
        Structured(json_schema=PERSON),
        Structured(regex=r"[a-z]{3,12} [0-9]{2}"),
        Structured(choice=("yes", "no", "maybe")),
        Structured(grammar='start: "<" /[a-z]{1,8}/ ">"'),
        None,
    ]
    params = [
        SamplingParams(max_tokens=80, temperature=temperature, seed=i, structured=form)
        for i in range(3)
        for form in forms
    ]
    answers = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params)
    ended = [
        answer.finish_reason == "stop"
        for answer, of in zip(answers, params, strict=True)
        if of.structured
    ]
    assert sum(ended) >= 9
    for answer, of in zip(answers, params, strict=True):
        if of.structured is None or answer.finish_reason == "length":
            continue
        if of.structured.json_schema:
            person = json.loads(answer.text)
            assert (
                person.keys() == {"name", "age"}
                and person["age"] in range(100)
                and len(person["name"]) <= 10
            )
        elif of.structured.choice:
            assert answer.text in of.structured.choice
        else:
            assert re.fullmatch(of.structured.regex or "<[a-z]{1,8}>", answer.text)


def test_a_form_that_cannot_be_compiled_is_refused_and_leaves_nothing(llm):
    with pytest.raises(ValueError, match=r"(?s)regex: .*unclosed group"):
        one(llm, structured=Structured(regex="(a"))
    assert not llm.engine.scheduler.requests


KINDS = {
    "greedy": {},
    "random": {"temperature": 0.9, "seed": 3},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 4},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "seed": 5,
    },
    "greedy penalties": {"presence_penalty": 0.6, "min_tokens": 5, "logit_bias": {300: 1.0}},
    "schema": {"structured": Structured(json_schema=PERSON)},
    "random regex": {"structured": Structured(regex="(ab ){4,9}c"), "temperature": 1.0, "seed": 6},
}


@pytest.mark.rotating
def test_drafts_change_no_token(llm, guessing):
    prompts = [*PROMPTS, "one two three one two three one two three one two"]
    params = [
        SamplingParams(max_tokens=40, **{"ignore_eos": "structured" not in kind, **kind})
        for kind in KINDS.values()
        for _ in prompts
    ]
    prompts = prompts * len(KINDS)
    plain, guessed = llm.generate(prompts, params), guessing.generate(prompts, params)
    different = [
        (name, i)
        for i, (a, b) in enumerate(zip(plain, guessed, strict=True))
        if a.token_ids != b.token_ids
        for name in [list(KINDS)[i * len(KINDS) // len(prompts)]]
    ]
    assert not different
    stats = guessing.engine.stats()
    assert stats.accepted > 20


def test_a_seed_gives_the_same_tokens_alone_and_among_others(llm):
    params = [
        SamplingParams(max_tokens=16, ignore_eos="structured" not in kind, **kind)
        for kind in KINDS.values()
    ]
    together = llm.generate([PROMPTS[0]] * len(params), params)
    for of, answer in zip(params, together, strict=True):
        assert llm.generate(PROMPTS[0], of)[0].token_ids == answer.token_ids


# Chats


def test_a_chat_is_the_completion_of_its_rendered_prompt(llm):
    pytest.importorskip("jinja2")
    parts = [{"type": "text", "text": "She looked"}, {"type": "text", "text": "at him"}]
    chat, params = [{"role": "user", "content": parts}], SamplingParams(max_tokens=12)
    (found,) = llm.chat(chat, params, chat_template_kwargs={"unused": 1})
    prompt = llm.tokenizer.decode(list(found.prompt_token_ids), skip_special_tokens=False)
    assert "She looked\nat him" in prompt
    assert llm.generate([found.prompt_token_ids], params)[0].token_ids == found.token_ids
    together = llm.chat([chat, chat], [params, replace(params, max_tokens=3)])
    assert [one.token_ids for one in together] == [found.token_ids, found.token_ids[:3]]


def test_a_chat_that_cannot_be_answered_is_refused(llm):
    pytest.importorskip("jinja2")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(ValueError, match="this model reads no images: Qwen3ForCausalLM has no"):
        llm.chat([{"role": "user", "content": [image]}])
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(ValueError, match="expected an object with a role"):
        llm.chat([{"content": "x"}])
    module = LLM.__new__(LLM)
    module._folder = module._chat_prompts = None
    with pytest.raises(ValueError, match="a module, which has no chat template: use generate"):
        module.chat([{"role": "user", "content": "x"}])


def test_only_allowed_tokens_are_sampled(llm, guessing):
    allowed = tuple(range(40, 70))
    params = [
        SamplingParams(max_tokens=12, allowed_token_ids=allowed, **more)
        for more in (
            {},
            {"temperature": 1.0, "seed": 2},
            {"logit_bias": {39: 100.0, 41: 5.0}, "min_tokens": 3},
            {"stop_token_ids": allowed[1:], "min_tokens": 12},
        )
    ]
    # Unconstrained requests of the same steps keep their tokens.
    (alone,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12))
    for model in (llm, guessing):
        *found, beside = model.generate([PROMPTS[0]] * 5, [*params, SamplingParams(max_tokens=12)])
        assert all(set(each.token_ids) <= set(allowed) for each in found)
        assert beside.token_ids == alone.token_ids
        assert 41 in found[2].token_ids and set(found[3].token_ids[:11]) == {40}


def test_bad_words_are_not_in_the_output(llm, guessing):
    whole = one(llm, PROMPTS[1], ignore_eos=True)
    words = tuple(sorted(set(re.findall("[A-Za-z]+", whole.text)), key=len)[-3:])
    encoded = [llm.tokenizer.encode(word, add_special_tokens=False).ids for word in words]
    assert max(map(len, encoded)) > 1, encoded
    kinds = {
        "greedy": {},
        "random": {"temperature": 0.9, "seed": 3},
        "token ids": {"bad_words": tuple(map(tuple, encoded))},
        "penalties": {"presence_penalty": 0.6, "logit_bias": {300: 1.0}},
        "grammar": {"structured": Structured(regex="( [a-z]{2,8}){4}")},
    }
    params = [
        SamplingParams(
            **{"max_tokens": 24, "bad_words": words, "ignore_eos": name != "grammar", **kind}
        )
        for name, kind in kinds.items()
    ]
    plain, guessed = (model.generate([PROMPTS[1]] * 5, params) for model in (llm, guessing))
    assert [each.token_ids for each in plain] == [each.token_ids for each in guessed]
    for name, found in zip(kinds, plain, strict=True):
        assert found.error is None, found.error
        if name != "token ids":
            assert not set(words) & set(re.findall("[A-Za-z]+", found.text)), name
        sequences = [list(found.token_ids[i : i + len(ids)]) for ids in encoded for i in range(24)]
        assert not any(ids in sequences for ids in encoded), name
    assert re.fullmatch("( [a-z]{2,8}){4}", plain[-1].text)
    assert plain[0].token_ids != whole.token_ids


def test_a_constraint_that_excludes_all_tokens_is_an_error_of_its_request(llm):
    (token,) = one(llm, max_tokens=1, ignore_eos=True).token_ids
    for params, message in [
        ({"allowed_token_ids": (token,), "bad_words": ((token,),)}, "exclude all 3072 tokens"),
        ({"allowed_token_ids": (9, 3072)}, "allowed_token_ids has token 3072, the vocabulary has"),
        (
            {"allowed_token_ids": (token,), "stop_token_ids": (token,), "min_tokens": 1},
            "min_tokens is 1, but .* are all of allowed_token_ids",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            one(llm, **params)
    # Bad words of two tokens, and a grammar, exclude all tokens of a later step only.
    params = SamplingParams(allowed_token_ids=(token,), bad_words=((token, token),), max_tokens=4)
    no_end = SamplingParams(
        structured=Structured(regex="a"), allowed_token_ids=(token,), max_tokens=4
    )
    failed, ended, whole = llm.generate([PROMPTS[0]] * 3, [params, no_end, SamplingParams()])
    assert failed.token_ids == (token,) and failed.error.by_client
    assert "in step 2 of this request" in failed.error.message
    assert "allowed_token_ids, bad_words exclude all tokens" in failed.error.message
    assert "structured output, allowed_token_ids exclude all" in ended.error.message
    assert whole.error is None
    assert not llm.engine.scheduler.requests


def test_long_prompts_are_cut_at_their_start(llm):
    tokens = list(range(300, 600))
    kept = llm.generate([tokens[-40:]], SamplingParams(max_tokens=4))[0]
    cut = llm.generate([tokens], SamplingParams(max_tokens=4, truncate_prompt_tokens=40))[0]
    assert cut.prompt_token_ids == tuple(tokens[-40:]) and cut.token_ids == kept.token_ids
    fits = llm.generate([tokens], SamplingParams(max_tokens=6, truncate_prompt_tokens=-1))[0]
    assert fits.prompt_token_ids == tuple(tokens[-250:]) and len(fits.token_ids) == 6
    short = llm.generate([tokens[:9]], SamplingParams(max_tokens=1, truncate_prompt_tokens=40))[0]
    assert short.prompt_token_ids == tuple(tokens[:9])
    with pytest.raises(ValueError, match=r"truncate_prompt_tokens is 257, it must be .* of 256"):
        llm.generate([tokens], SamplingParams(truncate_prompt_tokens=257))


def test_bad_words_follow_tokens_of_the_output_only(llm):
    """A bad word that begins in the prompt and ends in the output is not found, as in vLLM."""
    (prompt,) = [llm.tokenizer.encode(PROMPTS[0]).ids]
    plain = llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
    across, inside = ((prompt[-1], plain[0]),), ((plain[0], plain[1]),)
    params = [SamplingParams(max_tokens=4, ignore_eos=True, bad_words=w) for w in (across, inside)]
    same, other = llm.generate([prompt] * 2, params)
    assert same.token_ids == plain
    assert other.token_ids[0] == plain[0] and other.token_ids[1] != plain[1]
