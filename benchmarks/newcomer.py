"""Installs the package as it would be published, and follows the first pages of the docs.

    python -m benchmarks.newcomer dist             wheel and sdist, each in an empty environment
    python -m benchmarks.newcomer dist/*.whl       one

Used by `make release-check`. Every file of the package must be there, and nothing of this
repository is used except the pages and `constraints.txt`. Each command runs in a shell, in an empty
folder, and its output is compared with the page. The package index must be reachable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.pages import blocks, commands, unlike

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "first-split.md")
FOLDERS = ("planner", "rules", "runtime", "src/shardwright")


class Failed(Exception):
    """A step failed; the text says which."""


def environment(folder: Path, package: Path) -> dict[str, str]:
    """Make an environment with the package; return its environment variables."""
    # With a PYTHONPATH that leads here, pip would consider the package installed.
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**keep, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = f"python -m pip install -q -c {ROOT / 'constraints.txt'}"
    run(f"{install} --upgrade pip", variables, folder)
    run(f"{install} {package.resolve()}", variables, folder)
    return variables


def missing(variables: dict[str, str], folder: Path) -> list[str]:
    """List files of the package that git has and the installed package lacks."""
    where = "import pathlib, shardwright; print(pathlib.Path(shardwright.__file__).parent)"
    installed = Path(run(f'python -c "{where}"', variables, folder).strip())
    assert ROOT not in installed.parents, "it is this checkout that is installed"
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    names = [name.removeprefix("src/shardwright/") for name in listed]
    return [name for name in names if not (installed / name).exists()]


def run(command: str, variables: dict[str, str], folder: Path) -> str:
    """Run a command in a shell, and return its stdout, or else its stderr.

    Raises:
        Failed: it ended with an error.
    """
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True
    )
    if done.returncode:
        raise Failed(f"{command}\n{done.stdout}{done.stderr}")
    return done.stdout or done.stderr


def follow(page: Path, variables: dict[str, str], folder: Path) -> Iterator[tuple[str, float]]:
    """Follow a page; yield each command with the seconds that it took.

    Raises:
        Failed: a command failed, or its output differs from the page.
    """
    for block in (b for b in blocks(page) if not b.skipped):
        if block.kind == "python":
            assert block.title, f"{page.name}:{block.line}: which file is that?"
            (folder / block.title).write_text(block.text)
        for command, wanted in commands(block):
            begun = time.monotonic()
            if trouble := unlike(wanted, run(command, variables, folder)):
                raise Failed(f"{page.name}:{block.line}: {command}\n{trouble}")
            yield command, time.monotonic() - begun


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(paths: tuple[Path, ...]) -> None:
    """Try packages: files, or a folder with a wheel and an sdist in it."""
    packages = [p for path in paths for p in (sorted(path.iterdir()) if path.is_dir() else [path])]
    for package in packages:
        with tempfile.TemporaryDirectory() as temporary:
            folder, begun = Path(temporary), time.monotonic()
            try:
                variables = environment(folder / "venv", package)
                click.echo(f"{package.name}: installed, {time.monotonic() - begun:.0f} s")
                if lost := missing(variables, folder):
                    raise Failed(f"not there: {', '.join(lost)}")
                for page in PAGES:
                    place = folder / page.stem
                    place.mkdir()
                    for command, seconds in follow(page, variables, place):
                        click.echo(f"  {page.name}  {seconds:5.1f} s  {command}")
            except Failed as failed:
                sys.exit(f"{package.name}: {failed}")
    click.echo(f"{len(packages)} packages, and every command did what its page says")


if __name__ == "__main__":
    main()
