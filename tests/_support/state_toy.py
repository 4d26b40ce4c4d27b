"""Ops with state of other kinds than keys and values, defined here and in no table, toy models of
them, and engines that serve these. In fp64, so that rounding decides about no token.

T new tokens, S sequences, D width.
"""

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomc import ops
from atomc.ops import REGISTRY
from atomc.ops.op import op
from atomc.ops.op_traits import Kind, StateBinding
from atomc.ops.state import StateSpec, state_before
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.requests.sampling_params import SamplingParams

VOCAB, WIDTH, ODD, DECAY, MAX_LEN = 61, 16, 7, 0.8, 96
OPTIONS = {"strict": True, "glue": "eager", "layout": "paged"}


# ---- state of each sequence: a decayed running sum


def decayed_sum(x: Tensor, state: Tensor | None = None, *, decay: float) -> Tensor:
    """Row t of the result is the sum of decay^(t - j) x[j] over j <= t. x [T, D]."""
    t = torch.arange(len(x), device=x.device)
    return (decay ** (t[:, None] - t).clamp(min=0).to(x.dtype)).tril() @ x


def decayed_sum_step(
    x: Tensor,
    recurrent_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    *,
    decay: float,
) -> Tensor:
    """The same of ragged sequences, whose sums before the step are in their slots of
    recurrent_state [slots, D].
    """
    before = state_before(recurrent_state, query_start, seq_lens, state_slots)
    row, owner, real = rows_of(x, query_start)
    ago = row - query_start[owner]
    near = (owner[:, None] == owner) & (row[:, None] >= row) & real
    weights = (decay ** (row[:, None] - row).clamp(min=0).to(x.dtype)) * near
    sums = (
        weights @ x.masked_fill(~real[:, None], 0)
        + decay ** (ago[:, None] + 1).to(x.dtype) * before[owner]
    )
    last, new = (query_start[1:] - 1).clamp(min=0), query_start.diff()[:, None] > 0
    recurrent_state[state_slots] = torch.where(new, sums[last], before)
    return sums


def rows_of(x, query_start):
    """[T] each: the row's number, its sequence, and whether it has one."""
    row = torch.arange(len(x), device=x.device)
    owner = torch.searchsorted(query_start[1:].long(), row, right=True)
    last = len(query_start) - 2
    return row, owner.clamp(max=last), owner <= last


def sum_spec(name, given, codes):
    return StateSpec.of(name, "recurrent", [(given["x"].shape[-1],)], given["x"].dtype)


def sum_form(given, state, step):
    return MADE["decayed_sum_step"](
        given["x"],
        state["recurrent_state"],
        step.query_start,
        step.seq_lens,
        step.state_slots,
        decay=given["decay"],
    )


def own_decayed_sum_step(x, recurrent_state, query_start, seq_lens, state_slots, *, decay):
    return decayed_sum_step(x, recurrent_state, query_start, seq_lens, state_slots, decay=decay)


# ---- one tensor of odd width a token: what lies before is recalled by likeness


def recall(q: Tensor, m: Tensor, state: Tensor | None = None) -> Tensor:
    """softmax(q m^T) m over the rows up to each one's own. q and m [T, ODD]."""
    later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return (q @ m.T).masked_fill(later, -torch.inf).softmax(-1) @ m


def recall_write(m: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
    """As kv_write. Rows without a slot stand behind all others, and repeat the first: nothing waits
    for the device.
    """
    flat = kv_cache.view(-1, m.shape[-1])
    source = torch.where(slots >= 0, torch.arange(len(slots), device=slots.device), 0)
    at, known = slots[source].clamp(min=0), (slots[source] >= 0)[:, None]
    flat[at] = torch.where(known, m[source], flat[at])
    return m.new_empty((0,))


def recall_read(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
) -> Tensor:
    """Rows of no sequence are zero."""
    row, owner, real = rows_of(q, query_start)
    known = kv_cache[block_tables.long()].flatten(1, 2)[owner]  # [T, columns, ODD]
    position = seq_lens[owner] - (query_start[1:][owner] - row)
    hidden = torch.arange(known.shape[1], device=q.device) > position[:, None]
    weights = torch.einsum("tw,tcw->tc", q, known).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("tc,tcw->tw", weights.nan_to_num(0), known).masked_fill(~real[:, None], 0)


def recall_spec(name, given, codes):
    return StateSpec.of(name, "latent", [(given["m"].shape[-1],)], given["m"].dtype)


def recall_form(given, state, step):
    token = MADE["recall_write"](given["m"], state["kv_cache"], step.slots)
    return MADE["recall_read"](
        given["q"], state["kv_cache"], step.query_start, step.seq_lens, step.block_tables, token
    )


def own_recall_write(m, kv_cache, slots):
    return recall_write(m, kv_cache, slots)


def own_recall_read(q, kv_cache, query_start, seq_lens, block_tables, token):
    return recall_read(q, kv_cache, query_start, seq_lens, block_tables, token)


MADE: dict[Any, Any] = {}


def like(x, *_, **__):
    return torch.empty_like(x)


def sum_cost(call):
    """Each sequence reads and replaces its state."""
    x, states = call["x"], call["state_slots"].shape[0] * WIDTH * 8
    return 2 * x.bytes + 2 * states, 2 * x.numel


def write_cost(call):
    return 2 * call["m"].bytes, 0


def read_cost(call):
    """Each sequence reads its tokens once."""
    return 2 * call["q"].bytes + call["seq_lens"].shape[0] * call.context * ODD * 8, 4 * call[
        "q"
    ].numel * call.context


@pytest.fixture(scope="module", autouse=True)
def made():
    """The ops, while a module of tests runs: other tests run over all that there are."""
    if not MADE:
        define_ops()  # once per process: torch.library keeps them
    REGISTRY.update(MADE)
    yield MADE
    for name in MADE:
        del REGISTRY[name]


def define_ops():
    rows = lambda given: given["x"].shape[0]  # noqa: E731
    MADE["decayed_sum"] = op(
        kind=Kind.OTHER,
        rows=None,
        shape=like,
        state=StateBinding("state", rows, sum_spec, sum_form),
    )(decayed_sum)
    MADE["decayed_sum_step"] = op(
        kind=Kind.STATE_WRITE, rows=None, mutates=("recurrent_state",), cost=sum_cost, shape=like
    )(decayed_sum_step)
    MADE["decayed_sum_step"].kernel("mine")(own_decayed_sum_step)
    MADE["recall"] = op(
        kind=Kind.OTHER,
        rows=None,
        shape=like,
        state=StateBinding("state", lambda given: given["q"].shape[0], recall_spec, recall_form),
    )(recall)
    MADE["recall_write"] = op(
        kind=Kind.STATE_WRITE,
        rows=None,
        mutates=("kv_cache",),
        cost=write_cost,
        shape=lambda m, *_: m.new_empty((0,)),
    )(recall_write)
    MADE["recall_write"].kernel("mine", layout="paged")(own_recall_write)
    MADE["recall_read"] = op(kind=Kind.OTHER, rows=None, cost=read_cost, shape=like)(recall_read)
    MADE["recall_read"].kernel("mine", layout="paged")(own_recall_read)


# ---- a model of them


class Summed(nn.Module):
    def __init__(self, decay=DECAY):
        super().__init__()
        self.state, self.decay = ops.state_handle(WIDTH), decay

    def forward(self, x):
        return MADE["decayed_sum"](x, self.state, decay=self.decay)


class Recalling(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.m, self.out = (
            nn.Linear(WIDTH, ODD),
            nn.Linear(WIDTH, ODD),
            nn.Linear(ODD, WIDTH),
        )
        self.state = ops.state_handle(ODD)

    def forward(self, x):
        return self.out(MADE["recall"](self.q(x), self.m(x), self.state))


class Attending(nn.Module):
    def __init__(self, window=0):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.kv, self.window = ops.kv_state(1, WIDTH), window

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (1, WIDTH)) for linear in (self.q, self.k, self.v))
        return ops.attention(q, k, v, self.kv, scale=0.3, window=self.window).flatten(-2)


class LatentAttending(nn.Module):
    """Three heads, whose keys are 5 + 4 wide and whose values 6, over a latent of 7."""

    def __init__(self):
        super().__init__()
        self.q, self.kv_a = nn.Linear(WIDTH, 27, bias=False), nn.Linear(WIDTH, 11, bias=False)
        self.kv_b, self.out = nn.Linear(7, 33, bias=False), nn.Linear(18, WIDTH, bias=False)
        self.kv = ops.latent_state(7, 4)

    def forward(self, x):
        q_nope, q_rope = self.q(x).unflatten(-1, (3, 9)).split([5, 4], -1)
        latent, k_rope = self.kv_a(x).split([7, 4], -1)
        found = ops.mla_attention(
            q_nope, q_rope, latent, k_rope.unsqueeze(-2), self.kv_b.weight, self.kv, scale=0.3
        )
        return self.out(found.flatten(-2))


KINDS = {
    "latent": (LatentAttending, LatentAttending),
    "summed": (Summed, Summed),
    "recalling": (Recalling, Recalling),
    "mixed": (Summed, Attending, Recalling, Summed),
    "windowed": (Attending, Summed, lambda: Attending(window=5)),
}


def lasting():
    """Its state depends on the last 50 tokens or so."""
    return Summed(decay=0.95)


# In these a wrong state shows, even long after it was wrong.
LASTING = {
    "lasting": (lasting, lasting),
    "lasting mixed": (lasting, Attending, Recalling, lasting),
    "lasting windowed": (Attending, lasting, lambda: Attending(window=20)),
}
WITH_SUMS = ("summed", "mixed", "windowed")


class Toy(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layer() for layer in {**KINDS, **LASTING}[kind])
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids, positions, logits_rows=None):
        x = self.embed(input_ids) + torch.sin(positions)[:, None].to(self.embed.weight.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.lm_head(x if logits_rows is None else x.index_select(0, logits_rows))


def toy(kind, device="cpu", dtype=torch.float64):
    """In fp64, so that rounding decides about no token."""
    torch.manual_seed(len(kind))
    model = Toy(kind).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    return model.eval().requires_grad_(False).to(device)


def started(kind, module=None, **config):
    given = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "num_blocks": 40,
        "seed": 0,
        "options": OPTIONS,
    }
    return Engine(EngineConfig(**{**given, **config}), module=module or toy(kind), progress=False)


def prompts_of(*lengths, seed=0):
    generator = random.Random(seed)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in lengths]


@cache
def plain(kind):
    return toy(kind)


def alone(kind, prompt, count):
    """Greedy tokens of the plain model, which computes the whole sequence for each."""
    model, tokens = plain(kind), list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor(tokens), torch.arange(len(tokens)))[-1].argmax()))
    return tokens[len(prompt) :]


def requests_of(engine, prompts, count=8, **given):
    return [
        engine.request(str(i), prompt, SamplingParams(max_tokens=count, ignore_eos=True), **given)
        for i, prompt in enumerate(prompts)
    ]


def run(engine, requests, aborts=None, fails=()):
    """The tokens of each request. aborts: by the step before which a request is aborted; fails:
    errors that may come.
    """
    found: dict[str, list[Any]] = {request.id: [] for request in requests}
    step = 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        if aborts and step in aborts:
            engine.abort(aborts[step])
        try:
            for output in engine.step():
                assert output.error is None, output.error
                found[output.request_id] += output.token_ids
        except Failed as error:
            assert error in fails
        engine.check()
        step += 1
        assert step < 2000, "the requests do not end"
    return list(found.values())


class Failed(Exception):
    pass


LENGTHS = (1, 37, 5, 17, 16, 2, 23)
