"""Prompts with images: the same tokens, pixels and grids as transformers' processor, and text that
looks like an image.
"""

import hashlib
import json

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
from image_files import (  # noqa: E402
    IMAGE_TOKEN_ID,
    SPECIAL,
    TEMPLATE,
    VIDEO_TOKEN_ID,
    data_url,
    encoded,
    image_processor,
    picture,
    tokenizer,
    write_model,
)
from PIL import Image  # noqa: E402
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor  # noqa: E402

from atomc.runtime.images.content_parts import has_images, split_images  # noqa: E402
from atomc.runtime.images.image_error import ImageError  # noqa: E402
from atomc.runtime.images.placeholders import Placeholders  # noqa: E402
from atomc.runtime.images.processor import ImageProcessor, image_tokens, load_image_processor  # noqa: E402
from atomc.runtime.text.chat_prompts import ChatPrompts  # noqa: E402

SIZES = [(40, 24), (17, 90), (64, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chats(folder):
    return ChatPrompts(folder, tokenizer())


def text(value):
    return {"type": "text", "text": value}


def pil(image):
    return {"type": "image", "image": image}


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def prompt(chats, messages, tools=None, **kwargs):
    return chats.prompt(messages, tools, True, kwargs)


@pytest.fixture(scope="module")
def theirs():
    """transformers' processor of Qwen3-VL without the part for videos, which needs torchvision."""
    found = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    found.image_processor, found.video_processor = image_processor(), None
    found.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    found.chat_template = TEMPLATE
    found.image_token, found.video_token = "<|image_pad|>", "<|video_pad|>"
    found.image_token_id, found.video_token_id = IMAGE_TOKEN_ID, VIDEO_TOKEN_ID
    found.image_ids, found.video_ids, found.audio_ids = [IMAGE_TOKEN_ID], [VIDEO_TOKEN_ID], []
    return found


@pytest.mark.parametrize("number", [1, 3])
def test_tokens_pixels_and_grids_are_those_of_transformers(chats, theirs, number):
    images = [picture(*size, seed) for seed, size in enumerate(SIZES[:number])]
    parts = [part for image in images for part in (text("and \u00fc "), pil(image))]
    messages = [{"role": "system", "content": "Look."}, *user(*parts, text("?"))]
    tokens, found = prompt(chats, messages)

    expected = theirs.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True
    )
    grids = expected["image_grid_thw"].tolist()
    assert [tokens] == expected["input_ids"] and len(set(map(tuple, grids))) == number
    assert [list(image.grid) for image in found] == grids
    pixels = np.concatenate([np.frombuffer(image.pixels, np.float32) for image in found])
    np.testing.assert_array_equal(pixels, expected["pixel_values"].ravel())


def test_an_image_knows_its_tokens_and_a_digest_of_its_content(chats):
    first, second = picture(40, 24, 1), picture(24, 40, 2)
    tokens, images = prompt(chats, user(pil(first), text("x"), pil(second), pil(first)))
    ranges = [i for image in images for i in range(image.start, image.end)]
    assert ranges == [i for i, token in enumerate(tokens) if token == IMAGE_TOKEN_ID]
    for image in images:
        assert image.length == np.prod(image.grid) // 4
        assert tokens[image.start - 1] == SPECIAL.index("<|vision_start|>")
        assert tokens[image.end] == SPECIAL.index("<|vision_end|>")
        grid = repr(image.grid).encode()
        assert image.digest == hashlib.blake2b(grid + image.pixels, digest_size=32).digest()
    assert images[0].digest == images[2].digest != images[1].digest
    # The same values in another grid are another image.
    square = Image.new("RGB", (64, 16)), Image.new("RGB", (16, 64))
    wide, high = prompt(chats, user(*map(pil, square)))[1]
    assert wide.pixels == high.pixels and wide.digest != high.digest


def test_every_form_of_a_part_is_the_same_image(chats, tmp_path):
    image = picture(40, 24)
    data = encoded(image)
    (tmp_path / "a.png").write_bytes(data)
    url = data_url(data)
    forms = [
        pil(image),
        pil(url),
        pil(str(tmp_path / "a.png")),
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "video", "video": [url]},
        pil(image.convert("RGBA")),
    ]
    expected = prompt(chats, user(forms[0]))
    for form in forms:
        assert prompt(chats, user(form)) == expected


def test_the_frames_of_a_video_are_images_in_order(chats):
    frames = [picture(24, 24, seed) for seed in range(3)]
    video = prompt(chats, user(text("a"), {"type": "video", "video": frames}, text("b")))
    assert video == prompt(chats, user(text("a"), *map(pil, frames), text("b")))
    assert len(video[1]) == 3 and all(image.grid[0] == 1 for image in video[1])


def test_text_only_chats_of_a_model_with_images(chats):
    tokens, images = prompt(chats, [{"role": "user", "content": "Hello"}])
    assert images == () and (tokens, images) == prompt(chats, user(text("Hel"), text("lo")))
    assert tokenizer().decode(tokens, skip_special_tokens=False).endswith("assistant\n")


@pytest.mark.parametrize("where", ["before", "after", "both", "alone", "string", "kwargs"])
@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_a_literal_image_token_stays_text_and_shifts_no_image(chats, where, token):
    literal, images = f"a {token} b{token}", [pil(picture(40, 24, seed)) for seed in range(2)]
    contents = {
        "before": [text(literal), *images],
        "after": [*images, text(literal)],
        "both": [text(literal), images[0], text(literal), images[1], text(token)],
        "alone": [text(literal)],
        "string": literal,
        "kwargs": images,
    }
    kwargs = {"unused": literal} if where == "kwargs" else {}
    messages = [{"role": "user", "content": contents[where]}]
    tokens, found = prompt(chats, messages, **kwargs)
    assert tokens.count(IMAGE_TOKEN_ID) == sum(image.length for image in found)
    assert VIDEO_TOKEN_ID not in tokens
    for image in found:
        assert set(tokens[image.start : image.end]) == {IMAGE_TOKEN_ID}
    # Between the images the model reads the text that was written.
    inside = {i for image in found for i in range(image.start, image.end)}
    others = [one for i, one in enumerate(tokens) if i not in inside]
    decoded = tokenizer().decode(others, skip_special_tokens=False)
    assert decoded.count(token) == {"both": 5, "kwargs": 0}.get(where, 2)


def test_a_token_in_two_parts_is_refused(chats):
    """The template joins them to an image token."""
    messages = user(text("<|image"), text("_pad|>"))
    with pytest.raises(ImageError, match="wrote 1 image tokens for 0 images"):
        prompt(chats, messages)


def test_a_mark_cannot_be_guessed():
    marks = {Placeholders(["<|image_pad|>"]).hide("<|image_pad|>") for _ in range(10)}
    assert len(marks) == 10 and not any("<" in mark for mark in marks)


def test_hidden_tokens_are_restored_and_cut():
    hidden = Placeholders(["<img>", "<vid>"])
    value = {"a<img>": ["<vid><img>", 3, None, True], "b": ({"c": "<img>x<img>"},)}
    rendered = hidden.hide(json.dumps(value))
    assert "<img>" not in rendered and hidden.restore(rendered) == json.dumps(value)
    assert hidden.hide(value) == json.loads(hidden.hide(json.dumps(value)))
    pieces = hidden.pieces(rendered)
    assert "".join(pieces) == json.dumps(value)
    assert not any("<img>" in piece or "<vid>" in piece for piece in pieces)
    assert hidden.pieces("plain") == ["plain"]


def test_a_template_that_ignores_images_is_refused(tmp_path):
    folder = write_model(tmp_path)
    plain = "{% for message in messages %}{{ message.content[0].text }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(plain)
    with pytest.raises(ImageError, match="wrote 0 image tokens for 1 images"):
        prompt(ChatPrompts(folder, tokenizer()), user(text("x"), pil(picture(20, 20))))


INVALID = [
    ({"type": "image_url"}, "no URL of an image"),
    ({"type": "image_url", "image_url": {}}, "no URL of an image"),
    ({"type": "image_url", "image_url": {"url": 3}}, "no URL of an image"),
    ({"type": "image_url", "image_url": {"url": None}}, "no URL of an image"),
    ({"type": "image_url", "image_url": {"url": "data:", "size": 3}}, "has the field 'size'"),
    ({"type": "image_url", "image_url": "data:", "uuid": "3"}, "has the field 'uuid'"),
    ({"type": "image", "image": b"bytes"}, "no URL of an image"),
    ({"type": "image"}, "no URL of an image"),
    ({"type": "input_image", "image_url": "data:", "detail": "best"}, "detail is 'best'"),
    ({"type": "video", "video": []}, "no list of frames"),
    ({"type": "video", "video": "data:"}, "no list of frames"),
    ({"type": "video", "video": [3]}, "no URL of an image"),
    ({"type": "audio", "audio": "data:"}, "'audio' is not supported"),
    ({"type": "text"}, "'text' is not supported, only 'text' with a string"),
    ({"text": "x"}, "type None is not supported"),
    ("x", "type 'str' is not supported"),
    (pil(Image.new("F", (20, 20))), "image 1: an image of mode 'F'"),
    (pil(Image.new("RGB", (5000, 20))), "image 1: 5000 x 20 pixels: .*aspect ratio"),
    (pil("gone.png"), "image 1: gone.png: No such file"),
]


@pytest.mark.parametrize("part, message", INVALID)
def test_an_invalid_part_is_refused_in_one_sentence(chats, part, message):
    with pytest.raises(ValueError, match=message):
        prompt(chats, user(text("x"), part))


def test_the_number_of_images_is_limited():
    messages = user(*[pil(picture(16, 16))] * 3) + user({"type": "video", "video": ["a", "b"]})
    assert len(split_images(messages, 5)[1]) == 5
    with pytest.raises(ImageError, match="5 images, at most 4"):
        split_images(messages, 4)


def test_messages_without_images_are_returned_as_they_are():
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [text("y")]}, 3]
    assert not has_images(messages) and split_images(messages, 0) == (messages, [])
    assert not has_images([{"role": "user", "content": [{"type": ["image"]}, {"type": None}]}])


# The image processor of a folder


def loaded(folder):
    config = json.loads((folder / "config.json").read_text())
    tokens = image_tokens(folder, config, tokenizer())
    return tokens if isinstance(tokens, str) else load_image_processor(folder)


def test_the_processor_of_a_folder_is_the_pil_variant(folder):
    found = loaded(folder)
    assert isinstance(found, ImageProcessor)
    assert type(found._processor).__name__ == "Qwen2VLImageProcessorPil"


def test_settings_within_processor_config_json_are_read(tmp_path):
    folder = write_model(tmp_path)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    nested = {"processor_class": "Qwen3VLProcessor", "image_processor": settings}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    found, expected = loaded(folder), image_processor()
    assert isinstance(found, ImageProcessor)
    assert found.num_patches(50, 30) == expected.get_number_of_image_patches(30, 50)


def set_config(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))

    return change


def set_processor(**fields):
    def change(folder):
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


NO_IMAGES = [
    (set_config(vision_config=None), "Qwen3ForCausalLM has no vision encoder"),
    (set_config(image_token_id=None), "Qwen3ForCausalLM has no vision encoder"),
    (set_config(image_token_id=10**6), "its tokenizer has no token 1000000"),
    (lambda folder: (folder / "preprocessor_config.json").unlink(), "no preprocessor_config.json"),
    (
        lambda folder: (folder / "preprocessor_config.json").write_text("{"),
        "its image processor cannot be loaded: .*preprocessor_config.json.* JSON",
    ),
    (set_processor(image_processor_type="GoneProcessor"), "cannot be loaded"),
    (set_processor(image_processor_type="CLIPImageProcessor"), "does not make patches with a grid"),
    (set_processor(patch_size="eight"), "does not make patches with a grid"),
    (set_processor(merge_size=0), "does not make patches with a grid"),
]


@pytest.mark.parametrize("number", range(len(NO_IMAGES)))
def test_a_folder_without_a_usable_processor_says_why(tmp_path, number):
    change, reason = NO_IMAGES[number]
    folder = write_model(tmp_path)
    change(folder)
    found = loaded(folder)
    assert isinstance(found, str) and "\n" not in found
    with pytest.raises(ValueError, match=f"this model reads no images: .*{reason}"):
        prompt(ChatPrompts(folder, tokenizer()), user(pil(picture(20, 20))))


def test_a_library_that_is_missing_is_named(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    assert loaded(folder) == "the library PIL is missing, pip install 'atomc[images]'"
