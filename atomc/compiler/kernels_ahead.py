"""Compiles the Triton kernels of lowered graphs in parallel, before their first call.

Each kernel function is called once with fake tensors: what it launches is compiled, and does not
run.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from atomc import kernels
from atomc.compiler.phases import timed
from atomc.graph.node_record import record_of
from atomc.graph.sizes import first_size
from atomc.platform import Platform
from atomc.report.report import Report
from atomc.torch_compat.core import FakeTensorMode

# Functions whose launches are all Triton's, and that read no values of tensors.
_PROVIDERS = ("triton", kernels.INVARIANT)
_PARALLEL = "atomc.kernels.triton.launch.parallel_compile"


@contextlib.contextmanager
def compiling_kernels(
    graphs: Sequence[GraphModule], platform: Platform, report: Report
) -> Iterator[None]:
    """A context in which the kernels that these graphs launch are compiled and loaded; with dynamic
    sizes, those of the first call. One that fails to compile raises at its launch, and one that
    cannot be told from fake tensors is compiled there.
    """
    records = [record_of(node) for gm in graphs for node in gm.graph.nodes]
    if platform.kind == "cpu" or not any(record.kernel in _PROVIDERS for record in records):
        yield
        return
    with contextlib.ExitStack() as threads:
        with timed(report, "kernels"):
            compiling = kernels.load_module(_PARALLEL).compiling
            threads.enter_context(compiling(partial(_launch_all, graphs)))
        yield
        with timed(report, "kernels"):
            threads.close()


def _launch_all(graphs: Sequence[GraphModule]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        for gm in graphs:
            values: dict[Node, Any] = {}
            for node in gm.graph.nodes:
                # A kernel may need what is not there yet, such as a prepared weight, and a value
                # may have no fake tensor, such as one of a subclass.
                with contextlib.suppress(Exception):
                    values[node] = tree_map(_as_in_first_call, node.meta.get("val"))
                    if record_of(node).kernel in _PROVIDERS:
                        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                        values[node] = node.target(*args, **kwargs)


def _as_in_first_call(x: Any) -> Any:
    """A tensor or number with the sizes of the first call."""
    if isinstance(x, torch.SymInt):
        return first_size(x)
    if isinstance(x, Tensor):
        shape, stride = (tuple(map(first_size, sizes)) for sizes in (x.shape, x.stride()))
        return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
    return x
