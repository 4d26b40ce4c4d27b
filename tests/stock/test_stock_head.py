"""Classes of transformers whose logits a rank may compute for its part of the vocabulary alone, and
those where it may not. How ranks then choose tokens: see tests/parallel/test_vocab_parallel.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_group import fake_group
from torch import Tensor, nn

pytest.importorskip("transformers")

from tensor_parallel_ranks import IDS, POSITIONS, Case, whole
from test_self_check import llm_of, stock

import atomc
from atomc.options import Options
from atomc.parallel.process_group import TensorParallel
from atomc.parallel.vocab import LogitsOfRank, VocabParallelHead, leave_apart
from atomc.runtime.execution.self_check import SelfCheck
from atomc.runtime.execution.views.stock_head import separable_head
from atomc.stock.adapter import StockModel

RANKS = 2
# What classes compute of the outputs of their heads.
CLASSES = {
    "as they are": Case("qwen3", "stock"),
    "tied": Case("llama", "stock", {"tie_word_embeddings": True}),
    "an odd vocabulary": Case("llama", "stock", {"vocab_size": 97}),
    "capped": Case("gemma2", "stock", {"final_logit_softcapping": 5.0}),
    "divided": Case("granite", "stock", {"logits_scaling": 3.0}),
    "multiplied": Case("cohere", "stock", {"logit_scale": 0.25}),
}


def divided(case: Case, rank: int = 0) -> StockModel:
    model = atomc.parallelize(whole(case), TensorParallel(rank, RANKS, fake_group(RANKS)))
    assert isinstance(model, StockModel)
    return model


def with_tail(tail: Callable[[Tensor], Tensor]) -> StockModel:
    """A class that computes this of the outputs of its head."""
    model = divided(CLASSES["as they are"])
    hf_model: Any = model.hf_model
    kind = type(hf_model)

    class Tailed(kind):
        def forward(self, *args: Any, **named: Any) -> Any:
            out = super().forward(*args, **named)
            out.logits = tail(out.logits)
            return out

    hf_model.__class__ = Tailed
    return model


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_computed_of_each_output_alone_is_computed_of_a_part(name: str) -> None:
    expected = logits_of_states(whole(CLASSES[name]))
    size, found = expected.shape[-1], []
    for rank in range(RANKS):
        model = divided(CLASSES[name], rank)
        head = separable_head(model)
        assert head is model.hf_model.lm_head
        rows = len(head.weight)
        apart = leave_apart(head, rank)
        assert (apart.size, apart.first) == (size, rank * rows)
        found.append(logits_of_states(model))
        assert found[-1].shape == (len(IDS), rows)
    assert torch.cat(found, -1)[:, :size].allclose(expected, atol=1e-5)


def logits_of_states(model: Any) -> Tensor:
    """Logits of random states behind the layers, whose sums over ranks that are not there would be
    wrong.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    states = torch.randn(1, len(IDS), 64, generator=torch.Generator().manual_seed(0))
    out = BaseModelOutputWithPast(last_hidden_state=states)
    model.hf_model.model.__dict__["forward"] = lambda *_, **__: out
    logits: Tensor = model(IDS, POSITIONS)
    return logits


def masked(logits: Tensor, number: int) -> Tensor:
    out = logits.clone()
    out[..., number] = -torch.inf
    return out


@pytest.mark.parametrize(
    "tail",
    [
        lambda logits: logits.log_softmax(-1),
        lambda logits: logits - logits.amax(-1, keepdim=True),
        lambda logits: masked(logits, 5),
        lambda logits: masked(logits, 90),
        lambda logits: logits + torch.arange(logits.shape[-1]),
        lambda logits: logits * torch.linspace(0.5, 1, 96),
        lambda logits: logits[..., :80],
        lambda logits: logits.flip(-1),
        lambda logits: logits.where(logits >= logits.topk(9).values[..., -1:], -torch.inf),
    ],
    ids=["softmax", "largest", "first id", "last id", "place", "scales", "fewer", "order", "top"],
)
def test_what_needs_other_outputs_is_computed_of_all(tail: Callable[[Tensor], Tensor]) -> None:
    model = with_tail(tail)
    assert separable_head(model) is None
    assert type(model.hf_model.lm_head) is VocabParallelHead
    assert separable_head(with_tail(lambda logits: logits.tanh() * 2)) is not None


def test_a_head_that_is_whole_is_none() -> None:
    assert separable_head(whole(CLASSES["as they are"])) is None
    model = divided(CLASSES["as they are"])
    model.hf_model.lm_head = nn.Linear(64, 96, bias=False)
    assert separable_head(model) is None


def test_all_logits_are_compared_with_those_of_the_class() -> None:
    """Of this rank's part only, ranks might come to different verdicts."""
    llm, gathered = llm_of(stock("llama"), self_check=False), []

    class Apart(LogitsOfRank):
        def gathered(self, logits: Tensor) -> Tensor:
            gathered.append(logits.shape[-1])
            return torch.cat([logits, 1 + logits.square()], -1)

    apart = Apart(96, 0, RANKS, "")
    verdict = SelfCheck(llm.engine.module, Options(), apart).verdict(llm.program)
    assert verdict.right and len(gathered) == 2 + 2 * 5
