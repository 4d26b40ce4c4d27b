"""Writes the machine, the costs and the fusion opportunities of a graph into its report."""

from torch.fx import GraphModule

from atomc.compiler.phases import timed
from atomc.cost import cost
from atomc.cost.fusion_opportunities import fusion_opportunities
from atomc.cost.moe_layers import moe_layers
from atomc.cost.quantized_weights import quantized_weights
from atomc.graph.node_record import origins_of, record_of
from atomc.report.records import OpCost
from atomc.report.report import Report
from atomc.report.report_data import Machine
from atomc.rewriting.graph_pass import Context


def summarize_graph(gm: GraphModule, context: Context, report: Report, *, glue_fuses: bool) -> None:
    """Report what is known before lowering. glue_fuses: Inductor compiles the glue."""
    platform = context.platform
    report.machine = Machine(
        name=platform.name,
        arch=platform.arch,
        device=platform.device,
        bandwidth=platform.bandwidth,
        flops=platform.flops,
    )
    with timed(report, "passes"):
        costs = cost.graph_costs(gm)
    report.costs = [_op_cost(node_cost) for node_cost in costs]
    report.few_bits = quantized_weights(gm)
    report.moe = moe_layers(gm)
    if context.keep_texts:
        report.savings = fusion_opportunities(gm, costs, report.near, glue_fuses=glue_fuses)


def _op_cost(node_cost: cost.NodeCost) -> OpCost:
    nodes = [node.name for node in node_cost.nodes]
    made_of = sorted(set[str]().union(*map(origins_of, node_cost.nodes)))
    apart = str(node_cost.apart) if node_cost.apart != node_cost.cost.bytes else ""
    return OpCost(
        node_cost.op,
        node_cost.module_path,
        node_cost.layer,
        node_cost.source,
        str(node_cost.cost.bytes),
        str(node_cost.cost.flops),
        nodes,
        made_of,
        apart,
        record_of(node_cost.nodes[-1]).made_by,
        node_cost.rate,
        str(node_cost.sent),
    )
