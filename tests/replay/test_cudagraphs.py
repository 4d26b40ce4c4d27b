"""CUDA graphs of the backend and of the runtime's decode step."""

import contextlib
import itertools
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import atomc
from atomc import ops
from atomc.kernels import load
from atomc.kernels.triton.attention.attention_tiles import tiling
from atomc.kernels.triton.launch.tiles import HEAD_ROWS, LINEAR
from atomc.kernels.triton.linear.linear import MAX_ROWS
from atomc.loading.create_model import create_model
from atomc.loading.loader import ready
from atomc.replay import cudagraphs
from atomc.replay.cudagraphs import CapturedCall, Pool
from atomc.replay.static_buffer import StaticBuffer, fill
from atomc.report.report import Report
from atomc.runtime.execution.graphs import StepGraphs, decode_sizes, launched_shapes, step_shapes
from atomc.runtime.execution.input_batch import StepShape
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.torch_compat import core
from atomc.weights.parameters import fill_randomly

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


GPU = ("triton", "cuda", "torch")
CPU = torch.device("cpu")  # where tiles are those of an H200


def test_the_sizes_to_capture_grow_with_the_batch_and_end_at_its_bound() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(6) == [1, 2, 4, 6]
    sizes = decode_sizes(300)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 300 and 64 in sizes and 256 in sizes


def test_mixed_steps_are_captured_up_to_the_token_budget() -> None:
    assert [shape[:3] for shape in step_shapes(4, 100, 9)] == [
        (4, 4, 4),
        (2, 2, 2),
        (1, 1, 1),
        (100, 6, 4),
        (64, 5, 4),
    ]
    assert step_shapes(1, 10_000, 9)[1] == (2048, 3, 1, 9)
    assert (8, 2, 8, 9) in step_shapes(4, 100, 9, drafts=3)


def test_a_mixed_step_of_few_sequences_is_not_padded_to_all_of_them() -> None:
    shapes = step_shapes(256, 512, 9)
    of_512 = [(512, 257, 256), (512, 65, 64), (512, 9, 8)]
    assert [shape[:3] for shape in shapes if shape.rows == 512] == of_512
    graphs = StepGraphs.__new__(StepGraphs)
    graphs.captured = dict.fromkeys(sorted(shapes))
    assert graphs.shape_for(500, 8, 8, 490)[:3] == (512, 9, 8)
    assert graphs.shape_for(500, 10, 10, 490)[:3] == (512, 65, 64)
    assert graphs.shape_for(500, 1, 9, 500)[:3] == (512, 65, 64)  # nine rows are wanted


class PoolOfTwo:
    """Has memory for two graphs, and knows them while they are there."""

    def __init__(self):
        self.found = weakref.WeakSet()

    def capture(self, call, *, warm_up):
        if len(self.found) == 2:
            raise MemoryError
        captured = CapturedCall(None, torch.empty(1), 8)
        self.found.add(captured.output)
        return captured


def test_no_graph_is_left_after_one_that_cannot_be_captured() -> None:
    pool = PoolOfTwo()
    with pytest.raises(MemoryError) as raised:
        StepGraphs(len, step_shapes(4, 100, 9), Report("tiny"), pool=pool)
    assert not pool.found and raised.tb is not None


def compiled_for(shape, group, kv_heads, width, block_size=16):
    """What of a step's shape decides which attention kernels and which rows-of-a-program kernels
    are compiled.
    """
    cut = tiling(
        shape.rows, shape.sequences, group, kv_heads, width, 2, shape.columns * block_size, CPU
    )
    joined = triton.next_power_of_2(cut.splits) if cut.splits > 1 else 0
    linears = {
        LINEAR.choose(CPU, rows, n, 1024, 1024)
        for rows in (shape.rows, shape.wanted)
        if rows <= MAX_ROWS
        for n in (1024, 4096)
    }
    return {
        cut._replace(splits=cut.splits > 1),
        ("join", joined),
        HEAD_ROWS.choose(CPU, shape.rows),
        *linears,
    }


@pytest.mark.parametrize(
    "group, kv_heads, width", [(2, 8, 128), (4, 8, 128), (1, 16, 64), (7, 4, 128), (16, 2, 256)]
)
@pytest.mark.parametrize(
    "sequences, rows, columns, drafts",
    [(256, 8192, 256, 0), (256, 8192, 2560, 3), (17, 8192, 64, 0), (64, 2048, 256, 0)],
)
def test_a_step_of_any_shape_takes_kernels_that_were_launched_at_the_start(
    group, kv_heads, width, sequences, rows, columns, drafts
) -> None:
    met = set()
    for shape in launched_shapes(sequences, rows, columns, drafts):
        met |= compiled_for(shape, group, kv_heads, width)
    graphs = step_shapes(sequences, rows, columns, drafts)
    beyond = [
        StepShape(many, some, some, columns)
        for many in range(2049, rows + 1, 487)
        for some in (1, 2, 5, 20, sequences)
    ]
    for shape in graphs + beyond:
        assert compiled_for(shape, group, kv_heads, width) <= met, shape


def test_a_step_of_every_range_that_kernels_tell_apart_is_launched_at_the_start() -> None:
    assert [load(provider) for provider in ("triton", "cuda")] == [None, None]
    launched = launched_shapes(256, 2048, 9)
    assert len(launched) == len(set(launched))
    starts = {1}
    for tokens in [
        kernel.tokens
        for op in ops.REGISTRY.values()
        for kernel in op.kernels
        if kernel.provider in GPU
    ]:
        starts |= {tokens.first} if tokens.last is None else {tokens.first, tokens.last + 1}
    rows = {shape.rows for shape in launched_shapes(256, 8192, 256)}
    for first, end in itertools.pairwise([*sorted(starts), 8193]):
        assert rows & set(range(first, end)), f"no step of {first} to {end - 1} tokens"


# Layouts of inputs: name -> (what makes one of 4096 numbers, how many elements of memory a buffer
# needs for it).
LAYOUTS = {
    "expanded": (lambda x: x[:1].expand(64, 1), 1),
    "expanded in several dimensions": (lambda x: x[3:8, None, None].expand(5, 4, 6), 5),
    "expanded in all": (lambda x: x[9].expand(2, 3, 4), 1),
    "a number": (lambda x: x[3], 1),
    "transposed": (lambda x: x[:60].view(6, 10).t(), 60),
    "channels last": (
        lambda x: x[:240].view(2, 3, 5, 8).to(memory_format=torch.channels_last),
        240,
    ),
    "columns of a matrix, from the middle of its memory": (
        lambda x: x[7:907].view(30, 30)[:, 3:9],
        29 * 30 + 6,
    ),
    "every seventh": (lambda x: x[1:50:7], 43),
    "windows": (lambda x: x[:20].unfold(0, 5, 2), 19),
    "windows, expanded": (lambda x: x[:20].unfold(0, 5, 2)[:, None].expand(-1, 3, -1), 19),
    "rows of which none is like another": (lambda x: x.as_strided((3, 4), (2, 3), 5), 14),
    "no rows": (lambda x: x[:0].view(0, 4), 0),
    "no columns, expanded": (lambda x: x[:1, None].expand(3, 4)[:, :0], 0),
    "one row with a stride of its own": (lambda x: x.as_strided((1, 4), (77, 1), 0), 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_static_buffer_has_the_layout_of_the_input_and_no_more_memory_than_it_spans(
    layout,
) -> None:
    made, num_elements = LAYOUTS[layout]
    first, second = made(torch.arange(4096.0)), made(-torch.arange(4096.0) - 1)
    buffer = StaticBuffer(first)
    assert buffer.tensor.stride() == first.stride() and torch.equal(buffer.tensor, first)
    assert buffer.tensor.untyped_storage().nbytes() == 4 * num_elements
    address = buffer.tensor.data_ptr()
    fill([buffer], [second])
    assert torch.equal(buffer.tensor, second) and buffer.tensor.data_ptr() == address
    assert torch.equal(made(torch.arange(4096.0)), first)


def test_inputs_that_view_one_storage_get_buffers_of_their_own() -> None:
    storage = torch.arange(12.0)
    rows, column = storage.view(3, 4), storage.view(3, 4)[:, 1]
    buffers = StaticBuffer(rows), StaticBuffer(column)
    fill(buffers[:1], [rows + 100])
    assert torch.equal(buffers[1].tensor, column)
    fill(buffers[1:], [column * 2])
    assert torch.equal(buffers[0].tensor, rows + 100)


def test_a_few_columns_of_a_huge_matrix_get_no_buffer_as_large_as_that() -> None:
    expanded = torch.zeros(1, dtype=torch.int8).expand(2**14, 2**14)
    assert StaticBuffer(expanded).tensor.untyped_storage().nbytes() == 1
    columns = torch.empty(2**10, 2**17, dtype=torch.int8, device="meta")[:, :4]
    with pytest.raises(
        RuntimeError,
        match=r"shape \[1024, 4\] and strides \[131072, 1\] is spread over 134086660 bytes",
    ):
        StaticBuffer(columns)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


@pytest.mark.gpu
def test_the_backend_replays_a_graph_per_shape_and_results_may_be_kept() -> None:
    model = Mlp().cuda().requires_grad_(False)
    compiled = torch.compile(model, backend="atom", mode="reduce-overhead", dynamic=False)
    inputs = [torch.randn(n, 64, device="cuda") for n in (3, 5) * 5]
    results = [compiled(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, model(x))
    graphs = [graph for report in atomc.reports()[-2:] for graph in report.cuda_graphs]
    assert [graph["inputs"] for graph in graphs] == [[[3, 64]], [[5, 64]]]


@pytest.mark.gpu
def test_a_graph_sees_weights_that_were_updated_in_place() -> None:
    model = Mlp().cuda().requires_grad_(False)
    compiled = torch.compile(model, backend="atom", mode="reduce-overhead")
    x = torch.randn(3, 64, device="cuda")
    for _ in range(5):
        compiled(x)
    model.up.weight.mul_(2)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_as_it_is_with_a_note() -> None:
    def mixed(x: Tensor, y: Tensor) -> Tensor:
        return F.silu(x) * x + y.cuda()

    x, y = torch.randn(3, 4, device="cuda"), torch.randn(3, 4)
    compiled = torch.compile(mixed, backend="atom", mode="reduce-overhead")
    torch.testing.assert_close(compiled(x, y), mixed(x, y))
    assert any("no CUDA graph" in note for note in atomc.reports()[-1].notes)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_takes_an_input_of_any_layout_and_later_ones_like_it(layout) -> None:
    made, _ = LAYOUTS[layout]

    def scaled(x: Tensor) -> Tensor:
        return F.silu(x) * x + x.sum()

    compiled = torch.compile(scaled, backend="atom", mode="reduce-overhead", dynamic=False)
    for seed in range(6):
        x = made(torch.rand(4096, generator=torch.Generator().manual_seed(seed)).cuda())
        torch.testing.assert_close(compiled(x), scaled(x))
    notes = [note for report in atomc.reports()[-1:] for note in report.notes]
    assert not any("no CUDA graph" in note for note in notes) or layout == "a number", notes


@pytest.mark.gpu
def test_a_graph_is_not_replayed_for_another_number_on_the_host() -> None:
    def scaled(x: Tensor, by: Tensor) -> Tensor:
        return F.silu(x) * by + x

    compiled = torch.compile(scaled, backend="atom", mode="reduce-overhead")
    x = torch.randn(3, 4, device="cuda")
    for number in (2.0, 3.0, 2.0, 5.0) * 5:
        by = torch.tensor(number)
        torch.testing.assert_close(compiled(x, by), scaled(x, by))


@pytest.mark.gpu
def test_a_stock_model_decodes_a_batch_whose_positions_are_expanded() -> None:
    transformers = pytest.importorskip("transformers", reason="stock models")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    # In bf16, because the experts of transformers read sizes back to the host in fp32, which no
    # graph can hold.
    model = (
        transformers.Qwen3MoeForCausalLM(config)
        .to(torch.bfloat16)
        .eval()
        .requires_grad_(False)
        .cuda()
    )
    ids = torch.randint(0, 96, (64, 8), device="cuda")
    compiled = torch.compile(model, backend="atom", mode="reduce-overhead")

    def decoded(call) -> list[Tensor]:
        cache, logits = transformers.StaticCache(config=config, max_cache_len=16), []
        with torch.inference_mode():
            model(
                ids[:, :4],
                position_ids=torch.arange(4, device="cuda").expand(64, 4),
                past_key_values=cache,
            )
            for step in range(4, 8):
                positions = torch.tensor([[step]], device="cuda").expand(64, 1)
                out = call(ids[:, step : step + 1], position_ids=positions, past_key_values=cache)
                logits.append(out.logits.float())
        return logits

    for actual, expected in zip(decoded(compiled), decoded(model), strict=True):
        assert torch.linalg.vector_norm(actual - expected) < 0.05 * torch.linalg.vector_norm(
            expected
        )
    report = atomc.reports()[-1]
    assert report.cuda_graphs and not any("no CUDA graph" in note for note in report.notes), (
        report.notes
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_runtime_generates_the_same_tokens_with_and_without_graphs(dtype: torch.dtype) -> None:
    model = create_model(TINY, dtype=dtype, device="cuda")
    fill_randomly(model, "cuda")
    ready(model)
    prompts = [[5, 6, 7], [1] * 40, [9, 8], [3] * 17, [2, 4, 6, 8, 10]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    found = {}
    for eager in (False, True):
        llm = LLM(
            model,
            max_num_seqs=8,
            max_model_len=96,
            num_blocks=64,
            enforce_eager=eager,
            progress=False,
            options={"glue": "eager"},
        )
        found[eager] = [completion.token_ids for completion in llm.generate(prompts, params)]
        assert (llm.engine.stats().steps.get("full graph", 0) > 0) is not eager
        assert bool(llm.program.report.cuda_graphs) is not eager
    assert found[False] == found[True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_the_start_no_kernel_is_compiled_and_none_is_loaded(
    dtype, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model = create_model({**TINY, "max_position_embeddings": 4096}, dtype=dtype, device="cuda")
    fill_randomly(model, "cuda")
    ready(model)
    late, captured = [], []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **_: captured and late.append(src.name)
    )
    capture = Pool.capture
    monkeypatch.setattr(
        Pool, "capture", lambda *args, **how: captured.append(how) or capture(*args, **how)
    )
    llm = LLM(
        model,
        max_num_seqs=24,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        progress=False,
        options={"glue": "eager"},
    )
    for lengths in ((1,), (3, 5), (40,) * 20, (4000,), (3000, 700, 2), range(1, 25)):
        for params in (
            SamplingParams(max_tokens=3),
            SamplingParams(max_tokens=3, temperature=1.0, top_k=5),
        ):
            llm.generate([[token % 128 for token in range(length)] for length in lengths], params)
    assert not late
    assert [how["warm_up"] for how in captured[:3]] == [True, False, False]
    assert len(captured) == len(llm.program.report.cuda_graphs)


@pytest.mark.gpu
def test_a_kernel_may_be_loaded_during_a_capture_that_is_not_warmed_up() -> None:
    x, weight = torch.randn(3, 713, device="cuda"), torch.rand(713, device="cuda")
    (kernel,) = (kernel.function for kernel in ops.rms_norm.kernels if kernel.provider == "triton")
    captured = Pool().capture(lambda: kernel(x, weight, 1e-6), warm_up=False)
    x.mul_(3)
    torch.testing.assert_close(captured.replay(), ops.rms_norm.reference(x, weight, 1e-6))


class GraphThatFailed:
    """What CUDA makes of a capture in which a call failed: to end it raises an error of its own."""

    def capture_begin(self, **_):
        pass

    def capture_end(self):
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("error", [RuntimeError("this op waits"), KeyboardInterrupt("now")])
def test_a_call_that_cannot_be_captured_raises_its_own_error(error, monkeypatch):
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    cuda = types.SimpleNamespace(
        CUDAGraph=GraphThatFailed,
        Stream=lambda device: stream,
        current_stream=lambda: stream,
        device=contextlib.nullcontext,
        graph_pool_handle=lambda: 0,
        memory_reserved=lambda device: 0,
        stream=contextlib.nullcontext,
    )
    monkeypatch.setattr(cudagraphs, "torch", types.SimpleNamespace(cuda=cuda, device=torch.device))

    def fails():
        raise error

    with pytest.raises(type(error), match=str(error)):
        Pool().capture(fails, warm_up=False)
    with pytest.raises(RuntimeError, match="previous error"):
        Pool().capture(lambda: None, warm_up=False)


class CallsOfTensors(TorchFunctionMode):
    """Sees each call of a tensor's method, as a default device does; number: how many."""

    number = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


class PoolOfCalls:
    """Stands for Pool: a graph is the call that was captured."""

    def __init__(self, device):
        self.device = device

    def capture(self, call, warm_up=True):
        return types.SimpleNamespace(replay=call, bytes=0)


def test_a_known_graph_is_replayed_outside_of_torch_functions(monkeypatch):
    monkeypatch.setattr(cudagraphs, "Pool", PoolOfCalls)
    monkeypatch.setattr(cudagraphs.Graphed, "_refused", lambda graphed, key, args: None)
    graphs = []
    graphed = cudagraphs.Graphed(lambda x, weight: (x @ weight,), (), [], graphs)
    weight, other = (nn.Parameter(torch.randn(3, 3), requires_grad=False) for _ in range(2))

    def check(size, weight):
        x = torch.randn(size, 3)
        with CallsOfTensors() as mode:
            (found,) = graphed(x, weight)
        torch.testing.assert_close(found, x @ weight, rtol=0, atol=0)
        return mode.number

    def checked(size, weight):
        return [check(size, weight) for _ in range(cudagraphs.CALLS_BEFORE_CAPTURE + 1)]

    assert all(checked(2, weight)) and len(graphs) == 1  # what is captured is a user's program
    assert [check(2, weight), check(2, weight), len(graphs)] == [0, 0, 1]
    assert all(checked(5, weight)) and len(graphs) == 2
    assert check(5, other) and len(graphs) == 2, "the graph of other addresses is replaced"
    assert [check(2, weight), check(5, other), len(graphs)] == [0, 0, 2]


@pytest.mark.parametrize("in_python", [True, False])
def test_addresses_are_compared_for_the_inputs_with_these_numbers(monkeypatch, in_python) -> None:
    if in_python:
        monkeypatch.setattr(core, "_ARE_AT", None)
    elif core._ARE_AT is None:
        pytest.skip("torch is not built for CUDA")
    inputs = [torch.zeros(3), 2, torch.zeros(3), None, torch.zeros(0)]
    expected = core.addresses(inputs)
    assert core.are_at(inputs, expected, [0, 2, 4]) and core.are_at(inputs, expected, [])
    moved = [inputs[0], 3, inputs[2].clone(), None, inputs[4]]
    assert core.are_at(moved, expected, [0, 4]) and not core.are_at(moved, expected, [0, 2])
