"""Incremental detokenization with byte-level and byte-fallback tokenizers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomc import demo
from atomc.runtime.requests.request_errors import TokenizerError
from atomc.runtime.text.detokenizer import Detokenizer, TokenTexts, decode, encode

tokenizers = pytest.importorskip("tokenizers")
DEMO = tokenizers.Tokenizer.from_file(str(demo.PATH / "tokenizer.json"))
END = DEMO.token_to_id("<|endoftext|>")


def falling_back():
    """A tokenizer as in SentencePiece: words with U+2581, letters, and bytes as fallback."""
    pieces = [
        "<unk>",
        "</s>",
        "\u2581",
        "\u2581a",
        "b",
        "\u2581\u2581",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    model = tokenizers.models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    parts = (
        tokenizers.decoders.Replace("\u2581", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(list(parts))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


FALLING_BACK = falling_back()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.integers(0, 30))
def test_pieces_are_whole_characters_and_make_the_text(text, split):
    ids = DEMO.encode(text).ids
    prompt, new = ids[:split], ids[split:]
    detokenizer = Detokenizer(DEMO, prompt)
    pieces = [detokenizer.add([token]) for token in new]
    whole = DEMO.decode(ids)
    # If the prompt ends in an incomplete character, its first bytes are not part of the new text.
    before = DEMO.decode(prompt)
    if not before.endswith("\ufffd") and "\ufffd" not in whole:
        assert before + "".join(pieces) + detokenizer.flush() == whole
        assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_fall_back_wait_for_the_rest_of_their_character():
    ids = [
        FALLING_BACK.token_to_id(piece)
        for piece in ("\u2581a", "<0xE4>", "<0xB8>", "<0xAD>", "b", "\u2581\u2581", "b")
    ]
    detokenizer = Detokenizer(FALLING_BACK, [5])
    assert [detokenizer.add([token]) for token in ids] == [" a", "", "", "\u4e2d", "b", "  ", "b"]


@pytest.mark.parametrize("tokenizer", [DEMO, FALLING_BACK], ids=["byte level", "byte fallback"])
def test_bytes_that_are_no_characters_do_not_wait_for_ever(tokenizer):
    first = next(
        i for i in range(tokenizer.get_vocab_size()) if TokenTexts(tokenizer).bytes(i) == b"\x80"
    )
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.add([first]) for _ in range(100)]
    assert len(detokenizer.window) < 30
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 100


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_byte_level_tokens_need_no_context(data, skip):
    texts, size = TokenTexts(DEMO), DEMO.get_vocab_size()
    # Many tokens with a part of a character.
    parts = [i for i in range(size) if not texts.bytes(i).isascii()]
    tokens = st.lists(st.sampled_from(parts) | st.integers(0, size), max_size=30)
    prompt, new = data.draw(tokens), data.draw(tokens)
    detokenizer, slow = (Detokenizer(DEMO, prompt, skip_special_tokens=skip) for _ in range(2))
    assert not detokenizer._needs_context
    slow._needs_context = True
    assert [detokenizer.add([token]) for token in new] == [slow.add([token]) for token in new]
    assert detokenizer.flush() == slow.flush()


def test_a_decoder_that_joins_words_needs_context():
    assert Detokenizer(FALLING_BACK, [])._needs_context
    tokenizer = broken(decoder=tokenizers.decoders.WordPiece())
    assert Detokenizer(tokenizer, [0]).add([1, 0]) == " b a"


def test_special_tokens_are_skipped_or_kept():
    ids = [*DEMO.encode("once").ids, END]
    assert Detokenizer(DEMO, []).add(ids) == "once"
    assert Detokenizer(DEMO, [], skip_special_tokens=False).add(ids) == "once<|endoftext|>"


def test_each_token_has_bytes():
    texts = TokenTexts(DEMO)
    ids = DEMO.encode("Once, na\u00efve \u4e2d").ids
    assert b"".join(texts.bytes(token) for token in ids) == "Once, na\u00efve \u4e2d".encode()
    assert texts.bytes(END) == b"<|endoftext|>"
    assert texts.bytes(10**6) == b""
    assert any(b"\xe4" in texts.bytes(token) for token in ids)  # half a character


def test_tokens_that_fall_back_have_their_bytes():
    texts = TokenTexts(FALLING_BACK)
    ids = [FALLING_BACK.token_to_id(piece) for piece in ("\u2581a", "<0xE4>", "</s>")]
    assert [texts.bytes(token) for token in ids] == [b" a", b"\xe4", b"</s>"]


def test_every_byte_has_a_token_in_the_demo():
    texts = TokenTexts(DEMO)
    assert {texts.bytes(token) for token in range(DEMO.get_vocab_size())} >= {
        bytes([byte]) for byte in range(256)
    }


def broken(**parts):
    """A tokenizer of two letters without an unknown token, and with these parts."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "<unk>"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


STRIPS = broken(decoder=tokenizers.decoders.Strip("a", 2, 2))
CHUNKS = broken(pre_tokenizer=tokenizers.pre_tokenizers.FixedLength(0))


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda: encode(broken(), "c"), "Missing [UNK] token"),
        (lambda: encode(CHUNKS, "a"), "chunk size must be non-zero"),
        (lambda: decode(STRIPS, [0]), "index out of bounds"),
        (lambda: Detokenizer(STRIPS, [0]), "index out of bounds"),
        (lambda: Detokenizer(STRIPS, [1]).add([0]), "index out of bounds"),
    ],
)
def test_a_tokenizer_that_fails_or_panics_is_named(work, reason):
    with pytest.raises(TokenizerError) as raised:
        work()
    assert str(raised.value).startswith("the model's tokenizer failed: ")
    assert reason in str(raised.value)


def test_an_interrupt_is_no_failure_of_the_tokenizer():
    class Interrupted:
        def encode_batch_fast(self, texts, add_special_tokens):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(Interrupted(), "a")


def test_a_lone_surrogate_is_no_failure_of_the_tokenizer():
    with pytest.raises(UnicodeError):
        encode(DEMO, "\ud800")
