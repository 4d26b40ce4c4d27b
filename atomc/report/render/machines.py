"""Machines for the script of the HTML report, which computes times from them."""

from atomc.cost.efficiency import LAUNCH, shipped
from atomc.files.json_types import JSONLike
from atomc.platform import DESCRIBED


def known_machines() -> list[dict[str, JSONLike]]:
    """The machines with known data sheets, with their measured efficiencies."""
    return [
        machine_data(p.name, p.bandwidth, p.flops, p.device)
        for p in DESCRIBED.values()
        if p.bandwidth
    ]


def machine_data(
    name: str, bandwidth: float | None, flops: float | None, device: str
) -> dict[str, JSONLike]:
    """launch: minimum seconds of a kernel; rows: (op, kernel, first, last, floor, efficiency) of
    atomc.cost.efficiency.
    """
    table = shipped().get(name)
    rows = (
        [(row.op, row.kernel, row.first, row.last, row.floor, row.efficiency) for row in table.rows]
        if table
        else []
    )
    return {
        "name": name,
        "bandwidth": table.bandwidth if table else bandwidth,
        "flops": table.flops if table else flops,
        "launch": LAUNCH if device == "cuda" else 0.0,
        "rows": rows,
    }
