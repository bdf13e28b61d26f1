"""Renders plans as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardwright.planner.picture.view import Shown, View
from shardwright.planner.units import human_bytes, human_time
from shardwright.planner.wording import mesh_in_words

HERE = Path(__file__).parent


def page(shown: Sequence[Shown]) -> str:
    """Return a page that shows plans, one at a time if scripts run. It loads no other files."""
    frame = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    frame.filters |= {"bytes": human_bytes, "time": human_time, "mesh": mesh_in_words}
    views = [View(each, number) for number, each in enumerate(shown)]
    files = {name: (HERE / name).read_text() for name in ("page.css", "page.js")}
    return frame.get_template("page.html").render(views=views, style=files["page.css"],
                                                  script=files["page.js"])  # fmt: skip
