"""PromQL from the catalogue of metrics; an unknown metric or label raises ValueError.

Every query filters by the dashboards' variables for which the metric has labels. It looks back over
`$__rate_interval` (a point of the screen) or `$__range` (the whole screen), never over a process's
lifetime. Two kinds of process may export the same metric (queues of routers and of replicas); `of`
selects one kind by a metric that only this kind exports at the same address.
"""

from __future__ import annotations

import msgspec

from medha.metrics import CATALOGUE, Exporter, Metric

STEP, WHOLE = "$__rate_interval", "$__range"
METRICS = {metric.name: metric for metric in CATALOGUE}
MARKS: dict[Exporter, str] = {"router": "medha_replicas", "controller": "medha_kvp_generation"}
VARIABLES = ("namespace", "model", "class")


class Query(msgspec.Struct, frozen=True):
    """An expression, and the legend of its series (`{{label}}` is the label's value)."""

    expr: str
    legend: str


def level(name: str, *by: str, how: str = "sum", of: Exporter | None = None, **fixed: str) -> str:
    """Current value of a gauge, aggregated over processes by `how`."""
    _known(name, "gauge", by)
    return f"{how}{_by(by)} ({_of(_series(name, '', fixed), name, of)})"


def rate(name: str, *by: str, of: Exporter | None = None, **fixed: str) -> str:
    """Events per second of a counter."""
    _known(name, "counter", by)
    return _rate(name, "", by, STEP, of, fixed)


def increase(name: str, *by: str, **fixed: str) -> str:
    """Events of a counter over the time range shown."""
    _known(name, "counter", by)
    return f"sum{_by(by)} (increase({_series(name, '', fixed)}[{WHOLE}]))"


def share(part: str, *others: str, by: tuple[str, ...] = (), over: str = STEP) -> str:
    """Share of a counter in the sum of itself and others, 0 to 1; no value without events."""
    _known(part, "counter", by)
    whole = " + ".join(_rate(addend, "", by, over, None, {}) for addend in (part, *others))
    return f"{_rate(part, '', by, over, None, {})} / ({whole} > 0)"


def quantile(q: float, name: str, *by: str, **fixed: str) -> str:
    """Quantile of a histogram's recent observations."""
    _known(name, "histogram", by)
    return f"histogram_quantile({q:g}, {_rate(name, '_bucket', ('le', *by), STEP, None, fixed)})"


def quantiles(name: str, *by: str, at: tuple[float, ...] = (0.5, 0.9, 0.99)) -> tuple[Query, ...]:
    """Several quantiles of a histogram, by some labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return tuple(Query(quantile(q, name, *by), f"{legend} p{q * 100:g}".strip()) for q in at)


def mean(name: str, *by: str, **fixed: str) -> str:
    """Mean of a histogram's recent observations; no value without observations."""
    _known(name, "histogram", by)
    total, count = (_rate(name, end, by, STEP, None, fixed) for end in ("_sum", "_count"))
    return f"{total} / ({count} > 0)"


def sum_rate(name: str, *by: str, **fixed: str) -> str:
    """Sum of a histogram's observations per second."""
    _known(name, "histogram", by)
    return _rate(name, "_sum", by, STEP, None, fixed)


def count_rate(name: str, *by: str, **fixed: str) -> str:
    """Number of a histogram's observations per second."""
    _known(name, "histogram", by)
    return _rate(name, "_count", by, STEP, None, fixed)


def heat(name: str, **fixed: str) -> Query:
    """A histogram's buckets over time."""
    _known(name, "histogram", ())
    return Query(f"sum by (le) (increase({_series(name, '_bucket', fixed)}[{STEP}]))", "{{le}}")


def _known(name: str, kind: str, by: tuple[str, ...]) -> Metric:
    metric = METRICS.get(name)
    if metric is None or metric.kind != kind:
        raise ValueError(f"{name} is not a {kind} of the catalogue")
    if unknown := set(by) - {*metric.labels, "namespace", "pod", "instance"}:
        raise ValueError(f"{name} has no label {', '.join(sorted(unknown))}")
    return metric


def _series(name: str, end: str, fixed: dict[str, str]) -> str:
    labels = METRICS[name].labels
    given = {"namespace": "$namespace"} | {
        variable: f"${variable}"
        for variable in VARIABLES
        if variable in labels and variable not in fixed
    }
    if unknown := set(fixed) - set(labels):
        raise ValueError(f"{name} has no label {', '.join(sorted(unknown))}")
    chosen = [f'{label}=~"{value}"' for label, value in given.items()]
    chosen += [f'{label}="{value}"' for label, value in fixed.items()]
    return f"{name}{end}{{{', '.join(chosen)}}}"


def _rate(
    name: str, end: str, by: tuple[str, ...], over: str, of: Exporter | None, fixed: dict[str, str]
) -> str:
    return f"sum{_by(by)} ({_of(f'rate({_series(name, end, fixed)}[{over}])', name, of)})"


def _of(series: str, name: str, of: Exporter | None) -> str:
    exporters = METRICS[name].exporters
    ambiguous = len(exporters) > 1 and "model" in METRICS[name].labels
    if ambiguous != (of is not None):
        raise ValueError(f"{name} is exported by {', '.join(exporters)}: set `of`, which is {of}")
    if of is None:
        return series
    return f"{series} and on (instance, model) {_series(MARKS[of], '', {})}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
