"""Small charts as inline SVG: `line_chart` over steps and `bar_chart`, with titles and descriptions for readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Literal

__all__ = ["Bar", "Line", "bar_chart", "line_chart"]

Form = Literal["", "%"]

_WIDTH: Final = 800
_HEIGHT: Final = 260
_LEFT: Final = 70
_RIGHT: Final = 10
_TOP: Final = 20
_BOTTOM: Final = 40
_COLORS: Final = ("#0072b2", "#d55e00", "#007a5a", "#aa4499", "#8a6d00", "#444444")
"""Told apart by the colour-blind, and dark enough on white."""
_DASHES: Final = ' stroke-dasharray="6 4"'
_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class Line:
    """One value per step."""

    name: str
    values: Sequence[float]
    color: int
    """Index of its colour; further ones begin anew."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar."""

    name: str
    value: float


def line_chart(key: str, title: str, text: str, lines: Sequence[Line], *, form: Form = "", base: float = 0.0) -> str:
    """A figure with a line for each series of values, over the steps from 0.

    Args:
        key: Names the figure on its page.
        title: What it shows.
        text: A sentence more.
        lines: One at least, all of the same length of at least 1.
        form: "%" shows values as percentages.
        base: Where the axis of the values begins.
    """
    count = len(lines[0].values)
    most = max(max(line.values) for line in lines)
    ticks = _ticks(min(base, *(min(line.values) for line in lines)), most)
    low, high = ticks[0], ticks[-1]

    def across(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step / (count - 1) if count > 1 else 0.5)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

    parts = list(_grid(ticks, up, form))
    parts += [
        f'<text x="{across(step):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{step:,}</text>'
        for step in _step_ticks(count)
    ]
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">step</text>')
    for line in lines:
        color, dashes = _COLORS[line.color % len(_COLORS)], _DASHES if line.is_dashed else ""
        points = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in enumerate(line.values))
        name = f"<title>{escape(line.name)}</title>"
        parts.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="1.8"{dashes} points="{points}">{name}</polyline>'
        )
        if count == 1:  # a line of one point shows nothing
            parts.append(f'<circle fill="{color}" r="3" cx="{across(0):.1f}" cy="{up(line.values[0]):.1f}"/>')
    shown = f"{text} Lines: {', '.join(line.name for line in lines)}."
    return _figure(key, title, text, shown, parts, lines)


def bar_chart(key: str, title: str, text: str, bars: Sequence[Bar]) -> str:
    """A figure with upright bars, one at least; each has its value written over it."""
    ticks = _ticks(0.0, max(bar.value for bar in bars))
    high = ticks[-1]

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / high

    parts = list(_grid(ticks, up, ""))
    room = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    for index, bar in enumerate(bars):
        left, top = _LEFT + index * room, up(bar.value)
        parts.append(
            f'<rect fill="{_COLORS[0]}" x="{left + 0.1 * room:.1f}" y="{top:.1f}" width="{0.8 * room:.1f}" '
            f'height="{_HEIGHT - _BOTTOM - top:.1f}"><title>{escape(bar.name)}: {bar.value:,}</title></rect>'
        )
        parts.append(f'<text x="{left + room / 2:.1f}" y="{top - 4:.1f}" text-anchor="middle">{bar.value:,}</text>')
        # Two heights, so that neighbours do not run into each other.
        height = _HEIGHT - (24 if index % 2 == 0 else 8)
        parts.append(f'<text x="{left + room / 2:.1f}" y="{height}" text-anchor="middle">{escape(bar.name)}</text>')
    shown = f"{text} {', '.join(f'{bar.name}: {bar.value:,}' for bar in bars)}."
    return _figure(key, title, text, shown, parts, ())


def _figure(key: str, title: str, text: str, shown: str, parts: Sequence[str], lines: Sequence[Line]) -> str:
    legend = "".join(_legend(lines)) if len(lines) > 1 else ""
    inner = "\n".join(parts)
    return (
        f'<figure>\n<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{key}-title {key}-desc" '
        f'font-size="12" fill="#444">\n<title id="{key}-title">{escape(title)}</title>\n'
        f'<desc id="{key}-desc">{escape(shown)}</desc>\n{inner}\n</svg>\n'
        f"<figcaption>{escape(title)}. {escape(text)}{legend}</figcaption>\n</figure>"
    )


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        style = "dashed" if line.is_dashed else "solid"
        color = _COLORS[line.color % len(_COLORS)]
        yield (
            f' <span style="white-space: nowrap; margin-left: 1em"><span style="display: inline-block; width: 2em; '
            f'border-top: 3px {style} {color}; vertical-align: middle"></span> {escape(line.name)}</span>'
        )


def _grid(ticks: Sequence[float], up: Callable[[float], float], form: Form) -> Iterator[str]:
    for value in ticks:
        y = up(value)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value, ticks, form)}</text>'


def _number(value: float, ticks: Sequence[float], form: Form) -> str:
    step = (ticks[1] - ticks[0]) * (100 if form else 1)
    digits = next((digits for digits in range(12) if abs(round(step, digits) - step) <= 1e-6 * step), 12)
    return f"{value:.{digits}%}" if form else f"{value:,.{digits}f}"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest to above the highest value; two at least."""
    if high <= low:
        high = low + (abs(high) or 1.0)
    rough = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _step_ticks(count: int) -> list[int]:
    """Steps that are numbered."""
    if count == 1:
        return [0]
    step = max(round(_ticks(0, count - 1)[1]), 1)
    return list(range(0, count, step))
