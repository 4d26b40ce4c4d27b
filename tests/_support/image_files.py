"""A model folder that reads images: configs, a tokenizer, a chat template, and the image processor of
transformers; and image files as bytes and URLs.
"""

import base64
import io
import json
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IMAGE_TOKEN_ID, VIDEO_TOKEN_ID = SPECIAL.index("<|image_pad|>"), SPECIAL.index("<|video_pad|>")
# As Qwen3-VL's, without tools.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# A text model, whose config.json has the vision part that the front process looks for.
TEXT_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "dtype": "float32",
}
PATCH, MERGE = 8, 2


def tokenizer():
    """Bytes as tokens, after the special ones."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*SPECIAL, *alphabet])}
    found = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    found.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def image_processor():
    """transformers' own: patches of 8 x 8, images of 16 x 16 up to 64 x 64 pixels."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.6, 0.7],
    )


def write_model(folder, model=TEXT_MODEL):
    """A model folder without weights; serve it with --load-format dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    vision = {
        "vision_config": {"patch_size": PATCH},
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": VIDEO_TOKEN_ID,
    }
    (folder / "config.json").write_text(json.dumps({**vision, **model}))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    image_processor().save_pretrained(folder)
    return folder


def picture(width, height, seed=0, mode="RGB"):
    """An image of random colors."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def encoded(image, kind="PNG", **more):
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_chunk(kind, data=b""):
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png_with(chunks):
    """A PNG with these chunks after its header."""
    file = encoded(picture(8, 8))
    return file[:33] + chunks + file[33:]


def slow_png():
    """A million chunks take Pillow two seconds of CPU time."""
    return png_with(png_chunk(b"prVt") * 10**6)


def png_of_zeros(width, height):
    """A black PNG, written without an image in memory."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zeros(height * (1 + width))  # a row begins with its filter
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", data)
        + png_chunk(b"IEND")
    )


def zeros(count):
    """So many zeros, compressed by zlib: one compressed piece is repeated, which is fast."""
    size = 10**6
    pack = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    piece = pack.compress(bytes(size)) + pack.flush(zlib.Z_FULL_FLUSH)
    pack = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    rest = pack.compress(bytes(count % size)) + pack.flush()
    checksum = struct.pack(">I", count % 65521 << 16 | 1)
    return b"\x78\xda" + piece * (count // size) + rest + checksum


def write_vision_model(folder):
    """A small Qwen3-VL with random weights in a model folder; returns transformers' model."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "dtype": "float32",
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    tokens: dict[str, Any] = {
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": VIDEO_TOKEN_ID,
        "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.2)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, 0, 0.05)
    model.generation_config.eos_token_id = text["eos_token_id"]
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_model(folder, json.loads((folder / "config.json").read_text()))
    return model
