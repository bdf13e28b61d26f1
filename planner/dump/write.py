"""Writes what the planner traced and decided into a folder, even if there is no plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright.errors import UsageError
from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.dump.graph_text import graph_text
from shardwright.planner.dump.text import FOLDER, axes_text, decisions_text, states_text
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.problem.objective import question
from shardwright.planner.problem.optimize import Optimum
from shardwright.planner.problem.readable_names import axis_names
from shardwright.planner.search.ladder import Tell
from shardwright.planner.search.restrictions import Formulation
from shardwright.planner.search.search_state import Attempt, SearchState, attempted
from shardwright.planner.search.solution import Solution
from shardwright.planner.search.task import Task
from shardwright.planner.solvers import cpsat
from shardwright.planner.templates import rendered


class Followed:
    """Records a search: its steps, the last problem and the last solution."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.steps: list[Attempt] = []
        self.conflicts: tuple[Conflict, ...] = ()
        self.formulation: Formulation | None = None
        self.layouts: Layouts | None = None
        self.found: tuple[Formulation, Optimum] | None = None
        self.plan: Plan | None = None

    def tell(self, what: str, now: SearchState) -> None:
        """Record a step."""
        if now.task is not self.task:  # for example, the same model with sequence parallelism
            self.layouts = None
        self.task, self.conflicts = now.task, now.conflicts
        self.steps.append(attempted(what, now))
        self.formulation = now.formulation or self.formulation
        if isinstance(now.outcome, Solution):
            self.layouts = now.outcome.layouts
            assert now.formulation is not None
            self.found = now.formulation, now.outcome.optimum
        if isinstance(now.outcome, Plan):
            self.plan = now.outcome

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each file."""
        yield "README.txt", rendered(FOLDER, "README.txt")
        task, layouts = self.task, self.layouts
        names = axis_names(task.graph, task.axes)
        yield "graph.txt", graph_text(task.graph)
        yield "decisions.txt", decisions_text(task, self.steps, self.conflicts, names)
        if self.formulation is not None:
            states = self.formulation.costs.states
            yield "axes.txt", axes_text(task.graph, task.axes, states, names)
            yield "states.txt", states_text(task.graph, states, layouts, names)
        if self.plan is not None:
            yield "plan.json", self.plan.to_json()


@contextmanager
def dumping(
    folder: str | Path | None, task: Task, model: str | Path | None = None
) -> Iterator[Tell | None]:
    """Yield a callback for the steps of a search of `task`, and write the files at the end.

    The files are written even if the search fails, with what is known by then.

    Args:
        folder: Folder for the text files, if any.
        task: The planning task.
        model: File for the CP-SAT model of the last problem that had a solution, if any.

    Raises:
        UsageError: the folder or the file cannot be written.
    """
    if folder is None and model is None:
        yield None
        return
    followed = Followed(task)
    try:
        yield followed.tell
    finally:
        if folder is not None:
            _write_all(Path(folder), followed.files())
        if model is not None and followed.found is not None:
            formulation, optimum = followed.found
            asked = question(
                formulation.network.problem, optimum.byte_price, bool(optimum.caps)
            )  # the problem as it was posed, without reductions
            _write(Path(model), cpsat.as_text(asked, 0, optimum.caps))


def _write_all(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write files into a folder, or leave all as it was.

    They are written beside it first, where there is the same room.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with TemporaryDirectory(dir=there, prefix=".dump-") as beside:
            names = []
            for name, text in files:
                (Path(beside) / name).write_text(text)
                names.append(name)
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                (Path(beside) / name).replace(folder / name)
    except OSError as error:
        for path in missing:
            with suppress(OSError):  # it has files, or was not made
                path.rmdir()
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
