"""The draft layers of Qwen3-Next and Qwen3.5, whose models keep state per sequence: they are what
checkpoints call `mtp`, change no result, and read images.
"""

import json
import re
from fractions import Fraction

import pytest
import torch
from test_mtp import Reference, compare_drafts, engine, prompt_of, run
from tiny_mtp import CONFIG, QWENS, tensors_of, tiny_model, write
from torch import nn

from atomc.loading import loader
from atomc.loading.create_model import create_model
from atomc.loading.load_plan import PARTS
from atomc.models.experts import Experts
from atomc.models.qwen3_5_vl import Qwen3_5ForConditionalGeneration
from atomc.quantization import ONLINE, QuantizedExperts
from atomc.quantization.linear import QuantizedLinear
from atomc.runtime.bench.forced_acceptance import force_acceptance
from atomc.runtime.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.xdist_group("mtp_qwen")

FAST = "qwen3_next"
KINDS = [pytest.param(kind, marks=() if kind == FAST else pytest.mark.slow) for kind in QWENS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of each kind's checkpoint."""
    folder = tmp_path_factory.mktemp("mtp")
    return {
        kind: write(folder / kind, tensors_of(tiny_model(**differs)), **differs)
        for kind, differs in QWENS.items()
    }


def random_norms(model):
    """The model with different norms, each far from one."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.normal_(0, 0.5)
    return model


def norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


@pytest.mark.parametrize("kind", QWENS)
def test_the_draft_layer_of_a_checkpoint_is_loaded_and_computes_as_written(kind, tmp_path):
    written = random_norms(tiny_model(**QWENS[kind]))
    path = write(tmp_path / "model", tensors_of(written), **QWENS[kind])
    model = loader.load(path, draft_layers=1)
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in written.named_parameters()
    }
    for name, weight in written.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight, rtol=0, atol=0)
    of = {name.removeprefix("mtp."): x for name, x in written.named_parameters()}
    ids, hidden = torch.tensor([3, 1, 4, 1, 5]), torch.randn(5, 64, dtype=torch.float64)
    logits, states = model.draft_models(1)[0](ids, torch.arange(5), hidden, torch.tensor([1, 4]))
    embedded = norm(of["model.embed_tokens.weight"][ids], of["pre_fc_norm_embedding.weight"])
    both = torch.cat([embedded, norm(hidden, of["pre_fc_norm_hidden.weight"])], -1)
    x = both @ of["fc.weight"].T
    x = written.mtp.layers[0](x, *written.model.rotary_emb(x, torch.arange(5)))
    expected = norm(x, of["norm.weight"])
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    expected = expected[[1, 4]] @ of["lm_head.weight"].T
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_the_draft_layer_is_a_layer_of_the_model_with_attention_and_shares_embedding_and_head():
    for kind, differs in QWENS.items():
        model = tiny_model(tie_word_embeddings=kind == "qwen3_5", **differs)
        draft, layer = model.draft_models(1)[0], model.model.layers[1]
        assert draft.embed_tokens is model.model.embed_tokens and draft.lm_head is model.lm_head
        assert str(model.mtp.layers[0]) == str(layer), kind
        assert (draft.hidden_size, draft.dtype) == (64, torch.float64)
        assert model.mtp.layers[0].self_attn.kv is not layer.self_attn.kv


def test_hidden_states_are_those_before_the_models_head():
    """Which are normed, and so are those of a further token."""
    reference = Reference(**QWENS[FAST])
    ids = torch.tensor([3, 1, 4])
    logits, hidden = reference.states(ids, torch.arange(3), torch.arange(3))
    torch.testing.assert_close(reference.model.lm_head(hidden), logits)
    logits, hidden = reference.draft(ids, torch.arange(3), hidden, torch.arange(3))
    torch.testing.assert_close(reference.model.lm_head(hidden), logits)


@pytest.mark.parametrize("kind", QWENS)
def test_without_drafts_the_draft_layer_is_skipped(checkpoints, kind):
    model = loader.load(checkpoints[kind])
    assert not any("mtp" in name for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match="was made without its draft layers: set draft_layers"):
        model.draft_models(1)[0]


def refused(tmp_path, tensors=None, **differs):
    kind = differs.pop("kind", "qwen3_5")
    given = tensors_of(tiny_model(**QWENS[kind]))
    given = {name: x for name, x in given.items() if x is not None} | (tensors or {})
    given = {name: x for name, x in given.items() if x is not None}
    path = write(tmp_path / "model", given, **QWENS[kind] | differs)
    with pytest.raises(ValueError) as raised:
        loader.load(path, draft_layers=1)
    return str(raised.value).replace(str(path), "PATH")


def test_checkpoints_without_the_draft_layer_are_refused(tmp_path):
    names = [name for name in tensors_of(tiny_model(**QWENS["qwen3_5"])) if "mtp" in name]
    absent = refused(tmp_path, dict.fromkeys(names))
    assert absent == (
        "PATH has no draft layers: expected tensors mtp.*, but none has such a name "
        "(transformers does not save them); set speculative to 'ngram', or leave it out"
    )
    one, more = {"mtp.fc.weight": None}, {"mtp.fc.bias": torch.zeros(64)}
    assert "does not match Qwen3_5ForCausalLM: missing mtp.fc.weight." in refused(tmp_path, one)
    assert "unexpected mtp.fc.bias. " in refused(tmp_path, more)
    wrong = refused(tmp_path, {"mtp.fc.weight": torch.zeros(64, 64)})
    assert "mtp.fc.weight is [64, 64], expected [64, 128]" in wrong


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"mtp_num_hidden_layers": 0}, "Qwen3_5ForCausalLM has no draft layers for multi-token "
         "prediction: config.json has no mtp_num_hidden_layers above 0"),
        ({"mtp_use_dedicated_embeddings": True},
         "mtp_use_dedicated_embeddings True is not supported, only False"),
    ],
)  # fmt: skip
def test_configs_with_other_draft_layers_are_refused(tmp_path, differs, sentence):
    assert sentence in refused(tmp_path, **differs)


def test_names_of_parts_that_a_model_may_leave_out():
    names = {
        "mtp.fc.weight": "mtp",
        "hf_model.model.mtp.norm.weight": "hf_model.model.mtp",
        "model.visual.blocks.0.norm1.weight": "model.visual",
        "mtp_layers.0.weight": None,
        "model.layers.0.mtp.weight": None,
    }
    found = {name: PARTS.match(name) for name in names}
    assert {name: match and match[0] for name, match in found.items()} == names


@pytest.mark.parametrize("as_float", ["fc", ""], ids=["fc", "all of it"])
def test_parts_of_the_draft_layer_stored_without_quantization_are_loaded_so(tmp_path, as_float):
    """The model's layers are in fp8, and config.json does not name the others as exceptions."""
    tensors = tensors_of(tiny_model(**QWENS["qwen3_5_moe"]).float())
    stored = {}
    for name, weight in tensors.items():
        linear = weight.dim() == 2 and not re.search(r"embed|lm_head|gate\.weight|in_proj_", name)
        if not linear or name.startswith(f"mtp.{as_float}"):
            stored[name] = weight
        else:
            [made] = ONLINE["fp8"].quantize([weight])
            stored |= {f"{name.removesuffix('weight')}{leaf}": x for leaf, x in made.items()}
    ignored = ["gate", "shared_expert_gate", "lm_head", "re:.*in_proj.*"]
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ignored}
    path = write(
        tmp_path / "model",
        stored,
        **QWENS["qwen3_5_moe"],
        quantization_config=quantization,
        dtype="float32",
    )
    model = loader.load(path, draft_layers=1)
    layer = model.mtp.layers[0]
    assert type(model.model.layers[1].self_attn.q_proj) is QuantizedLinear
    assert type(model.mtp.fc) is nn.Linear
    assert torch.equal(model.mtp.fc.weight, tensors["mtp.fc.weight"])
    kinds = (QuantizedLinear, QuantizedExperts) if as_float else (nn.Linear, Experts)
    assert (type(layer.self_attn.q_proj), type(layer.mlp.experts)) == kinds


def drafting(path, **config):
    given = {"speculative_tokens": 3, "max_model_len": 160, "max_num_batched_tokens": 13}
    return engine(path, speculative="mtp", **given | config)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_draft_layer_over_the_whole_sequence(checkpoints, kind):
    """Also after chunks of a prompt, and after rejected drafts, behind which the accepted tokens
    are computed again.
    """
    one = drafting(checkpoints[kind], enable_prefix_caching=False)
    stats = compare_drafts(one, Reference(**QWENS[kind]), 20)
    assert stats.preemptions == 0
    assert {spec.kind for spec in one.executor.programs.draft.specs} == {"kv"}


@pytest.mark.slow
def test_drafts_of_a_sequence_that_was_preempted_are_the_same(checkpoints):
    one = drafting(checkpoints[FAST], enable_prefix_caching=False, num_blocks=10)
    assert compare_drafts(one, Reference(**QWENS[FAST]), 40).preemptions


def greedily(model, prompt, tokens):
    """Assert that each token is the likeliest after those before it."""
    ids = torch.tensor([*prompt, *tokens])
    logits = model(ids, torch.arange(len(ids)))
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens


@pytest.mark.rotating
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_models_through_preemption_and_snapshots_of_prefixes(
    checkpoints, kind
):
    model = tiny_model(**QWENS[kind])
    one = drafting(
        checkpoints[kind], num_blocks=12, scheduling_policy="priority", state_snapshots=4
    )
    one.scheduler.snapshots.least = one.scheduler.snapshots.interval = 16
    document = prompt_of(1, 40)
    for _ in range(2):
        prompts = [prompt_of(2, 7), *(document + prompt_of(i, 5 + 9 * i) for i in range(3))]
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        requests = [
            one.request(f"{i}", prompt, params, priority=-i) for i, prompt in enumerate(prompts)
        ]
        found = run(one, *requests)
        for request, prompt in zip(requests, prompts, strict=True):
            greedily(model, prompt, found[request.id])
    stats = one.stats()
    assert stats.drafted > stats.accepted > 0 and stats.snapshot_hits and stats.preemptions


@pytest.mark.parametrize("kind", KINDS)
def test_forced_acceptance_has_exactly_its_average(checkpoints, kind):
    """Of the steps that have a draft: after rejections in a row, one has none."""
    one = drafting(checkpoints[kind], max_num_batched_tokens=64)
    force_acceptance(one, 2.4)
    requests = [
        one.request(f"{i}", prompt_of(i, 5 + i), SamplingParams(max_tokens=61, ignore_eos=True))
        for i in range(3)
    ]
    for request in requests:
        one.add(request)
    drafted = {request.id: [] for request in requests}
    steps = 0
    while one.has_work:
        before = {request.id: request.num_drafts for request in requests}
        for output, request in ((x, requests[int(x.request_id)]) for x in one.step()):
            steps += 1
            if request.num_drafts > before[request.id]:
                drafted[request.id].append(len(output.token_ids))
    period = Fraction(2.4).limit_denominator(100)
    for of_steps in drafted.values():
        for start in range(len(of_steps) - period.denominator):
            assert sum(of_steps[start : start + period.denominator]) == period.numerator
    stats = one.stats()
    assert all(len(request.new_tokens) == 61 for request in requests)
    assert stats.acceptance_length == pytest.approx(2.4, abs=0.1)
    assert stats.drafts == sum(map(len, drafted.values())) < steps - len(requests)


def test_several_draft_layers_share_all_but_their_decoder_layers(tmp_path):
    differs = QWENS["qwen3_5"] | {"mtp_num_hidden_layers": 2}
    written = tiny_model(2, **differs)
    path = write(tmp_path / "model", tensors_of(written), **differs)
    first, second = loader.load(path, draft_layers=5).draft_models(5)
    assert first.layer.fc is second.layer.fc and first.layer.norm is second.layer.norm
    for index, draft in enumerate((first, second)):
        weight = draft.layer.layers[0].mlp.up_proj.weight
        assert torch.equal(weight, written.mtp.layers[index].mlp.up_proj.weight)
    one = drafting(path, max_num_batched_tokens=64)
    prompts = [prompt_of(i, 5 + 20 * i) for i in range(3)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    found = run(one, *[one.request(f"{i}", prompt, params) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        greedily(written, prompt, found[f"{i}"])
    assert one.stats().accepted


def test_several_draft_layers_of_a_model_that_reads_images_are_refused():
    hf = {"text_config": {"mtp_num_hidden_layers": 2}}
    with pytest.raises(ValueError, match=r"has 2 draft layers .* that reads images supports one"):
        Qwen3_5ForConditionalGeneration.stored_draft(hf)


def test_plans_and_engines_need_no_field_for_the_draft_layer_of_qwen3_next(tmp_path):
    config = {name: x for name, x in (CONFIG | QWENS[FAST]).items() if x is not None}
    assert "num_nextn_predict_layers" not in config
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = loader.load(tmp_path, load_format="dummy", draft_layers=1)
    assert model.draft_models(1)[0].layer.layers[0] is model.mtp.layers[0]
    assert create_model(config).mtp is None
