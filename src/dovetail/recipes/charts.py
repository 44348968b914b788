"""How are figures over time drawn, without anything but SVG? Small, with titles, and readable without colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1100, 260, 76, 12, 12, 28
MOST_POINTS = 120
MARK_PIXELS = 13
"""A band that is lower than this has no number in it."""
DASHES = ("", "8 4", "2 3", "10 3 2 3")

Points = list[tuple[float, float]]
Said = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Band:
    label: str
    """What stands in it."""
    name: str
    colour: str
    values: Points
    """All bands of a chart at the same times."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    title: str
    colour: str
    values: Points


def thinned(values: Points, most: int = MOST_POINTS) -> Points:
    """Neighbours averaged, so that at most so many are left. The areas stay as they are, spikes become lower."""
    if len(values) <= most:
        return values
    found = []
    for place in range(most):
        part = values[len(values) * place // most : len(values) * (place + 1) // most]
        found.append((part[-1][0], sum(value for _, value in part) / len(part)))
    return found


def stacked(title: str, bands: Sequence[Band], said: Said) -> str:
    """One band above the other; the first is the lowest."""
    series = [thinned(band.values) for band in bands]
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
    frame = _Frame(times[-1], max(sums), said)
    parts = [*frame.drawn()]
    for band, points, floor in zip(bands, series, floors, strict=True):
        parts += _band(frame, band, points, floor)
    return frame.svg(title, parts)


def _band(frame: _Frame, band: Band, points: Points, floor: Sequence[float]) -> Iterator[str]:
    if not points or not any(value for _, value in points):
        return
    # from the beginning, so that a chart of one sample is an area as well
    upper = [(0.0, floor[0] + points[0][1])] + [(t, floor[i] + value) for i, (t, value) in enumerate(points)]
    lower = [(0.0, floor[0])] + [(t, floor[i]) for i, (t, _) in enumerate(points)]
    path = " ".join(frame.at(*point) for point in (*upper, *reversed(lower)))
    mean = sum(value for _, value in points) / len(points)
    peak = max(value for _, value in points)
    told = f"{band.label} {band.name}: {frame.said(_three(mean))} on average, {frame.said(_three(peak))} at most"
    yield f'<polygon class="band" fill="{band.colour}" points="{path}"><title>{escape(told)}</title></polygon>'
    place = max(range(len(points)), key=lambda i: points[i][1])
    if frame.height(points[place][1]) >= MARK_PIXELS:
        x, y = frame.x(points[place][0]), frame.y(floor[place] + points[place][1] / 2)
        half = 6 + 4 * len(band.label)  # about half of what the text is wide
        x = min(max(x, LEFT + half), WIDTH - RIGHT - half)
        yield f'<text class="mark" x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">{escape(band.label)}</text>'


def lines(title: str, drawn: Sequence[Line], most: float, said: Said) -> str:
    """Lines of their own, told apart by their dashes as well, with a legend."""
    last = max((line.values[-1][0] for line in drawn if line.values), default=1.0)
    frame = _Frame(last, most, said)
    parts = [*frame.drawn()]
    legend = []
    for place, line in enumerate(drawn):
        path = " ".join(frame.at(*point) for point in thinned(line.values))
        dash = DASHES[place % len(DASHES)]
        style = f'stroke="{line.colour}" stroke-dasharray="{dash}"' if dash else f'stroke="{line.colour}"'
        parts.append(f'<polyline class="line" {style} points="{path}"><title>{escape(line.title)}</title></polyline>')
        sample = (
            f'<svg viewBox="0 0 40 8" style="width:40px" aria-hidden="true"><path d="M0 4H40" {style} class="line"/>'
        )
        legend.append(f"<li>{sample}</svg> {escape(line.title)}</li>")
    return frame.svg(title, parts) + f'\n<ul style="list-style:none;padding:0">{"".join(legend)}</ul>'


class _Frame:
    """Axes: seconds to the right, and from 0 up to something round."""

    def __init__(self, last: float, most: float, said: Said) -> None:
        self.last = max(last, 1e-3)
        self.step = _round_step(max(most, 1e-9) / 4)
        self.most = self.step * math.ceil(max(most, 1e-9) / self.step - 1e-9)
        self.said = said

    def x(self, t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, t / self.last))

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(1.0, value / self.most))

    def height(self, value: float) -> float:
        return (HEIGHT - TOP - BOTTOM) * value / self.most

    def at(self, t: float, value: float) -> str:
        return f"{self.x(t):.0f},{self.y(value):.1f}"

    def drawn(self) -> Iterator[str]:
        for count in range(round(self.most / self.step) + 1):
            value = count * self.step
            y = self.y(value)
            yield f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            told = escape(self.said(_three(value)))
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{told}</text>'
        step = _round_step(self.last / 6)
        for count in range(int(self.last / step) + 1):
            x = self.x(count * step)
            anchor = "start" if not count else "end" if x > WIDTH - 40 else "middle"
            yield f'<text x="{x:.0f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{_three(count * step):g} s</text>'

    def svg(self, title: str, parts: Sequence[str]) -> str:
        told = escape(title)
        inside = "\n".join(parts)
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
        return f'<svg {box} role="img" aria-label="{told}"><title>{told}</title>\n{inside}\n</svg>'


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-9)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _three(value: float) -> float:
    return float(f"{value:.3g}")
