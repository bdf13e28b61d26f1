"""The problem that the solvers get, as text: factors, their rows, and which row the plan took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.planner.solvers.problem import Factor, Problem


def problem_text(problem: Problem, values: Sequence[int] | None) -> Iterator[str]:
    """Variables and factors; with `values`, an assignment, the row that it takes is marked `*`.

    What only breaks ties between states of a tensor is shown in a line.
    """
    yield f"# {len(problem.names)} variables: number, tensor, how many states it may be in"
    for number, (name, domain) in enumerate(zip(problem.names, problem.domains, strict=True)):
        yield f"v{number} {name}: {len(domain)}"
    yield ""
    yield f"# {len(problem.factors)} factors: name, tensors, then a row each: states -> costs"
    yield f"# costs: {', '.join(problem.components)}"
    for factor in problem.factors:
        yield from _factor(problem, factor, values)


def _factor(problem: Problem, factor: Factor, values: Sequence[int] | None) -> Iterator[str]:
    if all(not any(row.costs[:-1]) for row in factor.rows) and len(factor.scope) == 1:
        numbers = " ".join(str(row.costs[-1]) for row in factor.rows)
        if any(row.costs[-1] for row in factor.rows):
            yield f"{factor.name}   {problem.components[-1]} of its states: {numbers}"
            return
    scope = ", ".join(problem.names[v] for v in factor.scope)
    yield f"{factor.name}   [{scope}]   {len(factor.rows)} rows"
    taken = None if values is None else tuple(values[v] for v in factor.scope)
    for row in factor.rows:
        mark = "*" if row.values == taken else " "
        costs = ", ".join(
            f"{component} {cost}"
            for component, cost in zip(problem.components, row.costs, strict=True)
            if cost
        )
        yield f"  {mark} {' '.join(map(str, row.values))}{f' -> {costs}' if costs else ''}"
