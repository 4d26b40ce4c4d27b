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
    report.costs = [_op_cost(found) for found in costs]
    report.few_bits = quantized_weights(gm)
    report.moe = moe_layers(gm)
    if context.keep_texts:
        report.savings = fusion_opportunities(gm, costs, report.near, glue_fuses=glue_fuses)


def _op_cost(found: cost.NodeCost) -> OpCost:
    nodes = [node.name for node in found.nodes]
    made_of = sorted(set[str]().union(*map(origins_of, found.nodes)))
    apart = str(found.apart) if found.apart != found.cost.bytes else ""
    return OpCost(
        found.op,
        found.module_path,
        found.layer,
        found.source,
        str(found.cost.bytes),
        str(found.cost.flops),
        nodes,
        made_of,
        apart,
        record_of(found.nodes[-1]).made_by,
        found.rate,
        str(found.sent),
    )
