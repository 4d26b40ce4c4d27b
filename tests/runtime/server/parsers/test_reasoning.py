"""Reasoning parsers: reasoning and content, for complete texts and for any split into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.server.chat import chat
from atomc.runtime.server.parsers.message_deltas import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from atomc.runtime.server.parsers.reasoning_parsers import (
    REASONING_PARSERS,
    PromptEnd,
    detect_reasoning_parser,
    reasoning_parser,
)
from atomc.runtime.server.service.model_info import ModelInfo
from atomc.runtime.server.service.protocol import ChatRequest
from atomc.runtime.text.chat_template import ChatTemplate

OPEN = "<|im_start|>assistant\n<think>\n"
OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
)


def parsed(name, end, *parts):
    """All deltas, with adjacent ones of the same type merged. end: a PromptEnd, or its prompt."""
    parser = reasoning_parser(name, PromptEnd(end) if isinstance(end, str) else end)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return merge_deltas(pieces + parser.finish())


def answer(thought="", said=""):
    return ([ReasoningDelta(thought)] if thought else []) + ([ContentDelta(said)] if said else [])


# name of the parser, prompt, text, pieces
CASES = {
    "think": ("think", "", "<think>\nHm.\n\nSo.\n</think>\n\nHello.\n", answer("Hm.\n\nSo.", "Hello.\n")),
    "opened-by-the-prompt": ("think", OPEN, "Hm.\n</think>\n\nHello.", answer("Hm.", "Hello.")),
    "opened-twice": ("think", OPEN, "<think>\nHm.</think>Hello.", answer("Hm.", "Hello.")),
    "closed-by-the-prompt": ("think", OFF, "Hello.", answer("", "Hello.")),
    "nothing-thought": ("think", "", "<think>\n\n</think>\n\nHello.", answer("", "Hello.")),
    "not-thinking": ("think", "", " Hello <b>.\n", answer("", " Hello <b>.\n")),
    "tags-later": ("think", "", "I write <think>x</think>.", answer("", "I write <think>x</think>.")),
    "second-closing-tag": ("think", "", "<think>a</think>b</think>c", answer("a", "b</think>c")),
    "cut-while-thinking": ("think", "", "<think>Hm. </thi", answer("Hm. </thi")),
    "cut-at-once": ("think", OPEN, "\n", answer()),
    "half-a-tag": ("think", "", "<thi", answer("", "<thi")),
    "nothing": ("think", "", "", answer()),
    "indented-answer": ("think", "", "<think>a</think>\n    code", answer("a", "    code")),
    "gpt-oss": (
        "gpt-oss", "", "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        answer("Hm.\n", "Hello."),
    ),
    "gpt-oss-twice": (
        "gpt-oss", "", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
        answer("a\n\nb"),
    ),
    "gpt-oss-cut": ("gpt-oss", "", "<|channel|>analysis<|message|>Hm <|e", answer("Hm <|e")),
    "gpt-oss-final-only": ("gpt-oss", "", "<|channel|>final<|message|>Hello.<|return|>", answer("", "Hello.")),
    "gpt-oss-calls-stay": ("gpt-oss", "", f"<|channel|>analysis<|message|>a<|end|>{CALL}", answer("a", CALL)),
    "gpt-oss-first-call-gets-its-start": ("gpt-oss", "", CALL.removeprefix("<|start|>assistant"), answer("", CALL)),
    "gpt-oss-end-forgotten": (
        "gpt-oss", "", "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", answer("a", "b"),
    ),
    "gpt-oss-plain": ("gpt-oss", "", "Hello.", answer("", "Hello.")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_text_is_understood(case):
    name, prompt, text, pieces = CASES[case]
    assert parsed(name, prompt, text) == pieces


@pytest.mark.parametrize("case", CASES)
def test_character_by_character_gives_the_same(case):
    name, prompt, text, pieces = CASES[case]
    assert parsed(name, prompt, *text) == pieces


@pytest.mark.parametrize("case", CASES)
def test_any_two_parts_give_the_same(case):
    name, prompt, text, pieces = CASES[case]
    for at in range(len(text)):
        assert parsed(name, prompt, text[:at], "", text[at:]) == pieces, at


FRAGMENTS = {
    "think": ["<think>", "</think>", "\n", " ", "<", "</", "think>", "x"],
    "gpt-oss": [
        "<|start|>",
        "assistant",
        "<|channel|>",
        "analysis",
        "final",
        " to=functions.f",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "\n",
        "<",
        "x",
        "to=",
    ],
}


@pytest.mark.parametrize("name", FRAGMENTS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_text_in_any_parts_gives_the_same_as_at_once(name, data):
    end = data.draw(st.sampled_from([PromptEnd(), PromptEnd(OPEN), PromptEnd(thinking=True)]))
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=20)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(name, end, text)
    assert parsed(name, end, *parts) == whole
    assert parsed(name, end, *text) == whole


def test_thoughts_come_as_they_are_thought():
    parser = reasoning_parser("think", PromptEnd(OPEN))
    assert parser.feed("Hm, ") == [ReasoningDelta("Hm, ")]
    assert parser.feed("well\n") == [ReasoningDelta("well")]
    assert parser.feed("so") == [ReasoningDelta("\nso")]


@pytest.mark.parametrize("name", ["think", "deepseek-r1"])
@pytest.mark.parametrize(
    ("prefill", "thought"),
    [
        ("<think>\nI was", True),
        ("<think>", True),
        ("<think>a</think>b <think>", True),
        ("<think>a</think>\n\nThe", False),
        ("The answer", False),
    ],
)
def test_an_answer_continues_the_reasoning_that_its_beginning_leaves_open(name, prefill, thought):
    end = PromptEnd(f"<think></think>{prefill}", prefill)
    parser = reasoning_parser(name, end)
    text = parser.feed(" thinking</think>5") + parser.finish()
    said = ContentDelta(" thinking</think>5")
    assert text == ([ReasoningDelta(" thinking"), ContentDelta("5")] if thought else [said])


@pytest.mark.parametrize(
    ("tail", "last_text", "opened"),
    [
        ("<think>\nOkay, ", "Hi", True),
        ("<think>\nOkay, ", " Hi\n", True),  # templates strip
        ("<think>a</think>\n<think>\nOkay, ", "Hi", True),
        ("<think>a</think>\nSo: ", "Hi", False),
        ("<think>\n", "n", True),  # within the tag
        ("<think>\n\n</think>\n\n", "k", False),
        ("", "What does <think> mean?", False),
        ("", "I write <think>", False),
        ("", "", False),
        ("<think>\n", "", True),
        ("Okay <think> so", "", False),  # of a message, for all that is known
    ],
)
def test_tags_after_the_last_message_open_and_close_the_reasoning(tail, last_text, opened):
    users = "".join(f"<user>\n{text}</user>\n" for text in ("Say <think>", last_text.strip()))
    prompt = f"{users}<assistant>\n{tail}"
    end = PromptEnd(prompt, last_text=last_text)
    whole = parsed("think", end, "x</think>y")
    assert whole == (answer("x", "y") if opened else answer("", "x</think>y"))
    assert parsed("think", end, *"x</think>y") == whole


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("I reason.\n</think>\n\nIt is 5.", answer("I reason.", "It is 5.")),
        ("\nI <b>reason</b>.</think>5 </think>", answer("I <b>reason</b>.", "5 </think>")),
        ("\n<think>\nHm.</think>5", answer("Hm.", "5")),
        (" It is 5.\n", answer("", " It is 5.\n")),
        ("It is </thin", answer("", "It is </thin")),
        ("", answer()),
    ],
)
def test_a_lone_closing_tag_ends_the_reasoning_that_the_client_switched_on(text, deltas):
    end = PromptEnd("<|im_start|>assistant\n", thinking=True)
    for at in range(len(text) + 1):
        assert parsed("think", end, text[:at], text[at:]) == deltas, at
    assert parsed("think", end, *text) == deltas


def test_an_answer_that_cannot_have_reasoning_is_not_held_back():
    for end in (
        PromptEnd("assistant\n"),
        PromptEnd(OFF, thinking=True),
        PromptEnd("a", "a", thinking=True),
    ):
        assert reasoning_parser("think", end).feed("It is ") == [ContentDelta("It is ")]


@pytest.mark.parametrize(
    ("source", "fields", "thinking"),
    [
        ("{{ enable_thinking }}", {"chat_template_kwargs": {"enable_thinking": True}}, True),
        ("{{ thinking }}", {"chat_template_kwargs": {"thinking": True}}, True),
        ("{{ enable_thinking }}", {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ("{{ enable_thinking }}", {}, False),
        ("no switch", {"chat_template_kwargs": {"enable_thinking": True}}, False),
    ],
)
def test_the_client_switches_the_reasoning_of_a_template_that_can(source, fields, thinking):
    model = ModelInfo((), None, ChatTemplate(source), {}, None, "think")
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    body = ChatRequest(messages=[{"role": "user", "content": parts}], **fields)
    assert chat._prompt_end("a\nb", body, model) == PromptEnd("a\nb", None, "b", thinking)


def test_tokens_are_of_the_kind_of_the_last_delta_after_them():
    counter = chat._ReasoningTokens(None)
    counts = []
    for deltas, num_tokens in [
        ([], 1),  # the opening tag
        ([ReasoningDelta("A")], 1),
        ([], 1),  # the closing tag
        ([ReasoningDelta("!"), ContentDelta("B")], 2),
        ([], 1),  # a part of a character
        ([ToolCallStart(0, "c", "f"), ToolCallArguments(0, "{}")], 4),
    ]:
        counter.add(deltas, (5,) * num_tokens)
        counts.append(counter.count)
    assert counts == [0, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("cuts", [(), (1,), (3,), (4,), (1, 3), (2, 3, 4, 5)])
def test_tokens_up_to_the_closing_one_are_counted_however_they_are_grouped(cuts):
    texts = ["<think>", "a", "b", "</think>", "c", "</think>", "d"]
    tokens = [1, 8, 8, 2, 8, 2, 8]
    counter, parser = chat._ReasoningTokens(2), reasoning_parser("think", PromptEnd())
    for start, end in zip((0, *cuts), (*cuts, len(texts)), strict=True):
        counter.add(parser.feed("".join(texts[start:end])), tokens[start:end])
    assert counter.count == 4
    empty, parser = chat._ReasoningTokens(2), reasoning_parser("think", PromptEnd())
    for text, token in [("<think>", 1), ("\n\n", 8), ("</think>", 2), ("a</think>", 2)]:
        empty.add(parser.feed(text), [token])
    assert empty.count == 0


def test_deepseek_r1_may_leave_out_the_opening_tag():
    said = "I reason.\n</think>\n\nIt is 5."
    assert parsed("deepseek-r1", "", *said) == answer("I reason.", "It is 5.")
    assert parsed("deepseek-r1", "", "I rea") == answer("I rea")
    assert parsed("deepseek-r1", OFF, "5</think>") == answer("", "5</think>")
    assert parsed("think", "", said) == answer("", said)
    for name in ("think", "deepseek-r1"):  # a grammar that forces content
        parser = reasoning_parser(name)
        assert parser.feed(said) + parser.finish() == answer("", said)


@pytest.mark.parametrize(
    ("structured", "content"),
    [
        (None, False),
        (Structured(json_schema={"enum": ["</think>"]}), True),
        (Structured(json_object=True), True),
        (Structured(regex="[a-z]*<\\/think>5"), False),
        (Structured(choice=("a", "b</think>c")), False),
        (Structured(choice=("a", "b")), True),
        (Structured(grammar='start: "x" "</think>" "y"'), False),
    ],
)
def test_a_grammar_with_the_closing_tag_begins_with_the_reasoning(structured, content):
    assert chat._is_content(structured) == content


def test_an_unknown_parser_is_rejected():
    with pytest.raises(
        ValueError, match="unknown reasoning parser 'x', expected one of think, qwen3"
    ):
        reasoning_parser("x")


@pytest.mark.parametrize(
    "template, model_type, name",
    [
        ("{{ content.split('</think>')[-1] }}", "qwen3", "think"),
        ("<|im_start|>assistant\n<think>\n", None, "think"),
        ("<|start|>assistant<|channel|>analysis", None, "gpt-oss"),
        ("", "gpt_oss", "gpt-oss"),
        ("<|im_start|>", "qwen2", None),
    ],
)
def test_the_template_tells_the_parser(template, model_type, name):
    assert detect_reasoning_parser(template, model_type) == name
    assert name is None or name in REASONING_PARSERS
