"""For the runtime: each state handle becomes cache tensors, and attention a write and a paged read.

    q, k, v, handle > attention
 =>
    token = kv_write(k, v, k_cache!, v_cache!, slots);  paged_attention(q, k_cache, v_cache, ..., token)

The token is a data edge: nothing can swap write and read, and dead-code removal cannot drop the write. The caches and
what a step carries become further graph inputs. A cache is in fp8 if the options or the handle's dtype say so; then its
scales are inputs, too, and an operand of both.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc import ops
from atomc.graph.canonical import value
from atomc.graph.inputs import set_graph_input
from atomc.graph.provenance import module_path, source_line
from atomc.graph_pass import Context, Outcome
from atomc.ops.formats import FP8
from atomc.ops.inputs import GraphInput, StateInput, StepInput
from atomc.ops.state import StateSpec, kv_shape
from atomc.platform import Platform
from atomc.rewrite import Fired, infer
from atomc.torch_compat.core import FakeTensorMode
from atomc.torch_compat.tracing import fake_mode_of, new_unbacked_size


def bind_state(gm: GraphModule, context: Context) -> Outcome:
    """Replace every attention that owns a handle. Returns one StateSpec per layer, in graph order.

    Raises ValueError for an attention that a paged cache cannot serve.
    """
    graph = gm.graph
    sites = [node for node in graph.nodes if node.target is ops.attention.overload and _argument(node, 3, "kv")]
    if not sites:
        return Outcome()
    mode = fake_mode_of(graph)
    assert mode is not None
    inputs = RuntimeInputs(graph, mode)
    windows = sorted({node.kwargs.get("window", 0) for node in sites})
    done = Outcome()
    for node in sites:
        q, k, v, handle = node.args[0], node.args[1], node.args[2], _argument(node, 3, "kv")
        assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
        path, line = module_path(node), source_line(node)
        if _argument(node, 4, "mask") is not None or not node.kwargs.get("causal", True):
            raise ValueError(f"attention in {path} ({line}) has a mask or is not causal, and a paged cache serves causal "
                             "attention only")
        try:
            shape = kv_shape(value(k), value(v))
        except ValueError as error:
            raise ValueError(f"attention in {path} ({line}): {error}") from None
        window = node.kwargs.get("window", 0)
        group = windows.index(window)
        codes = context.options.kv_cache_dtype == "fp8" or value(handle).dtype in FP8
        kept = fp8_of(context.platform) if codes else value(k).dtype
        spec = StateSpec(path, "kv", shape, kept, window, group=group)
        caches = inputs.caches(len(done.state), spec)
        scales = inputs.scales(len(done.state)) if codes else ()
        done.state.append(spec)
        slots, *sequences = inputs.of_step(q, group)
        meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        meta |= {"origins": node.meta.get("origins", {node.name}), "made_by": "bind_state"}
        with graph.inserting_before(node):
            token = graph.call_function(ops.kv_write.overload, (k, v, *caches, slots, *scales))
            token.meta.update(meta)
            infer(graph, token)
            read = graph.call_function(
                ops.paged_attention.overload,
                (q, *caches, *sequences, token, _argument(node, 5, "sinks"), *scales),
                {name: node.kwargs[name] for name in ("scale", "window", "softcap") if name in node.kwargs},
            )
            read.meta.update(meta, val=value(node))
        node.replace_all_uses_with(read)
        graph.erase_node(node)
        done.fired.append(Fired("bind_state", node, {"window": window}, {node}, [token, read]))
    return done


def fp8_of(platform: Platform) -> torch.dtype:
    """The e4m3 of the machine: MI300 has none with a negative zero."""
    return torch.float8_e4m3fnuz if platform.arch == "gfx942" else torch.float8_e4m3fn


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


class RuntimeInputs:
    """Further placeholders of the graph for what the runtime passes, made on first use."""

    def __init__(self, graph: Graph, mode: FakeTensorMode):
        self.graph, self.mode = graph, mode
        self.last = graph.find_nodes(op="placeholder")[-1]
        self.made: dict[GraphInput, Node] = {}
        self.sequences, self.block_size = new_unbacked_size(mode), new_unbacked_size(mode)
        self.blocks: dict[int, torch.SymInt] = {}
        self.device = next(value(node).device for node in graph.nodes if isinstance(value(node), Tensor))

    def get(self, given: GraphInput, make: Callable[[], Tensor]) -> Node:
        if given not in self.made:
            with self.mode, self.device:
                fake = make()
            with self.graph.inserting_after(self.last):
                self.last = self.made[given] = self.graph.placeholder(given.name)
            self.last.meta["val"] = fake
            set_graph_input(self.last, given)
        return self.made[given]

    def of_step(self, q: Node, group: int) -> tuple[Node, Node, Node, Node]:
        """For attention with queries q [..., N, D]: slots, query_start, seq_lens, block_tables (see Step)."""
        rows, i32 = math.prod(value(q).shape[:-2]), partial(torch.empty, dtype=torch.int32)
        slots = self.get(StepInput("slots", group), partial(torch.empty, rows, dtype=torch.int64))
        tables = self.get(StepInput("block_tables", group), lambda: i32(self.sequences, new_unbacked_size(self.mode)))
        starts = self.get(StepInput("query_start"), lambda: i32(self.sequences + 1))
        lengths = self.get(StepInput("seq_lens"), lambda: i32(self.sequences))
        return slots, starts, lengths, tables

    def caches(self, layer: int, spec: StateSpec) -> tuple[Node, Node]:
        """[blocks, block_size, heads, head_dim], twice. The layers of a group have the same number of blocks."""
        blocks = self.blocks.setdefault(spec.group, new_unbacked_size(self.mode))

        def make() -> Tensor:
            row = math.prod(spec.shape)
            sizes: list[Any] = [blocks, self.block_size, *spec.shape]
            strides: list[Any] = [self.block_size * row, row, spec.shape[-1], 1]
            # torch.empty would make the first stride Max(1, block_size) * row, equal to nothing.
            return torch.empty_strided(sizes, strides, dtype=spec.dtype)

        keys, values = (self.get(StateInput(layer, role), make) for role in spec.roles)
        return keys, values

    def scales(self, layer: int) -> tuple[Node, Node]:
        """What the codes of a layer's two caches are multiplied by, [1] each."""
        make = partial(torch.ones, 1, dtype=torch.float32)
        return self.get(StateInput(layer, "k_scale"), make), self.get(StateInput(layer, "v_scale"), make)
