"""What processes exchange becomes ops; sums and padding join the norms that they stand beside."""

import pytest
import torch
import torch.distributed._functional_collectives as functional
from fake_group import equal_ranks, fake_group
from kernel_cases.rows import one_process_group
from rewriting import after_passes, explained
from torch import distributed

from atomc import ops, passes
from atomc.passes.fuse.quantizers import QUANTIZERS

collective = torch.ops._c10d_functional
NAMED = {p.name: p for p in passes.PIPELINE}
X, R, W = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
W = W[0]
# torch 2.11 traces it for DTensor alone.
view_chunk_cat = torch._dynamo.dont_skip_tracing(functional._maybe_view_chunk_cat)
GROUP, FAKE = one_process_group(), {ranks: fake_group(ranks) for ranks in (1, 2, 4)}
EQUAL = equal_ranks(2)


def normed(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def summed(x):
    return functional.all_reduce(x, "sum", distributed.group.WORLD)


def summed_in_place(x):
    y = x * 2
    distributed.all_reduce(y)
    return y


@pytest.mark.parametrize("reduce", [summed, summed_in_place])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_sum_an_add_and_a_norm_are_one_op_whichever_way_they_are_added(reduce, swapped):
    def function(x, r, w):
        total = r + reduce(x) if swapped else reduce(x) + r
        return normed(total, w), total

    report = explained(function, X, R, W)
    assert report.matches["allreduce_add_rms_norm"] == report.num_ops["allreduce_add_rms_norm"] == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_nothing_reads_the_sum_before_the_last_norm(swapped):
    def function(x, r, w):
        return normed(r + summed(x) if swapped else summed(x) + r, w)

    report = explained(function, X, R, W)
    assert report.num_ops == {"allreduce_add_rms_norm": 1}


@pytest.mark.parametrize("reduce", [summed, summed_in_place])
def test_a_sum_and_a_norm_are_one_op(reduce):
    report = explained(lambda x, w: normed(reduce(x), w), X, W)
    assert report.num_ops == {"allreduce_rms_norm": 1}


@pytest.mark.parametrize("style", ["after", "before", "one_plus"])
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32], ids=str)
def test_every_style_and_weight_fuses(style, weight):
    def function(x, r, w):
        return ops.add_rms_norm(ops.all_reduce(x, EQUAL), r, w, 1e-6, style)

    report = explained(function, X, R, W.to(weight))
    assert report.num_ops == {"allreduce_add_rms_norm": 1}


def test_others_may_read_the_sum_as_the_first_layer_reads_the_sum_of_embeddings():
    report = explained(lambda x, w: (normed(y := summed(x), w), y.abs()), X, W)
    assert report.num_ops == {"allreduce_rms_norm": 1}


def test_a_sum_behind_an_add_that_others_read_stays():
    def function(x, r, w):
        total = (y := summed(x)) + r
        return normed(total, w), total, y.abs()

    report = explained(function, X, R, W)
    assert report.num_ops == {"all_reduce": 1, "add_rms_norm": 1}
    assert "no other reader of all_reduce" in report.why("allreduce_add_rms_norm")


JOINED = [
    NAMED[name] for name in ("tidy", "sums_behind_views", "allreduce_add", "total_behind_views")
]
GATE = torch.rand(5, 1, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize(
    "total",
    [
        lambda a, b, gate: a + b,
        lambda a, b, gate: a + gate * b,
        lambda a, b, gate: a * gate + b,
        lambda a, b, gate: b * gate + a,
    ],
)
@pytest.mark.parametrize("viewed", ["", "first", "both", "total"])
def test_what_is_added_behind_two_sums_is_summed_once(total, viewed):
    def function(x, r, gate):
        def view(y, *of):
            return y.view(1, *y.shape) if viewed in of else y

        first, second = (ops.all_reduce(y, FAKE[2]) for y in (x, r))
        factor = gate.view(1, 5, 1) if viewed == "both" else gate
        first, second = view(first, "both"), view(second, "both")
        if viewed == "first":
            first = first.view(1, 5, 64).view(5, 64)
        return view(total(first, second, factor), "total") * 2

    traced = after_passes(JOINED, function, X, R, GATE)
    assert traced.error == 0 and traced.report.matches["allreduce_add"] == 1
    assert traced.text.count("all_reduce") == 1
    *_, sum_of_all, doubled, _ = traced.text.splitlines()
    assert "all_reduce" in sum_of_all and "mul" in doubled


def test_experts_a_gated_shared_expert_and_the_residual_are_one_op_behind_a_view():
    def function(x, r, w, gate):
        experts = ops.all_reduce(x.relu(), FAKE[2]) + gate * ops.all_reduce(x * 3, FAKE[2])
        total = r + experts.view(1, 5, 64)
        return normed(total, w), total

    report = explained(function, X, R[None], W, GATE)
    assert report.num_ops == {"allreduce_add_rms_norm": 1}


def test_three_sums_are_one():
    def function(x, r):
        return ops.all_reduce(x, FAKE[2]) + (
            ops.all_reduce(r, FAKE[2]) + ops.all_reduce(x * 2, FAKE[2])
        )

    assert explained(function, X, R).num_ops == {"all_reduce": 1}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a, x: a + ops.all_reduce(x, FAKE[4]), "group"),
        (lambda a, x: a + functional.all_reduce(x, "max", FAKE[2]), "all_reduce"),
        (lambda a, x: a + (b := ops.all_reduce(x, FAKE[2])) + b.abs(), "no other reader of"),
        (lambda a, x: a.float() + ops.all_reduce(x.float(), FAKE[2]), "all_reduce"),
        (lambda a, x: a + ops.all_reduce(x.float(), FAKE[2]), "float32"),
        (lambda a, x: a + ops.all_reduce(x[:1], FAKE[2]), "size"),
        (lambda a, x: torch.add(a, ops.all_reduce(x, FAKE[2]), alpha=2), "alpha"),
        (lambda a, x: a - ops.all_reduce(x, FAKE[2]), ""),
        (lambda a, x: a * ops.all_reduce(x, FAKE[2]), ""),
        (lambda a, x: a + x[0] * ops.all_reduce(x, FAKE[2]), "size 1"),
        (lambda a, x: a + ops.all_reduce(x, FAKE[2]).relu(), "all_reduce"),
    ],
)  # fmt: skip
def test_sums_that_are_not_one_stay(function, reason):
    report = explained(lambda x, r: function(ops.all_reduce(r, FAKE[2]), x), X, R)
    assert not report.matches["allreduce_add"]
    assert reason in report.why("allreduce_add")


def test_a_view_that_others_read_beside_or_of_columns_stays_behind_its_sum():
    def read_twice(x):
        total = ops.all_reduce(x, FAKE[2])
        return total.view(1, 5, 64) * 2, total * 3

    def transposed(x):  # whose memory no view of this size has
        return ops.all_reduce(x.t(), FAKE[2]).view(320) * 2

    for function in (read_twice, transposed):
        traced = after_passes(JOINED, function, X)
        assert traced.error == 0
        lines = traced.text.splitlines()
        summed, viewed = (
            [i for i, line in enumerate(lines) if op in line] for op in ("all_reduce", "view")
        )
        assert max(summed) < max(viewed)


def gathered(x, ranks):
    """As atomc.parallel.vocab gathers logits."""
    found = collective.all_gather_into_tensor(x.contiguous(), ranks, FAKE[ranks])
    return torch.cat(collective.wait_tensor(found).view(ranks, *x.shape).unbind(0), -1)


def gathered_in_chunks(x, ranks):
    found = collective.all_gather_into_tensor(x.contiguous(), ranks, FAKE[ranks])
    return torch.cat(collective.wait_tensor(found).chunk(ranks), -1)


def gathered_by_dtensor(x, ranks):
    """As DTensor, and transformers with it, make a shard of columns whole: one row is viewed."""
    found = collective.all_gather_into_tensor(x.contiguous(), ranks, FAKE[ranks])
    return view_chunk_cat(collective.wait_tensor(found), ranks, x.dim() - 1)


def gathered_in_lists(x, ranks):
    """As torch.distributed.all_gather."""
    found = collective.all_gather_into_tensor(x.contiguous(), ranks, FAKE[ranks])
    parts = [torch.empty_like(x) for _ in range(ranks)]
    for part, own in zip(parts, collective.wait_tensor(found).split(x.shape[0]), strict=True):
        part.copy_(own)
    return torch.cat(parts, -1)


@pytest.mark.parametrize(
    ("gather", "ranks", "shape", "dynamic"),
    [
        (gathered, 1, (3, 10), False),
        (gathered, 4, (3, 10), True),
        (gathered, 2, (1, 3, 10), False),
        (gathered_in_chunks, 4, (3, 10), True),
        (gathered_by_dtensor, 2, (1, 10), False),
        (gathered_by_dtensor, 2, (1, 3, 10), True),
        (gathered_by_dtensor, 4, (1, 1, 10), False),
        (gathered_in_lists, 2, (2, 3, 10), False),
    ],
)
def test_columns_of_all_processes_are_gathered_by_one_op(gather, ranks, shape, dynamic):
    report = explained(lambda x: gather(x * 2, ranks) + 1, torch.randn(shape), dynamic=dynamic)
    assert report.num_ops == {"all_gather": 1}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda a, b: torch.cat((b, a), -1), "found the operands exchanged"),
        (lambda a, b: torch.cat((a, b), 0), "cat with dim"),
        (lambda a, b: torch.cat((a, b, a), -1), "cat"),
    ],
)
def test_other_orders_and_dimensions_of_gathered_parts_stay(wrong, reason):
    def function(x):
        found = collective.all_gather_into_tensor(x, 2, FAKE[2])
        return wrong(*collective.wait_tensor(found).chunk(2))

    report = explained(function, torch.randn(3, 10))
    assert not report.matches["all_gather"]
    assert reason in report.why("all_gather")


def test_the_largest_of_all_processes_is_no_sum():
    report = explained(
        lambda x, w: normed(functional.all_reduce(x, "max", distributed.group.WORLD), w), X, W
    )
    assert not report.matches["all_reduce"]


ONLY_SUMS = [
    NAMED[name]
    for name in (
        "tidy",
        "allreduce_add_rms_norm",
        "allreduce_rms_norm",
        "quantizers_before_views",
        "allreduce_add_rms_norm_quant",
        "allreduce_rms_norm_quant",
    )
]
SCALE = torch.tensor([0.02])


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda quantizer: quantizer.scheme)
@pytest.mark.parametrize(("add", "keep"), [("", True), ("first", False), ("second", True)])
def test_a_quantizer_joins_the_sum_and_the_norm(quantizer, keep, add):
    decided = {name: given.values[-1] for name, given in quantizer.captured.items()}
    if "dtype" in decided:
        decided["dtype"] = torch.float8_e4m3fn

    def function(x, r, w, scale):
        total = ops.all_reduce(x, GROUP)
        if add:
            y, total = ops.add_rms_norm(*((total, r) if add == "first" else (r, total)), w, 1e-6)
        else:
            y = ops.rms_norm(total, w, 1e-6)
        codes, *scales = quantizer(y.flatten(0, -2), scale, **decided)
        return codes.float(), *scales, total * 2, *([y * 2] * keep)

    traced = after_passes(ONLY_SUMS, function, X, R, W, SCALE)
    name = f"allreduce_{'add_' * bool(add)}rms_norm_quant"
    assert traced.error == 0 and traced.report.matches[f"{name}[{quantizer.scheme}]"] == 1
    assert f"scheme='{quantizer.scheme}'" in traced.text and f"keep={keep}" in traced.text


@pytest.mark.parametrize("columns", [1, 64, 192])
def test_a_padded_norm_behind_an_add_is_one_op(columns):
    def function(x, r, w):
        total = x + r
        return torch.nn.functional.pad(normed(total, w), (0, columns)), total

    chosen = [NAMED[name] for name in ("tidy", "rms_norm", "add_rms_norm", "add_rms_norm_pad")]
    traced = after_passes(chosen, function, X, R, W)
    assert traced.error == 0
    assert (
        traced.text
        == f"%0 = add_rms_norm_pad(x, r, w, 1e-06, {columns}, 'after')\nreturn %0.0, %0.1"
    )


@pytest.mark.parametrize("pad", [(2, 0), (0, -3), (0, 0, 0, 2)])
def test_columns_in_front_cut_off_or_rows_are_left_alone(pad):
    def function(x, r, w):
        total = x + r
        return torch.constant_pad_nd(normed(total, w), pad), total

    report = explained(function, X, R, W)
    assert not report.matches["add_rms_norm_pad"] and report.misses("add_rms_norm_pad")


def test_padding_with_something_else_than_zeros_is_left_alone():
    def function(x, r, w):
        total = x + r
        return torch.nn.functional.pad(normed(total, w), (0, 8), value=1.0), total

    report = explained(function, X, R, W)
    assert "value=1.0" in report.why("add_rms_norm_pad")
