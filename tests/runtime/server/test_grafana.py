"""Every metric and label that docs/grafana.json names is in /metrics."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from atomc.runtime.scheduling.stats import Stats
from atomc.runtime.server.engines.engine_group import Engines
from atomc.runtime.server.metrics import Metrics

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs/grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


class Engine:
    """What Metrics reads of an engine's client."""

    unhealthy_reason = None
    restarts = 0
    stats = Stats(
        running=0,
        waiting=0,
        kv_blocks_used=0,
        kv_blocks_total=1,
        kv_tokens=16,
        max_len=16,
        steps={"full graph": 1},
        expert_load={"layers.0": [1, 2]},
        drafts=1,
        drafted=1,
    )


@pytest.fixture(scope="module")
def exposed():
    """Labels by sample name."""
    metrics = Metrics(Engines([Engine()]), "m")
    metrics.finished.labels("m", "stop").inc()
    metrics.refused.labels("m", "400").inc()
    families = text_string_to_metric_families(metrics.text().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_reads_metrics_and_labels_that_are_exposed(panel, exposed):
    for target in panel["targets"]:
        names = re.findall(r"atomc:\w+", target["expr"])
        shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
        grouped = re.findall(r"by \((\w+)\)", target["expr"])
        selected = re.findall(r"(\w+)=~", target["expr"])
        assert names and set(names) <= exposed.keys()
        for name in names:
            assert {*shown, *grouped, *selected} <= exposed[name], name


def test_variables_of_the_dashboard_read_metrics_that_are_exposed(exposed):
    queries = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    names = re.findall(r"atomc:\w+", json.dumps(queries))
    assert len(names) == 2 and set(names) <= exposed.keys()


def test_panels_have_numbers_and_places_of_their_own():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
