"""What runs of the kernels' grid per change: something of everything, the same again by the same
seed.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import conftest
import pytest
import test_kernels
import torch
from kernel_grid import LONG, TRIED, Cell, cells_of, fixed, grid, name_of, shape
from torch import Tensor

from atomc import ops

SEED = 7
each_kernel = pytest.mark.parametrize("at", range(len(TRIED)), ids=lambda at: name_of(TRIED[at]))


@cache
def taken(at: int) -> list[Cell]:
    """The cells that a kernel takes."""
    return [cell for cell in cells_of(TRIED[at]) if cell.taken()]


@cache
def running(at: int) -> list[Cell]:
    """Those of them that run per change, whatever is drawn."""
    return [cell for cell in fixed(TRIED[at]) if cell.taken()]


@pytest.mark.rotating(each_case=3)
@each_kernel
def test_it_runs_in_each_dtype_and_each_case_that_it_takes_but_in_one_case_of_a_long_shape(
    at: int,
) -> None:
    assert {cell.dtype for cell in running(at)} == {cell.dtype for cell in taken(at)}
    assert {shape(cell.case) for cell in running(at)} == {shape(cell.case) for cell in taken(at)}
    left_out = {cell.case for cell in taken(at)} - {cell.case for cell in running(at)}
    assert all(shape(case) in LONG for case in left_out)


@pytest.mark.rotating(each_case=3)
@each_kernel
def test_every_part_of_a_cases_name_is_in_one_that_it_runs(at: int) -> None:
    assert parts(running(at)) == parts(taken(at))


def test_a_seed_draws_the_same_again_and_another_one_others_beside_the_same_fixed_cells() -> None:
    def drawn(seed: int) -> set[str]:
        return {cell.name for cell, now in grid(seed, TRIED[:9]) if now}

    always = {cell.name for kernel in TRIED[:9] for cell in fixed(kernel)}
    assert drawn(SEED) == drawn(SEED) != drawn(SEED + 1)
    assert always < drawn(SEED) and always < drawn(SEED + 1)
    assert len(drawn(SEED)) < 1.3 * len(always)


def test_a_worker_draws_what_the_controller_draws_and_a_seed_that_is_given_is_kept(
    pytestconfig: pytest.Config,
) -> None:
    assert isinstance(pytestconfig.option.grid_seed, int)  # a run without one has drawn it
    controller, worker = (
        SimpleNamespace(option=SimpleNamespace(grid_seed=seed)) for seed in (SEED, None)
    )
    node = SimpleNamespace(config=controller, workerinput={})
    conftest.pytest_configure(controller)
    conftest.pytest_configure_node(node)
    worker.workerinput = node.workerinput
    conftest.pytest_configure(worker)
    assert controller.option.grid_seed == worker.option.grid_seed == SEED
    assert f"--grid-seed {SEED}" in conftest.pytest_report_header(worker)


def parts(cells: list[Cell]) -> set[str]:
    return {part for cell in cells for part in cell.case.split(", ")}


def off(result: Tensor) -> None:
    """Make the first element another number."""
    first = (0,) * result.dim()
    if result.dtype == torch.bool:
        result[first] = not result[first]
    elif result.dtype.itemsize == 1:
        result.view(torch.uint8)[first] ^= 0b0101_0101
    else:
        result[first] += 100


def broken(kernel: ops.Kernel) -> ops.Kernel:
    """The kernel with one wrong number in what it returns or writes."""

    def function(**arguments: object) -> object:
        result = kernel.function(**arguments)
        mutated = map(arguments.get, ops.REGISTRY[kernel.op].mutates)
        results = result if isinstance(result, tuple) else (result,)
        off(
            next(
                value
                for value in (*results, *mutated)
                if isinstance(value, Tensor) and value.numel()
            )
        )
        return result

    return replace(kernel, function=function)


@pytest.mark.rotating(each_case=3)
@each_kernel
def test_a_wrong_number_of_it_fails_a_cell_that_runs(at: int) -> None:
    if not running(at):
        pytest.skip("it takes nothing on this machine")
    cell = next(cell for cell in running(at) if shape(cell.case) not in LONG)
    with pytest.raises(AssertionError):
        test_kernels.test_a_kernel_computes_what_its_op_means(
            broken(cell.kernel), *cell[1:], device="cpu"
        )
