"""How parameters are cut for each word of a plan, and what is refused. No processes: see
tests/parallel/test_tensor_parallel.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_experts import CONFIGS
from tiny_models import SIZES
from torch import Tensor, nn

import atomc
from atomc.cache.model_fingerprint import model_parts
from atomc.cache.store import differences
from atomc.loading.create_model import create_model
from atomc.models.experts import Experts
from atomc.ops.inputs import TEXT
from atomc.options import Options
from atomc.parallel import sizes
from atomc.parallel.heads import resize_groups
from atomc.parallel.process_group import TensorParallel
from atomc.parallel.shard_plan import plan_of
from atomc.parallel.shard_slice import ShardSlice
from atomc.parallel.sharding import Sharding
from atomc.platform import Platform
from atomc.program import compile_model

LLAMA = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
}


def rank(index: int = 0, size: int = 2) -> TensorParallel:
    return TensorParallel(index, size, "ranks")


def llama(**differs: object) -> nn.Module:
    torch.manual_seed(0)
    return create_model(LLAMA | differs).requires_grad_(False).eval()


# ---- parts of tensors

WHOLE = torch.arange(8 * 6).view(8, 6)


def test_parts_follow_one_another() -> None:
    assert torch.equal(torch.cat([ShardSlice(0, 4, i).of(WHOLE) for i in range(4)]), WHOLE)
    assert torch.equal(torch.cat([ShardSlice(1, 3, i).of(WHOLE) for i in range(3)], 1), WHOLE)


def test_each_segment_is_cut() -> None:
    assert ShardSlice(0, 2, 1, segments=(1, 1)).of(WHOLE).equal(WHOLE[[2, 3, 6, 7]])
    assert ShardSlice(1, 3, 0, segments=(1, 1)).of(WHOLE).equal(WHOLE[:, [0, 3]])
    assert ShardSlice(0, 2, 1, segments=(16, 16, 32)).of(WHOLE).equal(WHOLE[[1, 3, 6, 7]])


def test_the_last_part_is_padded() -> None:
    parts = [ShardSlice(0, 3, i, padded=True).of(WHOLE) for i in range(3)]
    assert [part.shape for part in parts] == [(3, 6)] * 3
    assert torch.equal(torch.cat(parts)[:8], WHOLE) and not parts[2][2].any()


def test_a_part_has_memory_of_its_own() -> None:
    part = ShardSlice(0, 2, 0).of(WHOLE)
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
    assert part.data_ptr() != WHOLE.data_ptr()


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        (ShardSlice(1, 4, 0), "6 do not divide into 4 equal parts"),
        (
            ShardSlice(0, 4, 0, segments=(1, 1, 1, 1)),
            "segments of 2, 2, 2, 2 do not divide into 4 equal parts",
        ),
        (ShardSlice(0, 2, 0, segments=(1, 1, 4)), "8 do not divide into segments of 1 : 1 : 4"),
        (ShardSlice(0, 16, 0), "8 do not divide into 16 equal parts"),
        (ShardSlice(0, 7, 0, padded=True), "the last would hold nothing"),
    ],
)
def test_what_does_not_divide_is_said(cut: ShardSlice, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        cut.of(WHOLE)


# ---- the words of plans


class Block(nn.Module):
    """A layer with one module or parameter, which a plan names."""

    def __init__(self, layer: nn.Module | nn.Parameter):
        super().__init__()
        self.layer = layer
        self.other = nn.Linear(6, 8)
        self.tp_plan: dict[str, str] = {}
        self.ep_plan: dict[str, str] = {}


def linear() -> nn.Linear:
    layer = nn.Linear(6, 8)
    layer.weight.data.copy_(WHOLE)
    layer.bias.data.copy_(torch.arange(8) + 1)
    return layer


def divided(
    layer: nn.Module | nn.Parameter, how: str, index: int, *, ep: bool = False, **other: str
) -> Block:
    model = Block(layer).requires_grad_(False)
    model.tp_plan = {"layer": how, "other": "rowwise", **other}
    return atomc.parallelize(model, rank(index), ep=ep)  # type: ignore[return-value]


BIAS = torch.arange(8.0) + 1
# word -> rows and columns of the weight of the second of two ranks, and its bias
LINEARS: dict[str, tuple[list[int], list[int], Tensor]] = {
    "colwise": ([4, 5, 6, 7], [0, 1, 2, 3, 4, 5], BIAS[4:]),
    "packed_colwise": ([2, 3, 6, 7], [0, 1, 2, 3, 4, 5], BIAS[[2, 3, 6, 7]]),
    "colwise_gather_output": ([4, 5, 6, 7], [0, 1, 2, 3, 4, 5], BIAS[4:]),
    "rowwise": (list(range(8)), [3, 4, 5], torch.zeros(8)),
    "rowwise_split_input": (list(range(8)), [3, 4, 5], torch.zeros(8)),
    "replicated_with_grad_allreduce": (list(range(8)), [0, 1, 2, 3, 4, 5], BIAS),
}


@pytest.mark.parametrize("how", LINEARS)
def test_a_linear_layer_is_cut_as_its_word_says(how: str) -> None:
    rows, columns, bias = LINEARS[how]
    layer = divided(linear(), how, 1).layer
    assert layer.weight.equal(WHOLE[rows][:, columns].float())
    assert layer.bias.equal(bias)
    gathered = how == "colwise_gather_output"
    assert (layer.out_features, layer.in_features) == (8 if gathered else len(rows), len(columns))


def test_the_bias_of_a_sum_is_that_of_the_first_rank() -> None:
    assert divided(linear(), "rowwise", 0).layer.bias.equal(BIAS)


def test_a_parameter_is_cut_by_its_first_dimension() -> None:
    assert divided(nn.Parameter(torch.arange(4.0)), "colwise", 1).layer.equal(
        torch.tensor([2, 3.0])
    )


def test_an_embedding_is_cut_by_vocabulary() -> None:
    layer = divided(nn.Embedding(7, 4), "embedding_rowwise", 1).layer
    assert layer.weight.shape == (4, 4) and not layer.weight[3].any() and layer.weight[:3].all()


def test_a_table_that_shares_a_weight_with_a_whole_layer_stays_whole() -> None:
    table = nn.Embedding(8, 6)
    model = Block(table).requires_grad_(False)
    model.head = nn.Linear(6, 8, bias=False)
    model.head.weight = table.weight
    model.tp_plan = {"layer": "embedding_rowwise", "other": "rowwise"}
    atomc.parallelize(model, rank())
    assert model.head.weight is model.layer.weight and table.weight.shape == (8, 6)


@pytest.mark.parametrize("ep", [False, True])
def test_experts_are_cut_by_width_or_by_expert(ep: bool) -> None:
    whole = Experts(4, 8, 6)
    w13, w2 = whole.gate_up_proj.data.clone(), whole.down_proj.data.clone()
    model = divided(whole, "moe_tp_experts", 1, ep=ep, **{"layer.down_proj": "rowwise"})
    if ep:
        assert model.layer.gate_up_proj.equal(w13[2:]) and model.layer.down_proj.equal(w2[2:])
        assert model.layer.expert_map.tolist() == [-1, -1, 0, 1]
    else:
        assert model.layer.gate_up_proj.equal(w13[:, [3, 4, 5, 9, 10, 11]])
        assert model.layer.down_proj.equal(w2[..., 3:])


@pytest.mark.parametrize(
    ("layer", "how", "sentence"),
    [
        (linear, "sequence_parallel", "has sequence_parallel, supported are all_reduce, colwise"),
        (
            lambda: nn.LayerNorm(8),
            "colwise",
            "layer is a LayerNorm, which the plan divides colwise",
        ),
        (
            lambda: nn.Embedding(8, 4, max_norm=1.0),
            "embedding_rowwise",
            "layer cannot be cut by vocabulary: its rows have a max_norm",
        ),
        (lambda: nn.Linear(6, 7), "colwise", "layer: 7 do not divide into 2 equal parts"),
        (linear, "moe_tp_experts", "layer: the experts of Linear have no weights"),
        (lambda: nn.Parameter(torch.ones(4)), "rowwise", "layer: a parameter that is divided row"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    layer: Callable[[], nn.Module], how: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        divided(layer(), how, 0)


# ---- models


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential does not define how it is divided"):
        atomc.parallelize(nn.Sequential(linear()), rank())


def test_a_refused_model_is_unchanged() -> None:
    model = llama(intermediate_size=99)
    before = {name: weight.shape for name, weight in model.named_parameters()}
    with pytest.raises(ValueError, match=r"99 columns .*do not divide by 2; only 1 does"):
        atomc.parallelize(model, rank())
    assert before == {name: weight.shape for name, weight in model.named_parameters()}


def test_one_rank_holds_all() -> None:
    model = llama()
    assert atomc.parallelize(model, rank(0, 1)) is model
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("size", [2, 4])
def test_heads_and_their_state_are_those_of_the_rank(size: int) -> None:
    """2 heads of keys, each of which is held by two of four ranks."""
    for index in range(size):
        whole, model = llama(), atomc.parallelize(llama(), rank(index, size))
        for layer, part in zip(whole.model.layers, model.model.layers, strict=True):
            own, attention = layer.self_attn, part.self_attn
            kept = index * 2 // size
            assert attention.kv.shape == (0, 1, 16)
            assert attention.k_proj.weight.equal(own.k_proj.weight[16 * kept :][:16])
            assert attention.v_proj.weight.equal(own.v_proj.weight[16 * kept :][:16])
            assert attention.q_proj.weight.shape == (64 // size, 64)


def test_a_weight_with_two_names_is_cut_once() -> None:
    model = atomc.parallelize(llama(tie_word_embeddings=True), rank(1))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (48, 64)


def test_what_is_divided_is_not_divided_again() -> None:
    model = atomc.parallelize(llama(), rank())
    with pytest.raises(ValueError, match=r"is already divided: atomc\.parallelize was called"):
        atomc.parallelize(model, rank())


def test_a_model_of_dtensors_is_refused() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = llama()
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh), requires_grad=False)
    model.lm_head.weight = weight
    with pytest.raises(ValueError, match=r"lm_head.weight is a DTensor: .* already divided"):
        atomc.parallelize(model, rank())


def test_experts_of_a_model_without_any_are_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        atomc.parallelize(llama(), rank(), ep=True)


@pytest.mark.parametrize("scheme", ["mxfp4_a16", "nvfp4_a16"])
def test_quantized_layers_are_cut_with_their_scales(scheme: str) -> None:
    whole, model = (atomc.quantize(llama(intermediate_size=128), scheme) for _ in range(2))
    atomc.parallelize(model, rank(1))
    for own, part in zip(whole.model.layers, model.model.layers, strict=True):
        down, up = own.self_attn.o_proj.dequantized(), own.mlp.up_proj.dequantized()
        assert part.self_attn.o_proj.dequantized().equal(down[:, 32:])
        assert part.mlp.up_proj.dequantized().equal(up[64:])


def test_a_part_of_a_block_is_refused_with_the_parts_that_work() -> None:
    model = atomc.quantize(llama(), "int4")
    with pytest.raises(
        ValueError, match=r"64 inputs in 4 gives 16, not .* parts that work are 1, 2"
    ):
        Sharding.of(model, rank(0, 4))


def test_each_segment_of_experts_ends_with_a_block() -> None:
    """384 rows of gate have three blocks, and two ranks one and a half."""
    config = CONFIGS["qwen3_moe"] | {"moe_intermediate_size": 384}
    model = atomc.quantize(create_model(config), "fp8_block", ["re:.*self_attn.*"])
    with pytest.raises(
        ValueError, match=r"384 outputs in 2 gives 192, .* parts that work are 1, 3"
    ):
        Sharding.of(model, rank())


def test_quantizing_a_divided_model_is_refused() -> None:
    with pytest.raises(ValueError, match="quantize the model first"):
        atomc.quantize(atomc.parallelize(llama(), rank()), "fp8")


@pytest.mark.parametrize("quantized", [None, "mxfp4_a16"])
@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_dummy_weights_are_parts_of_those_of_one_process(
    kind: str, quantized: str | None, tmp_path: Path
) -> None:
    import json

    from atomc.loading.loader import load
    from atomc.parallel.division import Division
    from atomc.parallel.process_group import Place

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    how = {"load_format": "dummy", "quantization": quantized}
    model, part = load(tmp_path, **how), load(tmp_path, **how, division=Division(Place(rank(1))))
    sharding = Sharding.of(model, rank(1))
    sharding.cut()
    sharding.connect()
    expected = model.state_dict()
    for name, tensor in part.state_dict().items():
        assert tensor.equal(expected[name]), name


# ---- all ranks compile the same


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_ranks_share_what_is_compiled(kind: str, tmp_path: Path) -> None:
    options = {"cache": True, "cache_dir": str(tmp_path), "glue": "eager"}
    config = LLAMA | {"attention_bias": True} if kind == "llama" else CONFIGS[kind]
    parts, kinds = [], []
    for index in range(2):
        model = create_model(config, torch.float32).requires_grad_(False).eval()
        atomc.parallelize(model, rank(index), ep=kind == "qwen3_moe")
        machine = Platform.detect("cpu")
        parts.append(model_parts(model, Options.of(options), machine, TEXT, owned=False))
        kinds.append(compile_model(model, options).report.cached.kind)
    assert parts[0] == parts[1], differences(*parts)
    assert kinds == ["miss", "hit"]


# ---- sizes


FIELDS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 1536,
    "hidden_size": 4096,
}
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
CONFIG_GROUPS = {"config_groups": {"group_0": {"weights": {"group_size": 128}}}}


@pytest.mark.parametrize(
    ("differs", "size", "sentence"),
    [
        ({}, 3, "32 heads (num_attention_heads) do not divide by 3; 1, 2, 4, 8, 16 and 32 do"),
        (
            {"num_key_value_heads": 6, "num_attention_heads": 24},
            8,
            "6 heads of keys and values (num_key_value_heads) do not divide by 8; "
            "1, 2, 3, 6, 12 and 24 do",
        ),
        (
            {"intermediate_size": 100},
            8,
            "100 columns (intermediate_size) do not divide by 8; 1, 2 and 4 do",
        ),
        (
            BLOCKS,
            8,
            "a cut of 1,536 columns (intermediate_size) in 8 gives 192, not a multiple of 128, "
            "which share a scale: they do not divide by 8; 1, 2 and 4 do",
        ),
        (
            BLOCKS | {"intermediate_size": 10944},
            2,
            "a cut of 10,944 columns (intermediate_size) in 2 gives 5,472, not a multiple of 128, "
            "which share a scale: they do not divide by 2; only 1 does",
        ),
        ({"quantization_config": CONFIG_GROUPS}, 8, "gives 192, not a multiple of 128"),
        ({"text_config": {"num_attention_heads": 5, "num_key_value_heads": 5}}, 2, "1 and 5 do"),
        ({"moe_intermediate_size": 6, "num_experts": 4}, 4, "(moe_intermediate_size)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    differs: dict[str, object], size: int, sentence: str
) -> None:
    if "text_config" in differs:
        differs = {**differs, "intermediate_size": 100}
    with pytest.raises(ValueError) as raised:
        sizes.check(FIELDS | differs, size)
    assert sentence in str(raised.value)


def test_experts_divide_by_expert_or_by_width() -> None:
    fields = FIELDS | {"moe_intermediate_size": 6, "num_experts": 12}
    sizes.check(fields, 4, ep=True)
    with pytest.raises(ValueError, match=r"12 experts do not divide by 8; 1, 2 and 4 do"):
        sizes.check(fields, 8, ep=True)


class OfTransformers(nn.Module):
    """As a model of transformers 5.17, which has no property for the plan of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.tp_plan = {"up": "colwise", "up.weight": "rowwise", "down": "rowwise"}
        self._ep_plan = {"up": "moe_tp_experts"}
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)


def test_the_plan_of_experts_is_read_from_all_versions_of_transformers() -> None:
    assert plan_of(OfTransformers()) == OfTransformers().tp_plan
    # What the plan says of a part of the experts is for a division by width.
    by_expert = plan_of(OfTransformers(), ep=True)
    assert by_expert == {"up": "ep_dispatch_experts", "down": "rowwise"}


@pytest.mark.parametrize(("parts", "size", "left"), [(2, 2, 4), (2, 4, 2), (1, 4, 1), (1, 8, 1)])
def test_as_many_queries_share_a_head_of_keys_as_are_left(parts: int, size: int, left: int) -> None:
    attention = nn.Module()
    attention.num_key_value_groups = 4
    resize_groups(attention, parts, size)
    assert attention.num_key_value_groups == left


@pytest.mark.parametrize(("how", "sides"), [("colwise", (256, 384)), ("rowwise", (384, 256))])
def test_a_quantized_layer_is_not_cut_within_a_block_of_scales(
    how: str, sides: tuple[int, int]
) -> None:
    layer = nn.Linear(*sides, bias=False, dtype=torch.bfloat16)
    quantized = atomc.quantize(nn.Sequential(layer), "fp8_block")[0]
    with pytest.raises(ValueError, match="in 2 gives 192, not a multiple of 128, which share a"):
        divided(quantized, how, 0)
