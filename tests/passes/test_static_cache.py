"""Copies into a dense static cache become one kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import atomc
from atomc import ops
from atomc.report.report import Report

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

H, K, S, D, START = 4, 2, 12, 16, 3


class Layer:
    """Attention over a static cache, after transformers' StaticLayer. copy: of new keys and values
    into the caches.
    """

    def __init__(self, rotate: Callable[..., tuple[Tensor, Tensor]], copy: Callable[..., None]):
        self.rotate, self.copy = rotate, copy

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor
    ) -> Tensor:
        index = torch.arange(k.shape[1]) + length
        length.add_(k.shape[1])
        q, k = self.rotate(q, k)
        self.copy(keys, values, index, k.transpose(1, 2), v.transpose(1, 2))
        mask = torch.arange(S) <= index[:, None]
        caches = keys.transpose(1, 2), values.transpose(1, 2)
        return ops.attention(q, *caches, mask=mask, scale=0.25, causal=False)


def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def roped(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.linspace(0, x, D) for x in (1, 2))
    return ops.rope(q, cos, sin), ops.rope(k, cos, sin)


def roped_in_fp32(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.linspace(0, x, D) for x in (1, 2))
    return ops.rope(q, cos, sin, "pairs", True), ops.rope(k, cos, sin, "pairs", True)


def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin, weight = (torch.linspace(0, x, D) for x in (1, 2, 3))
    return ops.qk_norm_rope(q, k, weight, weight + 1, cos, sin, 1e-6)


def copied(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    keys.index_copy_(2, index, k)
    values.index_copy_(2, index, v)


def inputs(batch: int = 1, tokens: int = 1, width: int = D) -> list[Tensor]:
    """Queries, keys and values, caches that hold START tokens, and their number."""
    new = [torch.randn(batch, tokens, *sizes) for sizes in ((H, D), (K, D), (K, width))]
    caches = [torch.randn(batch, K, S, columns) for columns in (D, width)]
    return [*new, *caches, torch.tensor(START)]


def compiled(function: Callable[..., Any], arguments: list[Tensor], **options: Any) -> Report:
    """The report of a function whose results and writes are those of eager."""
    expected_inputs = [x.clone() for x in arguments]
    with torch.no_grad():
        expected = function(*expected_inputs)
        run = torch.compile(function, backend="atom", options={"glue": "eager", **options})
        result = run(*arguments)
    torch.testing.assert_close(
        (result, arguments), (expected, expected_inputs), rtol=1e-5, atol=1e-5
    )
    return atomc.reports()[-1]


def served(report: Report) -> list[str]:
    """The ops that kernels compute, in their order."""
    return [kernel.op for kernel in report.kernels]


def final(report: Report) -> str:
    return report.stages[-1].text


@pytest.mark.parametrize(
    ("rotate", "op"),
    [
        (plain, "kv_write"),
        (roped, "rope_kv_write"),
        (roped_in_fp32, "rope_kv_write"),
        (normed, "qk_norm_rope_kv_write"),
    ],
)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_copies_of_keys_and_values_become_one_kernel_with_what_rotates_them(
    rotate: Callable[..., Any], op: str, batch: int, tokens: int, pretended_gpu: None
) -> None:
    report = compiled(Layer(rotate, copied), inputs(batch, tokens))
    assert served(report) == [op, "attention"]
    assert report.matches["static_cache"] == 1
    assert not report.near


def test_a_single_position_is_read_from_the_counter(pretended_gpu: None) -> None:
    text = final(compiled(Layer(roped, copied), inputs()))
    assert "= aten.view(args.5, [1])" in text
    assert text.count("aten.add") == 2  # of the mask, and to the counter


def test_values_may_have_another_width_than_keys(pretended_gpu: None) -> None:
    assert served(compiled(Layer(roped, copied), inputs(width=8))) == ["rope_kv_write", "attention"]


def test_positions_that_are_an_input_are_slots(pretended_gpu: None) -> None:
    _, k, v, keys, values, _ = inputs(tokens=2)
    rows = k.transpose(1, 2), v.transpose(1, 2)
    report = compiled(copied, [keys, values, torch.tensor([5, 2]), *rows])
    assert served(report) == ["kv_write"]


def other_positions(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    keys.index_copy_(2, index, k)
    values.index_copy_(2, index + 1, v)


def read_between(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    keys.index_copy_(2, index, k)
    values.index_copy_(2, index, v + keys[:, :, :1])


def in_one_cache(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    keys.index_copy_(2, index, k)
    keys.index_copy_(2, index, v)


def along_heads(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    for cache, new in ((keys, k), (values, v)):
        cache.index_copy_(1, torch.arange(1), new.expand(-1, -1, S, -1)[:, :1])


@pytest.mark.parametrize("copy", [other_positions, read_between, in_one_cache, along_heads])
def test_other_copies_are_left_alone(copy: Callable[..., None], pretended_gpu: None) -> None:
    report = compiled(Layer(plain, copy), inputs())
    assert report.matches["static_cache"] == 0
    assert "kv_write" not in final(report)


def test_operands_that_are_written_between_the_copies_are_read_by_each(pretended_gpu: None) -> None:
    def function(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
        keys.index_copy_(2, index, k)
        index.add_(1)
        values.index_copy_(2, index, v)

    _, k, v, keys, values, _ = inputs()
    rows = k.transpose(1, 2), v.transpose(1, 2)
    report = compiled(function, [keys, values, torch.tensor([5]), *rows])
    assert "kv_write" not in final(report)


def test_a_norm_whose_weight_is_written_before_the_copies_stays_before_them(
    pretended_gpu: None,
) -> None:
    def function(weight: Tensor, *arguments: Tensor) -> Tensor:
        def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = (torch.linspace(0, x, D) for x in (1, 2))
            results = ops.qk_norm_rope(q, k, weight, weight, cos, sin, 1e-6)
            weight.add_(1.0)
            return results

        return Layer(rotate, copied)(*arguments)

    report = compiled(function, [torch.ones(D), *inputs()])
    assert served(report) == ["qk_norm_rope", "kv_write", "attention"]


def test_old_values_that_are_read_first_stay_the_old_ones(pretended_gpu: None) -> None:
    def read_before(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
        copied(keys, values, index, k + keys[:, :, 2:3], v + values[:, :, 2:3])

    report = compiled(Layer(plain, read_before), inputs())
    assert served(report) == ["kv_write", "attention"]


def test_rotated_keys_that_something_else_reads_are_only_written(pretended_gpu: None) -> None:
    def twice(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = normed(q, k)
        return q + k.sum(), k

    report = compiled(Layer(twice, copied), inputs())
    assert served(report) == ["qk_norm_rope", "kv_write", "attention"]


def test_rotated_keys_that_are_read_behind_the_write_are_only_written(pretended_gpu: None) -> None:
    def with_keys(*arguments: Tensor) -> Tensor:
        rotated: list[Tensor] = []

        def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            q, k = normed(q, k)
            rotated.append(k)
            return q, k

        return Layer(rotate, copied)(*arguments) + rotated[0].sum()

    assert served(compiled(with_keys, inputs())) == ["qk_norm_rope", "kv_write", "attention"]


def test_queries_and_keys_of_other_tables_are_rotated_apart(pretended_gpu: None) -> None:
    def apart(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return roped(q, q)[0], ops.rope(k, *(torch.linspace(0, x, D) for x in (3, 4)))

    assert "rope_kv_write" not in served(compiled(Layer(apart, copied), inputs()))


def test_queries_that_are_read_before_the_write_are_rotated_before(pretended_gpu: None) -> None:
    def first(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = normed(q, k)
        return q * 2, k

    report = compiled(Layer(first, copied), inputs())
    assert served(report) == ["qk_norm_rope", "kv_write", "attention"]


def test_a_counter_that_is_added_to_before_is_no_position(pretended_gpu: None) -> None:
    def advanced(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        length = arguments[-1]
        return Layer(plain, copied)(*arguments), length * 2

    text = final(compiled(advanced, inputs()))
    assert "kv_write(" in text
    assert "aten.view(args.5, [1])" not in text


@pytest.mark.parametrize(
    "options", [{"passes": {"static_cache": False}}, {"layout": "contiguous"}], ids=str
)
def test_options_turn_it_off(options: dict[str, Any], pretended_gpu: None) -> None:
    assert served(compiled(Layer(normed, copied), inputs(), **options)) == [
        "qk_norm_rope",
        "attention",
    ]


def test_a_cpu_copies_as_the_model_does() -> None:
    report = compiled(Layer(normed, copied), inputs())
    assert "kv_write" not in final(report)
    assert final(report).count("aten.index_copy_(") == 2


def test_caches_that_no_kernel_writes_are_a_near_miss(pretended_gpu: None) -> None:
    report = compiled(Layer(plain, copied), [x.double() for x in inputs()[:-1]] + inputs()[-1:])
    [miss] = [miss for miss in report.near if miss.rewrite == "static_cache"]
    assert (miss.expected, miss.found) == ("a kernel that writes to these caches", "none")
    assert "aten.index_copy_(" in final(report)


def test_a_decode_step_of_olmo2_rotates_by_fp32_tables_as_it_writes() -> None:
    """Its rotation is in fp32, and rounded before the write."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    config = transformers.AutoConfig.for_model(
        "olmo2", num_attention_heads=4, pad_token_id=0, eos_token_id=0, **sizes
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    cache = transformers.StaticCache(config=config, max_cache_len=S)
    cache.early_initialization(1, 4, 16, torch.bfloat16, torch.device("cpu"))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    report = atomc.explain(model, ids, past_key_values=cache, platform="h200")
    assert served(report).count("rope_kv_write") == 2
    assert "rope" not in served(report) and "_to_copy" not in final(report)
