"""Repeated calls on a GPU: kernels of Triton, of Inductor and of libraries, streams and threads."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc
from atomc.replay.repeated import Repeated

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


class Block(nn.Module):
    """A norm and a gate (Triton), products (cuBLAS or Triton), and glue (Inductor)."""

    def __init__(self, d: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(d), nn.Linear(d, 512), nn.Linear(256, d)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        y = x + self.down(F.silu(gate) * up)
        return torch.sin(y).cumsum(-1) * torch.cos(y) + y.flip(-1)


@pytest.fixture
def block():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(DEVICE, torch.bfloat16).requires_grad_(False)
    options = {"cache": False}
    plain = torch.compile(
        model, backend="atom", dynamic=False, options={**options, "repeat": False}
    )
    return torch.compile(model, backend="atom", dynamic=False, options=options), plain


def rows(number: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(number, 256, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def is_repeated(repeated) -> bool:
    return any(tape is not None for one in repeated for tape in one.tapes.values())


@pytest.mark.parametrize("number", [1, 4, 300])
def test_results_are_those_of_the_graph_and_stay(number, block, repeated):
    compiled, plain = block
    inputs = [rows(number, seed) for seed in range(8)]
    results = [compiled(x) for x in inputs]
    assert is_repeated(repeated), atomc.reports()[-1].notes
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result, plain(x))


def test_another_alignment_gets_other_kernels(block, repeated):
    compiled, plain = block
    memory = rows(9).flatten()
    for start in (0, 1, 8, 2) * 5:
        x = memory[start : start + 4 * 256].view(4, 256)
        assert torch.equal(compiled(x), plain(x))
    assert is_repeated(repeated)


def test_streams_and_threads_do_not_share_temporaries(block, repeated):
    compiled, plain = block
    with torch.inference_mode():
        expected = [plain(rows(64, seed)) for seed in range(4)]
        for _ in range(4):
            compiled(rows(64))
    assert is_repeated(repeated)
    results = {}

    def run(seed):
        stream = torch.cuda.Stream(DEVICE)
        stream.wait_stream(torch.cuda.default_stream(DEVICE))
        with torch.cuda.stream(stream), torch.inference_mode():
            x = rows(64, seed)
            results[seed] = [compiled(x) for _ in range(50)]
        stream.synchronize()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, result in results.items():
        assert all(torch.equal(one, expected[seed]) for one in result)


def test_launches_and_products_are_direct_also_in_a_thread_that_has_not_used_cuda(block, repeated):
    compiled, plain = block
    x = rows(300)
    for _ in range(5):
        expected = compiled(x)
    assert is_repeated(repeated)
    [record] = [record for one in repeated for record in one.records]
    assert record["direct"] == record["kernels"] + 4, record  # of two blocks, two products each
    results = []
    thread = threading.Thread(target=lambda: results.append(compiled(x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)
    assert torch.equal(results[0], plain(x))


def test_a_kernel_that_nothing_sees_keeps_a_call_from_being_repeated():
    def launches(x):
        torch.cuda._sleep(100)
        return x + 1

    notes = []
    function = Repeated(launches, DEVICE, False, notes)
    x = torch.ones(4, device=DEVICE)
    for _ in range(8):
        assert torch.equal(function(x), x + 1)
    assert "1 of 2 kernels are launched unseen" in notes[0] and not is_repeated([function])


def test_a_call_that_waits_for_the_device_is_not_repeated():
    notes = []
    function = Repeated(lambda x: x * (2 if x.sum() > 0 else 3), DEVICE, False, notes)
    for sign in (1, -1) * 3:
        x = torch.full((4,), float(sign), device=DEVICE)
        assert torch.equal(function(x), x * (2 if sign > 0 else 3))
    assert "the host reads" in notes[0]


def test_a_repeated_call_can_be_captured(block, repeated):
    compiled, plain = block
    x = rows(4)
    with torch.inference_mode():
        for _ in range(5):
            compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)
        x.copy_(rows(4, seed=1))
        graph.replay()
    assert is_repeated(repeated) and torch.equal(result, plain(x))


def test_a_reset_of_dynamo_frees_what_is_repeated_and_captured(repeated):
    model = Block().to(DEVICE, torch.bfloat16).requires_grad_(False)
    torch._dynamo.reset()
    gc.collect()
    compiled = torch.compile(model, backend="atom", mode="reduce-overhead", dynamic=False)
    with torch.inference_mode():
        for _ in range(6):
            compiled(rows(4))
    assert is_repeated(repeated) and atomc.reports()[-1].cuda_graphs[0]["bytes"] >= 0
    (alive,) = [weakref.ref(one) for one in repeated]
    repeated.clear()
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def generated(model, ids, backend, new_tokens=40, mode=None):
    from transformers import CompileConfig

    how = {"disable_compile": True}
    if backend:
        how = {"compile_config": CompileConfig(backend=backend, mode=mode, fullgraph=False)}
    return model.generate(
        ids,
        max_new_tokens=new_tokens,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        eos_token_id=None,
        **how,
    )


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_generate_beyond_a_sliding_window_captures_one_graph_a_shape(mode, repeated):
    transformers = pytest.importorskip("transformers", reason="stock models")
    config = transformers.Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=16,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval().requires_grad_(False).to(DEVICE)
    torch._dynamo.reset()
    before = len(atomc.reports())
    for seed in range(3):
        ids = torch.randint(5, 100, (1, 10), generator=torch.Generator().manual_seed(seed))
        ids = ids.to(DEVICE)
        expected = generated(model, ids, None)
        assert torch.equal(generated(model, ids, "atom", mode=mode), expected)
    reports = atomc.reports()[before:]
    notes = [note for report in reports for note in report.notes]
    assert is_repeated(repeated), notes
    assert not any("no CUDA graph" in note or "not repeated" in note for note in notes), notes
    if mode:
        # Dynamo makes a graph of its own for a full window.
        assert max(len(report.cuda_graphs) for report in reports) == 1
