"""Validation of sampling parameters, with the error messages."""

import pytest

from atomc.runtime.requests.sampling_params import SamplingParams, Structured


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n is 0, it must be at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        (
            {"max_tokens": 4, "min_tokens": 5},
            "min_tokens is 5, it must be at least 0 and at most max_tokens=4",
        ),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"temperature": -1.0}, "temperature is -1.0, it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"top_k": -1}, "top_k is -1, it must be 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1, it must be at least 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, it must be at least 1e-06"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5, it must be at least -2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
        ({"seed": 2**64}, "seed is 18446744073709551616, it must be a number of 64 bits"),
        (
            {"logit_bias": {-1: 0.0}},
            "logit_bias is {-1: 0.0}, it must be token ids with numbers from -100 to 100",
        ),
        ({"logit_bias": {1: 101.0}}, "logit_bias is"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias is"),
        ({"stop": ("a", "")}, "stop is .'a', ''., it must be texts that are not empty"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids is"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is .., it must be at least one token id"),
        ({"allowed_token_ids": (3, -1)}, "allowed_token_ids is .3, -1., .* none that is negative"),
        ({"bad_words": ("a", " ")}, "bad_words is .'a', ' '., it must be a list of texts"),
        ({"bad_words": ((),)}, "bad_words is"),
        ({"bad_words": ((1, -1),)}, "bad_words is"),
        ({"bad_words": "word"}, "bad_words is 'word', it must be a list"),
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens is 0, it must be at least 1, or -1",
        ),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        (
            {"structured": Structured(regex="a"), "min_tokens": 1},
            "min_tokens is 1, it must be 0 with structured",
        ),
        (
            {"structured": Structured(regex="a"), "ignore_eos": True},
            "ignore_eos is True, it must be False with structured",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_what_the_vocabulary_lacks_is_refused():
    SamplingParams(logit_bias={9: 1.0}, logprobs=10).check_vocabulary(10)
    with pytest.raises(ValueError, match="logit_bias has token 10, the vocabulary has 10 tokens"):
        SamplingParams(logit_bias={9: 1.0, 10: 1.0}).check_vocabulary(10)
    SamplingParams(allowed_token_ids=[9, 0]).check_vocabulary(10)
    with pytest.raises(ValueError, match="allowed_token_ids has token 10, the vocabulary has 10"):
        SamplingParams(allowed_token_ids=[10, 9]).check_vocabulary(10)
    with pytest.raises(ValueError, match="logprobs is 11, the vocabulary has 10 tokens"):
        SamplingParams(logprobs=11).check_vocabulary(10)


def test_one_stop_text_may_come_alone():
    assert SamplingParams(stop="ab").stop == ("ab",) == SamplingParams(stop=["ab"]).stop


@pytest.mark.parametrize(
    "given", [{}, {"regex": "a", "json_object": True}, {"json_schema": "{}", "choice": ("a",)}]
)
def test_structured_output_is_exactly_one_thing(given):
    with pytest.raises(
        ValueError,
        match="expected exactly one of json_schema, json_object, regex, choice and grammar",
    ):
        Structured(**given)


@pytest.mark.parametrize("choice", [(), ("a", "")])
def test_a_choice_is_among_texts(choice):
    with pytest.raises(ValueError, match="expected at least one text and no empty text"):
        Structured(choice=choice)


def test_a_schema_keeps_the_order_of_its_properties_and_can_be_a_key():
    structured = Structured(json_schema={"b": 1, "a": 2})
    assert structured.json_schema == '{"b": 1, "a": 2}'
    assert hash(structured) == hash(Structured(json_schema='{"b": 1, "a": 2}'))


def test_parameters_travel_between_processes():
    msgspec = pytest.importorskip("msgspec")
    params = SamplingParams(
        max_tokens=None,
        logit_bias={3: 1.5},
        stop=("x", "y"),
        stop_token_ids=(4,),
        seed=2**63,
        logprobs=2,
        allowed_token_ids=[7, 8],
        bad_words=["word", [7, 8]],
        truncate_prompt_tokens=-1,
        structured=Structured(json_schema={"type": "object"}),
    )
    assert not params.penalized and not params.filtered
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
