"""SVG charts over time: stacked areas and lines, readable without colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1100, 260, 76, 12, 12, 28
MAX_POINTS = 120
MIN_LABEL_HEIGHT_PX = 13
"""Bands below this height have no label."""
DASH_PATTERNS = ("", "8 4", "2 3", "10 3 2 3")

Points = list[tuple[float, float]]
FormatValue = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Band:
    label: str
    """Text in the band."""
    name: str
    colour: str
    values: Points
    """All bands of a chart have the same times."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    title: str
    colour: str
    values: Points


def downsample(values: Points, most: int = MAX_POINTS) -> Points:
    """Average neighbours, so that at most `most` points remain. Areas stay the same, spikes become lower."""
    if len(values) <= most:
        return values
    found = []
    for place in range(most):
        part = values[len(values) * place // most : len(values) * (place + 1) // most]
        found.append((part[-1][0], sum(value for _, value in part) / len(part)))
    return found


def stacked_area_chart(title: str, bands: Sequence[Band], format_value: FormatValue) -> str:
    """Bands stacked in order; the first is at the bottom."""
    series = [downsample(band.values) for band in bands]
    length = max((len(points) for points in series), default=0)
    if not length:
        return "<p>Nothing was recorded.</p>"
    times = next([t for t, _ in points] for points in series if len(points) == length)
    sums = [0.0] * length
    floors: list[list[float]] = []
    for points in series:
        floors.append(list(sums))
        for place, (_, value) in enumerate(points):
            sums[place] += value
    frame = _Frame(times[-1], max(sums), format_value)
    parts = [*frame.axes()]
    for band, points, floor in zip(bands, series, floors, strict=True):
        parts += _draw_band(frame, band, points, floor)
    return frame.svg(title, parts)


def _draw_band(frame: _Frame, band: Band, points: Points, floor: Sequence[float]) -> Iterator[str]:
    if not points or not any(value for _, value in points):
        return
    # from time 0, so that a chart of one sample is an area as well
    upper = [(0.0, floor[0] + points[0][1])] + [(t, floor[i] + value) for i, (t, value) in enumerate(points)]
    lower = [(0.0, floor[0])] + [(t, floor[i]) for i, (t, _) in enumerate(points)]
    path = " ".join(frame.at(*point) for point in (*upper, *reversed(lower)))
    mean = sum(value for _, value in points) / len(points)
    peak = max(value for _, value in points)
    text = (
        f"{band.label} {band.name}: {frame.format_value(_three_digits(mean))} on average, "
        f"{frame.format_value(_three_digits(peak))} at most"
    )
    yield f'<polygon class="band" fill="{band.colour}" points="{path}"><title>{escape(text)}</title></polygon>'
    place = max(range(len(points)), key=lambda i: points[i][1])
    if frame.height(points[place][1]) >= MIN_LABEL_HEIGHT_PX:
        x, y = frame.x(points[place][0]), frame.y(floor[place] + points[place][1] / 2)
        half = 6 + 4 * len(band.label)  # about half of the width of the text
        x = min(max(x, LEFT + half), WIDTH - RIGHT - half)
        yield f'<text class="mark" x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">{escape(band.label)}</text>'


def line_chart(title: str, drawn: Sequence[Line], most: float, format_value: FormatValue) -> str:
    """Lines with different dashes, and a legend."""
    last = max((line.values[-1][0] for line in drawn if line.values), default=1.0)
    frame = _Frame(last, most, format_value)
    parts = [*frame.axes()]
    legend = []
    for place, line in enumerate(drawn):
        path = " ".join(frame.at(*point) for point in downsample(line.values))
        dash = DASH_PATTERNS[place % len(DASH_PATTERNS)]
        style = f'stroke="{line.colour}" stroke-dasharray="{dash}"' if dash else f'stroke="{line.colour}"'
        parts.append(f'<polyline class="line" {style} points="{path}"><title>{escape(line.title)}</title></polyline>')
        sample = (
            f'<svg viewBox="0 0 40 8" style="width:40px" aria-hidden="true"><path d="M0 4H40" {style} class="line"/>'
        )
        legend.append(f"<li>{sample}</svg> {escape(line.title)}</li>")
    return frame.svg(title, parts) + f'\n<ul style="list-style:none;padding:0">{"".join(legend)}</ul>'


class _Frame:
    """Axes: time in seconds, and values from 0 to a round number."""

    def __init__(self, last: float, most: float, format_value: FormatValue) -> None:
        self.end_s = max(last, 1e-3)
        self.step = _round_step(max(most, 1e-9) / 4)
        self.max_value = self.step * math.ceil(max(most, 1e-9) / self.step - 1e-9)
        self.format_value = format_value

    def x(self, t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, t / self.end_s))

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(1.0, value / self.max_value))

    def height(self, value: float) -> float:
        return (HEIGHT - TOP - BOTTOM) * value / self.max_value

    def at(self, t: float, value: float) -> str:
        return f"{self.x(t):.0f},{self.y(value):.1f}"

    def axes(self) -> Iterator[str]:
        for count in range(round(self.max_value / self.step) + 1):
            value = count * self.step
            y = self.y(value)
            yield f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            text = escape(self.format_value(_three_digits(value)))
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        step = _round_step(self.end_s / 6)
        for count in range(int(self.end_s / step) + 1):
            x = self.x(count * step)
            anchor = "start" if not count else "end" if x > WIDTH - 40 else "middle"
            yield f'<text x="{x:.0f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{_three_digits(count * step):g} s</text>'

    def svg(self, title: str, parts: Sequence[str]) -> str:
        text = escape(title)
        inside = "\n".join(parts)
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
        return f'<svg {box} role="img" aria-label="{text}"><title>{text}</title>\n{inside}\n</svg>'


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-9)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
