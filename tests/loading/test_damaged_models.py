"""Damaged model folders: each reader rejects them with one sentence, or works."""

import asyncio
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("msgspec")  # of the server
from atomc import demo
from atomc.cli import main
from atomc.loading import execute_plan, limits, loader
from atomc.loading.create_model import create_model
from atomc.loading.limits import MAX_TENSORS
from atomc.models.mrope import MRotary
from atomc.models.rotary import Rotary, rope_parameters
from atomc.planning.device_model import build_model
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.loading.load import load
from atomc.runtime.requests.request_errors import TokenizerError
from atomc.runtime.server.anthropic.errors import ERROR_FORMAT
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.http.api_keys import ApiKeys
from atomc.runtime.server.http.auth_middleware import AuthMiddleware
from atomc.runtime.server.http.responses import client_error
from atomc.runtime.server.http.web_pages import WebPages
from atomc.runtime.server.service.model_info import load_model_info
from atomc.runtime.text.detokenizer import load_tokenizer
from atomc.stock import adapter

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

VOCAB = 3072  # of the demo's tokenizer
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "dtype": "float32",
}
CONFIGS = {
    "llama": SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "olmoe": SIZES
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": 2,
        "bos_token_id": 0,
        "pad_token_id": 0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "float32",
    },
}
GPT_J = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    "n_embd": 64,
    "n_layer": 1,
    "n_head": 1,
    "rotary_dim": 64,
}
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a complete tiny model of each kind."""
    root = tmp_path_factory.mktemp("models")
    for kind, config in CONFIGS.items():
        folder = root / kind
        torch.manual_seed(0)
        model = create_model(config)
        if kind in ("olmoe", "gpt2"):
            model.hf_model.save_pretrained(folder)  # type: ignore[union-attr, operator]
        else:
            folder.mkdir()
            save_file(
                {name: weight.detach() for name, weight in model.named_parameters()},
                folder / "model.safetensors",
            )
        (folder / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(Path(demo.PATH) / name, folder)
    return root


def damaged(whole: Path, tmp_path: Path, kind: str, damage: Damage) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(whole / kind, folder)
    damage(folder)
    return folder


def refusals(folder: Path) -> set[str]:
    """The error messages of generate, serve and explain; other exceptions are raised."""

    def refusal(read: Callable[[], object]) -> str | None:
        try:
            read()
        except (
            ValueError,
            OSError,
            ImportError,
        ) as error:  # which the command line prints in one line
            return " ".join(str(error).split()).replace(f"{folder}", "PATH")
        return None

    found = {
        refusal(lambda: load(EngineConfig(model=str(folder), device="cpu"), progress=False)),
        refusal(lambda: load_model_info(folder, "model", ServerConfig())),
        refusal(lambda: build_model(folder)),
    }
    return {sentence for sentence in found if sentence is not None}


# Ways to damage a folder


def text(file: str, content: str | bytes) -> Damage:
    return lambda folder: (
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        and None
    )


def fields(file: str, **values: Any) -> Damage:
    """Sets fields of the JSON file; DELETED removes them."""

    def damage(folder: Path) -> None:
        path = folder / file
        found = (json.loads(path.read_text()) if path.exists() else {}) | values
        path.write_text(
            json.dumps({name: value for name, value in found.items() if value is not DELETED})
        )

    return damage


DELETED = object()


def config(**values: Any) -> Damage:
    return fields("config.json", **values)


def generation(**values: Any) -> Damage:
    return fields("generation_config.json", **values)


def template(value: Any) -> Damage:
    return fields("tokenizer_config.json", chat_template=value)


def quantization(**values: Any) -> Damage:
    return config(quantization_config=values)


def rope(rope_type: object, **values: Any) -> Damage:
    return config(rope_scaling={"rope_type": rope_type, **values})


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        found = json.loads((folder / "tokenizer.json").read_text())
        change(found)
        (folder / "tokenizer.json").write_text(json.dumps(found))

    return damage


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    return damage


def header(change: Callable[[dict[str, Any]], object], length: int | None = None) -> Damage:
    """Replaces the header of the weights, or its length."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        found = json.loads(raw[8 : 8 + size])
        change(found)
        new = json.dumps(found).encode()
        new += b" " * (-len(new) % 8)
        file.write_bytes(
            struct.pack("<Q", len(new) if length is None else length) + new + raw[8 + size :]
        )

    return damage


def first(found: dict[str, Any]) -> dict[str, Any]:
    return next(value for name, value in found.items() if name != "__metadata__")


def index(file_name: object, make: Damage = lambda folder: None) -> Damage:
    """An index that maps every tensor to file_name, instead of a single file."""

    def damage(folder: Path) -> None:
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        (folder / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file_name)})
        )
        make(folder)

    return damage


def link_out(folder: Path) -> None:
    """shard.safetensors is a symlink to a file outside of the folder."""
    (folder / "shard.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "shard.safetensors").symlink_to("../elsewhere.safetensors")


def directory(file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).mkdir()

    return damage


def pipe(file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return damage


def many_tensors(file: str, count: int) -> Damage:
    """A header of this many tensors, which is not parsed: it is no JSON."""
    text = b"{" * (count + 1)
    return lambda folder: (folder / file).write_bytes(struct.pack("<Q", len(text)) + text) and None


def two_shards(count: int) -> Damage:
    """Two files of this many tensors each."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in ("a.safetensors", "b.safetensors"):
            many_tensors(name, count)(folder)
        names = {"x": "a.safetensors", "y": "b.safetensors"}
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    return damage


DEEP = "[" * 100_000
NOT_ARCHITECTURES = (
    "config.json names no architecture (architectures: {}); expected a list "
    "such as ['LlamaForCausalLM']"
)
SAME = "are config.json and the weights of the same checkpoint?"
OTHER_SHAPES = "PATH: {} tensors of OlmoeForCausalLM have another shape, such as "
NOT_MADE = "config.json: transformers cannot build a {} from it: "
NOT_A_TOKENIZER = "PATH/tokenizer.json is not a valid tokenizer: "
SPECIAL = (
    "tokenizer_config.json, special_tokens_map.json: {}, expected a string or an object "
    "with a string `content`"
)
GENERATION = "generation_config.json: "
FIT = "PATH does not match LlamaForCausalLM: "
EXPECTED_FILE = ", expected a file in the model's folder such as model-00001-of-00002.safetensors"
GROUP = {
    "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "format": "pack-quantized",
}
AT = "config.json: quantization_config"

UNKNOWN_TOKEN = {
    "type": "TemplateProcessing",
    "pair": [],
    "special_tokens": {},
    "single": [
        {"SpecialToken": {"id": "<q>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
}

# Hostile tokenizers: they load, and fail on what they get.
PANICS_ON_TEXT = tokenizer(
    lambda found: found.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAAAAAA"}
    )
)
PANICS_ON_TOKENS = tokenizer(
    lambda found: found.update(
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Fuse"},
                {"type": "Replace", "pattern": {"Regex": ".+"}, "content": "a"},
                {"type": "Strip", "content": "a", "start": 5, "stop": 5},
            ],
        }
    )
)
FAILS_ON_TEXT = tokenizer(
    lambda found: found.update(
        model={
            "type": "WordPiece",
            "vocab": {"a": 1},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        }
    )
)

# (kind of model, damage, what at least one reader's sentence starts with)
REFUSED: list[tuple[str, Damage, str | tuple[str, ...]]] = [
    # config.json as a whole
    ("llama", lambda folder: (folder / "config.json").unlink(), "PATH has no config.json; is it a complete checkpoint?"),
    ("llama", text("config.json", ""), "PATH/config.json is not JSON: Expecting value"),
    ("llama", text("config.json", b"\xff\xfe"), "PATH/config.json is not JSON: 'utf-8' codec can't decode"),
    ("llama", text("config.json", "\ufeff{}"), "PATH/config.json is not JSON: Unexpected UTF-8 BOM"),
    ("llama", text("config.json", "NaN"), "PATH/config.json contains a number, expected an object"),
    ("llama", text("config.json", DEEP), "PATH/config.json is nested too deeply for a JSON file of a checkpoint"),
    ("llama", directory("config.json"), "PATH has no config.json"),
    ("llama", pipe("config.json"), "PATH has no config.json"),
    ("llama", config(rms_norm_eps={"__float__": "NaN"}), "llama: rms_norm_eps nan is not a positive number of fp32"),
    ("llama", config(hidden_size={"__float__": "-Infinity"}), "llama: hidden_size -inf is not a positive integer"),
    ("llama", config(head_dim=float("inf")), "config.json: head_dim is inf, expected at most 2147483647"),
    ("llama", config(head_dim={"__float__": "inf"}), "llama: head_dim {'__float__': 'inf'} is not a positive integer"),
    # Architectures
    ("llama", config(architectures=3), NOT_ARCHITECTURES.format(3)),
    ("llama", config(architectures="LlamaForCausalLM"), NOT_ARCHITECTURES.format("'LlamaForCausalLM'")),
    ("llama", config(architectures=[1]), NOT_ARCHITECTURES.format([1])),
    ("llama", config(architectures=["os.system"]), NOT_ARCHITECTURES.format(["os.system"])),
    ("llama", config(architectures=["Lama"]), "no model for Lama: atomc has DeepseekV2ForCausalLM"),
    ("olmoe", config(architectures=["FalconForCausalLM"]), NOT_MADE.format("FalconForCausalLM") + "AttributeError: "),
    # Dtype
    ("llama", config(dtype="float7"), "config.json: dtype 'float7' is not a dtype of torch, such as 'bfloat16'"),
    ("llama", config(dtype=[]), "config.json: dtype [] is not a dtype of torch"),
    ("llama", config(dtype="int64"), "config.json: dtype 'int64' is not a floating-point dtype"),
    ("olmoe", config(dtype="bool"), "config.json: dtype 'bool' is not a floating-point dtype"),
    ("llama", config(dtype="x" * 1000), "config.json: dtype 'xxx"),
    # Sizes
    ("llama", config(num_hidden_layers=10**9), "config.json: num_hidden_layers is 1000000000, expected at most 512"),
    ("gpt2", config(n_layer=10**9), "config.json: n_layer is 1000000000, expected at most 512"),
    ("llama", config(num_hidden_layers=100),
     f"config.json: num_hidden_layers is 100, and the checkpoint has 21 tensors; {SAME}"),
    ("llama", config(num_hidden_layers=3), FIT + "missing model.layers.2.self_attn.q_proj.weight"),
    ("llama", config(num_hidden_layers=0), "llama: num_hidden_layers 0 is not a positive integer"),
    ("llama", config(num_hidden_layers=-1), "llama: num_hidden_layers -1 is not a positive integer"),
    ("llama", config(num_hidden_layers=2.0), "llama: num_hidden_layers 2.0 is not a positive integer"),
    ("llama", config(num_hidden_layers="2"), "llama: num_hidden_layers '2' is not a positive integer"),
    ("llama", config(num_hidden_layers=True), "llama: num_hidden_layers True is not a positive integer"),
    ("llama", config(num_hidden_layers=None), "llama: config.json lacks 'num_hidden_layers', a positive integer"),
    ("olmoe", config(num_hidden_layers=-1), "OlmoeForCausalLM has no attention layer"),
    ("olmoe", config(num_hidden_layers=1.5), NOT_MADE.format("OlmoeForCausalLM")),
    ("olmoe", config(num_hidden_layers="2"), NOT_MADE.format("OlmoeForCausalLM")),
    ("olmoe", config(num_experts=10**6), "config.json: num_experts is 1000000, expected at most 4096"),
    ("olmoe", config(num_experts_per_tok=3), "config.json: num_experts_per_tok is 3, expected 1 to 2, the number of"),
    ("olmoe", config(num_experts_per_tok=-1), "config.json: num_experts_per_tok is -1, expected 1 to 2"),
    ("olmoe", config(num_experts=0), OTHER_SHAPES.format(6)),
    ("llama", config(vocab_size=10**12), "config.json: vocab_size is 1000000000000, expected at most 2147483647"),
    ("llama", config(vocab_size=10**30), "config.json: vocab_size is 10000000... (31 digits), expected at most"),
    ("llama", config(hidden_size=10**9), FIT + "model.embed_tokens.weight is [3072, 16], expected [3072, 1000000000]"),
    ("llama", config(max_position_embeddings=2**62), "config.json: max_position_embeddings is 4611686018427387904, "),
    ("olmoe", config(hidden_size=10**6), "config.json describes a OlmoeForCausalLM of "),
    ("olmoe", config(vocab_size=10**9), "config.json describes a OlmoeForCausalLM of "),
    ("olmoe", config(vocab_size=VOCAB + 1), OTHER_SHAPES.format(2) + "lm_head.weight: [3072, 16], expected [3073, 16]"),
    ("gpt2", config(n_embd=10**6), "config.json describes a GPT2LMHeadModel of "),
    ("gpt2", config(n_positions=10**9), "config.json describes a GPT2LMHeadModel of "),
    ("gpt2", config(n_head=-1), "GPT2LMHeadModel has -1 heads of -16 columns for keys and values, expected at least 1"),
    ("gpt2", config(num_labels=10**9), "config.json: num_labels is 1000000000, expected at most 1048576"),
    ("gpt2", config(n_head=7), NOT_MADE.format("GPT2LMHeadModel") + "ValueError: "),
    ("gpt2", config(activation_function="bogus"), NOT_MADE.format("GPT2LMHeadModel") + "KeyError: "),
    ("olmoe", config(text_config={"num_hidden_layers": 10**9}),
     "config.json: text_config.num_hidden_layers is 1000000000, expected at most 512"),
    ("llama", config(head_dim=10**9), FIT + "model.layers.0.self_attn.q_proj.weight is [16, 16], expected [4000000000, "),
    ("olmoe", config(**GPT_J, max_position_embeddings=2**31 - 1),
     ("config.json describes a GPTJForCausalLM with 1024.0 GiB of masks and tables such as transformer.h.0.attn.",
      "config.json describes a GPTJForCausalLM with 512.0 GiB of masks and tables such as transformer.rotary_emb.")),
    # Heads, layers, flags
    ("llama", config(num_attention_heads=3), "llama: num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
    ("llama", config(head_dim=7), "llama: head_dim 7 is odd"),
    ("llama", config(head_dim=0), "llama: head_dim 0 is not a positive integer"),
    ("llama", config(hidden_act="bogus"), "llama: hidden_act 'bogus' is not supported, only 'silu'"),
    ("llama", config(rms_norm_eps=float("nan")), "llama: rms_norm_eps nan is not a positive number of fp32"),
    ("llama", config(rms_norm_eps=10**400), "llama: rms_norm_eps 1000"),
    ("llama", config(tie_word_embeddings="false"), "llama: tie_word_embeddings 'false' is neither true nor false"),
    ("qwen3", config(use_sliding_window=3), "qwen3: use_sliding_window 3 is neither true nor false"),
    ("qwen3", config(use_sliding_window=True, sliding_window="x"), "qwen3: sliding_window 'x' is not a positive integer"),
    ("qwen3", config(use_sliding_window=True, max_window_layers="x"),
     "qwen3: max_window_layers 'x' is not a positive integer"),
    ("qwen3", config(layer_types=["full_attention"]), "qwen3: layer_types ['full_attention'] are not 2 of "),
    ("qwen3", config(layer_types=[[], []]), "qwen3: layer_types [[], []] are not 2 of "),
    ("qwen3", config(layer_types=3), "qwen3: layer_types 3 are not 2 of "),
    ("olmoe", config(layer_types=["bogus"]), NOT_MADE.format("OlmoeForCausalLM") + "StrictDataclass"),
    ("olmoe", config(clip_qkv="x"), NOT_MADE.format("OlmoeForCausalLM") + "StrictDataclass"),
    ("olmoe", config(head_dim=7), (NOT_MADE.format("OlmoeForCausalLM") + "StrictDataclass", OTHER_SHAPES.format(8))),
    ("olmoe", config(model_type=[]), "config.json: model_type is [], expected a text"),
    ("olmoe", config(num_attention_heads=2), OTHER_SHAPES.format(6)),
    # Rotary positions
    ("llama", config(rope_scaling=3), "llama: rope_parameters 3 is not an object such as {'rope_type': 'default', "),
    ("llama", config(rope_scaling="yarn"), "llama: rope_parameters 'yarn' is not an object"),
    ("llama", rope("bogus"), "llama: rope_type 'bogus' is not supported, only default, linear, llama3, yarn"),
    ("llama", rope([]), "llama: rope_type [] is not supported"),
    ("llama", rope("linear"), "llama: rope_type 'linear' needs the number 'factor', rope_parameters has "),
    ("llama", rope("linear", factor=0), "llama: factor 0 is not a positive number of fp32"),
    ("llama", rope("linear", factor="2"), "llama: factor '2' is not a positive number of fp32"),
    ("llama", rope("linear", factor=True), "llama: factor True is not a positive number of fp32"),
    ("llama", rope("default", rope_theta=0), "llama: rope_theta 0 is not a positive number of fp32"),
    ("llama", rope("default", partial_rotary_factor="x"), "llama: partial_rotary_factor 'x' is not supported, only 1.0"),
    ("llama", rope("llama3", factor=2.0, low_freq_factor=4, high_freq_factor=4),
     "llama: rope_type 'llama3': low_freq_factor 4.0 is not below high_freq_factor 4.0"),
    ("llama", rope("llama3", factor=2.0, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings="x"),
     "llama: original_max_position_embeddings 'x' is not a positive integer"),
    ("llama", rope("yarn", factor=2.0, original_max_position_embeddings=0),
     "llama: original_max_position_embeddings 0 is not a positive integer"),
    ("llama", rope("yarn", factor=2.0, beta_fast="x"), "llama: beta_fast 'x' is not a positive number of fp32"),
    ("llama", rope("yarn", factor=2.0, attention_factor="x"), "llama: attention_factor 'x' is not a positive number"),
    ("llama", rope("yarn", factor=2.0, rope_theta=1), "llama: rope_type 'yarn': rope_theta 1.0 is not above 1"),
    ("olmoe", rope("bogus"), NOT_MADE.format("OlmoeForCausalLM")),
    ("olmoe", rope("linear"), NOT_MADE.format("OlmoeForCausalLM")),
    ("olmoe", config(rope_scaling=3), NOT_MADE.format("OlmoeForCausalLM")),
    # Quantization
    ("llama", config(quantization_config=3), "config.json: quantization_config is a number, expected an object"),
    ("llama", quantization(quant_method=[]), f"{AT}.quant_method is [], expected a text"),
    ("olmoe", quantization(quant_method={}), f"{AT}.quant_method is {{}}, expected a text"),
    ("llama", quantization(quant_method="bogus"), "PATH: quantized weights of quant_method 'bogus' are not supported"),
    ("llama", quantization(quant_method="fp8", weight_block_size=3), f"{AT}.weight_block_size is 3, expected a list"),
    ("llama", quantization(quant_method="fp8", modules_to_not_convert="lm_head"),
     f"{AT}.modules_to_not_convert is 'lm_head', expected a list of names"),
    ("llama", quantization(quant_method="fp8", ignore=[None]), f"{AT}.ignore is [None], expected a list of names"),
    ("llama", quantization(quant_method="compressed-tensors", config_groups=[1]),
     f"{AT}.config_groups is [1], expected an object"),
    ("llama", quantization(quant_method="compressed-tensors", config_groups={"g": 1}),
     f"{AT}.config_groups.g is 1, expected an object"),
    ("llama", quantization(quant_method="compressed-tensors", config_groups={"g": {"weights": 1}}),
     f"{AT}.config_groups.g.weights is 1, expected an object"),
    ("llama", quantization(quant_method="compressed-tensors", config_groups={"g": {"weights": {}, "format": []}}),
     f"{AT}.config_groups.g.format is [], expected a text"),
    ("llama", quantization(quant_method="compressed-tensors", config_groups={"g": GROUP | {"targets": ["re:("]}}),
     "PATH: ignore pattern 're:(' is not a regular expression"),
    ("llama", quantization(quant_method="compressed-tensors", config_groups={"g": GROUP}, kv_cache_scheme=3),
     "PATH: compressed-tensors: kv_cache_scheme is 3, expected an object"),
    ("llama", quantization(quant_method="quark", global_quant_config=3), f"{AT}.global_quant_config is 3, expected an "),
    ("llama", quantization(quant_method="gptq", bits=4, group_size=[]), "PATH: gptq: group_size [] is not supported"),
    ("llama", text("quantize_config.json", DEEP), "PATH/quantize_config.json is nested too deeply"),
    # generation_config.json
    ("llama", text("generation_config.json", DEEP), "PATH/generation_config.json is nested too deeply"),
    ("llama", text("generation_config.json", "[]"), "PATH/generation_config.json contains a list, expected an object"),
    ("llama", directory("generation_config.json"), "PATH/generation_config.json is not a regular file"),
    ("llama", generation(temperature=-1), GENERATION + "temperature is -1, it must be 0 (greedy) or at least 0.0001"),
    ("llama", generation(temperature="0.7"), GENERATION + "temperature is '0.7', it must be a number"),
    ("llama", generation(temperature=True), GENERATION + "temperature is True, it must be a number"),
    ("llama", generation(temperature=float("nan")), GENERATION + "temperature is nan, it must be 0 (greedy)"),
    ("llama", generation(temperature=float("inf")), GENERATION + "temperature is inf, it must be 0 (greedy)"),
    ("llama", generation(top_p={"__float__": "Infinity"}), GENERATION + "top_p is inf, it must be above 0"),
    ("llama", generation(top_p=2), GENERATION + "top_p is 2, it must be above 0 and at most 1"),
    ("llama", generation(top_p=[0.7]), GENERATION + "top_p is [0.7], it must be a number"),
    ("llama", generation(top_k=1.5), GENERATION + "top_k is 1.5, it must be a whole number"),
    ("llama", generation(top_k=-5), GENERATION + "top_k is -5, it must be 0 (all tokens) or positive"),
    ("llama", generation(min_p={}), GENERATION + "min_p is {}, it must be a number"),
    ("llama", generation(repetition_penalty=0), GENERATION + "repetition_penalty is 0, it must be "),
    ("llama", generation(eos_token_id="0"), GENERATION + "eos_token_id has '0', it must be a token id or a list of token"),
    ("llama", generation(eos_token_id=[[1]]), GENERATION + "eos_token_id has [1], it must be a token id or a list"),
    ("llama", generation(eos_token_id=[0, None]), GENERATION + "eos_token_id has None, it must be a token id or a list"),
    ("llama", generation(eos_token_id=-1), GENERATION + "eos_token_id has -1, it must be a token id or a list"),
    ("llama", generation(eos_token_id=[0, VOCAB]), GENERATION + "eos_token_id has 3072, it must be below 3072, the size"),
    ("llama", generation(eos_token_id=10**30), GENERATION + "eos_token_id has 1000"),
    ("olmoe", generation(eos_token_id=VOCAB), GENERATION + "eos_token_id has 3072, it must be below 3072"),
    # Tokenizer and chat template
    ("llama", text("tokenizer.json", ""), NOT_A_TOKENIZER + "EOF while parsing"),
    ("llama", text("tokenizer.json", "[]"), NOT_A_TOKENIZER + "invalid type: sequence"),
    ("llama", text("tokenizer.json", "{}"), NOT_A_TOKENIZER + "Model missing"),
    ("llama", text("tokenizer.json", b"\xff\xfe"), NOT_A_TOKENIZER + "stream did not contain valid UTF-8"),
    ("llama", directory("tokenizer.json"), "PATH/tokenizer.json is not a regular file"),
    ("llama", tokenizer(lambda found: found["model"].pop("merges")), NOT_A_TOKENIZER),
    ("llama", tokenizer(lambda found: found["model"].update(vocab=[])), NOT_A_TOKENIZER),
    ("llama", tokenizer(lambda found: found["model"]["vocab"].update(zz=-1)), NOT_A_TOKENIZER),
    ("llama", tokenizer(lambda found: found["model"]["vocab"].update(zz=2**32)), NOT_A_TOKENIZER),
    ("llama", tokenizer(lambda found: found.update(pre_tokenizer={"type": "bogus"})), NOT_A_TOKENIZER),
    ("llama", tokenizer(lambda found: found.update(added_tokens=3)), NOT_A_TOKENIZER),
    ("llama", tokenizer(lambda found: found.update(post_processor=UNKNOWN_TOKEN)), NOT_A_TOKENIZER + "no entry found"),
    ("llama", text("tokenizer_config.json", DEEP), "PATH/tokenizer_config.json is nested too deeply"),
    ("llama", template(3), "PATH/tokenizer_config.json: chat_template is a number, expected a string or a list of {name, "),
    ("llama", template([{"name": "default", "template": 3}]), "PATH/tokenizer_config.json: chat_template is a list, expec"),
    ("llama", template("{{ x"), "the chat template 'default' is not valid Jinja: line 1: "),
    ("llama", template("{{ 1 | bogus }}"), "the chat template 'default' is not valid Jinja: line 1: No filter"),
    ("llama", template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"), "the chat template 'default' is nested too deeply"),
    ("llama", template("{% if x %}{% break %}{% endif %}"), "the chat template 'default' is not valid Jinja: 'break' outside loop"),
    ("llama", template("{% for x in [1] %}" * 25 + "{% endfor %}" * 25), "the chat template 'default' is not valid Jinja: too many statically nested blocks"),
    ("llama", template("{% if 1 %}" * 3000 + "{% endif %}" * 3000), "the chat template 'default' is nested too deeply"),
    ("llama", text("chat_template.jinja", b"\xff\xfe"), "PATH/chat_template.jinja is not UTF-8 text"),
    ("llama", fields("tokenizer_config.json", eos_token=3), SPECIAL.format("eos_token is 3")),
    ("llama", fields("tokenizer_config.json", eos_token={"x": 1}), SPECIAL.format("eos_token is {'x': 1}")),
    ("llama", fields("special_tokens_map.json", unk_token=[1]), SPECIAL.format("unk_token is [1]")),
    ("llama", text("special_tokens_map.json", DEEP), "PATH/special_tokens_map.json is nested too deeply"),
    # Weights
    ("llama", text("model.safetensors", ""), "PATH/model.safetensors is damaged or incomplete"),
    ("llama", header(lambda found: None, length=2**63), "PATH/model.safetensors is damaged or incomplete"),
    ("llama", header(lambda found: first(found).update(data_offsets=[0, 8])), "PATH/model.safetensors is damaged or inco"),
    ("llama", header(lambda found: first(found).update(data_offsets=[0, 10**15])), "PATH/model.safetensors is damaged or"),
    ("llama", header(lambda found: first(found).update(dtype="F7")), "PATH/model.safetensors is damaged or incomplete"),
    ("llama", header(lambda found: first(found).update(shape=[2**40, 2**40])), "PATH/model.safetensors is damaged or inc"),
    ("llama", directory("model.safetensors"), "PATH has neither model.safetensors nor model.safetensors.index.json"),
    ("llama", weights(lambda found: {name: found[name] for name in list(found)[1:]}), FIT + "missing "),
    ("llama", weights(lambda found: found | {"bogus": torch.zeros(1)}), FIT + "unexpected bogus"),
    ("llama", weights(lambda found: found | {"model.norm.weight": torch.zeros(3)}),
     FIT + "model.norm.weight is [3], expected [16]"),
    ("llama", weights(lambda found: found | {"model.norm.weight": torch.zeros(16, dtype=torch.int8)}),
     FIT + "model.norm.weight is I8, expected "),
    ("llama", weights(lambda found: found | {"model.layers.0.self_attn.k_scale": torch.zeros(1)}),
     "PATH: model.layers.0.self_attn.k_scale is [0.0], expected one positive number"),
    ("olmoe", weights(lambda found: {name: found[name] for name in list(found)[1:]}),
     "PATH: 1 tensors of OlmoeForCausalLM are missing, such as "),
    ("gpt2", weights(lambda found: found | {"transformer.ln_f.weight": torch.zeros(3)}),
     "PATH: 1 tensors of GPT2LMHeadModel have another shape, such as transformer.ln_f.weight: [3], expected [16]"),
    ("llama", many_tensors("model.safetensors", MAX_TENSORS + 1),
     f"model.safetensors: the header has {MAX_TENSORS + 1} tensors or more, expected at most {MAX_TENSORS} in all"),
    ("llama", index("shard.safetensors", many_tensors("shard.safetensors", MAX_TENSORS + 1)), "shard.safetensors: the"),
    ("llama", two_shards(MAX_TENSORS // 2 + 1), f"b.safetensors: the header has {MAX_TENSORS + 2} tensors or more"),
    ("llama", index("shard.safetensors", fields(INDEX, weight_map=dict.fromkeys(map(str, range(MAX_TENSORS + 1)), "a"))),
     f"{INDEX} names {MAX_TENSORS + 1} tensors, expected at most {MAX_TENSORS}; download it again"),
    # The index
    ("llama", index("shard.safetensors", text(INDEX, DEEP)), f"PATH/{INDEX} is nested too deeply"),
    ("llama", index("shard.safetensors", text(INDEX, "[]")), f"PATH/{INDEX} contains a list, expected an object"),
    ("llama", index("shard.safetensors", text(INDEX, "{}")), f"PATH/{INDEX} has no weight_map"),
    ("llama", index(3), f"PATH/{INDEX} has no weight_map"),
    ("llama", index(""), f"{INDEX} names ''{EXPECTED_FILE}"),
    ("llama", index("."), f"{INDEX} names '.'{EXPECTED_FILE}"),
    ("llama", index("x\0y"), f"{INDEX} names 'x\\x00y'{EXPECTED_FILE}"),
    ("llama", index("../../etc/passwd"), f"{INDEX} names '../../etc/passwd'{EXPECTED_FILE}"),
    ("llama", index("sub/../shard.safetensors"), f"{INDEX} names 'sub/../shard.safetensors'{EXPECTED_FILE}"),
    ("llama", index("/etc/passwd"), f"{INDEX} names '/etc/passwd'{EXPECTED_FILE}"),
    ("llama", index("C:\\shard.safetensors"), f"{INDEX} names 'C:\\\\shard.safetensors'{EXPECTED_FILE}"),
    ("llama", index("x" * 5000), f"{INDEX} names 'xxx"),
    ("llama", index("none.safetensors"), f"PATH lacks none.safetensors, which {INDEX} names; download it again"),
    ("olmoe", index("../model/shard.safetensors"), f"{INDEX} names '../model/shard.safetensors'{EXPECTED_FILE}"),
    ("llama", index("shard.safetensors", link_out), f"{INDEX} names 'shard.safetensors', a link to '"),
    ("olmoe", index("shard.safetensors", link_out), f"{INDEX} names 'shard.safetensors', a link to '"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "damage", "sentence"), REFUSED)
def test_a_damaged_folder_is_refused_in_one_sentence(
    whole: Path, tmp_path: Path, kind: str, damage: Damage, sentence: str | tuple[str, ...]
) -> None:
    """A tuple: transformers checks the field in its newer versions only."""
    found = refusals(damaged(whole, tmp_path, kind, damage))
    assert any(refusal.startswith(sentence) for refusal in found), found
    assert all(len(refusal) < 1000 for refusal in found)


def replace_by_hub_links(folder: Path) -> None:
    """As in the hub's cache: snapshots/<revision>/ has symlinks to ../../blobs/."""
    snapshot = folder / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = folder / "models--a--b" / "blobs"
    blobs.mkdir()
    for i, file in enumerate([file for file in folder.iterdir() if file.is_file()]):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")


def in_a_folder(folder: Path) -> None:
    (folder / "shards").mkdir()
    (folder / "shard.safetensors").rename(folder / "shards" / "shard.safetensors")


def remote_code(folder: Path) -> None:
    config(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})(folder)
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')")


WORK: list[tuple[str, Damage]] = [
    ("llama", lambda folder: None),
    ("qwen3", lambda folder: None),
    ("olmoe", lambda folder: None),
    ("gpt2", lambda folder: None),
    ("llama", remote_code),
    ("olmoe", remote_code),
    ("llama", lambda folder: (folder / "generation_config.json").unlink()),
    ("llama", lambda folder: (folder / "tokenizer.json").unlink()),
    ("llama", generation(top_k=-1)),
    ("llama", config(unused=[0.0, {"__float__": "Infinity"}], other=float("nan"))),
    ("llama", generation(temperature=1e-6)),
    ("llama", generation(temperature=None, top_p=1, eos_token_id=[0, VOCAB - 1])),
    (
        "llama",
        weights(lambda found: {name: weight * float("nan") for name, weight in found.items()}),
    ),
    ("llama", tokenizer(lambda found: found["model"]["vocab"].update(zz=VOCAB + 7))),
    ("llama", tokenizer(lambda found: found["model"]["vocab"].update(zz=2**31))),
    ("olmoe", weights(lambda found: found | {"bogus.weight": torch.zeros(1)})),
    ("llama", index("shard.safetensors")),
    ("llama", index("./shard.safetensors")),
    ("llama", index("shards/shard.safetensors", in_a_folder)),
    ("llama", rope("yarn", factor=2.0, mscale=1.0, mscale_all_dim=0)),
    ("llama", quantization()),
]


@pytest.mark.parametrize(("kind", "damage"), WORK)
def test_a_folder_with_what_does_no_harm_works(
    whole: Path, tmp_path: Path, kind: str, damage: Damage
) -> None:
    assert refusals(damaged(whole, tmp_path, kind, damage)) == set()


def test_padding_and_truncation_of_tokenizer_json_do_not_change_prompts(
    whole: Path, tmp_path: Path
) -> None:
    padding = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    change = tokenizer(lambda found: found.update(padding=padding, truncation=truncation))
    text = "one two three four"
    expected = load_tokenizer(whole / "llama").encode(text).ids  # type: ignore[union-attr]
    assert len(expected) > 1
    assert load_tokenizer(damaged(whole, tmp_path, "llama", change)).encode(text).ids == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["llama", "olmoe"])
def test_links_of_the_hubs_cache_into_its_store_are_followed(
    whole: Path, tmp_path: Path, kind: str
) -> None:
    folder = damaged(whole, tmp_path, kind, index("shard.safetensors"))
    replace_by_hub_links(folder)
    assert refusals(folder / "models--a--b" / "snapshots" / "0123") == set()


def test_an_index_in_a_linked_folder_is_followed(whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path, "llama", index("shard.safetensors"))
    (tmp_path / "link").symlink_to(folder)
    assert refusals(tmp_path / "link") == set()


@pytest.mark.parametrize("kind", ["llama", "olmoe"])
def test_random_weights_that_memory_cannot_hold_are_refused(
    whole: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = damaged(whole, tmp_path, kind, config(hidden_size=2**20, intermediate_size=2**20))
    monkeypatch.setattr(limits, "free_on_host", lambda: 2**30)
    with pytest.raises(
        ValueError, match=r"ForCausalLM whose weights take \d+\.\d GiB, and cpu has 1\.0 GiB free"
    ):
        loader.load(folder, load_format="dummy")


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_a_head_width_allocates_nothing_before_the_weights_have_it(rope_type: str) -> None:
    numbers = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = rope_parameters(SIZES | {"rope_scaling": {"rope_type": rope_type, **numbers}})
    with torch.device("meta"):  # 32 TiB of frequencies
        wide = MRotary(rope, 2**44, (8, 4, 4)).to(torch.bfloat16)
        rotary = MRotary(rope, 16, (4, 2, 2))
    assert wide.inv_freq.shape == wide.axes.shape == (2**43,)
    assert wide.inv_freq.dtype == torch.float32
    expected = Rotary(rope, 16)
    assert torch.equal(rotary.to_empty(device="cpu").inv_freq, expected.inv_freq)
    assert rotary.scaling == expected.scaling
    assert rotary.axes.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_weights_that_are_quantized_while_loading_parse_the_header_of_a_file_once(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    safe_open = execute_plan.safetensors.safe_open

    def counted(file: Path, framework: str) -> object:
        opened.append(file)
        return safe_open(file, framework=framework)

    monkeypatch.setattr(execute_plan.safetensors, "safe_open", counted)
    model = loader.load(whole / "llama", quantization="int8")
    layers = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    assert len(layers) == 14 and len(opened) == 3  # to plan, for norms, for all layers


def test_a_tied_weight_counts_once_among_the_parameters_that_a_config_describes() -> None:
    outline = adapter.empty_model(transformers.GPT2LMHeadModel, CONFIGS["gpt2"], torch.float32)
    counted = sum(weight.numel() for weight in outline.parameters())
    assert counted == sum(weight.numel() for weight in create_model(CONFIGS["gpt2"]).parameters())


@pytest.mark.parametrize(
    ("values", "part", "sentence"),
    [
        (
            {"num_hidden_layers": "2"},
            {"layers": 1},
            "num_hidden_layers '2' is not a positive integer",
        ),
        ({"layer_types": 3}, {"layers": 1}, "layer_types 3 are not 1 of "),
        (
            {"num_attention_heads": "4"},
            {"devices": 2},
            "num_attention_heads '4' is not a positive integer",
        ),
        (
            {"hidden_size": [], "head_dim": None},
            {"devices": 2},
            r"hidden_size \[\] is not a positive integer",
        ),
    ],
)
def test_a_part_of_a_damaged_model_is_refused(
    whole: Path, tmp_path: Path, values: dict[str, Any], part: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_model(damaged(whole, tmp_path, "qwen3", config(**values)), **part)


@pytest.mark.parametrize("command", ["generate", "explain"])
def test_the_command_line_says_it_in_one_line(
    whole: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(whole, tmp_path, "olmoe", config(layer_types=["bogus"]))
    assert (
        main([command, str(folder), *(["-p", "Hello", "--quiet"] if command == "generate" else [])])
        == 2
    )
    written = capsys.readouterr()
    assert written.out == ""
    assert [
        line for line in written.err.splitlines() if line.startswith("atomc: ")
    ] == written.err.splitlines()[-1:]
    assert "Traceback" not in written.err


@pytest.mark.parametrize("prompts", [["Hello"], ["Hello", "She"]])
def test_logits_that_are_nan_are_one_line(
    whole: Path, tmp_path: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    nan = weights(lambda found: {name: weight * float("nan") for name, weight in found.items()})
    folder = damaged(whole, tmp_path, "llama", nan)
    flags = [word for prompt in prompts for word in ("-p", prompt)]
    assert main(["generate", str(folder), "-q", "--device", "cpu", *flags]) == 2
    written = capsys.readouterr()
    assert all(prompt in written.out for prompt in prompts)
    (line,) = [line for line in written.err.splitlines() if line.startswith("atomc: ")]
    assert line.startswith(
        "atomc: the model produced logits that are NaN in step 1 of this request"
    )
    assert "Traceback" not in written.err


@pytest.mark.covering
@pytest.mark.parametrize(
    ("change", "prompts"),
    [
        (PANICS_ON_TEXT, ["aab"]),
        (PANICS_ON_TOKENS, ["aab"]),
        (PANICS_ON_TOKENS, ["aab", "aa"]),
        (FAILS_ON_TEXT, ["xyz"]),
    ],
)
def test_a_tokenizer_that_fails_is_one_line(
    whole: Path,
    tmp_path: Path,
    change: Damage,
    prompts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = damaged(whole, tmp_path, "llama", change)
    flags = [word for prompt in prompts for word in ("-p", prompt)]
    assert main(["generate", str(folder), "-q", "--device", "cpu", *flags]) == 2
    errors = capsys.readouterr().err
    (line,) = [line for line in errors.splitlines() if line.startswith("atomc: ")]
    assert line.startswith("atomc: the model's tokenizer failed: ")
    assert line.endswith("; is tokenizer.json damaged?")
    assert "Traceback" not in errors


def test_a_server_says_which_file_a_tokenizer_that_fails_is_from(
    whole: Path, tmp_path: Path
) -> None:
    folder = damaged(whole, tmp_path, "llama", PANICS_ON_TEXT)
    info = load_model_info(folder, "model", ServerConfig())
    info.max_len = 8
    with pytest.raises(TokenizerError, match="index out of bounds") as raised:
        asyncio.run(info.encode(["aab"]))
    answer = client_error(raised.value)
    assert answer.status == 500 and "is tokenizer.json damaged" in answer.message


class PanicException(BaseException):
    """As in pyo3: not an Exception."""


def response_to(error: BaseException) -> list[dict[str, Any]]:
    """The messages of the server whose endpoint raises this."""
    sent: list[dict[str, Any]] = []

    async def endpoint(*_: object) -> None:
        raise error

    async def send(message: Any) -> None:
        sent.append(message)

    app = AuthMiddleware(
        endpoint,
        keys=ApiKeys([], []),
        pages=WebPages([], None),
        open_paths=frozenset(),
        operation_paths=frozenset(),
        error_format=ERROR_FORMAT,
        count_error=lambda status: None,
    )
    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    asyncio.run(app(scope, lambda: None, send))  # type: ignore[arg-type, return-value]
    return sent


def test_a_panic_in_a_request_is_a_response_in_json() -> None:
    start, body = response_to(PanicException("index out of bounds"))
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["type"] == "server_error"
    with pytest.raises(KeyboardInterrupt):
        response_to(KeyboardInterrupt())


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(loader, "plan_load", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["generate", "--quiet", "--device", "cpu"])
