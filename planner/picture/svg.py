"""SVG as text: elements with escaped attributes, and text of a known width."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

SMALLEST = 0.7
"""How much a drawing may be scaled down where there is little room; then it can be moved about."""
LETTER = 0.56
"""Width of a letter, of its height, in the fonts of the page: about."""


def tag(name: str, *inside: str | Markup | Iterable[Markup], **attributes: object) -> Markup:
    """An element; `_` in the name of an attribute is `-`, `class_` is `class`, None leaves it out.

    Numbers are written with one digit behind the point, text inside is escaped.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    parts = (escape(part) if isinstance(part, str) else Markup("").join(part) for part in inside)
    return Markup(f"<{name}{given}>{Markup('').join(parts)}</{name}>")  # noqa: S704 all is escaped


def _text(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def drawing(width: float, height: float, label: str, inside: Iterable[Markup]) -> Markup:
    """A whole drawing, which says to those who cannot see it what it is of."""
    box = f"0 0 {width:.0f} {height:.0f}"
    least = f"min-width:{SMALLEST * width:.0f}px"
    return tag("svg", inside, viewBox=box, width=width, height=height, style=least, role="img",
               aria_label=label)  # fmt: skip


def fitted(text: str, width: float, size: float = 13) -> str:
    """`text`, its middle left out where it is wider than that."""
    most = max(int(width / (size * LETTER)), 3)
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[-(most - 1 - head) :]}"
