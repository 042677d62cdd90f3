"""Loss curves over each other, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["loss_plot"]

WIDTH, HEIGHT, MARGIN = 360, 220, 44
STYLES = {
    "round_robin": 'stroke="#d08770" stroke-width="5" stroke-opacity="0.55"',
    "balanced": 'stroke="#2b4c7e" stroke-width="1.5"',
}


def loss_plot(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Draw panel name -> strategy -> loss of each step; strategies are drawn over each other in the order of STYLES."""
    width = WIDTH * len(panels)
    drawn = [_panel(name, curves, WIDTH * at) for at, (name, curves) in enumerate(panels.items())]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 24}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *drawn, _legend(), "</svg>"]) + "\n"


def _panel(name: str, curves: Mapping[str, Sequence[float]], left: float) -> str:
    values = [value for curve in curves.values() for value in curve]
    low, high, last = min(values), max(values), max(len(curve) for curve in curves.values()) - 1
    span = (high - low) or 1.0
    right, bottom = WIDTH - 12, HEIGHT - MARGIN

    def point(step: int, value: float) -> str:
        x = MARGIN + (right - MARGIN) * step / max(last, 1)
        return f"{x:.1f},{MARGIN / 2 + (bottom - MARGIN / 2) * (high - value) / span:.1f}"

    lines = [
        f'<polyline fill="none" {style} points="{" ".join(point(*at) for at in enumerate(curves[strategy]))}"/>'
        for strategy, style in STYLES.items()
    ]
    title = f"{name} tokens a row" if name.isdigit() else f"{name} lengths"
    return "\n".join(
        [
            f'<g transform="translate({left},0)">',
            f'<path d="M{MARGIN},{MARGIN / 2} V{bottom} H{right}" fill="none" stroke="#888"/>',
            f'<text x="{(MARGIN + right) / 2}" y="14" text-anchor="middle">{title}</text>',
            *(
                f'<text x="{MARGIN - 6}" y="{at + 4}" text-anchor="end">{value:.2f}</text>'
                for at, value in ((MARGIN / 2, high), (bottom, low))
            ),
            f'<text x="{MARGIN}" y="{bottom + 16}">step 0</text>',
            f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{last}</text>',
            *lines,
            "</g>",
        ]
    )


def _legend() -> str:
    found = []
    for at, (strategy, style) in enumerate(STYLES.items()):
        x, y = MARGIN + 160 * at, HEIGHT + 8
        found.append(f'<line x1="{x}" y1="{y}" x2="{x + 30}" y2="{y}" {style}/>')
        found.append(f'<text x="{x + 36}" y="{y + 4}">loss, {strategy.replace("_", "-")}</text>')
    return "\n".join(found)
