"""The page in a real browser: no errors, the plan's numbers, clicks, keys, sizes of screens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.page import page
from shardwright.planner.picture.view import Shown
from tests.browser import NAMES, Browser, Page, browser, find
from tests.picture.test_drawing import Net
from tests.planning import plan

pytestmark = pytest.mark.skipif(
    find() is None,
    reason=f"THE PAGE WAS NOT TRIED: none of {', '.join(NAMES)} is installed "
    "(Debian: apt-get install chromium)",
)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [plan(Net(), tp=tp, args=(torch.zeros(3, 19, 64),)) for tp in (2, 4)]


@pytest.fixture(scope="module")
def file(plans: list[Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page") / "page.html"
    found.write_text(page([Shown(p, f"{p.world_size} ranks") for p in plans]))
    return found


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def tab(chromium: Browser, file: Path) -> Iterator[Page]:
    found = chromium.page()
    found.open(file, 1280, 900)
    yield found
    assert found.troubles == []


SHOWN = "[...document.querySelectorAll('article.plan')].filter(p => !p.hidden).map(p => p.id)"


def test_numbers_shown_are_those_of_the_plan(tab: Page, plans: list[Plan]) -> None:
    shown = tab.run("[...document.querySelectorAll('#p0 .figures data')].map(d => +d.value)")
    predicted = plans[0].predicted
    assert predicted.memory is not None
    ahead = sum(c.count for c in predicted.collectives if c.phase == "forward")
    assert shown == [predicted.memory.total, *predicted.phase_ns.values(), ahead, 0]


def test_click_on_a_weight_shows_it(tab: Page) -> None:
    at = "#p0 a.weight[href$='layers-1-3-down-weight']"
    tab.click(at)
    assert (
        tab.run("document.querySelector('#p0 .closeup.shown h3').textContent").replace("\u200b", "")
        == "layers.1-3.down.weight"
    )
    assert tab.run(
        "[...document.querySelectorAll('#p0 .closeup.shown .held td:nth-child(2)')]"
        ".map(d => d.textContent)"
    ) == ["0–127", "128–255"]
    assert tab.run("[...document.querySelectorAll('#p0 .closeup')]"
                   ".filter(c => c.offsetParent).length") == 1  # fmt: skip


def test_weights_are_reached_by_keys(tab: Page) -> None:
    tab.run("document.querySelector('#p0 a.weight[href$=\"layers-0-up-weight\"]').focus()")
    tab.press("Enter", 13)
    assert "layers.0.up" in tab.run(
        "document.querySelector('#p0 .closeup.shown h3').textContent"
    ).replace("\u200b", "")


def test_labels_stay_within_their_boxes(tab: Page) -> None:
    """Whatever their length: bars and sheets clip them."""
    clipped = "e => !['visible'].includes(getComputedStyle(e).overflowX)"
    assert tab.run(f"[...document.querySelectorAll('.bar i, .sheet i')].every({clipped})")


def test_plans_are_switched(tab: Page) -> None:
    assert tab.run(SHOWN) == ["p0"]
    tab.click("[data-plan=p1]")
    assert tab.run(SHOWN) == ["p1"]
    assert tab.run("document.querySelector('[aria-current][data-plan]').textContent") == "4 ranks"


@pytest.mark.parametrize("width", [390, 820, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_its_window(chromium: Browser, file: Path, width: int, dark: bool) -> None:
    """It is never wider than the window, and its ink differs from its paper."""
    tab = chromium.page()
    tab.open(file, width, 800, dark)
    assert tab.run("document.documentElement.scrollWidth") <= width
    ink, paper = tab.run(
        "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
        ".map(c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"
    )
    assert abs(ink - paper) > 400 and (paper < ink) == dark
    assert tab.troubles == []


def test_page_is_whole_without_scripts(chromium: Browser, file: Path, tmp_path: Path) -> None:
    """And on paper: all plans, all weights."""
    plain = tmp_path / "plain.html"
    plain.write_text(file.read_text().partition("<script>")[0])
    tab = chromium.page()
    tab.open(plain, 1280, 900)
    hidden = "[...document.querySelectorAll('.closeup, .plan')].filter(c => !c.offsetHeight).length"
    assert tab.run(hidden) == 0
    tab.open(file, 1280, 900)
    assert tab.run(hidden) > 0
    tab.send("Emulation.setEmulatedMedia", media="print")
    assert tab.run(hidden) == 0
