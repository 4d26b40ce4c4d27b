"""Adapters that cannot be used are one error with the reason."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_lora import CONFIG, WEIGHTS, write_adapter

from atomc.ops.inputs import LoraWeights
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.lora.files import read_config, read_pairs
from atomc.runtime.execution.lora.program import lora_shape
from atomc.weights.lora import LoraLayers, LoraPair

PATH = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("use_dora", True, "DoRA"),
        ("bias", "all", "biases of the model"),
        ("modules_to_save", ["lm_head"], "whole layers"),
        ("fan_in_fan_out", True, "transposed"),
        ("alpha_pattern", {"q_proj": 3}, "one lora_alpha"),
        ("init_lora_weights", "pissa_niter_4", "other weights of the model"),
        ("peft_type", "IA3", "expected 'LORA'"),
        ("r", 0, "expected a positive number"),
        ("r", True, "r is True, expected a positive number"),
        ("lora_alpha", "8", "expected a number"),
        ("lora_alpha", 10**400, "lora_alpha is 10{30,}, expected a number"),
        ("lora_alpha", math.inf, "lora_alpha is inf, expected a number"),
        ("lora_alpha", {"__float__": "NaN"}, "lora_alpha is nan, expected a number"),
        ("rank_pattern", ["q_proj"], r"rank_pattern is \['q_proj'\], expected an object"),
        ("rank_pattern", {"q_proj": 0}, "rank_pattern is {'q_proj': 0}, expected an object"),
        ("rank_pattern", {"q_proj": "8"}, "expected an object of names of layers with positive"),
    ],
)
def test_a_kind_of_adapter_that_is_not_supported_is_named(tmp_path, field, value, part):
    folder = write_adapter(
        tmp_path / "a", {PATH: (8, 4)}, **({field: value} if field != "r" else {})
    )
    if field == "r":
        config = json.loads((folder / CONFIG).read_text()) | {"r": value}
        (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=part):
        read_config(str(folder))


def test_missing_files_pickles_and_damage_are_named(tmp_path):
    with pytest.raises(ValueError, match="its folder has no adapter_config"):
        read_config(str(tmp_path))
    folder = write_adapter(tmp_path / "a", {PATH: (8, 4)})
    (folder / WEIGHTS).write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="is damaged"):
        read_pairs(read_config(str(folder)))
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle, which can run code"):
        read_config(str(folder))


def test_a_header_of_too_many_tensors_is_not_parsed(tmp_path):
    folder = write_adapter(tmp_path / "a", {PATH: (8, 4)})
    header = b"{" * (2**15 + 2)
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"has 32769 tensors or more, expected at most 32768 "):
        read_pairs(read_config(str(folder)))


@pytest.mark.parametrize(
    ("key", "shape", "part"),
    [
        (f"base_model.model.{PATH}.lora_magnitude_vector", (8,), "is not supported"),
        (f"base_model.model.{PATH}.lora_B.weight", (8, 3), r"lora_A \[4, 4\] and lora_B \[8, 3\]"),
        ("base_model.model.model.layers.1.mlp.up_proj.lora_A.weight", (4, 4), "has no lora_B"),
    ],
)
def test_tensors_that_are_no_pairs_are_named(tmp_path, key, shape, part):
    folder = write_adapter(tmp_path / "a", {PATH: (8, 4)})
    save_file(load_file(folder / WEIGHTS) | {key: torch.ones(shape)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=part):
        read_pairs(read_config(str(folder)))


@pytest.mark.parametrize(
    ("rank", "dtype", "part"),
    [
        (0, torch.float32, r"lora_A \[0, 4\] and lora_B \[8, 0\], expected .* of at least 1"),
        (4, torch.int64, "lora_A in torch.int64 and lora_B in torch.int64, expected floating"),
    ],
)
def test_pairs_of_rank_0_and_of_integers_are_named(tmp_path, rank, dtype, part):
    folder = write_adapter(tmp_path / "a", {PATH: (8, 4)})
    key = f"base_model.model.{PATH}"
    pair = {"A": torch.ones(rank, 4, dtype=dtype), "B": torch.ones(8, rank, dtype=dtype)}
    save_file({f"{key}.lora_{name}.weight": each for name, each in pair.items()}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=part):
        read_pairs(read_config(str(folder)))


def test_the_scale_is_alpha_over_the_rank_or_its_root(tmp_path):
    plain = write_adapter(tmp_path / "a", {PATH: (8, 4)}, rank=4, alpha=6)
    root = write_adapter(tmp_path / "b", {PATH: (8, 4)}, rank=4, alpha=6, use_rslora=True)
    scales = [read_pairs(read_config(str(each)))[PATH].scale for each in (plain, root)]
    assert scales == [1.5, 3.0]


def layers():
    """A layer with 4 inputs and 6 outputs, merged with one of 2 outputs, for 3 adapters."""
    found, names = LoraLayers(), ("one", "two")
    given = [("lora_a", (3, 2 * 5, 4)), ("lora_b", (3, 5, 8))]
    return found, [
        found.allocate(
            LoraWeights(0, role, names, (6, 2), shape, torch.float16), torch.device("cpu")
        )
        for role, shape in given
    ]


def test_an_adapter_is_written_to_its_place_and_replaces_all_of_the_last_one():
    found, (a, b) = layers()
    ones = {"one": LoraPair(torch.ones(3, 4), torch.ones(6, 3), 2.0)}
    found.write(1, ones | {"two": LoraPair(torch.ones(5, 4), torch.ones(2, 5), 1.0)})
    found.write(1, ones)
    assert a.nonzero()[:, :2].unique(dim=0).tolist() == [[1, 0], [1, 1], [1, 2]]
    assert b[1, :3, :6].eq(2).all() and b.count_nonzero() == 18


def test_a_layer_that_is_called_twice_has_the_adapter_in_both_places():
    found = LoraLayers()
    given = [
        (number, role, shape)
        for number in (0, 1)
        for role, shape in (("lora_a", (1, 2, 4)), ("lora_b", (1, 2, 6)))
    ]
    tensors = [
        found.allocate(
            LoraWeights(number, role, ("one",), (6,), shape, torch.float32), torch.device("cpu")
        )
        for number, role, shape in given
    ]
    found.write(0, {"one": LoraPair(torch.ones(2, 4), torch.ones(6, 2), 1.0)})
    assert len(found) == 1 and all(tensor.eq(1).all() for tensor in tensors)


@pytest.mark.parametrize(
    ("a", "b", "part"),
    [
        (torch.ones(3, 5), torch.ones(6, 3), "4 inputs and 6 outputs"),
        (torch.ones(3, 4), torch.ones(7, 3), "4 inputs and 6 outputs"),
        (torch.ones(6, 4), torch.ones(6, 6), "its rank is 6, at most 5 fits"),
        (torch.full((3, 4), 1e30), torch.ones(6, 3), "not finite"),
    ],
)
def test_a_pair_that_does_not_fit_changes_nothing(a, b, part):
    found, tensors = layers()
    fits = LoraPair(torch.ones(5, 4), torch.ones(2, 5), 1.0)
    with pytest.raises(ValueError, match=part):
        found.write(0, {"two": fits, "one": LoraPair(a, b, 1.0)})
    assert not any(tensor.count_nonzero() for tensor in tensors)


def test_room_is_made_for_the_adapters_that_are_given(tmp_path):
    given = {
        "a": str(write_adapter(tmp_path / "a", {PATH: (8, 4)}, rank=32)),
        "b": str(write_adapter(tmp_path / "b", {"model.layers.0.mlp.up_proj": (8, 4)})),
    }
    assert lora_shape(EngineConfig(lora=given)) == (2, 32, ("q_proj", "up_proj"))
    assert lora_shape(EngineConfig(lora=given, max_loras=5)) == (5, 32, ())
    assert lora_shape(EngineConfig(max_loras=5, lora_target_modules=("q_proj",))) == (
        5,
        16,
        ("q_proj",),
    )
    assert lora_shape(EngineConfig()) is None


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"tp": 2}, "tp is not supported with LoRA"),
        ({"pp": 2}, "pp is not supported with LoRA"),
        ({"speculative": "mtp"}, "the draft layer has no adapters"),
        ({"lora": {"a": "x", "b": "y"}, "max_loras": 1}, "names 2 adapters"),
        ({"max_loras": 0}, "at least 1"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(settings, part):
    with pytest.raises(ValueError, match=part):
        EngineConfig(**{"max_loras": 2, **settings})


def test_a_folder_of_an_adapter_may_be_a_path():
    config = EngineConfig(lora={"a": Path("adapters") / "a", "b": "adapters/b"})
    assert config.lora == {"a": str(Path("adapters/a")), "b": "adapters/b"}


@pytest.mark.parametrize("lora", [{"a": None}, {"a": b"x"}, {"a": 3}, {"": Path("x")}])
def test_what_is_no_name_and_folder_is_refused(lora):
    with pytest.raises(ValueError, match="expected a name and a folder"):
        EngineConfig(lora=lora)


def test_settings_of_adapters_without_adapters_are_refused():
    with pytest.raises(ValueError, match="set lora or max_loras"):
        EngineConfig(max_lora_rank=8)
    with pytest.raises(ValueError, match="batch_invariant is not supported"):
        lora_shape(EngineConfig(max_loras=1, options={"batch_invariant": True}))
