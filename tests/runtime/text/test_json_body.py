"""Bodies: UTF-8 only, with limits that hold for what the parser sees, in any division into parts."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from atomc.runtime.server.http.json_body import parse_json
from atomc.runtime.text import json_scan
from atomc.runtime.text.chat_template import _parse_arguments
from atomc.runtime.text.json_scan import (
    BLOCK_BYTES,
    DEPTH,
    DIGITS,
    NODES,
    VALUES,
    JSONScan,
    scan_json,
)

TEXT = '{"user": "\u2200", "z": [1, 2.5, null, "a\\"[\\\\"]}'


def scanned(text, size=BLOCK_BYTES):
    """Scans the text in parts of this size."""
    scan = JSONScan(0)
    for start in range(0, len(text), size):
        scan.feed(text[start : start + size])
    scan.end()


def refused(text, message, size=BLOCK_BYTES):
    with pytest.raises(ValueError, match=message):
        scanned(text, size)


def test_a_body_is_utf_8_with_or_without_a_byte_order_mark():
    for encoding in ("utf-8", "utf-8-sig"):
        assert parse_json(TEXT.encode(encoding)) == json.loads(TEXT)


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_refused(encoding, bom):
    with pytest.raises(ValueError, match="it is UTF-16 or UTF-32, expected UTF-8"):
        parse_json((bom + TEXT).encode(encoding))


@pytest.mark.parametrize(
    "text",
    [b'"\xc0\xaf"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'{"\xff": 1}', b'["\xe2\x88"]'],
)
def test_bytes_that_are_not_utf_8_are_refused(text):
    with pytest.raises(ValueError, match="it is not UTF-8"):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    [b"", b'"\x00"', b'"a\nb"', b'"\\ud800"', b"NaN", b"[1,]", b"{}x", b"1e400", b"9" * 5000],
)
def test_a_text_that_is_not_json_is_refused(text):
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("size", [1, 7, 1000, BLOCK_BYTES])
def test_depth_is_limited(size):
    scanned(b"[" * DEPTH + b"]" * DEPTH, size)
    refused(b"[" * (DEPTH + 1), f"{DEPTH} levels", size)
    refused(b'{"a":[' * DEPTH, f"{DEPTH} levels", size)
    refused(b"]" * 100, "closes a list or an object that is not open", size)


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":1}'])
def test_lists_objects_and_fields_are_limited(item):
    nodes = item.count(b"[") + item.count(b"{") + item.count(b":")
    count = (NODES - 1) // nodes
    scanned(b"[" + b",".join([item] * count) + b"]")
    refused(b"[" + b",".join([item] * (count + 1)) + b"]", f"{NODES} lists, objects and fields")


def test_values_are_limited_by_the_length_of_a_sequence():
    ids = b"[" + b"1," * (VALUES - 1) + b"1]"
    scanned(ids)
    longer = ids[:-1] + b",1]"
    refused(longer, f"{VALUES} JSON values")
    scan_json(longer, VALUES)


@pytest.mark.parametrize("shift", range(3))
def test_brackets_and_quotes_in_strings_count_nothing(shift):
    inner = b" " * shift + b'\\"[{,:\\\\' * 20_000
    scanned(b'{"a":"' + inner + b'"}')
    refused(b'{"a":"' + inner + b'",' + b'"b":' + b"[" * 200, "levels")


def test_parts_of_any_size_count_the_same():
    pieces = ['"', "\\", '\\"', "\\\\", "[", "]", "{", "}", ":", ",", "a", "1", "\u2200"]
    for seed in range(50):
        choice = random.Random(seed)
        text = "".join(choice.choices(pieces, k=400)).encode()
        results = {counts(text, size) for size in (1, 3, 50, 400)}
        assert len(results) == 1


def counts(text, size):
    scan = JSONScan(0)
    try:
        for start in range(0, len(text), size):
            scan.feed(text[start : start + size])
        scan.end()
    except ValueError as error:
        return str(error)
    return scan._num_nodes, scan._num_values, scan._depth, scan._slow_bytes


def test_an_escape_at_the_border_of_two_blocks_stays_one():
    for shift in range(4):
        inner = b"x" * (BLOCK_BYTES - 10 - shift) + b'\\"\\\\\\"' * 3
        refused(b'["' + inner + b'",' + b"[" * 200, "levels")
        scanned(b'["' + inner + b"[" * 200 + b'"]')


def test_digits_of_a_number_are_limited():
    scanned(b"[" + b"1" * (DIGITS - 1) + b', "' + b"1" * 5000 + b'"]')
    for size in (1, BLOCK_BYTES):
        refused(b"[" + b"1" * DIGITS + b"]", f"{DIGITS} digits", size)
        refused(b"[0." + b"123" * DIGITS + b"]", f"{DIGITS} digits", size)


@pytest.mark.parametrize("digits", [20, 399])
def test_long_numbers_are_limited(digits):
    number = b"9" * digits + b","
    scanned(b"[" + number * (100_000 // (digits // 20)) + b"1]")
    refused(b"[" + number * (120_000 // (digits // 20)) + b"1]", "20 digits in a row 80")


def test_escapes_and_characters_outside_of_ascii_are_limited():
    scanned(b'"' + b"x" * 2**24 + b'"')
    refused(('"' + "\u2200" * 2_800_000 + '"').encode(), "bytes of characters outside of ASCII")
    refused(b'"' + b"\\n" * 1_400_000 + b'"', "bytes of characters outside of ASCII")


@pytest.mark.parametrize("text", ["[" * 200, '{"a":[' + "[]," * 300_000 + "1]}", "1" * 4000])
def test_arguments_of_a_tool_call_that_would_take_long_stay_text(text):
    call = {"function": {"name": "f", "arguments": text}}
    assert _parse_arguments(call) is call
    small = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    assert _parse_arguments(small)["function"]["arguments"] == {"a": 1}


def num_nodes(value):
    """The number of lists, objects and fields."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_nodes, value.values()))
    return 1 + sum(map(num_nodes, value)) if isinstance(value, list) else 0


def depth(value):
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


TEXTS = st.sampled_from(["", "a", '"', "\\", '\\\\"', "[[[[[[[[{{{,,,,,,", "]}", "\u4e2d"])
JSON = st.recursive(
    TEXTS | st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)
)


@settings(max_examples=300, deadline=None)
@given(JSON, st.booleans())
def test_nodes_and_nesting_are_counted_as_a_parser_would(value, ascii_only):
    with pytest.MonkeyPatch.context() as patch:
        for name, number in (("NODES", 12), ("DEPTH", 4), ("BLOCK_BYTES", 7)):
            patch.setattr(json_scan, name, number)
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
        if num_nodes(value) <= 12 and depth(value) <= 4:
            scan_json(body, 0)
        else:
            with pytest.raises(ValueError, match=r"more than 12 lists|more than 4 levels"):
                scan_json(body, 0)
