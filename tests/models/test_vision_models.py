"""Models that read images: ours, and transformers' classes behind our forward, against
transformers.
"""

from typing import Any

import pytest
import torch
from rewriting import since
from test_models import error
from tiny_vl import DEEPSTACK, KINDS, ONE, OURS, THREE, VISION, made, prompt, theirs

import atomc
from atomc.encoder import EncoderProgram, compile_encoder
from atomc.loading.create_model import create_model
from atomc.models import vision_patches
from atomc.models.vision_patches import patch_inputs
from atomc.quantization.apply import methods_of
from atomc.quantization.config import online
from atomc.runtime.execution.self_check import own_attention
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.stock import vision
from atomc.stock.adapter import wrap_stock

vision_utils = pytest.importorskip("transformers.vision_utils")

EAGER = {"strict": True, "glue": "eager"}
PROMPTS = {"one image": ONE, "three images": THREE}
EVERY = [("ours", kind) for kind in OURS] + [("stock", kind) for kind in KINDS]


def some(*fast: tuple[Any, ...], every: list[Any] = EVERY) -> list[Any]:
    """Parameters of a test: those that run per change, and the others marked slow."""
    return [pytest.param(*one, marks=() if one in fast else pytest.mark.slow) for one in every]


# ---- where patches are


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize(
    "grids", [[(1, 2, 2)], [(1, 4, 6), (3, 2, 8)], [(1, 48, 48)], [(1, 62, 6), (2, 4, 4)]]
)
def test_patches_are_where_transformers_has_them_bit_for_bit(grids, merge):
    tensor = torch.tensor(grids)
    found = patch_inputs(grids, merge, 48, torch.device("cpu"))
    corners, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        tensor, 48, align_corners=True, spatial_merge_size=merge
    )
    assert torch.equal(found.corners, corners)
    assert torch.equal(found.weights, weights)
    assert torch.equal(found.coordinates, vision_utils.get_vision_position_ids(tensor, merge))
    assert torch.equal(found.query_start, vision_utils.get_vision_cu_seqlens(tensor))
    assert found.query_start.dtype == torch.int32


@pytest.mark.parametrize("grid", [(1, 3, 4), (1, 4, 5), (0, 4, 4)])
def test_a_grid_that_is_not_made_of_tokens_is_refused(grid):
    sentence = "an image has a grid of {} x {} x {} patches, expected".format(*grid)
    with pytest.raises(ValueError, match=sentence):
        patch_inputs([grid], 2, 6, torch.device("cpu"))


def test_positions_of_a_frame_are_computed_once_and_nobody_writes_them():
    grids, cpu = [(1, 4, 6), (3, 2, 8)], torch.device("cpu")
    before = vision_patches._frame.cache_info()
    first = patch_inputs([*grids, grids[0]], 2, 47, cpu)  # no other test has such a table
    expected = [each.clone() for each in first]
    for each in first:
        each.fill_(77)
    again = patch_inputs([*grids, grids[0]], 2, 47, cpu)
    assert all(torch.equal(*pair) for pair in zip(again, expected, strict=True))
    after = vision_patches._frame.cache_info()
    assert after.misses - before.misses == len(grids)
    assert after.currsize <= vision_patches.FRAMES_KEPT
    for array in vision_patches._frame(4, 6, 2, 47):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("merge", [1, 2])
def test_each_input_of_patches_begins_where_kernels_read_16_bytes(merge):
    found = patch_inputs([(1, 2, 2), (3, 2, 6)], merge, 48, torch.device("cpu"))
    assert [each.data_ptr() % 16 for each in found] == [0, 0, 0, 0]
    assert all(each.is_contiguous() for each in found)
    storages = {each.untyped_storage().data_ptr() for each in found}
    assert len(storages) == 1, "more than one copy to the device"


@pytest.mark.gpu
def test_positions_are_copied_to_a_gpu_without_waiting_for_it():
    grids = [(1, 4, 6), (3, 2, 8)]
    expected = patch_inputs(grids, 2, 48, torch.device("cpu"))
    patch_inputs(grids, 2, 48, torch.device("cuda"))  # the first one allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = patch_inputs(grids, 2, 48, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


# ---- eager


@pytest.mark.parametrize("kind", OURS)
def test_names_are_those_of_hugging_face(kind):
    ours = made("ours", kind)
    assert type(ours).__module__.startswith("atomc.models.qwen3_")
    assert [n for n, _ in ours.named_parameters()] == [
        n for n, _ in theirs(kind).named_parameters()
    ]


@pytest.mark.parametrize(("whose", "kind"), EVERY)
def test_embeddings_and_logits_are_those_of_hugging_face(whose, kind):
    model = made(whose, kind)
    assert model.merge_size == 2
    assert model.image_token_ids == {90, 91}
    assert model.patch_width == 96
    for given in PROMPTS.values():
        expected = given.embeddings(theirs(kind))
        embeddings = model.encode_images(given.pixels, list(given.grids))
        assert embeddings.shape == (int(given.is_image.sum()), model.embedding_width)
        assert error(embeddings, expected) < 1e-5
        placed = given.placed(embeddings)
        logits = model(given.ids, given.positions, None, placed, given.is_image)
        assert error(logits, given.logits(theirs(kind))) < 1e-4
        rows = torch.tensor([5, 0])
        some_logits = model(given.ids, given.positions, rows, placed, given.is_image)
        assert error(some_logits, logits[rows]) < 1e-6


@pytest.mark.parametrize(("whose", "kind"), EVERY)
def test_text_has_one_position_for_each_token(whose, kind):
    model, ids = made(whose, kind), torch.randint(80, (20,))
    positions = torch.arange(20)
    expected = theirs(kind)(input_ids=ids[None], use_cache=False).logits[0]
    assert error(model(ids, positions), expected) < 1e-4
    assert error(model(ids, positions.expand(3, -1)), expected) < 1e-4
    no_image = torch.zeros(20, dtype=torch.bool)
    placed = torch.full((20, model.embedding_width), float("inf"))
    assert error(model(ids, positions, None, placed, no_image), expected) < 1e-4


@pytest.mark.parametrize("whose", ["ours", "stock"])
def test_tokens_may_have_a_batch(whose):
    model, given = made(whose, "qwen3_vl"), ONE
    placed = given.placed(model.encode_images(given.pixels, list(given.grids)))
    expected = model(given.ids, given.positions, None, placed, given.is_image)
    twice = [x.expand(2, *x.shape) for x in (given.ids, placed, given.is_image)]
    positions = given.positions[:, None].expand(-1, 2, -1)
    logits = model(twice[0], positions, None, twice[1], twice[2])
    for row in logits:
        assert error(row, expected) < 1e-5


@pytest.mark.parametrize("whose", ["ours", "stock"])
def test_bf16_is_as_close_to_fp32_as_hugging_face_is(whose):
    expected = THREE.embeddings(theirs("qwen3_vl"))
    in_bf16 = theirs("qwen3_vl", torch.bfloat16)
    # Not to(bfloat16), which would also round transformers' rotary frequencies.
    model = made(whose, "qwen3_vl")
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    found = model.encode_images(THREE.pixels, list(THREE.grids))
    assert found.dtype == torch.bfloat16
    assert error(found, expected) < 1.5 * error(THREE.embeddings(in_bf16), expected)


# ---- compiled


@pytest.fixture(scope="module")
def encoders() -> dict[tuple[str, str], tuple[Any, EncoderProgram]]:
    """Models and their compiled encoders, each compiled once."""
    return {}


def encoder(
    encoders: dict[tuple[str, str], tuple[Any, EncoderProgram]], whose: str, kind: str
) -> tuple[Any, EncoderProgram]:
    if (whose, kind) not in encoders:
        model = made(whose, kind)
        encoders[whose, kind] = model, compile_encoder(model, EAGER)
    return encoders[whose, kind]


@pytest.mark.parametrize(("whose", "kind"), some(("ours", "qwen3_vl"), ("stock", "qwen3_vl")))
def test_one_graph_encodes_images_of_any_number_and_size(encoders, whose, kind):
    model, program = encoder(encoders, whose, kind)
    before = atomc.reports()
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    sizes = [ONE, THREE, prompt((1, 2, 2)), prompt((2, 4, 6)), prompt((1, 20, 12))]
    for given in sizes:
        found = program(given.pixels, list(given.grids))
        assert error(found, model.encode_images(given.pixels, list(given.grids))) < 1e-5
    assert since(before) == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames


@pytest.mark.parametrize(("whose", "kind"), some(("ours", "qwen3_vl"), ("stock", "qwen3_vl")))
def test_every_part_of_the_encoder_is_recognized(encoders, whose, kind):
    _, program = encoder(encoders, whose, kind)
    depth, levels = VISION["depth"], len(KINDS[kind][1].get("deepstack_visual_indexes", ()))
    assert_recognized(program, depth, levels)


def assert_recognized(program: EncoderProgram, depth: int, levels: int) -> None:
    report = program.report
    assert [miss.text() for miss in report.near] == []
    expected = {
        "linear": 1 + 4 * depth + 2 * (1 + levels),
        "layer_norm": 2 * depth + 1 + levels,
        # The sum of patches and places, and both sums of each block.
        "add_layer_norm": 2 * depth + 1,
        "rope": 2 * depth,
        "varlen_attention": depth,
        "embedding": 1,
    }
    assert {name: report.matches[name] for name in expected} == expected


def test_the_encoder_follows_weights_that_a_user_writes(encoders):
    model, program = encoder(encoders, "ours", "qwen3_vl")
    weight = model.model.visual.merger.linear_fc2.weight
    grids = list(ONE.grids)
    before = program(ONE.pixels, grids)
    weight.data.mul_(2.0)
    try:
        after = program(ONE.pixels, grids)
        assert error(after, model.encode_images(ONE.pixels, grids)) < 1e-5
        assert error(after, before) > 0.1
    finally:
        weight.data.div_(2.0)


@pytest.mark.rotating
@pytest.mark.parametrize("whose", [pytest.param("ours", marks=pytest.mark.slow), "stock"])
def test_an_owned_encoder_in_bf16_is_as_close_as_the_eager_one(whose):
    expected = THREE.embeddings(theirs("qwen3_vl"))
    model = made(whose, "qwen3_vl")
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    eager = model.encode_images(THREE.pixels, list(THREE.grids))
    program = compile_encoder(model, EAGER, owned=True)
    assert_recognized(program, VISION["depth"], levels=2)
    found = program(THREE.pixels, list(THREE.grids))
    assert found.dtype == torch.bfloat16
    assert error(found, expected) < 1.5 * error(eager, expected)


@pytest.mark.rotating
@pytest.mark.parametrize("whose", [pytest.param("ours", marks=pytest.mark.slow), "stock"])
def test_layers_that_add_embeddings_are_fused_as_those_of_text(whose):
    model = made(whose, "qwen3_vl")
    embeddings = THREE.placed(model.encode_images(THREE.pixels, list(THREE.grids)))
    arguments = (THREE.ids, THREE.positions, torch.tensor([3, 9]), embeddings, THREE.is_image)
    before = atomc.reports()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="atom", options=EAGER, fullgraph=True)
    assert error(compiled(*arguments), model(*arguments)) < 1e-5
    (report,) = since(before)
    expected = {"attention": 4, "rope": 8, "qk_norm_rope": 4, "add_rms_norm": 8, "silu_and_mul": 4}
    assert {name: report.matches[name] for name in expected} == expected


# ---- text is served


def generated(model: Any, ids: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return out[0, len(ids) :].tolist()


@pytest.mark.rotating
@pytest.mark.parametrize(("whose", "kind"), some(("stock", "qwen3_vl")))
def test_text_is_generated_as_by_transformers(whose, kind):
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(80, (n,), generator=generator).tolist() for n in (1, 6, 19, 40)]
    llm = LLM(made(whose, kind), options=EAGER, max_model_len=64, progress=False)
    found = llm.generate(prompts, SamplingParams(max_tokens=6))
    assert [list(one.token_ids) for one in found] == [
        generated(theirs(kind), ids, 6) for ids in prompts
    ]


# ---- stock classes


def test_only_layers_of_the_language_model_have_state():
    model = made("stock", "qwen3_vl")
    handles = [name for name, _ in model.named_buffers() if name.endswith(".kv")]
    assert handles == [f"hf_model.model.language_model.layers.{i}.self_attn.kv" for i in range(4)]


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_a_wrapped_model_still_reads_images_by_itself(kind):
    assert error(THREE.logits(made("stock", kind).hf_model), THREE.logits(theirs(kind))) < 1e-5


def test_the_self_check_leaves_the_attention_of_each_part_as_it_was():
    model = made("stock", "qwen3_vl")
    config = model.config
    with own_attention(model.hf_model):
        assert config.vision_config._attn_implementation == "eager"
    assert config._attn_implementation == config.text_config._attn_implementation == "atom"
    assert config.vision_config._attn_implementation == vision.ATTENTION


def test_a_language_model_that_adds_embeddings_otherwise_is_refused(monkeypatch):
    model = theirs("qwen3_vl", tie_word_embeddings=True)
    text = type(model.model.language_model)

    def added_to_all(self, hidden_states, visual_pos_masks, visual_embeds):
        return hidden_states + visual_embeds.sum(0)

    monkeypatch.setattr(text, "_deepstack_process", added_to_all)
    with pytest.raises(
        ValueError,
        match="Qwen3VLForConditionalGeneration: Qwen3VLTextModel adds embeddings of images "
        "otherwise than by a masked sum",
    ):
        wrap_stock(model)
    monkeypatch.setattr(text, "_deepstack_process", lambda self, hidden: hidden)
    with pytest.raises(ValueError, match="cannot be compared with a masked sum: TypeError"):
        wrap_stock(model)


# ---- quantization


@pytest.mark.parametrize(("whose", "kind"), [("ours", "qwen3_vl"), ("stock", "qwen3_5")])
def test_the_encoder_stays_in_16_bits_when_a_model_is_quantized(whose, kind):
    model = made(whose, kind)
    prefix = "hf_model." if whose == "stock" else ""
    layers = methods_of(model, online("int8"), prefix).linears
    assert any(".language_model.layers." in name for name in layers)
    assert not any("visual" in name for name in layers)


# ---- configs

CONFIG = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "head_dim": 16,
    },
    "vision_config": VISION | DEEPSTACK,
}


def configured(part: str = "", **differs: Any) -> dict[str, Any]:
    return CONFIG | ({part: CONFIG[part] | differs} if part else differs)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (configured(vision_config=None), "qwen3_vl: vision_config None is not an object"),
        (configured(text_config=[]), "qwen3_vl: text_config [] is not an object"),
        (
            configured("vision_config", out_hidden_size=32),
            "qwen3_vl: out_hidden_size 32 of vision_config is not the hidden_size 64 of text_config",
        ),
        (
            configured("vision_config", num_heads=3),
            "model: hidden_size 32 is not num_heads 3 times a multiple of 4, which rotary positions "
            "of two axes need",
        ),
        (
            configured("vision_config", deepstack_visual_indexes=[4]),
            "model: deepstack_visual_indexes [4] exceed the depth of 4",
        ),
        (
            configured("vision_config", deepstack_visual_indexes=[1, 1]),
            "model: deepstack_visual_indexes [1, 1] are not different layers",
        ),
        (
            configured("vision_config", hidden_act="silu"),
            "model: hidden_act 'silu' is not supported, only 'gelu_pytorch_tanh'",
        ),
        (
            configured("text_config", rope_parameters={"mrope_section": [4, 4]}),
            "qwen3_vl: mrope_section [4, 4] is not a list of three numbers such as [24, 20, 20]",
        ),
    ],
)
def test_an_unsupported_config_is_refused_in_one_sentence(config, sentence):
    with pytest.raises(ValueError) as raised:
        create_model(config, device="meta")
    assert str(raised.value) == sentence


def test_fields_that_a_config_leaves_out_have_transformers_defaults():
    config = type(theirs("qwen3_vl").config)(
        text_config=dict(CONFIG["text_config"]), vision_config={"out_hidden_size": 64, "depth": 25}
    )
    given = configured(vision_config={"out_hidden_size": 64, "depth": 25})
    ours = create_model(given, device="meta")
    with torch.device("meta"):
        hf_model = type(theirs("qwen3_vl"))(config)
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in hf_model.named_parameters()
    }
    assert ours.image_token_ids == {config.image_token_id, config.video_token_id}
    assert ours.model.visual.levels == tuple(config.vision_config.deepstack_visual_indexes)
    rotary = ours.model.language_model.rotary_emb
    text = config.text_config
    theta = text.rope_parameters["rope_theta"]
    frequencies = rotary.frequencies(torch.device("cpu"))
    torch.testing.assert_close(frequencies[1], torch.tensor(theta ** (-2 / 16)))
    assert ours.config.max_position_embeddings == text.max_position_embeddings
