"""Bind state for the runtime: each op with a state handle becomes ops on the tensors of the state.

    q, k, v, handle > attention
 =>
    token = kv_write(k, v, k_cache!, v_cache!, slots)
    paged_attention(q, k_cache, v_cache, ..., token)

An op declares its state and its form for the runtime (atomc.ops.op_traits.StateBinding). The
tensors of the state and the fields of a step become graph inputs. State is stored in fp8 if the
options or the handle's dtype request it; its scales are inputs as well. The token is a data
dependency: write and read cannot be reordered, and dead-code elimination cannot remove the write.

Layers that attend to the keys and values of an earlier layer (Gemma 3n) read its state:

    q', k, v, handle' > attention    =>    paged_attention(q', k_cache, v_cache, ..., token)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import Argument, map_aggregate
from torch.fx.proxy import GraphAppendingTracer

from atomc.graph.canonical import value
from atomc.graph.edit import add_input, infer, nodes_between
from atomc.graph.expressions import Size
from atomc.graph.node_record import NodeRecord, origins_of, set_record
from atomc.graph.op_call import kind_of
from atomc.graph.provenance import module_path, source_line
from atomc.ops.formats import FP8
from atomc.ops.inputs import GraphInput, StateInput, StepInput
from atomc.ops.op import Op, op_of
from atomc.ops.op_traits import Kind, StateBinding
from atomc.ops.state import GroupStep, StateSpec
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired
from atomc.torch_compat.tracing import fake_mode_of, new_unbacked_size


def bind_state(gm: GraphModule, context: Context) -> Outcome:
    """Replace every op that has a state handle. Returns one StateSpec per layer that writes state,
    in graph order.

    Raises ValueError for an op that the runtime does not support.
    """
    sites = _sites(gm.graph, context)
    if not sites:
        return Outcome()
    inputs = RuntimeInputs(gm.graph)
    writers = _writers(sites)
    layers = sorted(set(writers))
    fired: list[Fired] = []
    for site, writer in zip(sites, writers, strict=True):
        token = _token(fired[writer].new_nodes) if writer < len(fired) else None
        fired.append(_bound(site, layers.index(writer), inputs, token))
    return Outcome(fired=fired, state=[sites[writer].spec for writer in layers])


class _StatefulCall(NamedTuple):
    """A call with a state handle. values: its arguments by name, with fake tensors instead of
    nodes.
    """

    node: Node
    op: Op
    binding: StateBinding
    values: dict[str, Any]
    spec: StateSpec


def _sites(graph: Graph, context: Context) -> list[_StatefulCall]:
    """The calls with a state handle; calls with the same paging are in one group."""
    calls = [
        _site(node, op, context)
        for node in graph.nodes
        if (op := op_of(node.target)) is not None
        and op.handle(*node.args, **node.kwargs) is not None
    ]
    pagings = sorted({site.spec.paging for site in calls if site.spec.paging is not None})
    return [
        site
        if site.spec.paging is None
        else site._replace(spec=replace(site.spec, group=pagings.index(site.spec.paging)))
        for site in calls
    ]


def _site(node: Node, op: Op, context: Context) -> _StatefulCall:
    assert op.state is not None
    values = _mapped(value, _arguments(op, node))
    codes = context.options.kv_cache_dtype == "fp8" or values[op.state.handle].dtype in FP8
    try:
        spec = op.state.spec(module_path(node), values, fp8_of(context.platform) if codes else None)
    except ValueError as error:
        raise ValueError(
            f"{op.name} in {module_path(node)} ({source_line(node)}): {error}"
        ) from None
    return _StatefulCall(node, op, op.state, values, spec)


def _writers(sites: Sequence[_StatefulCall]) -> list[int]:
    """The index of the site that writes the state of each: its own, or that of an earlier call that
    keeps the same rows.
    """
    rows_kept = [_kept(site) for site in sites]
    return [rows_kept.index(rows) for rows in rows_kept]


def _kept(site: _StatefulCall) -> object:
    """What the state of a call keeps, and how; equal only to itself if others cannot read it."""
    if site.binding.reads is None:
        return object()
    arguments = _arguments(site.op, site.node)
    return (
        site.op.name,
        [arguments[name] for name in site.binding.kept],
        replace(site.spec, name=""),
    )


def _token(nodes: Sequence[Node]) -> Node:
    """The node that writes the state, of those that replaced a call."""
    return next(node for node in nodes if Kind.STATE_WRITE in kind_of(node))


def _arguments(op: Op, node: Node) -> dict[str, Argument]:
    """The arguments of a call by name; they may be results of calls that were replaced before."""
    return dict(op.signature.bind(*node.args, **node.kwargs).arguments)


def _mapped(function: Callable[[Node], Any], arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """The arguments of a call with the function applied to each node."""
    return {
        name: map_aggregate(x, lambda x: function(x) if isinstance(x, Node) else x)
        for name, x in arguments.items()
    }


def _bound(site: _StatefulCall, number: int, inputs: "RuntimeInputs", token: Node | None) -> Fired:
    """Replace one call by its form for the runtime. token: of the earlier call that writes its
    state.
    """
    node, graph, spec = site.node, inputs.graph, site.spec
    # Proxies take the place of tensors in the form of the op.
    proxy: Callable[[Node], Any] = partial(Proxy, tracer=GraphAppendingTracer(graph))
    state = {role: proxy(new_nodes) for role, new_nodes in inputs.state(number, spec).items()}
    step: Any = _Fields(inputs, site.binding.tokens(site.values), spec.group, proxy)
    before = node.prev
    with graph.inserting_before(node):
        arguments: Any = _mapped(proxy, _arguments(site.op, site.node))
        result: Any
        if token is None or site.binding.reads is None:
            result = site.binding.form(arguments, state, step)
        else:
            result = site.binding.reads(arguments, state, step, proxy(token))
    new_nodes = [each for each in nodes_between(before, node) if each.op != "placeholder"]
    _describe(new_nodes, result.node, node)
    node.replace_all_uses_with(result.node)
    graph.erase_node(node)
    captured = {} if spec.paging is None else {"window": spec.paging.window}
    return Fired("bind_state", node, captured, {node}, new_nodes)


def _describe(new_nodes: list[Node], result: Node, replaced: Node) -> None:
    """Set the metadata of the nodes that replace one."""
    source = ("nn_module_stack", "stack_trace")
    meta = {key: entry for key, entry in replaced.meta.items() if key in source}
    record = NodeRecord(made_by="bind_state", origins=origins_of(replaced))
    for node in new_nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise TypeError(
                f"the runtime form of {replaced.target} creates {node.format_node()}: it may only "
                "call atomc.ops and torch.ops.aten.<name>.<overload>"
            )
        node.meta.update(meta)
        set_record(node, record)
        if node is result:
            node.meta["val"] = value(replaced)
        else:
            infer(node)


def fp8_of(platform: Platform) -> torch.dtype:
    """The e4m3 dtype of the machine: MI300 has the variant without negative zero."""
    return torch.float8_e4m3fnuz if platform.arch == "gfx942" else torch.float8_e4m3fn


class _Fields:
    """The tensors of a step, for the form of an op; each becomes a graph input when it is read."""

    def __init__(
        self,
        inputs: "RuntimeInputs",
        tokens: Size,
        group: int | None,
        proxy: Callable[[Node], Proxy],
    ):
        self._inputs, self._tokens, self._group, self._proxy = inputs, tokens, group, proxy

    def __getattr__(self, field: str) -> Proxy:
        group = self._group if field in GroupStep._fields else None
        return self._proxy(self._inputs.step(StepInput(field, group), self._tokens))


class RuntimeInputs:
    """Adds placeholders for the inputs that the runtime passes, on first use."""

    def __init__(self, graph: Graph):
        mode = fake_mode_of(graph)
        assert mode is not None
        self.graph, self.mode = graph, mode
        self.nodes: dict[GraphInput, Node] = {}
        self.sequences, self.block_size = new_unbacked_size(mode), new_unbacked_size(mode)
        # The first size of the state: blocks by group; slots of sequences under None.
        self.rows: dict[int | None, torch.SymInt] = {}
        self.device = next(
            value(node).device for node in graph.nodes if isinstance(value(node), Tensor)
        )

    def step(self, step_input: StepInput, tokens: Size) -> Node:
        """A tensor of a step with this number of new tokens (see Step for the shapes)."""
        i32, i64 = (partial(torch.empty, dtype=dtype) for dtype in (torch.int32, torch.int64))
        makes: dict[str, Callable[[], Tensor]] = {
            "slots": lambda: i64(tokens),
            "block_tables": lambda: i32(self.sequences, new_unbacked_size(self.mode)),
            "query_start": lambda: i32(self.sequences + 1),
            "seq_lens": lambda: i32(self.sequences),
            "state_slots": lambda: i64(self.sequences),
        }
        if step_input.field not in makes:
            raise AttributeError(
                f"the form of an op reads {step_input.field!r}, which is not a field of StepFields"
            )
        return self._get(step_input, makes[step_input.field])

    def state(self, layer: int, spec: StateSpec) -> dict[str, Node]:
        """A layer's tensors and their scales, by role."""
        rows = self.rows.setdefault(spec.group, new_unbacked_size(self.mode))
        leading = spec.leading(blocks=rows, block_size=self.block_size, slots=rows)
        tensors = {
            tensor.role: self._get(
                StateInput(layer, tensor.role, spec.per_sequence),
                partial(_row_major, (*leading, *tensor.shape), tensor.dtype),
            )
            for tensor in spec.tensors
        }
        one = partial(torch.ones, 1, dtype=torch.float32)
        return tensors | {role: self._get(StateInput(layer, role), one) for role in spec.scales}

    def _get(self, runtime_input: GraphInput, make: Callable[[], Tensor]) -> Node:
        if runtime_input not in self.nodes:
            with self.device:
                record = NodeRecord(input=runtime_input)
                self.nodes[runtime_input] = add_input(self.graph, runtime_input.name, record, make)
        return self.nodes[runtime_input]


def _row_major(sizes: Sequence[Size], dtype: torch.dtype) -> Tensor:
    """An empty tensor. torch.empty would compute strides from Max(1, s) for a symbolic size s,
    which equals no other expression.
    """
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return torch.empty_strided(sizes, strides, dtype=dtype)
