"""Calls that are repeated without their Python give what the graph gives, in memory of their own."""

import threading

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from atomc.kernels.triton.rows.norm import add_rms_norm, rms_norm
from atomc.replay import recording, repeated
from atomc.replay.memory import ALIGNMENT, Temporary, arrange
from atomc.replay.recording import record
from atomc.replay.repeated import MOST_ATTEMPTS, MOST_KINDS, Repeated
from atomc.replay.tape import tape_of

D = 48
BEFORE = 3  # calls of a kind before it is repeated
CPU = torch.device("cpu")


class Counted:
    """A graph that counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


def repeats(function, dynamic=False):
    graph = Counted(function)
    return graph, Repeated(graph, CPU, dynamic, [])


def block(x, weight, matrix, residual):
    """Kernels of Triton, of PyTorch with and without memory for the result, and views."""
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    product = y.view(-1, D) @ matrix
    out = torch.empty_like(product)
    torch.add(product, 1.0, out=out)
    left, right = out.split(D // 2, dim=1)
    return rms_norm(out, weight, 1e-6), total, left * right


def block_inputs(seed=0, rows=3):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(1, rows, D, generator=generator) for _ in range(2))
    matrix = torch.randn(D, D, generator=generator)
    return [x, torch.randn(D, generator=generator), matrix, residual]


def assert_all_equal(results, expected):
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_the_fourth_call_is_repeated_with_equal_results_for_other_inputs():
    graph, function = repeats(block)
    for seed in range(5):
        inputs = block_inputs(seed)
        assert_all_equal(function(*inputs), block(*inputs))
    assert graph.calls == BEFORE, function.notes
    assert [(one["kernels"], one["ops"]) for one in function.records] == [(2, 3)]
    assert function.records[0]["host_ms"] > 0 and not function.untimed


def test_results_stay_when_the_graph_is_called_again():
    _, function = repeats(block)
    inputs = [block_inputs(seed) for seed in range(5)]
    results = [function(*one) for one in inputs]
    for one, result in zip(inputs, results, strict=True):
        assert_all_equal(result, block(*one))


def test_threads_have_temporaries_of_their_own():
    def squared(x):
        return torch.add(x @ x, 1.0, out=torch.empty_like(x)) * 2  # no kernel: one interpreter

    _, function = repeats(squared)
    for _ in range(BEFORE):
        function(torch.ones(D, D))
    results = {}

    def run(seed):
        results[seed] = [function(torch.full((D, D), seed + i / 8)) for i in range(20)]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        inputs = [torch.full((D, D), seed + i / 8) for i in range(20)]
        assert_all_equal(results[seed], [squared(x) for x in inputs])


def test_a_call_of_another_thread_while_one_is_recorded_runs_as_it_is():
    inside, done = threading.Event(), threading.Event()

    def waits(x):
        if not inside.is_set():
            inside.set()
            assert done.wait(10)
        return x + 1

    _, slow = repeats(waits)
    _, other = repeats(lambda x: x * 2)
    inside.set()
    slow(torch.ones(3)), other(torch.ones(3))
    inside.clear()
    thread = threading.Thread(target=slow, args=(torch.ones(3),))
    thread.start()
    assert inside.wait(10)
    assert torch.equal(other(torch.ones(3)), torch.full((3,), 2.0))
    assert [one.number for one in other.attempts.values()] == [0]
    done.set()
    thread.join()
    assert [one.number for one in slow.attempts.values()] == [1]


def scaled(x, factor, count):
    return x * factor, count


@pytest.mark.parametrize("factor", [3, 0.5])
def test_another_number_is_another_kind_of_call(factor):
    graph, function = repeats(scaled)
    x = torch.arange(4.0)
    for number in [*[2] * 4, *[factor] * 4, 2, factor]:
        assert_all_equal(function(x, number, None)[:1], [x * number])
    assert graph.calls == 2 * BEFORE


def test_an_input_at_another_alignment_is_another_kind_of_call():
    graph, function = repeats(lambda x: x * 2)
    memory = torch.arange(9, dtype=torch.bfloat16)
    for x in (memory[:8], memory[1:]) * 5:
        assert_all_equal([function(x)], [x * 2])
    assert graph.calls == 2 * BEFORE


def test_layouts_of_dynamic_graphs_tell_calls_apart():
    graph, function = repeats(lambda x: x.sum(0), dynamic=True)
    for rows in (3, 5) * 5:
        x = torch.randn(rows, 4)
        assert_all_equal([function(x)], [x.sum(0)])
    assert graph.calls == 2 * BEFORE


def test_lengths_without_end_are_repeated_up_to_a_bound():
    _, function = repeats(lambda x: x.sum(0), dynamic=True)
    for rows in [*range(1, 2 * MOST_KINDS), *[7] * 5]:
        for _ in range(5):
            x = torch.randn(rows, 4)
            assert_all_equal([function(x)], [x.sum(0)])
    assert sum(tape is not None for tape in function.tapes.values()) == MOST_KINDS
    assert len(function.tapes) <= 2 * MOST_KINDS and len(function.attempts) <= MOST_KINDS
    assert f"{MOST_KINDS} kinds of calls are repeated already" in function.notes[0]


def test_inputs_are_written_and_returned_as_they_are():
    def append(cache, x, at):
        cache.index_copy_(0, at, x)
        return cache, cache[1:], (x, [at, 7])

    graph, function = repeats(append)
    for number in range(5):
        cache, x, at = torch.zeros(4, 8), torch.randn(1, 8), torch.tensor([number % 4])
        same, view, (y, (position, seven)) = function(cache, x, at)
        assert same is cache and y is x and position is at and seven == 7
        expected = torch.zeros(4, 8)
        expected[number % 4] = x
        assert_all_equal([cache, view], [expected, expected[1:]])
        assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    assert graph.calls == BEFORE, function.notes


def test_views_start_where_the_input_does():
    graph, function = repeats(lambda x: x[1:].flatten() + 1)
    for start in range(5):
        x = torch.arange(100.0)[4 * start :][:8].view(2, 4)
        assert_all_equal([function(x)], [x[1].flatten() + 1])
    assert graph.calls == BEFORE


def test_memory_that_outlives_calls_is_the_same_in_all():
    workspace = torch.zeros(8)

    def accumulate(x):
        workspace.add_(x)
        return workspace * 1

    graph, function = repeats(accumulate)
    expected = torch.zeros(8)
    for _ in range(6):
        x = torch.randn(8)
        assert_all_equal([function(x)], [expected.add_(x)])
    assert graph.calls == BEFORE


def test_rows_that_a_tensor_of_integers_selects_are_repeated():
    graph, function = repeats(lambda x, rows: x[rows] * 2)
    for number in range(4):
        x, rows = torch.randn(5, 3), torch.tensor([number, 1])
        assert_all_equal([function(x, rows)], [x[rows] * 2])
    assert graph.calls == BEFORE


def test_other_dtypes_see_the_same_memory():
    graph, function = repeats(lambda x: (x * 2).view(torch.int32) + 1)
    for _ in range(4):
        x = torch.randn(2, 4)
        assert_all_equal([function(x)], [(x * 2).view(torch.int32) + 1])
    assert graph.calls == BEFORE


def test_ops_of_users_run_in_each_call(monkeypatch):
    counts = []
    with torch.library._scoped_library("replay_test", "DEF") as library:
        library.define("touch(Tensor x) -> Tensor")  # returns its argument, without saying so
        library.define("check(Tensor x) -> ()")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("touch", lambda x: counts.append("touch") or x, "CPU")
        library.impl("check", lambda x: counts.append("check"), "CPU")
        library.impl("twice", lambda x: counts.append("twice") or x * 2, "CPU")
        ops = torch.ops.replay_test

        def calls(x):
            y = ops.touch(x + 1)
            ops.check(y)
            return ops.twice(y) + ops.twice(y)

        graph, function = repeats(calls)
        for _ in range(4):
            x = torch.randn(3)
            assert_all_equal([function(x)], [(x + 1) * 2 + (x + 1) * 2])
        assert graph.calls == BEFORE
        assert counts == ["touch", "check", "twice", "twice"] * 4


def test_autocast_casts_what_the_graph_lets_it_cast():
    def mixed(x, weight):
        y = x @ weight
        with torch.autocast("cpu", enabled=False):
            return y, x @ weight

    graph, function = repeats(mixed)
    for _ in range(4):
        x, weight = torch.randn(3, 4), torch.randn(4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            assert_all_equal(function(x, weight), mixed(x, weight))
    assert graph.calls == BEFORE


def reads(x):
    return x * (2 if x.sum().item() > 0 else 3)


def maps(x):
    from torch._higher_order_ops.map import map as mapped

    return mapped(lambda row: row + 1, x[:, None])


def selects(x):
    return x[x > 0]


class Alternating:
    """Launches something else in each call."""

    number = 0

    def __call__(self, x):
        self.number += 1
        return x * self.number


def unseen(x):
    """Writes memory where no recording sees it."""
    y = torch.empty_like(x)
    y.numpy()[...] = x.numpy() + 1
    return y * 2


def unseen_result(x):
    y = torch.empty_like(x)
    y.numpy()[...] = (x.numpy() + 1) * 2
    return y


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (reads, "the host reads what aten._local_scalar_dense.default returns"),
        (selects, "the host reads what aten.index.Tensor returns"),
        (maps, "it calls map_impl"),
        (Alternating(), "another number in each call"),
        (unseen, "an op reads memory that nothing visible has written"),
        (unseen_result, "no visible kernel has written an output"),
    ],
    ids=["item", "selection", "map", "number", "unseen", "unseen result"],
)
def test_what_cannot_be_repeated_runs_as_it_is_and_says_why(function, reason):
    graph, function = repeats(function)
    for number in range(1, MOST_ATTEMPTS + 4):
        x = torch.tensor([1.0, -2.0, 3.0]) * (-1) ** number
        expected = x * number if reason.startswith("another") else graph.function(x)
        assert_all_equal([function(x)], [expected])
    assert graph.calls == MOST_ATTEMPTS + 3
    assert len(function.notes) == 1 and reason in function.notes[0]


@pytest.mark.parametrize(
    "inputs", [lambda x: (x, x), lambda x: (x[:6], x[2:8])], ids=["equal", "overlapping"]
)
def test_of_inputs_that_share_memory_none_is_taken_for_another(inputs):
    _, function = repeats(lambda x, y: x.view(-1) * 2 + y.view(-1))
    for _ in range(4):
        x, y = inputs(torch.randn(8))
        assert_all_equal([function(x, y)], [x * 2 + y])
    x, y = torch.randn(len(x)), torch.randn(len(x))
    assert_all_equal([function(x, y)], [x * 2 + y])


def test_a_packed_weight_and_its_parts_are_told_apart_by_their_layouts():
    def product(x, part, packed):
        return x @ packed.t(), x @ part.t()

    graph, function = repeats(product)
    for _ in range(4):
        packed, x = torch.randn(6, 4), torch.randn(2, 4)
        assert_all_equal(function(x, packed[:2], packed), product(x, packed[:2], packed))
    assert graph.calls == BEFORE, function.notes


def test_other_subclasses_of_tensor_are_not_repeated():
    class Marked(Tensor):
        pass

    graph, function = repeats(lambda x: x + 1)
    for _ in range(4):
        function(torch.ones(3).as_subclass(Marked))
    assert graph.calls == 4 and "an input is a Marked" in function.notes[0]


def test_under_a_transform_the_graph_runs():
    graph, function = repeats(lambda x: x * 2 + 1)
    for _ in range(5):
        function(torch.randn(3))
    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.vmap(function)(x), x * 2 + 1)
    assert graph.calls == BEFORE + 1


def test_a_sparse_input_is_not_repeated():
    graph, function = repeats(lambda x, y: torch.sparse.mm(x, y))
    for _ in range(5):
        x, y = torch.eye(3), torch.randn(3, 2)
        torch.testing.assert_close(function(x.to_sparse(), y), y)
    assert graph.calls == 5 and "an input is a torch.sparse_coo" in function.notes[0]


def test_a_graph_with_sparse_temporaries_is_not_repeated():
    graph, function = repeats(lambda x: torch.sparse.mm(x.to_sparse(), x) + 1)
    for _ in range(5):
        x = torch.eye(3) * 2
        torch.testing.assert_close(function(x), x @ x + 1)
    assert graph.calls == 5 and "a tensor without strides" in function.notes[0]


@pytest.mark.parametrize("broken", ["tape_of", "_computes_nothing", "_is_read_by_host"])
def test_a_bug_of_ours_is_a_note_and_no_failure(broken, monkeypatch):
    def fails(*args, **kwargs):
        raise LookupError("of ours")

    graph, function = repeats(lambda x: x * 2 + 1)
    function.strict = False
    function(torch.ones(3))
    monkeypatch.setattr(repeated if broken == "tape_of" else recording, broken, fails)
    for _ in range(5):
        x = torch.randn(3)
        assert_all_equal([function(x)], [x * 2 + 1])
    assert graph.calls == 6
    assert "a bug of atomc, please report it: LookupError: of ours" in function.notes[0]


def test_a_profiler_sees_the_ops_of_the_graph():
    graph, function = repeats(block)
    for _ in range(5):
        function(*block_inputs())
    with profile() as profiler:
        function(*block_inputs())
    assert graph.calls == BEFORE + 1 and any("aten::mm" in e.key for e in profiler.key_averages())


def test_a_default_device_changes_nothing():
    graph, function = repeats(lambda x: x.sum(0) + 1)
    for _ in range(5):
        x = torch.randn(3, 4)
        with torch.device("meta"):
            result = function(x)
        assert_all_equal([result], [x.sum(0) + 1])
    assert graph.calls == BEFORE


def test_recordings_hold_no_more_memory_than_allowed(monkeypatch):
    monkeypatch.setattr(repeated, "MOST_BYTES_ON_CPU", 4000)
    graph, function = repeats(lambda x: (x + 1) * 2, dynamic=True)
    small = [torch.randn(200 + rows) for rows in range(4)]  # two recordings exceed the limit
    for x in small * 4:
        assert_all_equal([function(x)], [(x + 1) * 2])
    assert graph.calls == 16 and not function.notes
    assert sum(one.recording is not None for one in function.attempts.values()) == 2
    for _ in range(3):
        function(small[0])
    assert graph.calls == 18
    for _ in range(2):
        function(torch.randn(5000))
    assert "temporaries of a call have more than" in function.notes[0]


def test_a_recording_has_the_ops_that_composite_ones_consist_of():
    weight = torch.randn(4, 4)
    _, recording = record(
        lambda x: torch.nn.functional.linear(x, weight), [torch.ones(2, 4)], 10**6
    )
    assert [str(event.function) for event in recording.events] == ["aten.mm.default"]


def layers(x, mask):
    for _ in range(3):
        blind = ~mask.any(-1)
        x = (x * 2).masked_fill_(blind[:, None], 0.0)
    return x


def writes_between(x, mask):
    first = mask.sum(-1)
    mask.logical_not_()
    return first * 2, mask.sum(-1) * 2


def writes_a_result(x, mask):
    counts = mask.sum(-1)
    counts.add_(1)
    return counts * 2, mask.sum(-1) * 3


def returns_both(x, mask):
    return mask.sum(-1), mask.sum(-1)


def launches_between(x, mask):
    first = x * 2
    out = rms_norm(x, x[0], 1e-6)
    return first, x * 2, out


def writes_what_overlaps(x, mask):
    first, rows = mask.sum(-1), mask[1:]
    rows.logical_not_()
    return first * 2, mask.sum(-1) * 2


def draws(x, mask):
    return x + torch.rand(4), x + torch.rand(4)


@pytest.mark.parametrize(
    ("function", "num_ops"),
    [
        (layers, 8),
        (writes_between, 5),
        (writes_what_overlaps, 5),
        (writes_a_result, 5),
        (returns_both, 2),
        (launches_between, 2),
    ],
)
def test_what_layers_compute_alike_is_computed_once(function, num_ops, monkeypatch):
    graph, repeating = repeats(function)
    tapes = []
    monkeypatch.setattr(
        repeated, "tape_of", lambda *args, **how: tapes.append(tape_of(*args, **how)) or tapes[-1]
    )
    for number in range(4):
        x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.2 * number
        copy = mask.clone()
        results, expected = repeating(x, mask), function(x, copy)
        assert_all_equal(
            *([one] if isinstance(one, Tensor) else one for one in (results, expected))
        )
        assert torch.equal(mask, copy)
    assert graph.calls == BEFORE, repeating.notes
    inputs = [x, mask]
    _, recording = record(
        lambda *args: tapes[-1].run(args, [one.data_ptr() for one in args], 0), inputs, 10**6
    )
    assert len([event for event in recording.events if hasattr(event, "results")]) == num_ops


def test_a_write_through_another_input_is_seen():
    def between(x, rows):
        first = x * 2
        rows.add_(1)
        return first, x * 2

    _, function = repeats(between)
    for _ in range(6):
        x, theirs = torch.randn(4, 3), torch.empty(4, 3)
        theirs.copy_(x)
        assert_all_equal(function(x, x[1:3]), between(theirs, theirs[1:3]))


def test_random_numbers_are_drawn_each_time():
    _, function = repeats(draws)
    x = torch.zeros(4)
    for _ in range(4):
        first, second = function(x, x)
        assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", range(20))
def test_temporaries_of_one_time_do_not_overlap(seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 20, (30, 3), generator=generator).tolist()
    temporaries = [
        Temporary(torch.empty(size * 100, dtype=torch.uint8), first, first + length)
        for size, first, length in numbers
    ]
    offsets, total = arrange(temporaries)
    for one in temporaries:
        assert offsets[one] % ALIGNMENT == 0 and offsets[one] + one.bytes <= total
        for other in temporaries:
            together = one.first <= other.last and other.first <= one.last
            if one is not other and together:
                ends = offsets[one] + one.bytes, offsets[other] + other.bytes
                assert ends[0] <= offsets[other] or ends[1] <= offsets[one]


def test_temporaries_after_each_other_share_memory():
    chain = [Temporary(torch.empty(1000, dtype=torch.uint8), i, i + 1) for i in range(10)]
    assert arrange(chain)[1] <= 2 * 1024
