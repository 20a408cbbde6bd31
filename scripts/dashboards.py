"""Writes deploy/grafana/*.json from dashboard_panels.py, by Grafana's own schema of version 10.1.

Run as `python -m scripts.dashboards`. `--check` only says which files are not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline
from grafana_foundation_sdk.builders import timeseries as ts
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as types
from grafana_foundation_sdk.models import dashboard as models

from scripts.dashboard_panels import BOARDS, Board, Panel

FOLDER = Path(__file__).resolve().parent.parent / "deploy/grafana"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
STATES = {"1": ("ready", "green"), "2": ("draining", "yellow"), "3": ("lost", "red")}


def _thresholds(warn: float | None) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(value=None, color="green")]
    if warn is not None:
        steps.append(models.Threshold(value=warn, color="red"))
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _panel(panel: Panel) -> Any:
    """The builder of one panel."""
    made: Any
    if panel.kind == "stat":
        made = stat.Panel().color_mode(types.BigValueColorMode.VALUE)
        made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        made.thresholds(_thresholds(panel.warn))
    elif panel.kind == "states":
        made = (
            statetimeline.Panel()
            .show_value(types.VisibilityMode.NEVER)
            .mappings(
                [
                    models.ValueMap(
                        options={
                            value: models.ValueMappingResult(text=text, color=color)
                            for value, (text, color) in STATES.items()
                        }
                    )
                ]
            )
        )
    else:
        made = ts.Panel().line_width(1).fill_opacity(30 if panel.kind == "stack" else 0)
        made.legend(
            common.VizLegendOptions()
            .display_mode(types.LegendDisplayMode.LIST)
            .placement(types.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        made.tooltip(common.VizTooltipOptions().mode(types.TooltipDisplayMode.MULTI))
        made.min(0)
        if panel.kind == "stack":
            made.stacking(common.StackingConfig().mode(types.StackingMode.NORMAL))
        if panel.warn is not None:
            made.thresholds(_thresholds(panel.warn))
            made.thresholds_style(
                common.GraphThresholdsStyleConfig().mode(types.GraphTresholdsStyleMode.LINE)
            )
    made.title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE)
    made.span(panel.span).height(4 if panel.kind == "stat" else 8)
    if panel.most is not None:
        made.max(panel.most)
    for number, (query, legend) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query).legend_format(legend).datasource(SOURCE)
        target.ref_id(chr(ord("A") + number))
        made.with_target(target.instant() if panel.kind == "stat" else target.range())
    return made


def build(board: Board) -> str:
    """One dashboard's JSON."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags(["kvshuttle"])
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .link(
            dashboard.DashboardLink("kvshuttle")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["kvshuttle"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    if board.workers:
        made.with_variable(
            dashboard.QueryVariable("worker")
            .label("Worker")
            .query("label_values(kvshuttle_worker_info, worker_id)")
            .datasource(SOURCE)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
        )
    for row in board.rows:
        made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def main() -> int:
    """0 when the files are, or now are, as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, board in BOARDS.items():
        path, text = FOLDER / f"{name}.json", build(board)
        if check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(path.name)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"not current, run python -m scripts.dashboards: {', '.join(stale)}\n")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
