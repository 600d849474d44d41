"""A board as Grafana's JSON, by Grafana's own builders."""

from __future__ import annotations

import json
from collections.abc import Callable

from dashboards.panels import Board, Panel
from dashboards.queries import Query, level
from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    StackingMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
EVERYWHERE = '{__name__=~"medha_replicas|medha_kvp_generation|medha_operator_leading"}'
VARIABLES = (
    ("namespace", "Namespace", f"label_values({EVERYWHERE}, namespace)"),
    ("model", "Model", 'label_values(medha_replicas{namespace=~"$namespace"}, model)'),
    ("class", "Class", 'label_values(medha_slo_attained_total{model=~"$model"}, class)'),
)
OBJECTIVES = "0.99,0.95,0.999"


_CONDITION, _RESOURCE = "medha_replica_condition", ("namespace", "name")
ANNOTATIONS = (
    (
        "Rollouts",
        "blue",
        f"1 - {level(_CONDITION, *_RESOURCE, how='min', condition='Updated')} > 0",
    ),
    (
        "Growth of KVP groups",
        "purple",
        f"{level(_CONDITION, *_RESOURCE, how='max', condition='KvpGrowing')} > 0",
    ),
)
"""Marks on every panel: name, colour, and an expression that is 1 while it lasts."""

Made = timeseries.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel


def as_json(board: Board) -> str:
    """The file's text: keys in order, so that a change shows where it is."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(f"medha-{board.name}")
        .description(board.description)
        .tags(["medha"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .link(dashboard.DashboardLink("Medha").as_dropdown(True).tags(["medha"]).keep_time(True))
    )
    _add_variables(builder)
    for name, colour, expr in ANNOTATIONS:
        annotation = dashboard.AnnotationQuery().name(name).datasource(SOURCE).expr(expr)
        builder.annotation(annotation.enable(True).icon_color(colour))
    for row in board.rows:
        builder.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            builder.with_panel(_made(panel))
    built = builder.build()
    for number, built_panel in enumerate(built.panels or (), start=1):
        built_panel.id_val = number
    return json.dumps(built, cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _add_variables(builder: dashboard.Dashboard) -> None:
    builder.with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    for name, label, query in VARIABLES:
        builder.with_variable(
            dashboard.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query(query)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    builder.with_variable(
        dashboard.CustomVariable("objective").label("Objective").values(OBJECTIVES)
    )


def _made(panel: Panel) -> Made:
    kinds: dict[str, Callable[[Panel], Made]] = {
        "lines": _lines,
        "areas": _areas,
        "heat": _heat,
        "number": _number,
        "states": _states,
    }
    builder = kinds[panel.kind](panel)
    builder.title(panel.title).description(panel.description).datasource(SOURCE)
    builder.span(panel.width).height(panel.height)
    for letter, query in zip("ABCDEF", panel.queries, strict=False):
        builder.with_target(_target(panel, query).ref_id(letter))
    return builder


def _target(panel: Panel, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend)
    if panel.kind == "heat":
        target.format(PromQueryFormat.HEATMAP)
    return target.instant() if panel.kind == "number" else target.range()


def _lines(panel: Panel) -> timeseries.Panel:
    return (
        timeseries.Panel()
        .unit(panel.unit)
        .line_width(1)
        .fill_opacity(8)
        .show_points(VisibilityMode.NEVER)
    )


def _areas(panel: Panel) -> timeseries.Panel:
    stacked = common.StackingConfig().mode(StackingMode.NORMAL)
    return _lines(panel).fill_opacity(40).stacking(stacked).min(0)


def _heat(panel: Panel) -> heatmap.Panel:
    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
    return (
        heatmap.Panel()
        .calculate(False)
        .color(colours.exponent(0.5).steps(64))
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .show_y_histogram()
    )


def _number(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .unit(panel.unit)
        .color_mode(BigValueColorMode.NONE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _states(panel: Panel) -> statetimeline.Panel:
    builder = statetimeline.Panel().mappings([_colours("red", "green")])
    for words, colour in ((panel.faults, "red"), (panel.work, "yellow")):
        if words:
            mappings = DynamicConfigValue(id_val="mappings", value=[_colours("green", colour)])
            builder.override_by_regexp(f"/(^| )({'|'.join(words)})$/", [mappings])
    return (
        builder.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED))
        .merge_values(True)
        .row_height(0.8)
        .show_value(VisibilityMode.NEVER)
    )


def _colours(no: str, yes: str) -> ValueMap:
    values = (("0", "no", no), ("1", "yes", yes))
    return ValueMap(
        options={
            value: ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, text, colour) in enumerate(values)
        }
    )
