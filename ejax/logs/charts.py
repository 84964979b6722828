"""Curves as SVG: colours are variables of the page's style, values stand in ``data-`` attributes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

NUM_COLOURS = 8
"""Classes of the page's style, ``c0`` and so on; after them come the same ones dashed."""
_WIDTH, _HEIGHT = 380, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 372, 8, 168
_MAX_POINTS = 500
LARGEST = 1e300
"""The largest number that is drawn: larger ones count as not finite, since their sums may be."""
_SPIKY = 20.0  # one outlier must not flatten the rest
"""An axis is cut where all values span this many times what the middle 96% do."""


class Point(NamedTuple):
    """The quartiles of the runs that have a finite value at a step; NaN: none has."""

    step: int
    low: float
    value: float
    high: float
    num_values: int


@dataclass(frozen=True)
class Curve:
    """Values over steps: of one run, or the median of several with the quartiles about it."""

    label: str
    colour: int
    points: Sequence[Point]
    num_runs: int

    def pieces(self) -> list[list[Point]]:
        stretches = groupby(self.points, key=lambda point: math.isfinite(point.value))
        return [list(stretch) for finite, stretch in stretches if finite]


def curve_of(label: str, colour: int, runs: Sequence[Mapping[int, float]]) -> Curve:
    """Median and quartiles at each step."""
    points = []
    for step in sorted(set().union(*runs)):
        values = [run[step] for run in runs if abs(run.get(step, math.nan)) <= LARGEST]
        low, value, high = np.percentile(values, (25, 50, 75)).tolist() if values else [math.nan] * 3
        points.append(Point(step, low, value, high, len(values)))
    return Curve(label, colour, points, len(runs))


def number_text(x: float) -> str:
    """Write a number for people; the exact one stands next to it wherever it is shown."""
    if not math.isfinite(x):
        return "not finite"
    is_long = x == round(x) or abs(x) >= 1e4
    return f"{x:,.0f}" if is_long and abs(x) < 1e15 else f"{x:.4g}"


def curves_figure(title: str, curves: Sequence[Curve], x_name: str) -> str:
    thin = [_thinned(curve) for curve in curves]
    # bands are in the picture too
    finite = [y for curve in curves for piece in curve.pieces() for point in piece for y in point[1:4]]
    if not finite:
        return f"<figure><figcaption>{escape(title)}</figcaption><p class=note>no finite value</p></figure>"
    bottom, top, cut = _range(finite)
    right = max(curve.points[-1].step for curve in curves)
    x = _Axis(0, max(right, 1), _LEFT, _RIGHT)
    y = _Axis(bottom, top, _BOTTOM, _TOP)
    notes = [cut] if cut else []
    if any(len(a.points) < len(b.points) for a, b in zip(thin, curves, strict=True)):
        notes.append(f"of more than {_MAX_POINTS} points of a curve the lowest and highest of each stretch are drawn")
    last = "; ".join(f"{curve.label}: {number_text(curve.points[-1].value)}" for curve in curves)
    inside = "".join([*(_band(curve, x, y) for curve in thin), *(_line(curve, x, y) for curve in thin)])
    box = f'x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}"'
    view = f'viewBox="{_LEFT} {_TOP} {_RIGHT - _LEFT} {_BOTTOM - _TOP}"'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg class="curves" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" data-title="{escape(title)}" '
        f'data-x-name="{escape(x_name)}" data-frame="{_LEFT} {_RIGHT} {_TOP} {_BOTTOM} {x.low:g} {x.high:.10g}" '
        f'aria-label="{escape(f"{title} over {x_name}; last {last}")}">'
        f"{_frame(x, y, x_name)}<svg {box} {view}>{inside}</svg>"
        f'<line class="cursor" x1="-9" x2="-9" y1="{_TOP}" y2="{_BOTTOM}"/></svg>'
        f"{''.join(f'<p class=note>{escape(note)}</p>' for note in notes)}</figure>"
    )


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        place = self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)
        return min(max(place, -1e4), 1e4)  # what is cut off need not be far away

    def ticks(self) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / 4  # about four ticks fit next to each other
        size = 10.0 ** math.floor(math.log10(rough))
        step = size * next(factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        values = [i * step for i in range(first, first + 8) if i * step <= self.high + 1e-9 * step]
        return [(value, _tick(value, step)) for value in values]


def _tick(value: float, step: float) -> str:
    if abs(value) < step * 1e-6:
        return "0"
    size, unit = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= pair[0]), (1.0, ""))
    digits = max(4, math.ceil(math.log10(abs(value) / step)) + 1)
    return f"{value / size:.{min(digits, 12)}g}{unit}"


def _range(values: Sequence[float]) -> tuple[float, float, str | None]:
    """Return the bottom and top of an axis, and a note where it is cut."""
    low, high = min(values), max(values)
    inner_low, inner_high = np.percentile(values, (2, 98)).tolist()
    note = None
    if len(values) >= 50 and high - low > _SPIKY * (inner_high - inner_low) > 0:
        margin = 0.3 * (inner_high - inner_low)
        lowest, highest = low, high
        low, high = max(low, inner_low - margin), min(high, inner_high + margin)
        note = f"the axis is cut: values go from {number_text(lowest)} to {number_text(highest)}"
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin, note


def _frame(x: _Axis, y: _Axis, x_name: str) -> str:
    parts = []
    for value, text in y.ticks():
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y(value) + 3.5:.1f}" text-anchor="end">{text}</text>')
    for value, text in x.ticks():
        anchor = "end" if x(value) > _RIGHT - 12 else "middle"
        parts.append(f'<text x="{x(value):.1f}" y="{_BOTTOM + 13}" text-anchor="{anchor}">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>')
    place = f'x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 5}"'
    parts.append(f'<text class="name" {place} text-anchor="middle">{escape(x_name)}</text>')
    return "".join(parts)


def _line(curve: Curve, x: _Axis, y: _Axis) -> str:
    marks = [  # h0: a lone point
        f"{'L' if i else 'M'}{x(point.step):.1f} {y(point.value):.1f}{'' if i else 'h0'}"
        for piece in curve.pieces()
        for i, point in enumerate(piece)
    ]
    step, low, value, high, count = zip(*curve.points, strict=True)  # the page shows them at the cursor
    data = {"label": curve.label, "x": " ".join(map(str, step)), "y": _texts(value)}
    if curve.num_runs > 1:
        data |= {"low": _texts(low), "high": _texts(high), "n": " ".join(map(str, count)), "runs": str(curve.num_runs)}
    attributes = " ".join(f'data-{name}="{escape(text)}"' for name, text in data.items())
    dash = ' stroke-dasharray="5 3"' if curve.colour // NUM_COLOURS % 2 else ""
    return f'<path class="line c{curve.colour % NUM_COLOURS}" d="{"".join(marks)}"{dash} {attributes}/>'


def _band(curve: Curve, x: _Axis, y: _Axis) -> str:
    if curve.num_runs == 1:
        return ""
    path = ""
    for piece in curve.pieces():
        around = [(each.step, each.high) for each in piece] + [(each.step, each.low) for each in reversed(piece)]
        if len(piece) > 1:
            path += "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in around) + "z"
    return f'<path class="band c{curve.colour % NUM_COLOURS}" d="{path}"/>'


def _thinned(curve: Curve) -> Curve:
    """Keep the lowest and the highest point of each stretch, and both ends."""
    points, total = curve.points, len(curve.points)
    if total <= _MAX_POINTS:
        return curve
    edges = [round(i) for i in np.linspace(0, total, _MAX_POINTS // 2)]  # two points of each stretch are kept
    kept = {0, total - 1}
    for start, end in pairwise(edges):
        finite = [i for i in range(start, end) if math.isfinite(points[i].value)] or [start]
        kept |= {min(finite, key=lambda i: points[i].value), max(finite, key=lambda i: points[i].value)}
    return replace(curve, points=[points[i] for i in sorted(kept)])


def _texts(values: Sequence[float]) -> str:
    return " ".join("-" if not math.isfinite(value) else f"{value:.7g}" for value in values)
