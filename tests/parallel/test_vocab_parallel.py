"""Embeddings and heads cut by vocabulary compute what the whole ones do, on each process."""

import copy
import multiprocessing
from pathlib import Path

import pytest
import torch
import vocab_ranks
from fake_group import fake_group
from torch import nn
from vocab_model import IDS, Decoder, divided, rows
from vocab_ranks import CASES, COMPILED, DTYPES, RANKS, some_logits

from atomc.cache.model_fingerprint import model_parts
from atomc.loading.create_model import create_model
from atomc.ops.inputs import ModelInputs
from atomc.options import Options
from atomc.parallel.process_group import TensorParallel
from atomc.parallel.sharding import cut_parameters
from atomc.parallel.vocab import gather_logits, leave_apart, rows_of_rank, sum_lookups
from atomc.platform import Platform
from atomc.program import compile_model

pytestmark = pytest.mark.xdist_group("vocabulary")  # one worker starts the processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both processes wrote."""
    made = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=vocab_ranks.run, args=(rank, made), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=240)
        process.kill()  # if it still waits for the other one
    return made


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_compute_the_logits_of_one(case, folder):
    size, tied = case
    whole = Decoder(size, tied)(IDS % size)
    found = [torch.load(folder / f"{CASES.index(case)}-{rank}.pt") for rank in range(RANKS)]
    for out in found:
        assert not isinstance(out, str), out
        for logits in out["logits"]:
            torch.testing.assert_close(logits, whole)
    first, second = found
    assert torch.equal(first["logits"][-1], second["logits"][-1]) and first["ops"] == second["ops"]
    if case in COMPILED:
        assert first["ops"].items() >= {"allreduce_rms_norm": 1, "all_gather": 1}.items()


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_processes_find_the_largest_logit_from_their_largest_ones(dtype, folder):
    whole = some_logits(dtype)
    for rank in range(RANKS):
        ids, largest, gathered = torch.load(folder / f"apart-{rank}.pt")[dtype]
        torch.testing.assert_close(gathered, whole, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(largest, whole.amax(-1), rtol=0, atol=0, equal_nan=True)
        sampled = [0, 1, 2, 3, 4, 7]
        assert ids[sampled].tolist() == [
            whole[row].eq(whole[row].max()).nonzero()[0].item() for row in sampled
        ]
        assert ids.min() >= 0 and ids.max() < 67


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [12, 11, 10])
def test_every_id_is_held_once_and_the_last_rows_are_zeros(size, ranks):
    weight = torch.arange(1, size + 1.0)[:, None]
    parts = [rows(TensorParallel(rank, ranks, "")).of(weight) for rank in range(ranks)]
    assert {len(part) for part in parts} == {rows_of_rank(size, ranks)}
    joined = torch.cat(parts)
    assert torch.equal(joined[:size], weight) and not joined[size:].any()


def test_a_process_without_an_id_is_refused():
    with pytest.raises(ValueError, match="a vocabulary of 9 cannot be cut over 4 processes"):
        rows_of_rank(9, 4)


def cut(rank: int, model: Decoder) -> nn.Module:
    return divided(model, TensorParallel(rank, 2, fake_group(2)))


def test_ranks_differ_in_parameters_and_buffers_only():
    texts = []
    for rank in (0, 1):
        model = cut(rank, Decoder(67, False))
        assert not {"rank", "tp"} & {name for m in model.modules() for name in vars(m)}
        ignored = {id(p) for p in (*model.parameters(), *model.buffers())}
        texts.append(
            [
                sorted(
                    (k, repr(v)) for k, v in vars(m).items() if id(v) not in ignored and k[0] != "_"
                )
                for m in model.modules()
            ]
        )
        assert model.embed.first_id.item() == 34 * rank
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_head_left_apart_has_the_columns_from_its_first_id_on(rank):
    head = nn.Linear(8, 67, bias=False)
    tp, part = TensorParallel(rank, 2, fake_group(2)), copy.deepcopy(head)
    cut_parameters(part, {"weight": rows(tp)})
    gather_logits(part, tp)
    of_rank, x = leave_apart(part, rank), torch.randn(3, 8)
    assert (of_rank.first, of_rank.size) == (34 * rank, 67)
    columns = head(x)[:, of_rank.first :][:, :34]
    torch.testing.assert_close(part(x)[:, : columns.shape[1]], columns)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_class_that_scales_its_lookup_scales_the_rows_of_its_process(rank):
    class Scaled(nn.Embedding):
        def forward(self, input):
            return super().forward(input) * 3

    whole = Scaled(10, 4)
    part = copy.deepcopy(whole)
    tp = TensorParallel(rank, 2, fake_group(2))
    cut_parameters(part, {"weight": rows(tp)})
    sum_lookups(part, tp)
    ids = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    expected = whole(ids) * torch.tensor([1 - rank, 1 - rank, rank, rank])[:, None]
    assert torch.equal(part(ids), expected) and part.num_embeddings == 10
    assert torch.equal(copy.deepcopy(part)(ids), expected)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 67,
    "tie_word_embeddings": True,
}


@pytest.mark.rotating
def test_a_served_model_compiles_for_any_rows_of_logits_under_one_key_on_all_ranks():
    parts = []
    for rank in (0, 1):
        model = create_model(LLAMA, dtype=torch.float32, device="cpu").eval().requires_grad_(False)
        tp = TensorParallel(rank, 2, fake_group(2))
        cut_parameters(model, {"model.embed_tokens.weight": rows(tp)})
        sum_lookups(model.model.embed_tokens, tp)
        gather_logits(model.lm_head, tp)
        where = Platform.detect("cpu")
        parts.append(model_parts(model, Options(), where, ModelInputs(), owned=False))
    assert parts[0] == parts[1]
    compiled = compile_model(model, {"strict": True, "glue": "eager", "cache": False})
    assert compiled.report.num_ops["all_gather"] == 1


def test_a_model_on_meta_is_cut_and_keeps_its_first_id():
    with torch.device("meta"):
        model = cut(1, Decoder(67, True))
    assert model.head.weight is model.embed.weight and model.embed.weight.shape[0] == 34
    assert model.embed.first_id.item() == 34
