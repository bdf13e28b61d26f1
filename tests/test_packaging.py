"""The package as installed: its links, its surface, what it imports, and what it must not name."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import settings

import shardwright
from shardwright.planner.contract.styles import STYLES
from shardwright.planner.exports.exports import EMITTERS

ROOT = Path(__file__).parent.parent
FOLDERS = ("planner", "rules", "runtime")
HEAVY = ("torch", "transformers", "ortools", "networkx")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> list[str]:
    """Every file in the three folders, relative to the root."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc")


# --- links and metadata


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_name_is_a_relative_link_to_the_root_folder(folder: str) -> None:
    link = ROOT / "src" / "shardwright" / folder
    assert link.readlink() == Path("../..") / folder
    assert link.resolve() == ROOT / folder


def test_version_is_that_of_pyproject() -> None:
    try:
        installed = metadata.version("shardwright")
    except metadata.PackageNotFoundError:
        pytest.skip("run from a checkout that is not installed")
    assert shardwright.__version__ == installed == PYPROJECT["project"]["version"]


def test_version_has_release_notes() -> None:
    notes = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {PYPROJECT['project']['version']}\n" in notes


@pytest.mark.parametrize(
    "target",
    [
        *PYPROJECT["project"]["scripts"].values(),
        *EMITTERS.values(),
        *(style.layer for style in STYLES.values()),
        *(style.module for style in STYLES.values()),
    ],
)
def test_entry_point_leads_to_a_callable(target: str) -> None:
    assert callable(metadata.EntryPoint("", target, "").load())


# --- the public surface


@pytest.mark.parametrize("name", shardwright.__all__)
def test_public_name_is_importable(name: str) -> None:
    assert getattr(shardwright, name) is not None


def test_dir_lists_the_public_names() -> None:
    assert dir(shardwright) == sorted(shardwright.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shardwright' has no attribute 'nothing'"):
        getattr(shardwright, "nothing")  # noqa: B009 pyright knows that it is missing


# --- light imports


def heavy_imports(code: str) -> set[str]:
    """Which of the heavy packages are loaded when `code` has run in a fresh interpreter."""
    script = f"""
try:
    {code}
finally:
    import sys
    print("\\nloaded", *({set(HEAVY)} & sys.modules.keys()))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def run_command_line(*arguments: str) -> str:
    return (
        f"import runpy, sys; sys.argv[1:] = {list(arguments)}; "
        "runpy.run_module('shardwright', run_name='__main__', alter_sys=True)"
    )


@pytest.mark.parametrize(
    "code", ["import shardwright", run_command_line("--help")], ids=["import", "--help"]
)
def test_start_is_light(code: str) -> None:
    assert heavy_imports(code) == set()


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_import_would_be_seen(name: str) -> None:
    """The test above can fail."""
    assert name in heavy_imports(f"import {name}")


# --- no special cases


# Model types, or what is left of them without a version, that are also words one may need here.
PLAIN_WORDS = set(
    "align aria beam bit canary clap clip codegen dots encoder-decoder funnel git gte led opt "
    "radio rag sam step tips".split()
)


@cache
def architecture_names() -> re.Pattern[str]:
    """What matches a model type (`gpt_neox`, GPT-NeoX), its family (`qwen`), or a class name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    types = {name.lower() for name in CONFIG_MAPPING_NAMES}
    families = {re.sub(r"[-_]?v?\d[\d._pv]*$", "", name) for name in types}
    types |= {name for name in families if len(name) > 3}
    prefixes = {name.removesuffix("Config") for name in CONFIG_MAPPING_NAMES.values()}
    plain = {name for name in prefixes if name.lower() in PLAIN_WORDS and not name.isupper()}
    return re.compile(
        rf"(?<![A-Za-z0-9])(?i:{_any_of(types - PLAIN_WORDS)})(?![A-Za-z0-9])"
        rf"|\b(?:{_any_of(prefixes - plain)})(?=[A-Z][a-z]|MLP)"
    )


def _any_of(names: set[str]) -> str:
    # The longest first, for the report; "-" and "_" are written either way or left out.
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return "|".join(re.sub(r"[-_]|\\-", "[-_]?", re.escape(name)) for name in ordered)


@cache
def named(words: str) -> list[str]:
    """The architectures that are named in a few words, which many lines have."""
    return [match[0] for match in architecture_names().finditer(words)]


def named_in(line: str) -> list[str]:
    """The architectures that are named in a line. No name has other characters."""
    return [name for words in re.findall(r"[\w.-]+", line) for name in named(words)]


@pytest.mark.parametrize("file", sources())
def test_no_architecture_is_named(file: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    found = [f"{file}:{n}: {name}" for n, line in enumerate(lines, 1) for name in named_in(line)]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'if config.model_type == "llama":',
        "def llama_attention(): ...",
        "# GPT-NeoX interleaves q, k and v",
        "isinstance(module, Qwen3MoeSparseMoeBlock)",
        "class_name.startswith('DeepseekV3')",
        "QWEN = 1",
        "OPTDecoderLayer",
    ],
)
def test_named_architecture_would_be_found(line: str) -> None:
    assert named_in(line)


@pytest.mark.parametrize(
    "line", ["torch.clip(x)", "one bit at a step", "BitMask", "optimal", "OPTIONS", "A VARIANT"]
)
def test_plain_words_are_left_alone(line: str) -> None:
    assert not named_in(line)


# --- size


def test_no_file_is_over_500_lines() -> None:
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in sources()}
    assert lengths, "no source files found"
    assert not {file: length for file, length in lengths.items() if length > 500}


def modules() -> dict[str, Path]:
    """Name below `shardwright` -> file, of every module in the three folders."""
    files = [ROOT / file for file in sources() if file.endswith(".py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in files}


@cache
def imports() -> nx.DiGraph:
    """Which module imports which, as the code says it: inside of functions, too."""
    known, graph = modules(), nx.DiGraph()
    for module, file in known.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                graph.add_edges_from((module, name.name) for name in node.names)
            if isinstance(node, ast.ImportFrom):
                parts = module.split(".")[: -node.level] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                base = base.removeprefix("shardwright.")
                names = (f"{base}.{name.name}" for name in node.names)
                graph.add_edges_from((module, n if n in known else base) for n in names)
    return graph


def folder(module: str) -> str:
    """The room of a module: a folder of the planner or of the runtime, or the rules."""
    parts = module.split(".")
    return parts[0] if parts[0] == "rules" else ".".join(parts[:2])


def leads(source: str, target: str) -> dict[str, set[str]]:
    """Modules below `source` -> what they import below `target`."""
    found: dict[str, set[str]] = {}
    for a, b in imports().edges:
        if f"{a}.".startswith(f"{source}.") and f"{b}.".startswith(f"{target}."):
            found.setdefault(a, set()).add(b)
    return found


FROM_RUNTIME = {
    "planner.prepare": {"runtime.model"},
    "planner.cli": {"runtime.serving"},
    "planner.devices": {"runtime.communication"},
    "planner.dry_run": {
        "runtime.code", "runtime.communication", "runtime.modules", "runtime.slots",
    },
    "planner.exports": {"runtime.model"},
    "planner.on_ranks": {
        "runtime.api", "runtime.boundary", "runtime.in_transformers",
        "runtime.model", "runtime.ranks", "runtime.state",
    },
    "planner.prove": {"runtime.model"},
    "planner.report": {"runtime.model"},
    "planner.trace": {
        "runtime.boundary", "runtime.calls", "runtime.code", "runtime.model", "runtime.modules",
        "runtime.quantized", "runtime.scopes", "runtime.slots",
    },
    "planner.search": {"runtime.modules"},
    "planner.tune": {"runtime.api", "runtime.model", "runtime.slots"},
}  # fmt: skip
"""All that the planner takes of the runtime: to build a model, to try a plan, to measure; and what
sets attributes for a while."""


def test_planner_imports_of_the_runtime_what_is_listed() -> None:
    found: dict[str, set[str]] = {}
    for module, taken in leads("planner", "runtime").items():
        found.setdefault(folder(module), set()).update(map(folder, taken))
    assert found == FROM_RUNTIME


def test_runtime_imports_of_the_planner_the_contract_alone() -> None:
    found = set().union(*leads("runtime", "planner").values())
    assert found and {folder(module) for module in found} == {"planner.contract"}
    assert not leads("runtime", "ortools")


def test_contract_imports_nothing_but_the_errors() -> None:
    inside = leads("planner.contract", "planner")
    assert inside and {folder(m) for found in inside.values() for m in found} == {
        "planner.contract"
    }
    for package in ("torch", "transformers", "runtime", "rules"):
        assert not leads("planner.contract", package)


def test_rules_import_neither_of_the_others() -> None:
    for package in ("planner", "runtime", "ortools"):
        assert not leads("rules", package)


def test_imports_between_folders_run_one_way() -> None:
    """Files beside the folders of the planner and the runtime count as folders of one file."""
    known = modules()
    between = nx.DiGraph(
        (folder(a), folder(b)) for a, b in imports().edges if b in known and folder(a) != folder(b)
    )
    order = nx.condensation(between)
    for n in nx.topological_sort(order):  # pytest -s shows it
        print(*sorted(order.nodes[n]["members"]))
    assert between.has_edge("planner.api", "planner.trace"), "no imports found"
    assert not [set(c) for c in nx.strongly_connected_components(between) if len(c) > 1]


def test_examples_of_hypothesis_are_not_timed() -> None:
    assert settings.default is not None and settings.default.deadline is None  # set in conftest.py
