"""data/dashboards.yml as Grafana reads it (dashboard JSON, schema 36: Grafana 9 and newer)."""

from __future__ import annotations

import json
from typing import Any

ACROSS, HEIGHT = 3, 8
WIDTH = 24 // ACROSS  # Grafana's grid has 24 columns
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(name: str, entry: dict[str, Any]) -> str:
    """The text of a dashboard's file."""
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    if "variable" in entry:
        variable = entry["variable"]
        variables.append(
            {
                "name": variable["name"],
                "type": "query",
                "datasource": SOURCE,
                "query": f"label_values({variable['of']}, {variable['name']})",
                "refresh": 2,
                "includeAll": True,
                "multi": True,
                "allValue": ".*",
            }
        )
    content = {
        "uid": f"gpu-fleet-{name}",
        "title": entry["title"],
        "tags": ["gpu_fleet"],
        "schemaVersion": 36,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, panel) for number, panel in enumerate(entry["panels"])],
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(number: int, panel: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "title": panel["title"],
        "type": panel.get("kind", "timeseries"),
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": number % ACROSS * WIDTH, "y": number // ACROSS * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.get("unit", "short")}, "overrides": []},
        "targets": [{"refId": "A", "datasource": SOURCE, "expr": panel["expr"], "legendFormat": panel["legend"]}],
    }
