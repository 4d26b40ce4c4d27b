"""Placements of experts on ranks: computed from counts, written, read, and followed by the load of a
checkpoint. Text of several ranks: see tests/runtime/ranks/test_ranks_models.py.
"""

import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import test_quant_experts_checkpoints
import torch
from test_quant_experts_checkpoints import (
    FORMATS,
    GPT_OSS,
    LLM_NAMES,
    WIDE,
    blocks,
    per_expert,
    weights_of,
)
from test_quant_experts_checkpoints import checkpoint as quantized_checkpoint
from tiny_experts import CONFIGS, random_model, stored
from tiny_experts import write as write_experts
from torch import nn

from atomc import models
from atomc.cache.model_fingerprint import model_parts
from atomc.cache.store import differences
from atomc.cli import main
from atomc.loading.loader import check_expert_placement, load
from atomc.ops.inputs import TEXT
from atomc.options import Options
from atomc.parallel.collectives import EXPERT_MAP, EXPERT_PLACES
from atomc.parallel.division import Division
from atomc.parallel.expert_placement import (
    balanced,
    equal_ranges,
    imbalance,
    read_placement,
    read_tokens,
    tokens_of_ranks,
    write_placement,
)
from atomc.parallel.process_group import Place, TensorParallel
from atomc.parallel.shard_slice import ShardSlice
from atomc.platform import Platform
from atomc.runtime.config import EngineConfig

SLOW = pytest.mark.slow
PATHS = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
# Of four experts; the second layer keeps ranges.
RANKS = (1, 0, 0, 1)
MEMBERS = [[1, 2], [0, 3]]


def rank(index: int, size: int = 2) -> TensorParallel:
    return TensorParallel(index, size, "ranks")


# ---- from counts


def test_the_largest_expert_goes_first_to_the_rank_with_the_fewest_tokens() -> None:
    tokens = [10, 100, 5, 90, 3, 0, 1, 2]
    placed = balanced(tokens, 2)
    assert placed == (1, 0, 0, 1, 1, 0, 0, 1)
    assert tokens_of_ranks(tokens, placed, 2) == [106, 105]
    assert imbalance(tokens, equal_ranges(8, 2), 2) == pytest.approx(205 * 2 / 211)
    assert imbalance(tokens, placed, 2) == pytest.approx(106 * 2 / 211)


def test_each_rank_has_equally_many_experts_even_if_one_gets_nearly_all_tokens() -> None:
    placed = balanced([1000, 1, 1, 1, 1, 1, 1, 1, 1], 3)
    assert sorted(placed) == [0] * 3 + [1] * 3 + [2] * 3


def test_without_tokens_or_where_ranges_are_as_good_ranges_stay() -> None:
    assert balanced([0] * 6, 3) == balanced([5] * 6, 3) == equal_ranges(6, 3) == (0, 0, 1, 1, 2, 2)
    assert imbalance([0] * 6, equal_ranges(6, 3), 3) == 1.0
    # The longest first gives 6 + 3 against 5 + 4 + 1 of ranges.
    tokens = [5, 4, 0, 3, 3, 3]
    assert balanced(tokens, 2) == equal_ranges(6, 2)


def test_random_counts_are_never_less_balanced_than_ranges_and_near_the_best() -> None:
    rng = random.Random(0)
    for _ in range(40):
        tokens = [int(rng.paretovariate(1.2) * 10) for _ in range(6)]
        placed = balanced(tokens, 2)
        assert placed == balanced(list(tokens), 2) and sum(placed) == 3
        best = min(
            max(tokens_of_ranks(tokens, ranks, 2))
            for ranks in set(permutations((0, 0, 0, 1, 1, 1)))
        )
        found = max(tokens_of_ranks(tokens, placed, 2))
        assert found <= max(tokens_of_ranks(tokens, equal_ranges(6, 2), 2))
        assert found <= best * 4 / 3


@pytest.mark.parametrize("ranks", [4, 0, 7])
def test_counts_that_do_not_divide_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"6 experts do not divide by {ranks}; 1, 2, 3 and 6 do"):
        balanced([1] * 6, ranks)


# ---- files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    placement = {PATHS[0]: RANKS, PATHS[1]: (0, 1, 0, 1)}
    write_placement(tmp_path / "p.json", placement)
    assert read_placement(tmp_path / "p.json", 2) == placement
    assert json.loads((tmp_path / "p.json").read_text())[PATHS[0]] == list(RANKS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"p\.json is not JSON .*, expected a placement of experts"),
        ("[]", r"p\.json has a list, expected an object: a placement of experts"),
        ('{"a": 3}', r"p\.json: a: 3 is not a list with the rank of each expert"),
        ('{"a": []}', r"\[\] is not a list with"),
        ('{"a": [0, true]}', r"\[0, true\] is not a list with"),
        ('{"a": [0, -1]}', r"\[0, -1\] is not a list with"),
        ('{"a": [0, 0, 1, 2]}', r"expert 3 is on rank 2, but there are 2 ranks, 0 to 1"),
        ('{"a": [0, 0, 0, 1]}', r"the ranks have 3, 1 experts, expected equally many on each"),
        ('{"a": [0, 1, 0]}', r"the ranks have 2, 1 experts, expected equally many on each"),
    ],
)
def test_a_file_that_is_no_placement_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_placement(tmp_path / "p.json", 2)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"{}model.layers.7.mlp.experts": RANKS}, "'{}model.layers.7.mlp.experts', which are no"),
        ({"{}model.layers.0.mlp": RANKS}, "expected are {}model.layers.0.mlp.experts, {}model.l"),
        ({"{}model.layers.0.mlp.experts": (0, 1)}, "2 experts for {}model.layers.0.mlp.experts, "),
    ],
)
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_a_placement_of_another_model_is_refused_without_its_weights(
    stock: bool, placement: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stock:
        pytest.importorskip("transformers")
        monkeypatch.setattr(models, "REGISTRY", {})
    prefix = "hf_model." * stock
    placement = {path.format(prefix): ranks for path, ranks in placement.items()}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    with pytest.raises(ValueError) as raised:
        check_expert_placement(tmp_path, placement, 2)
    assert message.format(prefix, prefix) in str(raised.value)


def test_a_placement_needs_experts_that_are_divided() -> None:
    with pytest.raises(ValueError, match=r"expert_placement .* set ep, with tp or dp"):
        EngineConfig(tp=2, expert_placement="p.json")
    config = EngineConfig(tp=2, ep=True, expert_placement=Path("p.json"))  # type: ignore[arg-type]
    assert config.expert_placement == "p.json"
    assert [
        config.expert_ranks,
        EngineConfig(dp=4, ep=True).expert_ranks,
        EngineConfig(dp=4, tp=2, ep=True).expert_ranks,
        EngineConfig(dp=4).expert_ranks,
    ] == [2, 4, 8, 1]


# ---- loads


def test_a_part_may_be_of_any_members() -> None:
    whole = torch.arange(4 * 6).view(4, 6)
    cut = ShardSlice(0, 2, 1, members=(3, 0))
    assert cut.of(whole).equal(whole[[3, 0]])
    assert [cut.position(i, 2) for i in range(4)] == [1, None, None, 0]
    assert ShardSlice(1, 3, 0, members=(5, 1)).of(whole).equal(whole[:, [5, 1]])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_placed(folder: Path, prefix: str = "", **how: Any) -> None:
    """Each rank has the experts that are placed on it, and what it has without a placement."""
    placement = {prefix + PATHS[0]: RANKS}
    whole = load(folder, progress=False, **how)
    names = [name for name, _ in whole.named_parameters() if name.startswith(prefix + PATHS[0])]
    assert names
    for index, own in enumerate(MEMBERS):
        for place, ep in ((Place(rank(index)), True), (Place(experts=rank(index)), False)):
            part, in_ranges = (
                load(folder, progress=False, **how, division=Division(place, ep, placed))
                for placed in (placement, {})
            )
            ranges = in_ranges.state_dict()
            for name, weight in part.state_dict().items():
                if name not in names:
                    assert bits(weight).equal(bits(ranges[name])), name
                    continue
                expected = whole.get_parameter(name)
                if not name.endswith("input_scale"):
                    expected = expected[own]
                assert bits(weight).equal(bits(expected)), name
            assert_mapped(part, prefix, index)


def assert_mapped(model: nn.Module, prefix: str, index: int) -> None:
    for path, ranks, own in (
        (PATHS[0], RANKS, MEMBERS[index]),
        (PATHS[1], (0, 0, 1, 1), [2 * index, 2 * index + 1]),
    ):
        buffers = dict(model.get_submodule(prefix + path).named_buffers())
        if EXPERT_PLACES in buffers:
            rows, numbers = buffers[EXPERT_PLACES].tolist()
            assert [number // 2 for number in numbers] == list(ranks)
            assert [numbers[expert] - 2 * index for expert in own] == [
                rows[expert] for expert in own
            ]
        else:
            rows = buffers[EXPERT_MAP].tolist()
        assert [rows.index(row) for row in range(2)] == own
        assert len({rows[expert] for expert in range(4) if expert not in own} - {0, 1}) == 1


@pytest.mark.parametrize(
    "name",
    [name if name == "int4 with zeros" else pytest.param(name, marks=SLOW) for name in FORMATS],
)
def test_quantized_experts_are_those_of_the_placement(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"moe_intermediate_size": 256, "intermediate_size": 256}
    monkeypatch.setattr(test_quant_experts_checkpoints, "WIDE", wide)
    assert_placed(quantized_checkpoint(tmp_path, name))


@pytest.mark.parametrize("kind", ["transposed", "one by one", pytest.param("mxfp4", marks=SLOW)])
def test_stacked_experts_and_single_ones_are_those_of_the_placement(
    kind: str, tmp_path: Path
) -> None:
    if kind == "transposed":
        write_experts(tmp_path, "gpt_oss", stored(random_model("gpt_oss")))
    elif kind == "mxfp4":
        write_experts(tmp_path, "gpt_oss", blocks(weights_of("gpt_oss")), GPT_OSS, **WIDE)
    else:
        weights = per_expert(weights_of("qwen3_moe"), lambda weight: {"weight": weight}, LLM_NAMES)
        write_experts(tmp_path, "qwen3_moe", weights, **WIDE)
    assert_placed(tmp_path)


@pytest.mark.parametrize(
    "scheme", ["fp8", pytest.param("fp8_block", marks=SLOW), pytest.param("int4", marks=SLOW)]
)
def test_experts_that_are_quantized_while_loading_are_those_of_the_placement(
    scheme: str, tmp_path: Path
) -> None:
    write_experts(tmp_path, "qwen3_moe", weights_of("qwen3_moe"), **WIDE)
    ignore = ["re:.*self_attn.*"]  # whose scales are those of a part
    assert_placed(tmp_path, quantization={"scheme": scheme, "ignore": ignore})


def test_a_class_of_transformers_has_the_experts_of_the_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**CONFIGS["qwen3_moe"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr(models, "REGISTRY", {})
    assert_placed(tmp_path, "hf_model.")


def test_random_experts_are_those_of_the_placement(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    assert_placed(tmp_path, load_format="dummy", quantization="mxfp4_a16")


def test_a_placement_of_other_experts_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    write_experts(tmp_path, "qwen3_moe", weights_of("qwen3_moe"), **WIDE)
    with pytest.raises(ValueError, match="no experts of this model"):
        load(tmp_path, division=Division(Place(rank(0)), True, {"model.layers.9": RANKS}))


def test_placements_share_what_is_compiled(tmp_path: Path) -> None:
    write_experts(tmp_path, "qwen3_moe", weights_of("qwen3_moe"), **WIDE)
    options, machine = Options.of({"glue": "eager"}), Platform.detect("cpu")
    parts = [
        model_parts(
            load(tmp_path, progress=False, division=Division(Place(rank(0)), True, placement)),
            options,
            machine,
            TEXT,
            owned=False,
        )
        for placement in ({}, {PATHS[0]: RANKS})
    ]
    assert parts[0] == parts[1], differences(*parts)


# ---- the command

COUNTS = {"a": [100, 90, 10, 5, 3, 2, 1, 0], "b": [5] * 8}


def test_the_command_writes_what_loads_read_and_prints_the_imbalance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "load.json", tmp_path / "p.json"
    source.write_text(json.dumps({"tokens": COUNTS}))
    assert main(["place-experts", str(source), "--ranks", "2", "-o", str(target)]) == 0
    assert read_placement(target, 2) == {path: balanced(each, 2) for path, each in COUNTS.items()}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "211", "1.94", "1.00"] in lines and ["b", "40", "1.00", "1.00"] in lines
    assert ["mean", "of", "the", "layers", "1.47", "1.00"] in lines


def test_counts_without_what_is_around_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text(json.dumps(COUNTS))
    assert read_tokens(tmp_path / "load.json") == COUNTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tokens": {"a": [1] * 5}}, "load.json: 5 experts do not divide by 2; 1 and 5 do"),
        ({"tokens": {"a": [1.5, 2]}}, "has [1.5, 2] for 'a', expected the number of tokens"),
        ({"error": {"message": "start the server"}}, "expected the number of tokens of each"),
        ({"tokens": {}}, "has no layers: start the server with --expert-load"),
        ([1, 2], "has a list, expected an object: the answer to GET /experts"),
    ],
)
def test_counts_that_cannot_be_placed_are_an_error_in_one_line(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "load.json").write_text(json.dumps(content))
    target = tmp_path / "p.json"
    argv = ["place-experts", str(tmp_path / "load.json"), "--ranks", "2", "-o", str(target)]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_ranks_with_the_same_tokens_send_them_to_those_of_their_own_part() -> None:
    # Two data ranks of two ranks each: rank 2 d + t has an expert of eight in turn, and one more.
    owners = [0, 2, 1, 3, 3, 0, 2, 1]
    experts_of_rank = [[0, 5], [2, 7], [1, 6], [3, 4]]
    for d, t in ((0, 0), (0, 1), (1, 0), (1, 1)):
        model = random_model("qwen3_moe", num_experts=8, num_hidden_layers=1)
        place = TensorParallel(t, 2, "the same tokens"), None, TensorParallel(d, 2, "others")
        division = Division(Place(*place), True, {PATHS[0]: tuple(owners)})
        sharding = division.shard(model)
        assert sharding is not None
        uncut = model.get_parameter(f"{PATHS[0]}.down_proj").clone()
        sharding.cut()
        sharding.connect()
        held = experts_of_rank[2 * d + t]
        assert model.get_parameter(f"{PATHS[0]}.down_proj").equal(uncut[held])
        rows, numbers = model.get_submodule(PATHS[0]).get_buffer(EXPERT_PLACES).tolist()
        assert [rows[expert] for expert in held] == [0, 1] and sum(
            row in (0, 1) for row in rows
        ) == 2
        for expert, owner in enumerate(owners):
            is_sent = owner % 2 == t
            row = experts_of_rank[owner].index(expert)
            assert numbers[expert] == (owner // 2 * 4 + row if is_sent else 4 * d + 2)
