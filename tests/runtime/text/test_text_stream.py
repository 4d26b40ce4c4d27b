"""Text streams: stop strings at any split into tokens, and the final delta."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomc import demo
from atomc.runtime.requests.request import Output, TokenLogprobs
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.text.text_stream import TextDelta, TextStream

tokenizers = pytest.importorskip("tokenizers")
DEMO = tokenizers.Tokenizer.from_file(str(demo.PATH / "tokenizer.json"))
END = DEMO.token_to_id("<|endoftext|>")


def streamed(tokens, sizes=(), finish="length", reason=None, **params):
    """The deltas of these tokens, in steps of the given sizes (then one by one), until the stream
    has finished.
    """
    stream = TextStream(DEMO, [], SamplingParams(**params))
    deltas, start, sizes = [], 0, iter(sizes)
    while start < len(tokens) and not stream.finished:
        end = start + next(sizes, 1)
        done = end >= len(tokens)
        deltas.append(
            stream.add(
                Output(
                    "a",
                    tuple(tokens[start:end]),
                    finish_reason=finish if done else None,
                    stop_reason=reason if done else None,
                )
            )
        )
        start = end
    return deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def ids(text):
    return DEMO.encode(text).ids


def test_a_stop_string_ends_the_text_before_it():
    deltas = streamed(ids("Once upon a time there was"), stop=("time",))
    assert text_of(deltas) == "Once upon a "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "time")
    assert DEMO.decode([token for delta in deltas for token in delta.token_ids]).endswith("time")


def test_a_stop_string_can_be_kept():
    assert (
        text_of(streamed(ids("one, two, three"), stop=("two",), include_stop_str_in_output=True))
        == "one, two"
    )


def test_a_stop_string_across_tokens_never_shows_its_beginning():
    letters = [token for letter in "the cat" for token in ids(letter)]
    deltas = streamed(letters, stop=("e c",))
    assert text_of(deltas) == "th"
    # A partial stop string is returned with the first letter that does not match.
    assert [delta.text for delta in streamed(letters, stop=("e d",))] == [
        "t",
        "h",
        "",
        "",
        "e c",
        "a",
        "t",
    ]


def test_a_stop_string_of_half_tokens_inside_characters():
    tokens = [
        DEMO.token_to_id(piece)
        for piece in tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(
            "a\u4e2db\u6587"
        )[0][0]
    ]
    assert len(tokens) == 8
    assert text_of(streamed(tokens, stop=("\u4e2db",))) == "a"
    assert text_of(streamed(tokens, stop=("b\u6587",))) == "a\u4e2d"
    assert text_of(streamed(tokens, stop=("\u6587c",))) == "a\u4e2db\u6587"


def test_a_partial_stop_string_is_returned_at_the_end():
    deltas = streamed(ids("a b c"), stop=("c d",))
    assert text_of(deltas) == "a b c" and deltas[-1].finish_reason == "length"


def test_of_several_the_first_in_the_text_stops():
    tokens = ids("one two three")
    assert streamed(tokens, [len(tokens)], stop=("three", "two"))[-1].stop_reason == "two"
    assert text_of(streamed(tokens, [len(tokens)], stop=("three", "two"))) == "one "


def test_stop_strings_wait_for_min_tokens():
    letters = [token for letter in "aXbXcX" for token in ids(letter)]
    assert text_of(streamed(letters, stop=("X",))) == "a"
    assert text_of(streamed(letters, stop=("X",), min_tokens=2)) == "aXb"
    assert text_of(streamed(letters, stop=("bX",), min_tokens=3)) == "aX"
    assert text_of(streamed(letters, stop=("bX",), min_tokens=4)) == "aXbXcX"


def test_the_token_that_stopped_it_has_no_text():
    tokens = [*ids("once upon"), END]
    assert text_of(streamed(tokens, finish="stop", skip_special_tokens=False)) == "once upon"
    named = ids("once upon")
    assert text_of(
        streamed(named, finish="stop", reason=named[-1], stop_token_ids=(named[-1],))
    ) == DEMO.decode(named[:-1])
    kept = dict(stop_token_ids=(named[-1],), include_stop_str_in_output=True)
    assert text_of(streamed(named, finish="stop", reason=named[-1], **kept)) == "once upon"
    # The end-of-sequence token is not in stop_token_ids.
    assert (
        text_of(streamed(tokens, finish="stop", skip_special_tokens=False, **kept)) == "once upon"
    )


def test_half_a_character_at_the_end_is_shown_as_such():
    assert text_of(streamed(ids("ok\u4e2d")[:-1])) == "ok\ufffd"


def test_an_end_without_tokens_gives_what_was_held_back():
    stream = TextStream(DEMO, [], SamplingParams(stop=("k!",)))
    assert stream.add(Output("a", tuple(ids("ok")))).text == "o"
    assert stream.add(Output("a", (), finish_reason="abort")) == TextDelta("k", (), None, "abort")


def test_logprobs_come_with_their_tokens_and_stop_with_them():
    tokens = tuple(token for letter in "abXc" for token in ids(letter))
    logprobs = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in tokens)
    stream = TextStream(DEMO, [], SamplingParams(stop=("X",)))
    assert stream.add(Output("a", tokens, logprobs=logprobs)) == TextDelta(
        "ab", tokens[:3], logprobs[:3], "stop", "X"
    )
    assert stream.finished
    assert stream.add(Output("a", tokens[3:], logprobs=logprobs[3:])) == TextDelta()


def test_without_a_tokenizer_there_are_tokens_only():
    stream = TextStream(None, [1], SamplingParams(stop=("X",)))
    assert stream.add(Output("a", (5, 6))) == TextDelta("", (5, 6))
    assert stream.add(Output("a", (7,), finish_reason="length")) == TextDelta(
        "", (7,), None, "length"
    )


def expected(tokens, stops, min_tokens):
    """The text up to the first token that completes a stop string."""
    texts = [DEMO.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    texts[:-1] = [text.rstrip("\ufffd") for text in texts[:-1]]
    for count, text in enumerate(texts):
        if count > min_tokens:
            lower = len(texts[min_tokens])
            places = [(text.find(stop, max(lower - len(stop) + 1, 0)), stop) for stop in stops]
            found = min(
                (place for place in places if place[0] >= 0),
                default=None,
                key=lambda place: place[0],
            )
            if found is not None:
                return text[: found[0]], found[1]
    return texts[-1], None


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab \u4e2d\U0001f600", min_size=1, max_size=25),
    st.lists(st.text("ab \u4e2d", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4)),
    st.integers(0, 6),
    st.booleans(),
)
def test_the_text_is_that_of_a_search_after_each_token(text, stops, sizes, min_tokens, by_byte):
    tokens = ids(text)
    if by_byte:
        pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        tokens = [DEMO.token_to_id(character) for piece, _ in pieces for character in piece]
    deltas = streamed(tokens, sizes, stop=tuple(stops), min_tokens=min_tokens)
    assert (text_of(deltas), deltas[-1].stop_reason) == expected(tokens, stops, min_tokens)
    assert sum(len(delta.token_ids) for delta in deltas) <= len(tokens)
