"""Private API of torch's DTensor, and of what traces operations on them."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    get_proxy_slot,
    track_tensor_tree,
)

from atomc.torch_compat.core import FakeTensor, FakeTensorMode, outside_of_tracing
from atomc.torch_compat.tracing import sizes_stay_symbolic

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard["DTensor"]:
    """Whether x is a DTensor; does not import them."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def local_tensor(x: "DTensor") -> Tensor:
    """The tensor of this process, as the same object in each call; what a collective under way
    computes is awaited.
    """
    local = x._local_tensor
    wait = getattr(local, "wait", None)  # of AsyncCollectiveTensor
    awaited: Tensor = local if wait is None else wait()
    return awaited


def mark_as_parameter(local: Tensor) -> None:
    """Let a local tensor be an instance of nn.Parameter. Its type, which Dynamo guards, stays."""
    local._is_param = True


def replace_local(x: "DTensor", local: Tensor) -> "DTensor":
    """A DTensor like x, with another tensor of this process."""
    dtensor: DTensor = type(x)(local, x._spec, requires_grad=False)
    return dtensor


def holds_mask(x: "DTensor") -> bool:
    """Whether x is a look-up in parts of a vocabulary. Its placement holds which tokens are of
    other parts, until the parts are summed; DTensor keeps such a placement for later calls.
    """
    return any(hasattr(placement, "mask_buffer") for placement in x.placements)


def release_masks(x: "DTensor") -> None:
    """Let the placement be used again, after a look-up that is not summed."""
    for placement in x.placements:
        buffer = getattr(placement, "mask_buffer", None)
        while buffer is not None and buffer.data is not None:
            buffer.release_mask()


class Tracer:
    """Appends the ATen operations that run inside `recording` to a graph."""

    def __init__(self, mode: FakeTensorMode):
        self.mode, self.tracer = mode, PythonKeyTracer()
        self.graph: Graph = Graph(tracer_cls=PythonKeyTracer)
        self.tracer.graph = self.graph
        self.tracer.root = torch.nn.Module()  # owns tensors that are constants
        self.tracer.tensor_attrs = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with (
            self.mode,
            sizes_stay_symbolic(),
            torch.no_grad(),
            ProxyTorchDispatchMode(self.tracer, "fake"),
        ):
            yield
        self._spell_constants()

    def _spell_constants(self) -> None:
        """Replace numbers that are tensors by calls that make them, as a graph of Dynamo has no
        tensors of its own.
        """
        for node in self.graph.find_nodes(op="get_attr"):
            fake = vars(self.tracer.root).get(str(node.target))
            if fake is None:  # of Dynamo's graph
                continue
            constant = fake.constant if isinstance(fake, FakeTensor) else fake
            if constant is None or constant.numel() != 1:
                raise NotImplementedError("an operation reads a tensor of values")
            with self.graph.inserting_before(node), outside_of_tracing():
                filled = self.graph.call_function(
                    torch.ops.aten.full.default,
                    (list(constant.shape), constant.item()),
                    {"dtype": constant.dtype, "device": fake.device},
                )
            filled.meta = dict(node.meta)
            node.replace_all_uses_with(filled)
            self.graph.erase_node(node)
            delattr(self.tracer.root, str(node.target))

    def track(self, value: Any, node: Node) -> None:
        """Let `node` compute a fake value: a tensor, a size, or a tuple of them."""
        metadata = dict(node.meta)
        track_tensor_tree(value, Proxy(node, self.tracer), constant=None, tracer=self.tracer)
        node.meta = metadata

    def alias(self, fake: Any, node: Node) -> Any:
        """A value like `fake`, which `node` computes."""
        if not isinstance(fake, Tensor):
            if isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool):
                self.track(fake, node)
            return fake
        with self.mode, torch.no_grad():
            view = fake.detach()
        self.track(view, node)
        return view

    def node_of(self, value: Any) -> Node | None:
        """The node that computes a value; None for a constant."""
        if isinstance(value, Tensor):
            node: Node = get_proxy_slot(value, self.tracer).proxy.node
            return node
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            if value.node.constant is not None or value.node.expr.is_number:
                return None
            number: Node = get_proxy_slot(value, self.tracer).force().node
            return number
        return None
