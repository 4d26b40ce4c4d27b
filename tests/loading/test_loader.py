"""Checkpoints as they come: whole, in shards, with too much, with too little, and damaged."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import atomc.demo
from atomc import models
from atomc.loading.checkpoint_files import load_config
from atomc.loading.create_model import create_model
from atomc.loading.limits import Stored
from atomc.loading.load_plan import LoadPlan, Quantize, plan_load
from atomc.loading.loader import load
from atomc.quantization.apply import methods_of
from atomc.quantization.config import online
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.loading.load import load as load_for_engine

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
IDS, POSITIONS = torch.tensor([3, 1, 4, 1, 5]), torch.arange(5)


def weights(**differs: object) -> dict[str, Tensor]:
    """The tensors of a random model with that config."""
    torch.manual_seed(0)
    return {
        name: weight.detach() for name, weight in create_model(CONFIG | differs).named_parameters()
    }


def checkpoint(
    path: Path, *shards: dict[str, Tensor], index: dict[str, str] | None = None, **differs: object
) -> Path:
    """A directory with config.json and the shards; with an index if there are several or one is
    given.
    """
    (path / "config.json").write_text(json.dumps(CONFIG | differs))
    if len(shards) == 1 and index is None:
        save_file(shards[0], path / "model.safetensors")
        return path
    for i, shard in enumerate(shards):
        save_file(shard, path / f"{i}.safetensors")
    weight_map = index or {
        name: f"{i}.safetensors" for i, shard in enumerate(shards) for name in shard
    }
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return path


def halves(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = list(tensors)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    return {name: tensors[name] for name in first}, {name: tensors[name] for name in second}


def assert_holds(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    loaded = dict(model.named_parameters())
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def refusal(path: Path, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as raised:
        load(path, progress=False)
    text = str(raised.value)
    assert "\n" not in text
    return text.replace(f"{path}", "PATH")


def test_a_loaded_model_is_ready_for_inference(tmp_path: Path) -> None:
    tensors = weights()
    model = load(checkpoint(tmp_path, tensors))
    assert_holds(model, tensors)
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.isfinite(model(IDS, POSITIONS)).all()


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    tensors = weights()
    assert_holds(load(checkpoint(tmp_path, *halves(tensors))), tensors)


def test_the_index_decides_where_a_tensor_in_two_shards_is_read(tmp_path: Path) -> None:
    tensors = weights()
    stale = {"model.norm.weight": torch.zeros(32), "model.embed_tokens.weight": torch.zeros(48, 32)}
    index = dict.fromkeys(tensors, "1.safetensors")
    assert_holds(load(checkpoint(tmp_path, stale, tensors, index=index)), tensors)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_reading_into_memory_gives_what_mapping_gives(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    path = checkpoint(tmp_path, *halves(weights()))
    mapped = load(path, dtype=dtype)
    assert_holds(load(path, dtype=dtype, mmap=False), dict(mapped.named_parameters()))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
@pytest.mark.parametrize("mmap", [True, False])
def test_an_engine_maps_the_files_of_weights_unless_told_not_to(tmp_path: Path, mmap: bool) -> None:
    path = checkpoint(tmp_path, weights())
    loaded = load_for_engine(EngineConfig(str(path), device="cpu", mmap=mmap), progress=False)
    maps = Path("/proc/self/maps").read_text()
    assert (str(path / "model.safetensors") in maps) == mmap
    del loaded


def test_transformers_reads_the_files_that_it_may_not_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        **CONFIG | {"architectures": None, "model_type": "olmo2"}
    )
    stock = transformers.AutoModelForCausalLM.from_config(config)
    stock.save_pretrained(tmp_path)

    def refuse(*args: object, **options: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr("transformers.modeling_utils.safe_open", refuse)
    with pytest.raises(OSError, match="no such device"):
        load(tmp_path)
    assert_holds(load(tmp_path, mmap=False).hf_model, dict(stock.named_parameters()))


def test_a_model_read_into_memory_outlives_its_files(tmp_path: Path) -> None:
    tensors = weights()
    model = load(checkpoint(tmp_path, tensors), mmap=False)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert_holds(model, tensors)


def test_weights_are_cast_to_the_dtype_asked_for_or_that_of_the_config_or_the_stored_one(
    tmp_path: Path,
) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in weights().items()}

    def dtypes(path: Path, dtype: torch.dtype | None = None) -> set[torch.dtype]:
        model = load(path, dtype=dtype)
        handles = [buffer for name, buffer in model.named_buffers() if name.endswith(".kv")]
        assert model.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32
        return {tensor.dtype for tensor in (*model.parameters(), *handles)}

    assert dtypes(checkpoint(tmp_path, tensors, dtype=None)) == {torch.bfloat16}
    assert dtypes(checkpoint(tmp_path, tensors, dtype=None, torch_dtype="float16")) == {
        torch.float16
    }
    assert dtypes(checkpoint(tmp_path, tensors, dtype="float16"), torch.float32) == {torch.float32}


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_embeddings_are_one_tensor_under_either_name(tmp_path: Path, stored: str) -> None:
    tensors = weights(tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    on_disk = {
        name: tensor for name, tensor in tensors.items() if name != "model.embed_tokens.weight"
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if stored in (name, "both"):
            on_disk[name] = embedding.clone()
    model = load(checkpoint(tmp_path, on_disk, tie_word_embeddings=True))
    assert_holds(model, tensors)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_layers_that_the_model_does_not_have_are_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = weights()
    extra = {
        "model.layers.2.eh_proj.weight": torch.zeros(2),
        "mtp.fc.weight": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    with caplog.at_level(logging.INFO, "atomc"):
        model = load(checkpoint(tmp_path, tensors | extra))
    assert_holds(model, tensors)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: skipped model.layers.0.self_attn.rotary_emb.inv_freq, "
        "model.layers.2.eh_proj.weight, "
        "mtp.fc.weight, which are not part of Qwen3ForCausalLM"
    ]


def test_dummy_weights_need_no_file_and_are_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    first, second = (load(tmp_path, load_format="dummy", dtype=torch.bfloat16) for _ in range(2))
    assert_holds(first, dict(second.named_parameters()))
    assert first.lm_head.weight is first.model.embed_tokens.weight
    assert first.model.norm.weight.float().mean() == pytest.approx(1, abs=0.05)
    assert first.model.layers[0].mlp.up_proj.weight.float().std() == pytest.approx(0.02, rel=0.1)
    assert torch.isfinite(first(IDS, POSITIONS)).all()


def test_dummy_weights_of_a_stock_class_are_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    phi3 = CONFIG | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(phi3))
    first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
    assert_holds(first, dict(second.named_parameters()))
    assert torch.isfinite(first(IDS, POSITIONS)).all()


def test_the_demo_checkpoint_loads() -> None:
    model = load(atomc.demo.PATH)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.isfinite(model(IDS, POSITIONS)).all()


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(40)
    tensors["lm_head.weight"] = torch.zeros(47, 32)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(40, 32, dtype=torch.int8)
    assert refusal(checkpoint(tmp_path, tensors)) == (
        "PATH does not match Qwen3ForCausalLM: missing model.norm.weight; unexpected "
        "model.layers.0.mlp.up_proj.bias; "
        "model.layers.1.mlp.up_proj.weight is I8, expected F64 or F32 or F16 or BF16, "
        "lm_head.weight is [47, 32], expected [48, 32]. "
        "Are config.json and the weights of the same checkpoint?"
    )


def test_a_long_list_of_missing_tensors_is_cut(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in weights().items() if ".layers." not in name}
    assert refusal(checkpoint(tmp_path, tensors)).startswith(
        "PATH does not match Qwen3ForCausalLM: missing model.layers.0.self_attn.q_proj.weight, "
        "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight and 19 "
        "more. "
    )


@pytest.mark.parametrize("kept", [0, 4, 100, 20000])
def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path: Path, kept: int) -> None:
    file = checkpoint(tmp_path, weights()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    text = refusal(tmp_path)
    assert text.startswith("PATH/model.safetensors is damaged or incomplete (")
    assert text.endswith("); download it again")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, *halves(weights()))
    (tmp_path / "1.safetensors").unlink()
    assert refusal(tmp_path, FileNotFoundError) == (
        "PATH lacks 1.safetensors, which model.safetensors.index.json names; download it again"
    )


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path) -> None:
    first, second = halves(weights())
    index = {**dict.fromkeys(first, "0.safetensors"), **dict.fromkeys(second, "1.safetensors")}
    index["model.norm.weight"] = "0.safetensors"
    assert refusal(checkpoint(tmp_path, first, second, index=index)) == (
        "PATH/model.safetensors.index.json: model.norm.weight not in the file it names "
        "(0.safetensors)"
    )


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, *halves(weights()))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    assert refusal(tmp_path) == (
        "PATH/model.safetensors.index.json has no weight_map (name of tensor -> file); "
        "download it again"
    )


def test_a_directory_without_weights_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").touch()
    assert refusal(tmp_path, FileNotFoundError) == (
        "PATH has neither model.safetensors nor model.safetensors.index.json; it has "
        "config.json, pytorch_model.bin"
    )


def test_what_is_not_a_checkpoint_directory_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no", FileNotFoundError) == (
        "PATH is not a directory; expected one with config.json and *.safetensors"
    )
    assert (
        refusal(tmp_path, FileNotFoundError)
        == "PATH has no config.json; is it a complete checkpoint?"
    )
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path).startswith("PATH/config.json is not JSON: ")
    (tmp_path / "config.json").write_text("[]")
    assert refusal(tmp_path) == "PATH/config.json contains a list, expected an object"


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        (
            {"architectures": None},
            "config.json names no architecture (architectures: None); "
            "expected a list such as ['LlamaForCausalLM']",
        ),
        (
            {"dtype": "bf16"},
            "config.json: dtype 'bf16' is not a dtype of torch, such as 'bfloat16'",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "PATH: quantized weights of quant_method 'bitsandbytes' are not supported, only "
            "fp8, compressed-tensors, gptq, "
            "awq, mxfp4, quark, modelopt",
        ),
    ],
)
def test_a_config_we_cannot_use_is_refused(
    tmp_path: Path, differs: dict[str, object], sentence: str
) -> None:
    assert refusal(checkpoint(tmp_path, weights(), **differs)) == sentence


def test_an_unknown_architecture_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    text = refusal(checkpoint(tmp_path, weights(), architectures=["LamaForCausalLM"]))
    assert text.startswith("no model ")
    assert f"LamaForCausalLM: atomc has {', '.join(sorted(models.REGISTRY))}" in text


def test_a_stock_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Phi3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = transformers.Phi3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    tensors = {
        name: weight.detach()
        for name, weight in model.state_dict().items()
        if name != "model.norm.weight"
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert refusal(tmp_path) == (
        "PATH: 1 tensors of Phi3ForCausalLM are missing, such as model.norm.weight; "
        "is config.json of the same checkpoint?"
    )


def test_an_unknown_load_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"load_format 'gguf' is not one of \('auto', 'safetensors', 'dummy'\)"
    ):
        load(checkpoint(tmp_path, weights()), load_format="gguf")


def test_load_config_returns_the_file_as_it_is(tmp_path: Path) -> None:
    assert load_config(checkpoint(tmp_path, weights())) == CONFIG


class Tied(nn.Module):
    """An embedding, a head that shares its weight, and two projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.q_proj, self.k_proj = nn.Linear(32, 16, bias=False), nn.Linear(32, 8, bias=False)
        self.norm = nn.RMSNorm(32, dtype=torch.float32)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight


def headers(**shapes: tuple[int, ...]) -> dict[str, Stored]:
    """Tensors of these shapes in a file that nobody reads."""
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {
        name: Stored(Path("a.safetensors"), "F16", shape, name) for name, shape in names.items()
    }


SHAPES = {
    "embed__weight": (48, 32),
    "q_proj__weight": (16, 32),
    "k_proj__weight": (8, 32),
    "norm__weight": (32,),
}


def planned(stored: dict[str, Stored], scheme: str | None = None) -> LoadPlan:
    with torch.device("meta"):
        model = Tied().bfloat16()
        model.norm.float()
    layers = methods_of(model, online(scheme)) if scheme else None
    return plan_load(model, stored, Path("folder"), torch.bfloat16, layers)


def test_a_plan_says_which_tensor_becomes_which_parameter_without_reading_one() -> None:
    plan = planned(headers(**SHAPES, mtp__fc__weight=(2,)))
    assert [(fill.names, fill.stored.name, fill.dtype, fill.shape) for fill in plan.fills] == [
        (("embed.weight", "head.weight"), "embed.weight", torch.bfloat16, (48, 32)),
        (("q_proj.weight",), "q_proj.weight", torch.bfloat16, (16, 32)),
        (("k_proj.weight",), "k_proj.weight", torch.bfloat16, (8, 32)),
        (("norm.weight",), "norm.weight", torch.float32, (32,)),
    ]
    assert plan.quantized == plan.scales == () and plan.skipped == ("mtp.fc.weight",)


def test_a_plan_groups_the_layers_that_are_quantized_together_and_keeps_tied_ones() -> None:
    stored = headers(**SHAPES)
    plan = planned(stored, "fp8")
    assert plan.quantized == (
        (
            Quantize("q_proj", stored["q_proj.weight"], torch.bfloat16),
            Quantize("k_proj", stored["k_proj.weight"], torch.bfloat16),
        ),
    )
    assert [fill.names for fill in plan.fills] == [
        ("embed.weight", "head.weight"),
        ("norm.weight",),
    ]


def test_a_plan_reads_a_tied_parameter_once_and_names_all_that_does_not_fit() -> None:
    both = planned(headers(**SHAPES, head__weight=(48, 32)))
    assert [fill.stored.name for fill in both.fills if "head.weight" in fill.names] == [
        "embed.weight"
    ]
    with pytest.raises(
        ValueError,
        match=r"^folder does not match Tied: missing norm.weight; unexpected bias; "
        r"k_proj.weight is \[9, 32\], expected \[8, 32\]\.",
    ):
        planned(
            headers(
                embed__weight=(48, 32), q_proj__weight=(16, 32), k_proj__weight=(9, 32), bias=(1,)
            )
        )
