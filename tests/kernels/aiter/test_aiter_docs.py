"""The table of docs/aiter.md names each kernel, what it calls and its proof; explain chooses
AITER's kernels.
"""

import re
from pathlib import Path

import pytest
import stand_ins
from aiter_cases import ARCHS, IN_TRITON, KERNELS

from atomc.cli import main
from atomc.kernels.aiter import library
from atomc.kernels.aiter.collective import groups

PAGE = Path(__file__).parents[3] / "docs/aiter.md"


def rows() -> list[tuple[str, set[str], str, str]]:
    """(op, functions, where they run, proof) of each row of the table."""
    found = []
    op = ""
    text = PAGE.read_text()
    for first, functions, where, proof in re.findall(
        r"^\| (.*?) ?\| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE
    ):
        op = first.strip("`") or op
        found.append((op, set(re.findall(r"`(\w+)`", functions)), where, proof))
    return [row for row in found if row[0] in {kernel.op for kernel in KERNELS.values()}]


def test_the_table_has_a_row_for_each_kernel_and_says_where_it_runs() -> None:
    written = sorted((op, where == "Triton") for op, _, where, _ in rows())
    assert written == sorted((kernel.op, name in IN_TRITON) for name, kernel in KERNELS.items())


def test_kernels_are_tried_in_the_order_of_the_table() -> None:
    for op in {kernel.op for kernel in KERNELS.values()}:
        tried = [name in IN_TRITON for name, kernel in KERNELS.items() if kernel.op == op]
        assert [where == "Triton" for of, _, where, _ in rows() if of == op] == tried, op
    shuffled = "linear_shuffled_split_cat"
    assert [name for name, kernel in KERNELS.items() if kernel.op == "linear_split_cat"] == [
        f"{module}.linear_split_cat"
        for module in (shuffled, f"{shuffled}_mxfp4", "linear_split_cat")
    ]


def test_a_row_is_value_checked_if_its_functions_have_stand_ins() -> None:
    played = {name for _, name in stand_ins.STAND_INS}
    for op, functions, where, proof in rows():
        if where == "Triton":
            assert proof.startswith("executed: interpreter, object"), op
        else:
            assert proof == ("value-checked" if functions <= played else "names and shapes"), op


def test_the_table_names_every_function_of_aiter_that_is_called() -> None:
    of_groups = {function.name for function in groups.FUNCTIONS}
    asked_not_called = {*of_groups, "IPCBufferPool", "_gemm_splitk_reduce_kernel"}
    enums = {"QuantType", "ActivationType"}
    assert (
        set().union(*(functions for _, functions, _, _ in rows()))
        == {function.name for function in library.FUNCTIONS} - asked_not_called - enums
    )


@pytest.mark.rotating
@pytest.mark.parametrize("arch", ARCHS)
def test_explain_chooses_aiter_for_the_runtime(
    arch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["explain", "--runtime", "--layers", "1", "--platform", arch])
    chosen = dict(re.findall(r"^(\w+) +\d+ +any +(\w+)$", capsys.readouterr().out, re.MULTILINE))
    ops = (
        "rms_norm",
        "add_rms_norm",
        "linear",
        "qk_norm_rope_kv_write",
        "paged_attention",
        "silu_and_mul",
    )
    others = {"embedding": "torch", "rotary_tables": "triton"}
    assert chosen == others | dict.fromkeys(ops, "aiter")
