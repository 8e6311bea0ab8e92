"""Draws charts as inline SVG: axes, lines, dots with intervals, bars. Colours are the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

PALETTE = 10
"""How many colours a page defines: ``--c0`` to ``--c9``."""


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element; ``_`` in an attribute's name stands for ``-``, one at its end is dropped."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_number(value))}" for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>"


def text(content: str, x: float, y: float, css: str = "", **attributes: object) -> str:
    """A label."""
    return tag("text", escape(content), x=x, y=y, class_=f"label {css}".strip(), **attributes)


def colour(index: int) -> str:
    """A colour of the page."""
    return f"var(--c{index % PALETTE})"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def tick_labels(values: Sequence[float]) -> list[str]:
    """All with as many decimals as the one that needs most."""
    written = [f"{round(value, 6):.10g}" for value in values]
    decimals = max((len(w.partition(".")[2]) for w in written), default=0)
    return [f"{value:,.{decimals}f}" for value in values]


@dataclass(slots=True)
class Plot:
    """A chart in the making: two linear scales, and what has been drawn so far."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: float = 460.0
    height: float = 260.0
    left: float = 52.0
    right: float = 16.0
    top: float = 12.0
    bottom: float = 44.0
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1.0) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return (
            self.height - self.bottom - (value - low) / ((high - low) or 1.0) * (self.height - self.top - self.bottom)
        )

    def x_axis(self, label: str, values: Sequence[float] | None = None, *, grid: bool = False) -> None:
        base = self.height - self.bottom
        shown = ticks(*self.x_range, 6) if values is None else values
        for value, written in zip(shown, tick_labels(shown), strict=True):
            at = self.x(value)
            if grid:
                self.parts.append(tag("line", x1=at, x2=at, y1=self.top, y2=base, class_="grid"))
            self.parts.append(text(written, at, base + 16, "middle"))
        self.parts.append(tag("line", x1=self.left, x2=self.width - self.right, y1=base, y2=base, class_="axis"))
        middle = (self.left + self.width - self.right) / 2
        self.parts.append(text(label, middle, self.height - 8, "middle title"))

    def y_axis(self, label: str, values: Sequence[float] | None = None) -> None:
        shown = ticks(*self.y_range) if values is None else values
        for value, written in zip(shown, tick_labels(shown), strict=True):
            at = self.y(value)
            self.parts.append(tag("line", x1=self.left, x2=self.width - self.right, y1=at, y2=at, class_="grid"))
            self.parts.append(text(written, self.left - 8, at + 4, "end"))
        middle = (self.top + self.height - self.bottom) / 2
        self.parts.append(text(label, 14, middle, "middle title", transform=f"rotate(-90 14 {middle:.1f})"))

    def line(self, points: Sequence[tuple[float, float]], index: int, title: str, *, dashed: bool = False) -> None:
        """A line through points that are marked; pointing at one shows ``title`` and its numbers."""
        path = " ".join(f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in points)
        dash = {"stroke_dasharray": "5 4"} if dashed else {}
        style = f"stroke:{colour(index)}"
        self.parts.append(tag("polyline", points=path, class_="line", style=style, **dash))
        for x, y in points:
            self.dot(x, y, index, f"{title}: {x:g}, {y:.3g}", radius=3.0)

    def dot(self, x: float, y: float, index: int, title: str, *, radius: float = 4.5) -> None:
        circle = tag("title", escape(title))
        self.parts.append(
            tag("circle", circle, cx=self.x(x), cy=self.y(y), r=radius, class_="dot", style=f"fill:{colour(index)}")
        )

    def whisker(self, low: float, high: float, y: float, index: int) -> None:
        """An interval along x."""
        left, right, at = self.x(low), self.x(high), self.y(y)
        style = f"stroke:{colour(index)}"
        self.parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="whisker", style=style))
        for end in (left, right):
            self.parts.append(tag("line", x1=end, x2=end, y1=at - 3, y2=at + 3, class_="whisker", style=style))

    def upright(self, x: float) -> None:
        """A vertical line that others are compared with."""
        at = self.x(x)
        self.parts.append(tag("line", x1=at, x2=at, y1=self.top, y2=self.height - self.bottom, class_="reference"))

    def bar(self, x: float, width: float, low: float, high: float, css: str, index: int, title: str = "") -> None:
        """A rectangle from ``low`` to ``high``, with a hairline between neighbours."""
        left, right = self.x(x), self.x(x + width)
        inner = tag("title", escape(title)) if title else ""
        wide = max(right - left - 0.8, 0.6)
        shape = {"x": left, "y": self.y(high), "width": wide, "height": max(self.y(low) - self.y(high), 0.0)}
        self.parts.append(tag("rect", inner, **shape, class_=css, style=f"fill:{colour(index)}"))

    def svg(self, description: str) -> str:
        """The chart; ``description`` is for those who cannot see it."""
        return tag(
            "svg",
            "".join(self.parts),
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            role="img",
            aria_label=description,
            style=f"max-width:{self.width:g}px",
        )


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Names with their colours, as HTML."""
    items = "".join(
        tag("span", tag("i", "", style=f"background:{colour(index)}") + escape(name), class_="key")
        for name, index in names
    )
    return tag("div", items, class_="legend")
