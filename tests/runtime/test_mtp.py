"""Drafts of a checkpoint's own draft layer: they are what the layer computes, change no result, and
are counted.
"""

import json
import math
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
from serving import COMPILED, serving
from tiny_mtp import CONFIG, DEPTH, DRAFT, tensors_of, tiny_model, write
from torch import nn
from torch.utils import _pytree as pytree

from atomc import ops
from atomc.cli import main
from atomc.loading import loader
from atomc.models import glm4_moe
from atomc.models.experts import Experts
from atomc.models.mtp import DraftModel
from atomc.models.rotary import apply_partial_rope
from atomc.quantization import ONLINE, QuantizedExperts
from atomc.quantization.linear import QuantizedLinear
from atomc.runtime.bench import offline
from atomc.runtime.bench.forced_acceptance import check_acceptance, force_acceptance
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.execution.draft import draft_specs
from atomc.runtime.execution.draft_history import DraftHistory
from atomc.runtime.execution.graphs import _uneven
from atomc.runtime.execution.input_batch import InputBatch, StepShape
from atomc.runtime.execution.views.hidden_states import WithHiddenStates
from atomc.runtime.llm import LLM
from atomc.runtime.requests.request import Request
from atomc.runtime.requests.sampling_params import SamplingParams, Structured
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.scheduler import Scheduler
from atomc.runtime.scheduling.speculative import ForcedAcceptance
from atomc.runtime.scheduling.step import Admission, Chunk, ScheduledStep

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import equality
from embeddings import embed

pytestmark = pytest.mark.xdist_group("mtp")

# fp64, so that rounding decides about no token on any machine.
COMMON = {"dtype": "float64", "device": "cpu"}
# What the first engine compiles, the others and the server load.
OPTIONS = {"strict": True, "glue": "eager", "cache": True, "cache_dir": COMPILED}
LONGEST = 150
# No layer has experts: where these prove nothing, less is compiled.
DENSE = {"first_k_dense_replace": DEPTH + 1}
# Beside bench/equality.py's: chunks, few blocks, priorities, one row more than fits, no sharing.
ENGINES = [
    {"layout": "paged", "max_num_batched_tokens": 37, "num_blocks": 11, "speculative_tokens": 3},
    {"layout": "paged", "max_num_batched_tokens": 256, "num_blocks": 11, "speculative_tokens": 1,
     "scheduling_policy": "priority"},
    {"layout": "paged", "max_num_batched_tokens": 5, "num_blocks": 60, "speculative_tokens": 4},
    {"layout": "paged", "max_num_batched_tokens": 90, "num_blocks": 40, "speculative_tokens": 2,
     "enable_prefix_caching": False},
    {"layout": "contiguous", "max_num_batched_tokens": 64, "speculative_tokens": 3},
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mtp") / "model", tensors_of(tiny_model()))


def engine(checkpoint, layout="paged", **config):
    config = {**COMMON, "max_num_seqs": 8, "num_blocks": 500, "model": str(checkpoint), **config}
    return Engine(EngineConfig(**config, options={**OPTIONS, "layout": layout}), progress=False)


@pytest.fixture(scope="module")
def plain(checkpoint):
    return engine(checkpoint)


@pytest.fixture(scope="module")
def drafting(checkpoint):
    return engine(checkpoint, speculative="mtp", speculative_tokens=3)


def run(one, *requests):
    """The new tokens of each request by its id."""
    found = {request.id: [] for request in requests}
    for request in requests:
        one.add(request)
    while one.has_work:
        for output in one.step():
            assert output.error is None
            found[output.request_id].extend(output.token_ids)
        one.check()
    return found


def prompt_of(seed, length):
    return random.Random(seed).choices(range(1, CONFIG["vocab_size"]), k=length)


class Reference:
    """The model and its draft layer in eager mode, over whole sequences."""

    def __init__(self, draft=None, draft_layers=1, **differs):
        self.model = tiny_model(draft_layers, **differs)
        self.layers = [draft(self.model)] if draft else self.model.draft_models(draft_layers)
        self.draft = self.layers[0]
        self.states = WithHiddenStates(self.model, self.draft.reads)

    def drafts(self, tokens, count):
        """The draft after these tokens: each draft layer over all of them, one token further than
        the one before; then the last one over its own.
        """
        ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
        _, *states = self.states(ids, positions, positions)
        hidden, following, found = torch.cat(states, -1)[:-1], ids[1:], []
        for layer in (self.layers + self.layers[-1:] * count)[:count]:
            rows = torch.arange(len(following))
            logits, states = layer(following, rows, hidden, rows[-1:])
            found.append(int(logits[0].argmax()))
            following = torch.cat([following, logits.argmax(-1)])
            if layer is self.layers[-1]:
                hidden = torch.cat([hidden, states[-1:]])
            else:
                hidden, following = states, following[1:]
        return found


def test_the_draft_layer_of_a_checkpoint_is_loaded_and_computes_as_written(checkpoint):
    model, written = loader.load(checkpoint, draft_layers=1), tiny_model()
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in written.named_parameters()
    }
    for name, weight in written.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight, rtol=0, atol=0)
    ids, hidden = torch.tensor([3, 1, 4, 1, 5]), torch.randn(5, 64, dtype=torch.float64)
    logits, states = model.draft_models(1)[0](ids, torch.arange(5), hidden, torch.tensor([4]))
    layer = written.model.layers[2]
    norm = nn.functional.rms_norm
    embedded = written.model.embed_tokens(ids)
    merged = torch.cat([norm(embedded, (64,), eps=1e-5), norm(hidden, (64,), eps=1e-5)], -1)
    x = merged @ layer.eh_proj.weight.T
    x = super(type(layer), layer).forward(x, *written.model.rotary_emb(x, torch.arange(5)))
    torch.testing.assert_close(states, x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        logits, norm(x[-1:], (64,), eps=1e-5) @ written.lm_head.weight.T, rtol=1e-6, atol=1e-6
    )


def test_without_drafts_the_draft_layer_is_not_loaded(checkpoint):
    model = loader.load(checkpoint)
    assert not any(name.startswith(DRAFT) for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"speculative_tokens": 1}, marks=pytest.mark.slow),
        {"speculative_tokens": 4, "max_num_batched_tokens": 13},
        {"speculative_tokens": 3, "num_blocks": 10},
    ],
    ids=["one", "chunks", "preemption"],
)
def test_drafts_are_those_of_the_draft_layer_over_the_whole_sequence(checkpoint, config):
    """Also after chunks of a prompt, rejected drafts, and in a sequence that was preempted. Not for
    prefixes shared with other requests, see atomc.runtime.execution.draft.
    """
    one = engine(
        checkpoint, speculative="mtp", max_model_len=160, enable_prefix_caching=False, **config
    )
    stats = compare_drafts(one, Reference(), 40 if "num_blocks" in config else 20)
    assert ("num_blocks" not in config) == (stats.preemptions == 0)


def compare_drafts(one, reference, most):
    """Assert that each draft is that of the reference, while some requests run; the statistics."""
    seen = Counter()
    for i, length in enumerate((1, 15, 16, 40, 90)):
        params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=i % 2, seed=i)
        one.add(one.request(str(i), prompt_of(i, length), params))
    while one.has_work:
        one.step()
        for request in one.scheduler.running:
            if request.draft:
                expected = reference.drafts(request.tokens, len(request.draft))
                assert list(request.draft) == expected, (request.id, request.length)
                seen[request.id] += 1
    stats = one.stats()
    assert min(seen.values()) > 2 and len(seen) == 5
    assert 0 < stats.acceptance_rate < 1
    return stats


class OfTwoLayers(DraftModel):
    """A draft over the mean of two hidden states, those of the first layer and of the last."""

    reads = ("model.layers.0", "model.norm")

    def forward(self, input_ids, positions, hidden, logits_rows):
        first, last = hidden.chunk(2, -1)
        logits, states = super().forward(input_ids, positions, (first + last) / 2, logits_rows)
        return logits, torch.cat([states, -states / 2], -1)


def of_two_layers(model):
    draft = model.draft_models(1)[0]
    return OfTwoLayers(draft.embed_tokens, draft.rotary_emb, draft.layer, draft.lm_head)


@pytest.mark.rotating
def test_a_draft_model_may_read_hidden_states_of_several_layers():
    model = tiny_model(**DENSE)
    draft = of_two_layers(model)
    model.draft_models = lambda count: [draft]
    llm = LLM(
        model, speculative="mtp", speculative_tokens=3, max_num_batched_tokens=13,
        max_model_len=160, enable_prefix_caching=False, options={**OPTIONS, "cache": False},
        progress=False,
    )  # fmt: skip
    compare_drafts(llm.engine, Reference(of_two_layers, **DENSE), 20)


LATENT = DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": CONFIG["num_attention_heads"],
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
}


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("indexer", "kinds"),
    [
        ({}, {"latent"}),
        pytest.param(
            {
                "architectures": ["DeepseekV32ForCausalLM"],
                "model_type": "deepseek_v32",
                "index_topk": 6,
                "index_n_heads": 12,
                "index_head_dim": 20,
            },
            {"latent", "indexer"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all keys", "chosen keys"],
)
def test_the_draft_layer_of_a_model_with_latent_attention_has_its_state_too(
    indexer, kinds, tmp_path
):
    latent = LATENT | indexer
    model = write(tmp_path / "model", tensors_of(tiny_model(**latent)), **latent)
    one = engine(
        model,
        speculative="mtp",
        speculative_tokens=2,
        max_num_batched_tokens=13,
        max_model_len=160,
        enable_prefix_caching=False,
    )
    assert {spec.kind for spec in one.executor.programs.draft.specs} == kinds
    compare_drafts(one, Reference(**latent), 20)


def test_a_shared_prefix_changes_no_result_and_its_own_drafts_at_most_by_the_last_row(checkpoint):
    one = engine(checkpoint, speculative="mtp", speculative_tokens=2)
    prompt = prompt_of(7, 64)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    first = run(one, one.request("a", prompt, params))["a"]
    seen = one.stats().accepted
    assert run(one, one.request("b", prompt, params))["b"] == first
    stats = one.stats()
    assert stats.prefix_hits == 48 and stats.accepted == 2 * seen > 0


@pytest.mark.rotating
def test_a_pooled_request_shares_no_blocks_with_requests_that_draft(drafting):
    prompt = prompt_of(8, 64)
    embed(drafting, [prompt], "last")
    hits = drafting.stats().prefix_hits
    run(drafting, drafting.request("a", prompt, SamplingParams(max_tokens=2)))
    assert drafting.stats().prefix_hits == hits
    embed(drafting, [prompt], "last")
    assert drafting.stats().prefix_hits > hits


def differing(checkpoint, number, seeds, alone):
    setting = {"speculative": "mtp", **ENGINES[number]}
    one = equality.engine_of(setting, {**COMMON, "model": str(checkpoint)}, OPTIONS, LONGEST)
    wrong = []
    for seed in seeds:
        requests = equality.mix(seed, one.vocab_size, one.max_len - equality.LONGEST_ANSWER, 6)
        got = equality.run_mix(one, requests)
        wrong += equality.differences(alone, requests, got, bound=0.0)
    return wrong, one.stats()


@pytest.fixture(scope="module")
def alone(plain):
    return equality.Alone(plain)


@pytest.mark.covering
@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_what_a_request_gets_is_what_it_gets_alone_without_drafts(checkpoint, alone, number):
    wrong, stats = differing(checkpoint, number, [number], alone)
    assert wrong == [] and 0 < stats.acceptance_rate < 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_fifty_mixes_too(checkpoint, alone, number):
    wrong, stats = differing(checkpoint, number, range(100 + number, 150, len(ENGINES)), alone)
    assert wrong == [] and 0 < stats.acceptance_rate < 1
    few = ENGINES[number].get("num_blocks", 99) < 20
    assert few <= (stats.preemptions > 0)


def test_penalties_and_forms_are_kept(plain, drafting):
    for params in (
        SamplingParams(max_tokens=30, ignore_eos=True, repetition_penalty=1.3, seed=1),
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, top_p=0.9, seed=2),
        SamplingParams(max_tokens=9, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    ):
        prompt = prompt_of(3, 40)
        assert run(drafting, drafting.request("a", prompt, params)) == run(
            plain, plain.request("a", prompt, params)
        )


@pytest.mark.rotating
@pytest.mark.parametrize("draws", [700, pytest.param(20_000, marks=pytest.mark.slow)])
def test_the_distribution_is_kept(tmp_path, draws):
    """Of the two tokens after the first one, which are verified with a draft of two tokens."""
    differs = {"vocab_size": 8, **DENSE}
    model = tiny_model(**differs)
    checkpoint = write(tmp_path / "model", tensors_of(model), **differs)
    one = engine(
        checkpoint, speculative="mtp", speculative_tokens=2, max_num_seqs=64, max_queue=draws
    )
    temperature = 3.0
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=temperature)
    requests = [one.request(str(seed), [5], replace(params, seed=seed)) for seed in range(draws)]
    found = Counter(tuple(tokens[1:3]) for tokens in run(one, *requests).values())
    assert 0.1 < one.stats().acceptance_rate < 0.9

    def after(*tokens):
        ids = torch.tensor([5, *tokens])
        return (model(ids, torch.arange(len(ids)))[-1] / temperature).softmax(-1)

    expected = torch.zeros(8, 8, dtype=torch.float64)
    for first, chance in enumerate(after()):
        for second, its in enumerate(after(first)):
            expected[second] += draws * chance * its * after(first, second)
    cells = [(float(expected[cell]), found[cell]) for cell in product(range(8), repeat=2)]
    rare = [cell for cell in cells if cell[0] < 5]
    cells = [cell for cell in cells if cell[0] >= 5]
    cells += [(sum(x for x, _ in rare), sum(n for _, n in rare))] if rare else []
    statistic = sum((count - mean) ** 2 / mean for mean, count in cells)
    degrees = len(cells) - 1
    # Exceeded once in a thousand times: Wilson and Hilferty's approximation.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def forced(checkpoint, average):
    one = engine(checkpoint, speculative="mtp", speculative_tokens=3)
    force_acceptance(one, average)
    return one


@pytest.mark.parametrize(
    "average",
    [1.0, 2.4, *(pytest.param(each, marks=pytest.mark.slow) for each in (1.25, 3.0, 4.0))],
)
def test_forced_acceptance_has_exactly_its_average(checkpoint, average):
    one = forced(checkpoint, average)
    requests = [
        one.request(f"{i}", prompt_of(i, 5 + i), SamplingParams(max_tokens=97, ignore_eos=True))
        for i in range(4)
    ]
    for request in requests:
        one.add(request)
    lengths = {request.id: [] for request in requests}
    while one.has_work:
        for output in one.step():
            lengths[output.request_id].append(len(output.token_ids))
    period = Fraction(average).limit_denominator(100)
    for of_steps in lengths.values():
        first, *drafted = of_steps
        assert first == 1 and sum(of_steps) == 97
        for start in range(len(drafted) - period.denominator):
            window = drafted[start : start + period.denominator]
            assert sum(window) == period.numerator, (start, drafted)
    assert one.stats().acceptance_length == pytest.approx(average, abs=0.05)
    assert any("NOT that of the model" in note for note in one.program.report.notes)


def test_forced_acceptance_depends_on_the_request_and_not_on_the_batch(checkpoint):
    one = forced(checkpoint, 2.5)

    def request(i):
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.5, seed=i)
        return one.request(f"{i}", prompt_of(i, 5 + i), params)

    together = run(one, *[request(i) for i in range(5)])
    assert all(run(one, request(i)) == {f"{i}": together[f"{i}"]} for i in range(5))
    starts = {ForcedAcceptance(2.5).count(seed, 0) for seed in range(9)}
    assert starts == {1, 2}


def test_forced_acceptance_leaves_structured_output_alone(checkpoint):
    one = forced(checkpoint, 4.0)
    request = Request("a", [5], SamplingParams(structured=Structured(regex="a+")))
    request.tokens, request.draft = [5, 6], (1, 2, 3)
    assert one.scheduler.chunks.num_forced(request) is None
    request.params = SamplingParams()
    assert one.scheduler.chunks.num_forced(request) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative": "eagle"}, r"speculative is 'eagle', expected one of ngram, mtp"),
        ({}, "speculative_accept needs drafts in every step"),
        ({"speculative": "ngram"}, "set speculative to 'mtp'"),
        (
            {"speculative": "mtp"},
            "speculative_accept is 2.4, a step of 1 draft tokens yields 1 to 2 tokens",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_acceptance(EngineConfig(**settings), 2.4)


@pytest.mark.rotating
def test_a_benchmark_forces_the_acceptance_of_its_engine(checkpoint, tmp_path, capsys, monkeypatch):
    """Two steps with drafts yield five tokens, after the one of the prompt."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [i, 7, 9]}) + "\n" for i in range(3)))
    command = [
        "bench", "throughput", str(checkpoint), "--num-prompts", "3", "--dataset", str(prompts),
        "--output-len", "21", "--device", "cpu", "--dtype", "float64", "--quiet",
        "--json", str(tmp_path / "run.json"), "--options", "glue=eager",
        "--speculative", "mtp", "--speculative-tokens", "3",
    ]  # fmt: skip
    assert main([*command, "--speculative-accept", "4.5"]) == 2
    assert "a step of 3 draft tokens yields 1 to 4 tokens" in capsys.readouterr().err
    engines, measured = [], offline.run

    def run_of(engine, *args, **options):
        engines.append(engine)
        return measured(engine, *args, **options)

    monkeypatch.setattr(offline, "run", run_of)
    assert main([*command, "--speculative-accept", "2.5"]) == 0
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["settings"]["speculative_accept"] == 2.5
    assert [each["output_tokens"] for each in written["requests"]] == [21] * 3
    (stats,) = [engine.stats() for engine in engines]
    assert (stats.drafts, stats.accepted, stats.acceptance_length) == (3 * 8, 3 * 12, 2.5)


def test_ngrams_are_meant_by_a_number_of_tokens_alone_and_each_way_has_a_default_number():
    def both(**settings):
        config = EngineConfig(**settings)
        return config.speculative, config.speculative_tokens

    assert both() == (None, 0)
    assert both(speculative_tokens=5) == both(speculative="ngram", speculative_tokens=5)
    assert both(speculative_tokens=5) == ("ngram", 5)
    assert both(speculative="ngram") == ("ngram", 3) and both(speculative="mtp") == ("mtp", 1)


class WithoutDraft(nn.Linear):
    """A model of the user's."""

    def forward(self, input_ids, positions, logits_rows):
        return super().forward(input_ids)[logits_rows]


def test_a_model_without_draft_layers_is_refused(tmp_path):
    def message(path, **config):
        with pytest.raises(ValueError) as caught:
            engine(path, speculative="mtp", **config)
        return str(caught.value)

    bare = tensors_of(tiny_model(draft_layers=0))
    none = write(tmp_path / "none", bare, num_nextn_predict_layers=0)
    assert "Glm4MoeForCausalLM has no draft layers for multi-token prediction" in message(none)
    dropped = write(tmp_path / "dropped", bare)
    assert "but none has such a name (transformers does not save them)" in message(dropped)
    stock = write(
        tmp_path / "stock",
        bare,
        architectures=["Ernie4_5_MoeForCausalLM"],
        model_type="ernie4_5_moe",
    )
    assert "runs as its transformers class, which drops the draft layers" in message(stock)
    other = write(tmp_path / "other", bare, architectures=["LlamaForCausalLM"])
    assert "LlamaForCausalLM: atomc.models.llama does not implement draft layers" in message(other)
    for module in (tiny_model(draft_layers=0), WithoutDraft(2, 2)):
        with pytest.raises(ValueError, match=r"without its draft layer|has no draft layers"):
            LLM(module, speculative="mtp", max_model_len=64, progress=False)


def test_of_several_draft_layers_the_first_is_used_where_config_json_says_so(tmp_path, drafting):
    tensors = tensors_of(tiny_model())
    second = f"model.layers.{DEPTH + 1}."
    tensors |= {
        name.replace(DRAFT, second): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(DRAFT)
    }
    one = engine(write(tmp_path / "one", tensors), speculative="mtp", speculative_tokens=3)
    params, prompt = SamplingParams(max_tokens=20, ignore_eos=True), prompt_of(9, 20)
    for each in (one, drafting):
        each.add(each.request("a", prompt, params))
    while one.has_work:
        assert [output.token_ids for output in one.step()] == [
            output.token_ids for output in drafting.step()
        ]
    assert not drafting.has_work and one.stats().accepted


SEVERAL = DENSE | {"num_nextn_predict_layers": 3}


def several(path, layers, **differs):
    """A checkpoint with so many draft layers."""
    differs = SEVERAL | differs | {"num_nextn_predict_layers": layers}
    return write(path, tensors_of(tiny_model(layers, **differs)), **differs)


@pytest.mark.parametrize(
    ("layers", "differs", "blocks"),
    [
        (2, {}, 500),
        (2, {}, 10),
        pytest.param(3, {}, 500, marks=pytest.mark.rotating),
        pytest.param(3, LATENT, 500, marks=pytest.mark.rotating),
    ],
    ids=["two", "two, preemption", "three", "three with latent attention"],
)
def test_each_of_several_draft_layers_drafts_one_token_further(tmp_path, layers, differs, blocks):
    """Also after rejected drafts, which leave nothing behind in any layer."""
    one = engine(
        several(tmp_path / "model", layers, **differs), speculative="mtp", speculative_tokens=3,
        max_model_len=160, enable_prefix_caching=False, num_blocks=blocks,
    )  # fmt: skip
    assert [len(programs) for programs in one.executor.programs.draft.layers] == [1] * layers
    reference = Reference(draft_layers=layers, **(SEVERAL | differs))
    stats = compare_drafts(one, reference, 40 if blocks == 10 else 20)
    assert (blocks == 500) == (stats.preemptions == 0)


@pytest.mark.parametrize("number", [0, pytest.param(2, marks=pytest.mark.rotating)])
def test_several_draft_layers_change_no_result(tmp_path, number):
    """With shared prefixes, chunks and preemption."""
    path = several(tmp_path / "model", 2)
    wrong, stats = differing(path, number, [5], equality.Alone(engine(path)))
    assert wrong == [] and 0 < stats.acceptance_rate < 1


def test_the_history_of_a_slot_ends_with_its_request():
    """The next one begins at the same position, behind a shared prefix: it computes no row of the
    prefix again.
    """
    batch = InputBatch(rows=8, sequences=1, columns=2, block_size=4, slots=1, drafts=2)
    history = DraftHistory(1, batch, 1, torch.float32)
    admission = Admission(SamplingParams(), 0, 4, frozenset())

    def draft_step(chunk, hidden):
        shape = batch.write(ScheduledStep((chunk,)))
        batch.keep_samples(torch.full((chunk.num_samples,), 9))
        step, _ = batch.draft_step(shape, torch.full((chunk.num_tokens, 1), hidden))
        return history.moved_back(step)

    prompt = Chunk("a", 0, (1, 2, 3, 4), 0, ((0, (1, 2)),), 1, 1, admission=admission)
    draft_step(prompt, 0.5)
    rejected = {"num_samples": 3, "num_output_rows": 3}
    step = draft_step(Chunk("a", 0, (5, 6, 7), 4, ((0, ()),), **rejected), 1.5)
    assert step.positions.tolist() == [3, 4, 5] and step.input_ids.tolist() == [9, 9, 9]
    assert step.hidden[:, 0].tolist() == [0.5, 1.5, 1.5]
    assert (step.groups[0].slots.tolist(), step.seq_lens.tolist()) == ([7, 8, 9], [6])
    assert step.logits_rows.tolist() == [1]
    step = draft_step(
        Chunk("b", 0, (5, 6, 7), 5, ((0, (3, 2)),), **rejected, admission=admission), 2.5
    )
    assert step.positions.tolist() == [5, 6, 7] and step.hidden[:, 0].tolist() == [2.5] * 3
    assert step.groups[0].slots.tolist() == [9, 10, 11] and step.logits_rows.tolist() == [0]


def test_a_draft_layer_whose_blocks_no_layer_of_the_model_has_is_refused(drafting):
    specs = drafting.program.specs
    for paging in (specs[0].paging._replace(window=8), None):
        with pytest.raises(ValueError, match="no layer of the model has: its blocks cannot be"):
            draft_specs([replace(specs[0], paging=paging)], specs)


class WindowAttention(glm4_moe.Attention):
    def forward(self, x_TD, cos, sin):
        q, k, v = (
            project(x_TD).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_partial_rope(self.q_norm(q), self.k_norm(k), cos, sin)
        out = ops.attention(q, k, v, self.kv, scale=self.scale, window=8)
        return self.o_proj(out.flatten(-2))


@pytest.mark.rotating
def test_draft_layers_with_a_window_read_no_blocks_that_their_sequence_released():
    def drafts(released):
        model = tiny_model(3, **SEVERAL)
        for module in model.modules():
            if type(module) is glm4_moe.Attention:
                module.__class__ = WindowAttention
        one = LLM(
            model, speculative="mtp", speculative_tokens=3, max_model_len=160, num_blocks=40,
            enable_prefix_caching=False, options={**OPTIONS, "layout": "paged", "cache": False},
            progress=False,
        ).engine  # fmt: skip
        prompts = {str(i): prompt_of(i, 1 + 9 * i) for i in range(4)}
        found = {name: [] for name in prompts}
        for name, prompt in prompts.items():
            one.add(one.request(name, prompt, SamplingParams(max_tokens=50, ignore_eos=True)))
        drafts = []
        while one.has_work:
            for output in one.step():
                found[output.request_id].extend(output.token_ids)
            drafts.append([request.draft for request in one.scheduler.running])
            [group] = one.scheduler.pool.groups
            for cache in one.executor.runner.draft.caches:
                for tensor in pytree.tree_leaves(cache):
                    tensor[list(group.free)] = released
        for name, prompt in prompts.items():
            ids = torch.tensor([*prompt, *found[name]])
            expected = model(ids, torch.arange(len(ids))).argmax(-1)
            assert found[name] == expected[len(prompt) - 1 : -1].tolist()
        assert 0 < one.stats().acceptance_rate < 1
        return drafts

    assert drafts(0.0) == drafts(math.nan)


def test_only_the_draft_layers_that_are_used_are_loaded(tmp_path):
    path = write(tmp_path / "model", tensors_of(tiny_model(3, **SEVERAL)), **SEVERAL)
    for wanted, loaded in ((1, 1), (2, 2), (7, 3)):
        layers = loader.load(path, draft_layers=wanted).model.layers
        assert len(layers) == DEPTH + loaded
        assert len(loader.load(path).model.layers) == DEPTH


def of_last_token(model):
    """A model whose next token depends on the last one only, and draft layers that compute it."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("eh_proj.weight"):
            weight.copy_(torch.eye(*weight.shape))
    return model


@pytest.mark.parametrize(("wrong", "accepted"), [((), 2), (("second",), 1), (("first",), 0)])
def test_drafts_of_layers_that_compute_the_model_are_all_accepted(tmp_path, wrong, accepted):
    """And those of a layer that does not are not."""
    differs = SEVERAL | {"num_nextn_predict_layers": 2}
    model = of_last_token(tiny_model(2, **differs))
    prompts = [prompt_of(i, 3 + 9 * i) for i in range(3)]
    for layer in wrong:
        index = DEPTH + ("first", "second").index(layer)
        model.model.layers[index].shared_head.norm.weight.neg_()
    path = write(tmp_path / "model", tensors_of(model), **differs)
    one = engine(path, speculative="mtp", speculative_tokens=2)
    params = SamplingParams(max_tokens=22, ignore_eos=True)
    found = run(one, *[one.request(f"{i}", prompt, params) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([*prompt, *found[f"{i}"]])
        expected = model(ids, torch.arange(len(ids))).argmax(-1)
        assert found[f"{i}"] == expected[len(prompt) - 1 : -1].tolist()
    stats = one.stats()
    assert stats.drafts and stats.accepted == accepted * stats.drafts


@pytest.mark.rotating
def test_a_module_with_its_draft_layer_drafts_too(drafting):
    llm = LLM(
        tiny_model(), speculative="mtp", speculative_tokens=3,
        options={**OPTIONS, "layout": "paged"}, progress=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompt = prompt_of(4, 30)
    tokens = list(llm.generate([prompt], params)[0].token_ids)
    assert tokens == run(drafting, drafting.request("a", prompt, params))["a"]
    assert 0 < llm.engine.stats().acceptance_rate < 1


def test_a_failed_step_is_repeated_with_its_drafts(drafting, plain, monkeypatch):
    params, prompt = SamplingParams(max_tokens=30, ignore_eos=True), prompt_of(5, 20)
    expected = run(plain, plain.request("a", prompt, params))["a"]
    drafting.add(drafting.request("a", prompt, params))
    found = [token for _ in range(4) for output in drafting.step() for token in output.token_ids]
    assert drafting.scheduler.requests["a"].draft

    def broken(*_):
        raise RuntimeError("the device said no")

    with monkeypatch.context() as patch:
        patch.setattr(drafting.executor.runner, "propose", broken)
        with pytest.raises(RuntimeError, match="said no"):
            drafting.step()
    drafting.check()
    while drafting.has_work:
        found += [token for output in drafting.step() for token in output.token_ids]
    assert found == expected


def test_draft_steps_begin_at_the_last_accepted_token_and_write_only_to_blocks_of_their_sequence():
    batch = InputBatch(rows=16, sequences=4, columns=4, block_size=4, drafts=3)
    prompt = Chunk("a", 0, (1, 2), 0, ((0, (3,)),), next_token=6)
    drafted = Chunk("b", 1, (7, 8, 9), 4, ((0, (5, 2)),), num_samples=3, num_output_rows=3)
    shape = batch.write(ScheduledStep((prompt, drafted)))
    batch.keep_samples(torch.tensor([8, 4, 4]))  # the first draft token is right
    step, positions = batch.draft_step(shape, torch.zeros(5, 8))
    assert step.input_ids.tolist() == [2, 6, 8, 4, 4]
    assert (int(step.logits_rows[0]), int(positions[0])) == (3, 5)

    def following(position):
        tokens, positions = torch.tensor([4, 0]), torch.tensor([position, 0])
        step = batch.next_draft_step(shape, tokens, positions, torch.zeros(2, 8))
        assert step.query_start.tolist() == [0, 1, 1]
        return step.groups[0].slots.tolist(), step.seq_lens.tolist()

    assert following(6) == ([2 * 4 + 2, -1], [7, 0])
    assert following(8) == ([-1, -1], [8, 0])  # its second block is its last


def test_blocks_are_reserved_for_draft_steps_up_to_the_longest_sequence():
    def num_blocks(length, lookahead):
        limits = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 32}
        scheduler = Scheduler(BlockPool(9, 16), **limits, lookahead=lookahead)
        scheduler.add(Request("a", [1] * length))
        scheduler.next_step()
        return len(scheduler.pool.table("a"))

    assert (num_blocks(14, 0), num_blocks(14, 2), num_blocks(14, 3), num_blocks(31, 9)) == (
        1,
        1,
        2,
        2,
    )


class PaddedSteps:
    """Runs steps as CUDA graphs do, in shapes larger than they are."""

    def __init__(self, runner, drafts):
        self.runner, self.captured, self.drafts = runner, {}, drafts

    def shape_for(self, rows, sequences, wanted, longest):
        columns = self.runner.input_batch.columns
        if longest <= 1 + self.drafts:
            padded = (sequences + 2) * (1 + self.drafts)
            return StepShape(padded, sequences + 2, padded, columns)
        padded = min(rows + 5, self.runner.input_batch.rows)
        return StepShape(padded, _uneven(padded, sequences + 2), wanted + 1, columns)

    def __call__(self, shape):
        return self.runner._run(self.runner.program, shape)


@pytest.mark.parametrize("layers", [1, 2])
def test_padded_steps_give_the_same_tokens_and_drafts(checkpoint, layers, tmp_path):
    path = checkpoint if layers == 1 else several(tmp_path / "model", layers)

    def steps(padded):
        one = engine(path, speculative="mtp", speculative_tokens=3, max_num_batched_tokens=50)
        if padded:
            one.executor.runner.variants["text"].graphs = PaddedSteps(one.executor.runner, 3)
        for i, length in enumerate((3, 20, 60, 90)):
            params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=i % 2, seed=i)
            one.add(one.request(str(i), prompt_of(i, length), params))
        found = []
        while one.has_work:
            outputs = one.step()
            drafts = [(request.id, request.draft) for request in one.scheduler.running]
            found.append(([(output.request_id, output.token_ids) for output in outputs], drafts))
        assert set(one.stats().steps) == {"full graph" if padded else "eager: on a CPU"}
        return found

    assert steps(padded=True) == steps(padded=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("layers", "count"), [(1, 1), (1, 3), (2, 3)])
def test_drafts_of_cuda_graphs_are_those_of_calls(checkpoint, layers, count, tmp_path):
    path = checkpoint if layers == 1 else several(tmp_path / "model", layers)

    def steps(enforce_eager):
        one = engine(
            path,
            device="cuda",
            dtype="float32",
            speculative="mtp",
            speculative_tokens=count,
            enforce_eager=enforce_eager,
        )
        for i, length in enumerate((3, 20, 60, 90)):
            params = SamplingParams(max_tokens=20, ignore_eos=True, seed=i)
            one.add(one.request(str(i), prompt_of(i, length), params))
        found = []
        while one.has_work:
            one.step()
            found.append([(request.id, request.draft) for request in one.scheduler.running])
        stats = one.stats()
        assert ("full graph" in stats.steps) == (not enforce_eager) and stats.accepted > 0
        return found

    assert steps(enforce_eager=False) == steps(enforce_eager=True)


@pytest.mark.parametrize("as_float", ["eh_proj", ""], ids=["eh_proj", "all of it"])
def test_parts_of_the_draft_layer_stored_without_quantization_are_loaded_so(tmp_path, as_float):
    """The model's layers are in fp8, and config.json does not name the others as exceptions."""
    tensors = tensors_of(tiny_model().float())
    stored = {}
    for name, weight in tensors.items():
        kept = "embed" in name or "head" in name or "gate.weight" in name or weight.dim() < 2
        if kept or name.startswith(f"{DRAFT}{as_float}"):
            stored[name] = weight
        else:
            [made] = ONLINE["fp8"].quantize([weight])
            stored |= {f"{name.removesuffix('weight')}{leaf}": x for leaf, x in made.items()}
    quantization = {"quant_method": "fp8", "ignored_layers": ["gate", "lm_head"]}
    path = write(tmp_path / "model", stored, quantization_config=quantization, dtype="float32")
    layers = loader.load(path, draft_layers=1).model.layers
    assert type(layers[1].self_attn.q_proj) is QuantizedLinear
    assert type(layers[2].eh_proj) is nn.Linear
    assert torch.equal(layers[2].eh_proj.weight, tensors[f"{DRAFT}eh_proj.weight"])
    kinds = (QuantizedLinear, QuantizedExperts) if as_float else (nn.Linear, Experts)
    assert (type(layers[2].self_attn.q_proj), type(layers[2].mlp.experts)) == kinds


@pytest.mark.rotating
def test_the_server_drafts_and_counts(checkpoint, plain):
    httpx, tokenizers = pytest.importorskip("httpx"), pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model = shutil.copytree(checkpoint, checkpoint.parent / "with tokenizer")
    tokenizer.save(str(model / "tokenizer.json"))
    prompt = prompt_of(9, 30)
    with serving(
        model, "--dtype", "float64", "--device", "cpu", "--options", "glue=eager",
        "--options", "layout=paged", "--speculative", "mtp", "--speculative-tokens", 3, "--served-model-name", "tiny",
    ) as server:  # fmt: skip
        for asked in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3}):
            body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, **asked}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            params = SamplingParams(max_tokens=40, ignore_eos=True, **asked)
            expected = run(plain, plain.request("a", prompt, params))["a"]
            assert answer["choices"][0]["text"].split() == [f"w{token}" for token in expected]
        metrics = httpx.get(f"{server.url}/metrics").text

    def value(name):
        return float(re.search(rf"^atomc:spec_decode_{name}{{.*}} (.*)$", metrics, re.M)[1])

    drafted, accepted = value("num_draft_tokens_total"), value("num_accepted_tokens_total")
    assert drafted > accepted > 0
    assert value("draft_acceptance_rate") == pytest.approx(accepted / drafted)
    length = 1 + accepted / value("num_drafts_total")
    assert value("mean_acceptance_length") == pytest.approx(length)
    assert "Glm4MoeForCausalLM on cpu" in server.log
