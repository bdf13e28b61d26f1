"""The page of a plan as text: whole, by itself, and with the numbers of the plan."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.planning_models import MODELS
from shardwright.planner.cli.main import main
from shardwright.planner.contract.dims import local_ranges
from shardwright.planner.contract.mesh import coords_of
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.page import page
from shardwright.planner.picture.sheets import COLOURS, side_of, spans
from shardwright.planner.picture.view import Shown
from shardwright.planner.units import human_bytes, human_time
from tests.picture.test_drawing import Net
from tests.planning import plan

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Parsed(HTMLParser):
    """Ids, links, values and texts of a page; that each element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.values: list[int] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for key, value in attrs:
            assert key not in ("src", "srcset"), "it loads something"
            if key == "id":
                self.ids.append(value or "")
            if key in ("href", "xlink:href"):
                self.links.append(value or "")
            if key == "value" and tag == "data":
                self.values.append(int(value or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def net() -> Plan:
    return plan(Net(), tp=2, args=(torch.zeros(3, 19, 64),))


@pytest.fixture(scope="module")
def published() -> Plan:
    """A model of 405 B parameters, all of its layers."""
    return plan(MODELS["llama-405b"].config(), tp=16, phase="prefill,decode")


def test_page_holds_together(net: Plan) -> None:
    text = page([Shown(net, "one"), Shown(net, "another")])
    found = Parsed(text)
    assert len(found.ids) == len({*found.ids})
    assert found.links and {link.removeprefix("#") for link in found.links} <= {*found.ids}
    assert "http" not in text and "url(" not in text.replace("url(#", "")


def test_numbers_are_those_of_the_plan(published: Plan) -> None:
    text = page([Shown(published)])
    found, words = Parsed(text), " ".join(Parsed(text).words)
    predicted = published.predicted
    assert predicted.memory is not None
    wanted = [predicted.memory.total, *predicted.phase_ns.values(), published.solver.gap]
    assert {*wanted} <= {*found.values}
    for use, size in dict(predicted.memory).items():
        assert not size or human_bytes(size) in words, use
    for phase in ("forward", "decode", "backward"):
        number = sum(c.count for c in predicted.collectives if c.phase == phase)
        assert number and f"{number:,}" in words
    for ns in predicted.phase_ns.values():
        assert human_time(ns) in words


def test_page_is_small(published: Plan) -> None:
    assert len(page([Shown(published)]).encode()) < 1e6


def test_who_holds_what_of_query_key_and_value(published: Plan) -> None:
    """128 query heads and 8 key and value heads of 128 over 16 ranks: two ranks share a key."""
    words = Parsed(page([Shown(published)])).words
    names = [w for w in words if "self_attn." in w and w.endswith("weight")]
    assert {w.replace("\u200b", "").split(".")[-2] for w in names} >= {"q_proj", "k_proj", "v_proj"}
    entry = published.module("model.layers.0.self_attn.q_proj")
    assert entry is not None
    rows = parse(entry.parameters["weight"].placement).dims[0]
    text = " ".join(words)
    ranks = [published.coords(r) for r in range(16)]
    for piece in side_of(rows, ranks).pieces:
        assert spans([(piece.start, piece.stop)]) in text


@pytest.mark.parametrize(
    "dim", ["7@tp", "4@tp*2 + 2", "2@tp.0*2@tp.1*3", "6@tp.1*5", "3*(4@tp + 2)"]
)
def test_pieces_cover_a_dim(dim: str) -> None:
    """Each index is in one piece, held by just the ranks that hold it."""
    ranks = [coords_of({"tp": 4}, {"tp": [2, 2]}, r) for r in range(4)]
    tree = parse(dim).dims[0]
    found = side_of(tree, ranks)
    assert found.pieces[0].start == 0 and found.pieces[-1].stop == found.size
    for piece in found.pieces:
        for index in (piece.start, piece.stop - 1):
            holders = [
                r for r, at in enumerate(ranks)
                if any(a <= index < b for a, b in local_ranges(tree, at))
            ]  # fmt: skip
            assert holders == list(piece.ranks)


def test_ranks_have_colours_that_can_be_told_apart() -> None:
    """Sixteen of them: each pair differs by far more than the least that is seen."""
    points = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS]
    assert len(points) == 16
    for i, one in enumerate(points):
        for other in points[:i]:
            red = (one[0] + other[0]) / 2 / 256  # the "redmean" approximation of CIELUV
            weights = (2 + red, 4, 3 - red)
            far = sum(w * (a - b) ** 2 for w, a, b in zip(weights, one, other, strict=True))
            assert far**0.5 > 100, (one, other)


def test_what_does_not_fit_is_red_and_not_praised(net: Plan) -> None:
    limit = net.objective.model_copy(update={"memory_bytes": 1000})
    text = page([Shown(net.model_copy(update={"objective": limit}))])
    assert 'class="bad"' in text and "The plan does not fit: a rank holds" in text
    assert "DOES NOT FIT" in text and ">proven<" not in text
    fitting = page([Shown(net)])
    assert 'class="bad"' not in fitting and ">proven<" in fitting


def test_names_are_escaped(net: Plan) -> None:
    assert "<em>" not in page([Shown(net, "<em>"), Shown(net)])


def test_show_writes_a_page(net: Plan, tmp_path: Path) -> None:
    net.save(tmp_path / "a.json")
    net.save(tmp_path / "b.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    out = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["show", *files, "--html", str(out)])
    assert result.exit_code == 0 and f"Wrote {out}" in result.output
    assert {"a.json", "b.json"} <= {*Parsed(out.read_text()).words}
    assert [*tmp_path.glob(".*")] == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a.json", "a.json"], "need --html"),
        (["a.json", "--html", "p.html", "--json"], "exclude each other"),
        (["no.json", "--html", "p.html"], "cannot read plan no.json"),
        (["a.json", "--html", "a.json/p.html"], "not a directory"),
    ],
)
def test_errors_are_one_line(
    net: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    net.save("a.json")
    result = CliRunner().invoke(main, ["show", *arguments])
    assert result.exit_code != 0 and message in result.output
    assert not Path("p.html").exists()


def test_plan_draws_with_alternatives(tmp_path: Path) -> None:
    """What it knows from planning is what `show` learns from the plan and the model again."""
    source = tmp_path / "net.py"
    source.write_text(
        "from tests.picture.test_drawing import Net\nimport torch\n"
        "def example():\n    return (torch.zeros(3, 19, 64),)\n"
    )
    file, out, again = (str(tmp_path / name) for name in ("net.json", "net.html", "again.html"))
    how = ["--inputs", f"{source}:example"]
    for command in (
        ["plan", f"{source}:Net", "--tp", "2", "--objective", "memory", "-o", file, "--html", out],
        ["show", file, "--model", f"{source}:Net", "--html", again],
    ):
        result = CliRunner().invoke(main, [*command, *how])
        assert result.exit_code == 0, result.output
    assert Path(again).read_text() == Path(out).read_text()
    words = " ".join(Parsed(Path(out).read_text()).words)
    assert "Alternatives, compared with the plan" in words
    assert "; unsharded: " in words, "a time with nothing to compare it with"
    assert "has no tensor-parallel plan in transformers" in words
