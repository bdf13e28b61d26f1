"""The documents hold: blocks run, links lead somewhere, no key of a plan is left out."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from benchmarks.pages import SKIPPED, blocks, commands, unlike
from benchmarks.planning_models import MODELS
from shardwright.planner.contract.plan_file import VERSION, Plan
from shardwright.planner.contract.styles import UNCHANGED
from shardwright.planner.contract.transitions import TRANSITIONS, Kind
from shardwright.planner.search.ladder import LADDER
from shardwright.runtime.modules import layers
from tests.page_blocks import output
from tests.test_packaging import folder, imports, modules

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LINKED = [*PAGES, ROOT / "CHANGELOG.md"]
FORMAT = DOCS / "plan-format.md"
DESIGN = DOCS / "design.md"
FIRST = DOCS / "first-split.md"
FOLDERS = "planner rules runtime src tests benchmarks docs examples".split()

SHOWN = {"text", "toml", "json"}
"""Kinds of blocks of which only the paths are looked at."""
NOT_RUN = 8
"""So many blocks may say that they are not run."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- blocks


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_is_run_or_says_that_it_is_not(page: Path) -> None:
    shown = SHOWN | ({"sh"} if page.name == "CONTRIBUTING.md" else set())
    found = {block.kind for block in blocks(page) if not block.skipped}
    assert found <= {"python", "bash", "console"} | shown


def test_few_blocks_are_not_run() -> None:
    skipped = [block for page in PAGES for block in blocks(page) if block.skipped]
    assert len(skipped) <= NOT_RUN and all(len(b.title) > len(SKIPPED) for b in skipped)


def follow(page: Path, folder: Path) -> None:
    """Run all blocks of a page, in order and in a folder: python blocks share their names."""
    names: dict[str, Any] = {"__name__": "page"}
    with contextlib.chdir(folder):
        for block in (b for b in blocks(page) if not b.skipped):
            if block.kind == "python":
                file = folder / (block.title or f"line_{block.line}.py")
                # Planning reads the code of modules; a failure should name the line of the page.
                above = "" if block.title else "\n" * (block.line - 1)
                file.write_text(above + block.text)
                if not block.title:
                    exec(compile(file.read_text(), str(file), "exec"), names)
            for command, wanted in commands(block):
                trouble = unlike(wanted, output(command, folder))
                assert not trouble, f"{page.name}:{block.line}: {command}\n{trouble}"


@pytest.fixture(scope="module")
def first_split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that who followed the first page is in."""
    folder = tmp_path_factory.mktemp("first")
    follow(FIRST, folder)
    return folder


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.kind not in SHOWN for b in blocks(p))], ids=page_id
)
def test_blocks_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    goes_on = "folder of [the first split]" in " ".join(page.read_text().split())
    if goes_on or page == FIRST:
        shutil.copytree(request.getfixturevalue("first_split"), tmp_path, dirs_exist_ok=True)
    if page != FIRST:
        follow(page, tmp_path)


# --- links and paths


def slug(heading: str) -> str:
    """The anchor that a heading gets on a page."""
    words = re.sub(r"[^\w\- ]", "", heading.lower())
    return words.strip().replace(" ", "-")


@pytest.mark.parametrize("page", LINKED, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"(?:\]\(|(?:href|src|srcset)=\")([^)\"\s]+)", text):
        file, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://", "gallery/")):
            continue
        path = page.parent / file if file else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


def test_the_gallery_has_every_published_model() -> None:
    """`make docs` makes these pages."""
    linked = re.findall(r'href="gallery/([\w-]+)\.html"', (DOCS / "gallery.md").read_text())
    assert linked == list(MODELS)


@pytest.mark.parametrize("page", LINKED, ids=page_id)
def test_paths_exist(page: Path) -> None:
    """What is set like code and looks like a path of this repository is one."""
    if page.name == "CHANGELOG.md":
        return  # it tells of what was
    code = "\n".join(b.text for b in blocks(page) if b.kind != "console")
    code += "\n".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    found = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]*)", code)
    missing = [p for p in found if not any(ROOT.glob(p.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (?:\w+=\S+ )*([\w-]+)|^make ([\w-]+)", page.read_text()):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target


def test_folders_stand_above_what_they_import() -> None:
    """The list in the design has every folder, each above all that it imports."""
    found = re.search(r"^## Folders\n.*?```text\n(.*?)```", DESIGN.read_text(), re.M | re.S)
    assert found
    listed = [
        line.split()[0].removesuffix(".py").replace("/", ".") for line in found[1].splitlines()
    ]
    inside = {
        f"{path.parent.parent.name}.{path.parent.name}"
        for half in ("planner", "runtime")
        for path in (ROOT / half).glob("*/__init__.py")
    }
    assert inside | {"rules"} <= set(listed)
    known = modules()
    for a, b in imports().edges:
        above, below = folder(a), folder(b)
        if b in known and above != below and {above, below} <= set(listed):
            assert listed.index(above) < listed.index(below), f"{a} imports {b}"


def test_the_ladder_is_that_of_the_search() -> None:
    text = DESIGN.read_text().partition("`LADDER`")[2]
    shown = next(block for block in re.findall(r"^```text\n(.*?)```", text, re.M | re.S))
    assert shown.splitlines() == [step.what for step in LADDER]


# --- messages


def texts(file: Path) -> list[str]:
    """All string literals in a source file; NUL stands for each formatted value."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return str(node.value) if isinstance(node, ast.Constant) else "\0"

    nodes = ast.walk(ast.parse(file.read_text()))
    return [text(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]


def in_this_order(parts: list[str], text: str) -> bool:
    """Whether a text has all parts, each behind the one before."""
    at = 0
    for part in parts:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def test_every_message_on_the_page_of_errors_is_raised() -> None:
    """`<...>` on the page stands for any text."""
    page = DOCS / "errors.md"
    quoted = [block.text.strip() for block in blocks(page) if block.kind == "text"]
    known = [text for file in modules().values() for text in texts(file)]
    for message in quoted:
        parts = re.split(r"<[^>]*>", message)
        assert any(in_this_order(parts, text) for text in known), message
    assert len(quoted) > 20


# --- the plan's format


def models() -> dict[str, type[BaseModel]]:
    """The plan's pydantic models by name."""
    found: dict[str, type[BaseModel]] = {}
    queue: list[Any] = [Plan]
    while queue:
        kind = queue.pop()
        if get_origin(kind) is not None:
            queue += get_args(kind)
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ not in found:
            found[kind.__name__] = kind
            queue += [field.annotation for field in kind.model_fields.values()]
    return found


def described(model: str) -> dict[str, str]:
    """Keys of the table in the section that the page has for a model -> their defaults there."""
    found = re.search(rf"^### `{model}`\n(.*?)(?=^##|\Z)", FORMAT.read_text(), re.M | re.S)
    assert found, f"docs/plan-format.md has no section `{model}`"
    return dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+?) \|", found[1], re.MULTILINE))


def default(field: Any) -> str:
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.get_default(call_default_factory=True))}`"


@pytest.mark.parametrize("model", sorted(models()))
def test_every_key_is_described(model: str) -> None:
    fields = models()[model].model_fields
    assert described(model) == {name: default(field) for name, field in fields.items()}


def test_every_transition_is_described() -> None:
    cell = r"(?:`([\w, -]+)` )?"
    row = rf"^\| `([\w, -]+)` \| `([\w, -]+)` \| {cell}\| {cell}\| (yes|no) \|$"
    found = {
        (Kind(before), Kind(after)): (forward or "identity", backward or "identity", planned)
        for before, after, forward, backward, planned in re.findall(row, FORMAT.read_text(), re.M)
    }
    assert found == {
        pair: (t.forward.name, t.backward.name, "yes" if t.planned else "no")
        for pair, t in TRANSITIONS.items()
    }


def test_every_layer_is_described() -> None:
    table = FORMAT.read_text().partition("\n## Layers\n")[2].partition("\n## ")[0]
    found = {c for c in vars(layers).values() if isinstance(c, type)}
    known = sorted([UNCHANGED, *(c.__name__ for c in found if issubclass(c, layers.LocalModule))])
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == known


def test_no_other_key_is_described() -> None:
    sections = re.findall(r"^### `([A-Z]\w+)`$", FORMAT.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(models())
    assert f"version {VERSION}" in FORMAT.read_text()
