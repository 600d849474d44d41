"""Draws the panels of a committed dashboard as SVG, with what a Prometheus answered.

It is no Grafana: it lays panels out as the JSON says and draws their series plainly, so that a page
of documentation can show what there is to see. What it draws it was given: expressions are asked
elsewhere, and a panel without an answer says so.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import msgspec

COLUMN, ROW, GAP = 50.0, 26.0, 8.0
INK, PALE, GRID, PAPER = "#24292f", "#6e7781", "#e6e8eb", "#ffffff"
STATES = {"green": "#3f9c5a", "yellow": "#c9a227", "red": "#b5483f"}
COLOURS = (
    "#3b6fb6",
    "#d9822b",
    "#3f9c5a",
    "#b5483f",
    "#7b5ea7",
    "#2a9d9d",
    "#c15c9c",
    "#8a8d3a",
    "#5b6770",
    "#a0703c",
)
LEGEND, LEGEND_WIDE, MOST_LEGENDS = 13.0, 160.0, 9
MARGIN, NAMES = 52.0, 190.0


class Line(msgspec.Struct, frozen=True):
    """A series under its legend: (time in s, value)."""

    legend: str
    points: tuple[tuple[float, float], ...]


Ask = Callable[[str, str], Sequence[Line]]
"""Answers an expression, given the pattern of its legends."""


class _Frame(msgspec.Struct, frozen=True):
    """Area of a panel's data, and the range of times and values."""

    x: float
    y: float
    width: float
    height: float
    times: tuple[float, float]
    values: tuple[float, float] = (0.0, 1.0)

    def at(self, time: float, value: float) -> tuple[float, float]:
        (begun, ended), (low, high) = self.times, self.values
        across = (time - begun) / ((ended - begun) or 1.0)
        up = (value - low) / ((high - low) or 1.0)
        return self.x + across * self.width, self.y + (1.0 - up) * self.height


def drawn(board: Mapping[str, Any], ask: Ask, times: tuple[float, float]) -> str:
    """The whole dashboard as one SVG."""
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    width, height = 24 * COLUMN + GAP, bottom * ROW + 40.0
    parts = [_text(GAP + 4, 24, board["title"], size=17, bold=True)]
    for panel in board["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] * COLUMN + GAP, place["y"] * ROW + 36.0
        if panel["type"] == "row":
            parts.append(_text(x + 4, y + 17, panel["title"], size=14, bold=True))
            continue
        w, h = place["w"] * COLUMN - GAP, place["h"] * ROW - GAP
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{PAPER}" '
            f'stroke="{GRID}"/>'
        )
        parts.append(_text(x + 10, y + 18, panel["title"], size=12, bold=True))
        parts.append(_panel(panel, ask, (x + 10, y + 28, w - 20, h - 36), times))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="Helvetica, Arial, sans-serif"><rect width="100%" height="100%" '
        f'fill="#f6f8fa"/>{"".join(parts)}</svg>\n'
    )


def _panel(
    panel: Mapping[str, Any],
    ask: Ask,
    box: tuple[float, float, float, float],
    times: tuple[float, float],
) -> str:
    lines = [
        line
        for target in panel["targets"]
        for line in ask(target["expr"], target["legendFormat"])
        if line.points
    ]
    x, y, w, h = box
    if not lines:
        return _text(x + w / 2, y + h / 2, "no data here", anchor="middle", colour=PALE)
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    match panel["type"]:
        case "stat":
            value = lines[0].points[-1][1]
            return _text(x + w / 2, y + h / 2 + 10, said(value, unit), size=30, anchor="middle")
        case "heatmap":
            unit = panel["options"]["yAxis"].get("unit", "short")
            return _heat(lines, _Frame(x + MARGIN, y, w - MARGIN, h - 18, times), unit)
        case "state-timeline":
            frame = _Frame(x + NAMES, y, w - NAMES, h - 18, times)
            return _states(lines, frame, panel["fieldConfig"])
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    shown = lines[:MOST_LEGENDS]
    below = 22 + LEGEND * math.ceil(len(shown) / _columns(w))
    frame = _Frame(x + MARGIN, y, w - MARGIN, h - below, times)
    return _lines(_piled(lines) if stacked else lines, frame, unit, stacked) + _legends(shown, box)


def _lines(lines: Sequence[Line], frame: _Frame, unit: str, filled: bool) -> str:
    values = [value for line in lines for _, value in line.points]
    low, high = min(0.0, *values), max(values)
    high = high if high > low else low + 1.0
    frame = msgspec.structs.replace(frame, values=(low, low + 1.05 * (high - low)))
    parts = [_scale(frame, unit)]
    for number, line in reversed(list(enumerate(lines))):
        colour = COLOURS[number % len(COLOURS)]
        for run in _runs(line.points):
            path = " ".join("{:.1f},{:.1f}".format(*frame.at(*point)) for point in run)
            if filled:
                ground = frame.y + frame.height
                first, last = frame.at(*run[0])[0], frame.at(*run[-1])[0]
                parts.append(
                    f'<polygon points="{first:.1f},{ground:.1f} {path} {last:.1f},{ground:.1f}" '
                    f'fill="{colour}" fill-opacity="0.85"/>'
                )
            elif len(run) == 1:
                at = frame.at(*run[0])
                parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="1.6" fill="{colour}"/>')
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
            )
    return "".join(parts)


def _piled(lines: Sequence[Line]) -> list[Line]:
    """Each line on top of those before it."""
    below: dict[float, float] = {}
    piled = []
    for line in lines:
        points = []
        for time, value in line.points:
            below[time] = below.get(time, 0.0) + value
            points.append((time, below[time]))
        piled.append(Line(line.legend, tuple(points)))
    return piled


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Split points at gaps in time: a gap in time is a gap in the line."""
    step = min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=1.0)
    runs = [[points[0]]]
    for point in points[1:]:
        if point[0] - runs[-1][-1][0] > 1.5 * step:
            runs.append([])
        runs[-1].append(point)
    return runs


def _heat(lines: Sequence[Line], frame: _Frame, unit: str) -> str:
    """Counts per bucket: cumulative ones, as histograms have them, made into their differences."""
    edges = sorted(lines, key=lambda line: float(line.legend))
    counts: dict[tuple[int, float], float] = {}
    below: dict[float, float] = {}
    for row, line in enumerate(edges):
        for time, value in line.points:
            counts[row, time] = max(0.0, value - below.get(time, 0.0))
            below[time] = value
    most = max(counts.values(), default=0.0)
    times = sorted(below)
    wide = frame.width * (times[1] - times[0] if len(times) > 1 else 1.0)
    wide /= (frame.times[1] - frame.times[0]) or 1.0
    tall = frame.height / len(edges)
    parts = [
        f'<rect x="{frame.at(time, 0.0)[0] - wide:.1f}" '
        f'y="{frame.y + frame.height - (row + 1) * tall:.1f}" width="{wide:.1f}" '
        f'height="{tall:.1f}" fill="#c8501e" fill-opacity="{(count / most) ** 0.5:.2f}"/>'
        for (row, time), count in counts.items()
        if count > 0.05 and time > frame.times[0]
    ]
    for row in range(0, len(edges), max(1, len(edges) // 6)):
        y = frame.y + frame.height - (row + 1) * tall
        label = edges[row].legend
        text = "∞" if label == "+Inf" else said(float(label), unit)
        parts.append(_text(frame.x - 6, y + 4, text, size=10, anchor="end", colour=PALE))
    return "".join(parts) + _clock(frame)


def _states(lines: Sequence[Line], frame: _Frame, config: Mapping[str, Any]) -> str:
    """Draw a bar per line, in the colours of the panel's mappings."""
    tall = min(22.0, frame.height / len(lines))
    parts = []
    for number, line in enumerate(lines):
        y, colours = frame.y + number * tall, _colours(config, line.legend)
        parts.append(_text(frame.x - 6, y + tall / 2 + 3, line.legend[:36], size=9, anchor="end"))
        for time, value in line.points:
            x = frame.at(time, 0.0)[0]
            step = frame.width / max(1, len(line.points) - 1)
            colour = STATES[colours["1" if value else "0"]["color"]]
            wide = min(step, frame.x + frame.width - x)
            if wide > 0:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{wide + 0.3:.1f}" '
                    f'height="{tall - 4:.1f}" fill="{colour}"/>'
                )
    return "".join(parts) + _clock(frame)


def _colours(config: Mapping[str, Any], legend: str) -> Mapping[str, Any]:
    """Return the mapping of values that holds for a line: an override's, or the panel's."""
    mappings = config["defaults"]["mappings"]
    for override in config["overrides"]:
        if re.search(override["matcher"]["options"].strip("/"), legend):
            mappings = override["properties"][0]["value"]
    colours: Mapping[str, Any] = mappings[0]["options"]
    return colours


def _scale(frame: _Frame, unit: str) -> str:
    """Horizontal lines with their values, and the time below."""
    low, high = frame.values
    parts = []
    for tick in ticks(low, high):
        y = frame.at(frame.times[0], tick)[1]
        parts.append(
            f'<line x1="{frame.x:g}" x2="{frame.x + frame.width:g}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{GRID}"/>'
        )
        parts.append(
            _text(frame.x - 6, y + 4, said(tick, unit), size=10, anchor="end", colour=PALE)
        )
    return "".join(parts) + _clock(frame)


def _clock(frame: _Frame) -> str:
    begun, ended = frame.times
    return "".join(
        _text(
            frame.at(begun + tick, 0.0)[0],
            frame.y + frame.height + 14,
            f"{tick:g} s",
            size=10,
            anchor="middle",
            colour=PALE,
        )
        for tick in ticks(0.0, ended - begun)
    )


def _legends(lines: Sequence[Line], box: tuple[float, float, float, float]) -> str:
    """Draw the legends in columns below a picture."""
    x, y, w, h = box
    columns = _columns(w)
    wide, rows = (w - MARGIN) / columns, math.ceil(len(lines) / columns)
    parts = []
    for number, line in enumerate(lines):
        left = x + MARGIN + (number % columns) * wide
        top = y + h - LEGEND * (rows - number // columns) + 10
        parts.append(
            f'<rect x="{left:g}" y="{top - 6:g}" width="10" height="3" '
            f'fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        parts.append(
            _text(left + 15, top, line.legend[: int((wide - 15) / 5.6)], size=10, colour=PALE)
        )
    return "".join(parts)


def _columns(width: float) -> int:
    """Number of legends that fit into a row."""
    return max(1, int((width - MARGIN) / LEGEND_WIDE))


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    bold: bool = False,
    colour: str = INK,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}"{weight}>{escape(text)}</text>'
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from low to high, about `about` of them."""
    raw = (high - low) / about
    if raw <= 0.0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def said(value: float, unit: str) -> str:
    """Format a value with its unit, in short form."""
    match unit:
        case "percentunit":
            return f"{value * 100:.3g} %"
        case "s":
            if value == 0.0 or abs(value) >= 1.0:
                return f"{value:.3g} s"
            small = abs(value) < 1e-3
            return f"{value * 1e6:.3g} µs" if small else f"{value * 1e3:.3g} ms"
        case "reqps" | "ops":
            return f"{value:.3g}/s"
        case "Bps":
            return f"{_short(value)}B/s"
    return _short(value)


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"
