"""The kernel protocol as the compiler uses it: refusals, token ranges, prepared weights, plans,
workspaces, layouts.
"""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_group import fake_group
from torch import Tensor, nn

import atomc
from atomc import kernels, ops
from atomc.compiler.select import Selection
from atomc.loading.create_model import create_model
from atomc.loading.loader import ready
from atomc.ops import GroupStep, Prepared, Refusal, Step
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.weights.parameters import fill_randomly

kernels.load("torch")
EAGER = {"glue": "eager"}


@contextmanager
def registered(op: ops.Op, provider: str, function: Any, **protocol: Any):
    """A kernel that exists for one test."""
    kernels = [*op.kernels]
    op.kernel(provider, **protocol)(function)
    try:
        yield
    finally:
        op.kernels[:] = kernels


def chosen_for(op: str) -> list[tuple[str, str]]:
    return [
        (choice.tokens, choice.chosen) for choice in atomc.reports()[-1].kernels if choice.op == op
    ]


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def test_a_refusal_is_reported_with_its_code_and_a_sentence_alone_as_other() -> None:
    def coded(platform: Platform, gate: Tensor, up: Tensor) -> Refusal:
        return Refusal("shape", "not these rows")

    def sentence(platform: Platform, gate: Tensor, up: Tensor) -> str:
        return "not today"

    with (
        registered(ops.silu_and_mul, "a", lambda: None, refuses=coded),
        registered(ops.silu_and_mul, "b", lambda: 0, refuses=sentence),
    ):
        report = atomc.explain(
            gated, torch.randn(3, 8), torch.randn(3, 8), options=EAGER, platform="h200"
        )
    (choice,) = [choice for choice in report.kernels if choice.op == "silu_and_mul"]
    assert choice.refused_by("shape") == [("a", "not these rows")] and choice.refused_by(
        "other"
    ) == [("b", "not today")]
    assert len(choice.codes) == len(choice.refused)


def test_a_kernel_from_outside_is_preferred_and_its_refusal_is_reported() -> None:
    def twice(gate: Tensor, up: Tensor) -> Tensor:
        return 2 * gated(gate, up)

    def only_eights(platform: Platform, gate: Tensor, up: Tensor) -> str | None:
        return None if gate.shape[-1] == 8 else f"rows of {gate.shape[-1]}, written for 8"

    with registered(ops.silu_and_mul, "mine", twice, refuses=only_eights):
        compiled = torch.compile(gated, backend="atom", dynamic=False, options=EAGER)
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x, x), 2 * gated(x, x))
        assert chosen_for("silu_and_mul") == [("any", "mine")]
        y = torch.randn(3, 6)
        torch.testing.assert_close(compiled(y, y), gated(y, y))
        (choice,) = [
            choice for choice in atomc.reports()[-1].kernels if choice.op == "silu_and_mul"
        ]
        assert choice.chosen == "torch" and ("mine", "rows of 6, written for 8") in choice.refused
        assert "mine: rows of 6, written for 8" in atomc.reports()[-1].why("silu_and_mul")


def test_registering_the_same_function_twice_is_an_error() -> None:
    with (
        registered(ops.silu_and_mul, "mine", gated),
        pytest.raises(ValueError, match="is registered already"),
    ):
        ops.silu_and_mul.kernel("mine")(gated)


def test_an_unknown_op_or_parameter_is_an_error_that_lists_what_exists() -> None:
    with pytest.raises(ValueError, match=r"no op 'rms'; ops are .*'rms_norm'"):
        atomc.register_kernel("rms", "mine")
    with pytest.raises(
        ValueError, match=r"prepare names \['wight'\], the op has \['x', 'weight', 'bias'\]"
    ):
        ops.linear.kernel("mine", prepare={"wight": lambda w: Prepared((w,))})


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


@pytest.mark.parametrize("dynamic", [True, False])
def test_each_range_of_tokens_gets_its_own_kernel_and_the_borders_are_right(dynamic: bool) -> None:
    seen: list[tuple[str, int]] = []

    def few(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(("few", x.shape[:-1].numel()))
        return F.linear(x, weight, bias)

    def many(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(("many", x.shape[:-1].numel()))
        return F.linear(x, weight, bias)

    model = Mlp().eval().requires_grad_(False)
    with (
        registered(ops.linear, "few", few, tokens=ops.Tokens(1, 8)),
        registered(ops.linear, "many", many, tokens=ops.Tokens(256)),
    ):
        options = {**EAGER, "providers": ("few", "many", "torch")}
        compiled = torch.compile(model, backend="atom", dynamic=dynamic, options=options)
        for shape in ((1, 1), (1, 7), (2, 4), (1, 9), (5, 51), (2, 128), (1, 257)):
            seen.clear()
            x = torch.randn(*shape, 6)
            torch.testing.assert_close(compiled(x), model(x))
            count = shape[0] * shape[1]
            assert seen == (
                [("few", count)] * 2
                if count <= 8
                else [("many", count)] * 2
                if count >= 256
                else []
            )
            if not dynamic:
                expected = (
                    "1 to 8" if count <= 8 else "256 and more" if count >= 256 else "9 to 255"
                )
                assert {tokens for tokens, _ in chosen_for("linear")} == {expected}
    if dynamic:
        assert any(
            {tokens for tokens, _ in [(c.tokens, c.chosen) for c in report.kernels]}
            == {"1 to 8", "9 to 255", "256 and more"}
            for report in atomc.reports()
        )


def test_a_range_that_no_call_can_have_is_not_compiled() -> None:
    """Dynamo's dynamic sizes are 2 at least."""
    one = ops.Tokens(1, 1)
    with registered(ops.linear, "one", F.linear, tokens=one):
        options = {**EAGER, "providers": ("one", "torch")}
        x = torch.randn(5, 6)
        torch._dynamo.mark_dynamic(x, 0)
        torch.compile(Mlp().eval().requires_grad_(False), backend="atom", options=options)(x)
        assert {tokens for tokens, _ in chosen_for("linear")} == {"2 and more"}


def test_the_ranges_of_kernels_behind_one_for_any_number_of_tokens_split_nothing() -> None:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def few(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    model = Mlp().eval().requires_grad_(False)
    with (
        registered(ops.linear, "few", few, tokens=ops.Tokens(2, 8)),
        registered(ops.linear, "any", product),
    ):
        for providers, expected in (
            (("any", "few"), {"any"}),
            (("few", "any"), {"2 to 8", "9 and more"}),
        ):
            compiled = torch.compile(
                model, backend="atom", dynamic=True, options={**EAGER, "providers": providers}
            )
            compiled(torch.randn(3, 6))
            assert {tokens for tokens, _ in chosen_for("linear")} == expected
            torch._dynamo.reset()


def test_a_weight_is_prepared_once_and_the_kernel_receives_what_was_made() -> None:
    prepared: list[int] = []

    def transposed(weight: Tensor) -> Prepared:
        prepared.append(weight.data_ptr())
        return Prepared((weight.t().contiguous(),))

    def product(x: Tensor, weight: tuple[Tensor], bias: Tensor | None = None) -> Tensor:
        out = x @ weight[0]
        return out if bias is None else out + bias

    model = Mlp().eval().requires_grad_(False)
    x = torch.randn(3, 6)
    with registered(ops.linear, "mine", product, prepare={"weight": transposed}):
        compiled = torch.compile(model, backend="atom", options=EAGER)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    assert prepared == [model.up.weight.data_ptr(), model.down.weight.data_ptr()]


def test_a_weight_that_is_computed_in_the_graph_cannot_be_prepared() -> None:
    def product(x: Tensor, weight: tuple[Tensor], bias: Tensor | None = None) -> Tensor:
        raise AssertionError("must not run")

    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w * 2)

    x, w = torch.randn(3, 6), torch.randn(4, 6)
    with registered(
        ops.linear, "mine", product, prepare={"weight": lambda weight: Prepared((weight,))}
    ):
        torch.testing.assert_close(
            torch.compile(scaled, backend="atom", options=EAGER)(x, w), scaled(x, w)
        )
    assert "it prepares `weight` once, but the graph computes it in each call" in str(
        atomc.reports()[-1].kernels
    )


def test_a_workspace_has_the_size_that_the_kernel_asks_for() -> None:
    sizes: list[int] = []

    def with_scratch(gate: Tensor, up: Tensor, workspace: Tensor) -> Tensor:
        sizes.append(workspace.numel())
        assert workspace.dtype == torch.uint8 and workspace.device == gate.device
        return gated(gate, up)

    def bytes_for(gate: Tensor, up: Tensor) -> int:
        return 4 * gate.numel()

    with registered(ops.silu_and_mul, "mine", with_scratch, workspace=bytes_for):
        compiled = torch.compile(gated, backend="atom", dynamic=True, options=EAGER)
        for rows in (3, 5):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x, x), gated(x, x))
    assert sizes == [4 * 24, 4 * 40]


TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tiny() -> nn.Module:
    model = create_model(TINY, dtype=torch.float32)
    fill_randomly(model, "cpu")
    return ready(model)


def prompt_of_five() -> Step:
    """A step of one sequence of five tokens, in block 1."""
    group = GroupStep(torch.arange(5) + 16, torch.tensor([[1]], dtype=torch.int32))
    return Step(
        torch.arange(5),
        torch.arange(5),
        torch.tensor([0, 5], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.arange(5),
        (group,),
        torch.zeros(1, dtype=torch.int64),
    )


def test_a_plan_is_made_once_a_step_for_all_layers(tiny: nn.Module) -> None:
    plans: list[int] = []

    def plan(step: Step, specs: Any) -> tuple[Tensor, ...]:
        plans.append(len(specs))
        return (step.seq_lens * 2,)

    def planned(*args: Any, plan: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
        assert torch.equal(plan[0], torch.tensor([10], dtype=torch.int32))
        return ops.paged_attention.reference(*args, **kwargs)

    def attend(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        token: Tensor,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        plan: tuple[Tensor, ...],
    ) -> Tensor:
        return planned(
            q,
            k_cache,
            v_cache,
            query_start,
            seq_lens,
            block_tables,
            token,
            sinks,
            scale=scale,
            plan=plan,
        )

    ids, positions = torch.arange(5), torch.arange(5)
    with registered(ops.paged_attention, "mine", attend, layout="paged", plan=plan):
        program = compile_model(tiny, EAGER)
        assert {spec.paging.layout for spec in program.specs} == {"paged"}
        program.bind([spec.allocate(2, 16, "cpu") for spec in program.specs])
        with torch.no_grad():
            torch.testing.assert_close(program(prompt_of_five()), tiny(ids, positions))
    assert plans == [2]


def lengths_doubled(seq_lens: Tensor, heads: int) -> tuple[Tensor, ...]:
    COMPUTED.append(heads)
    return (seq_lens * 2,)


COMPUTED: list[int] = []


@pytest.mark.rotating
@pytest.mark.parametrize("glue", ["eager", "inductor"])
def test_what_layers_have_in_common_is_computed_once_a_step(tiny: nn.Module, glue: str) -> None:
    def attend(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        token: Tensor,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        shared: tuple[Tensor, ...],
    ) -> Tensor:
        assert torch.equal(shared[0], torch.tensor([10], dtype=torch.int32))
        return ops.paged_attention.reference(
            q, k_cache, v_cache, query_start, seq_lens, block_tables, token, scale=scale
        )

    doubled = ops.Shared(lengths_doubled, ("seq_lens",), lambda q, **_: (q.shape[-2],))
    COMPUTED.clear()
    ids = torch.arange(5)
    with registered(ops.paged_attention, "mine", attend, layout="paged", shared=doubled):
        program = compile_model(tiny, EAGER | {"glue": glue})
        program.bind([spec.allocate(2, 16, "cpu") for spec in program.specs])
        with torch.no_grad():
            torch.testing.assert_close(program(prompt_of_five()), tiny(ids, ids))
    heads = TINY["num_attention_heads"]
    assert len(program.specs) == 2 and heads == COMPUTED.pop() and not COMPUTED


def test_a_layout_without_a_writer_is_not_chosen(tiny: nn.Module) -> None:
    with registered(ops.paged_attention, "mine", ops.paged_attention.reference, layout="swizzled"):
        program = compile_model(tiny, EAGER)
    assert {spec.paging.layout for spec in program.specs} == {"paged"}
    (refusal, *_) = [
        reason
        for choice in program.report.kernels
        if choice.op == "paged_attention"
        for provider, reason in choice.refused
        if provider == "mine"
    ]
    assert refusal == "supports layout 'swizzled', the state has layout 'paged'"


def test_kernels_of_a_machine_that_is_not_here_can_be_asked_for(tiny: nn.Module) -> None:
    report = atomc.explain(tiny, platform="h200", options=EAGER)
    served = {choice.op: choice.chosen for choice in report.kernels}
    assert served["rms_norm"] == served["qk_norm_rope"] == "triton"
    here = atomc.explain(tiny, options=EAGER)
    (reason,) = {
        reason
        for choice in here.kernels
        if choice.op == "rms_norm"
        for provider, reason in choice.refused
        if provider == "triton"
    }
    assert reason == "Triton kernels run on a GPU"


def test_a_norm_that_rounds_once_is_refused_where_the_models_roundings_are_asked_for() -> None:
    def once(x: Tensor, weight: Tensor, eps: float, style: str = "after") -> Tensor:
        raise AssertionError("must not run")

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x32 = x.float()
        return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16()
    with registered(ops.rms_norm, "mine", once, rounds="once"):
        compiled = torch.compile(norm, backend="atom", options={**EAGER, "rounding": "hf"})
        assert torch.equal(compiled(x, weight), norm(x, weight))
    assert "it rounds once, rounding='hf' asks for the model's own roundings" in str(
        atomc.reports()[-1].kernels
    )


def test_the_order_of_providers_is_the_users() -> None:
    selection = Selection(Options(providers=("torch",)), Platform.detect("cpu"), eager=True)
    assert selection.order == ["torch"]


def test_numbers_of_tokens_are_spelled_and_wrong_ones_refused() -> None:
    assert [str(tokens) for tokens in (ops.Tokens(), ops.Tokens(2, 8), ops.Tokens(3, 3))] == [
        "1 and more",
        "2 to 8",
        "3",
    ]
    assert 8 in ops.Tokens(2, 8) and 9 not in ops.Tokens(2, 8) and 9 in ops.Tokens(9)
    assert ops.Tokens(3, 8).within(ops.Tokens(2)) and not ops.Tokens(2).within(ops.Tokens(2, 8))
    for first, last in ((0, 4), (5, 4)):
        with pytest.raises(ValueError, match=f"no numbers of tokens from {first} to {last}"):
            ops.Tokens(first, last)
    with pytest.raises(
        TypeError, match=r"kernel of linear: tokens is \(1, 8\), expected atomc.ops.Tokens"
    ):
        ops.linear.kernel("mine", tokens=(1, 8))


def exchanged(x: Tensor, ids: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    tokens, local, *_ = ops.dispatch_tokens(x, ids, weights, places, 2, 2, fake_group(2))
    return ops.combine_tokens(tokens * 2, local, 2, fake_group(2))


def test_one_provider_serves_both_halves_of_an_exchange() -> None:
    def only_wide(platform: Platform, partial: Tensor) -> str | None:
        return None if partial.shape[1] == 8 else "written for 8"

    def providers(width: int) -> dict[str, tuple[str, list[tuple[str, str]]]]:
        x, ids = torch.randn(3, width), torch.zeros(3, 2, dtype=torch.int64)
        options = {"providers": ("first", "both", "second")}
        report = atomc.explain(exchanged, x, ids, torch.rand(3, 2), ids[:2], options=options)
        return {choice.op: (choice.chosen, choice.refused) for choice in report.kernels}

    with (
        registered(ops.dispatch_tokens, "first", lambda: None),
        registered(ops.dispatch_tokens, "both", lambda: None),
        registered(ops.combine_tokens, "both", lambda: None, refuses=only_wide),
        registered(ops.combine_tokens, "second", lambda: None),
    ):
        wide, narrow = providers(8), providers(4)
    alone = ("first", "it has no combine_tokens")
    assert wide["dispatch_tokens"] == ("both", [alone])
    assert wide["combine_tokens"] == ("both", [])
    other = "it does not serve the other half of the exchange, dispatch_tokens"
    assert narrow["dispatch_tokens"] == (
        "inline",
        [alone, ("both", "it has no combine_tokens; written for 8")],
    )
    assert narrow["combine_tokens"] == ("inline", [("both", "written for 8"), ("second", other)])
