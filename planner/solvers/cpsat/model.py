"""Builds the CP-SAT model of a problem: an integer for each part of a variable, and tables.

The model has a literal for each value of a variable, which fixes all parts of the variable, and a
literal for each row of a table. The rows that hold a value sum to its literal. With implications
instead of sums the bound of the linear relaxation is lost, and optimality is not proven in minutes;
with sums it is proven at the root or near it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.errors import SolverError
from shardwright.planner.solvers.problem import Factor, Problem


class PartModel:
    """The CP-SAT model of a problem whose tables all have rows.

    Attributes:
        model: The CP-SAT model.
        parts: For each variable, the integers of its parts. They are the solution.
        values: For each variable and value, a literal.
        rows: For each factor, a literal per row. With one variable these are the values' literals.

    Raises:
        SolverError: two values of a variable have the same parts.
    """

    def __init__(self, problem: Problem) -> None:
        from ortools.sat.python import cp_model  # imported in the solver's thread, during a dry run

        self.cp: Any = cp_model
        self.problem, self.model = problem, self.cp.CpModel()
        self.parts: list[list[Any]] = []
        self.values: list[dict[int, Any]] = []
        self._meaning: list[dict[tuple[int, ...], int]] = []
        for v in range(len(problem.names)):
            self._add_variable(v)
        self.rows = [self._rows(factor) for factor in problem.factors]

    def _add_variable(self, v: int) -> None:
        problem, model = self.problem, self.model
        name, domain, parts = problem.names[v], problem.domains[v], problem.parts[v]
        columns = [[part.values[x] for x in domain] for part in parts]
        meaning = {tuple([column[i] for column in columns]): x for i, x in enumerate(domain)}
        if len(meaning) < len(domain):
            raise SolverError(f"two values of '{name}' have the same parts: please report it")
        literals = {x: model.new_bool_var(f"{name} is {key}") for key, x in meaning.items()}
        model.add_exactly_one(literals.values())
        integers = []
        for part, column in zip(parts, columns, strict=True):
            found = self.cp.Domain.from_values(sorted(set(column)))
            integers.append(model.new_int_var_from_domain(found, part.name))
            total = self.cp.LinearExpr.weighted_sum(list(literals.values()), column)
            model.add(total == integers[-1])
        self.values.append(literals)
        self.parts.append(integers)
        self._meaning.append(meaning)

    def _rows(self, factor: Factor) -> list[Any]:
        model = self.model
        if not factor.scope:
            return [model.new_constant(1)]
        if len(factor.scope) == 1:
            group = self.values[factor.scope[0]]
            rows = [group[row.values[0]] for row in factor.rows]
            if len(rows) < len(group):
                model.add_exactly_one(rows)
            return rows
        rows = [model.new_bool_var(f"{factor.name} row {i}") for i in range(len(factor.rows))]
        model.add_exactly_one(rows).with_name(factor.name)
        for k, v in enumerate(factor.scope):
            held: dict[int, list[Any]] = {x: [] for x in self.values[v]}
            for literal, row in zip(rows, factor.rows, strict=True):
                held[row.values[k]].append(literal)
            for x, literal in self.values[v].items():
                model.add(self.cp.LinearExpr.sum(held[x]) == literal)
        return rows

    def hint(self, assignment: Sequence[int]) -> None:
        """Set the hint of the model: the value of each integer and literal for an assignment."""
        told: list[tuple[Any, int]] = []
        parts = zip(self.problem.parts, self.parts, self.values, assignment, strict=True)
        for meant, integers, literals, value in parts:
            told += [(i, part.values[value]) for part, i in zip(meant, integers, strict=True)]
            told += [(literal, x == value) for x, literal in literals.items()]
        for factor, rows in zip(self.problem.factors, self.rows, strict=True):
            values = tuple(assignment[v] for v in factor.scope)
            if len(factor.scope) > 1:  # otherwise the literals are those of the values
                pairs = zip(rows, factor.rows, strict=True)
                told += [(literal, row.values == values) for literal, row in pairs]
        self.model.clear_hints()
        hint = self.model.proto.solution_hint  # `add_hint` takes ten times as long
        hint.vars.extend([of.index for of, _ in told])
        hint.values.extend([int(is_now) for _, is_now in told])

    def read(self, value: Callable[[Any], int]) -> tuple[int, ...]:
        """Return the assignment, given a function for the value of each integer."""
        return tuple(
            meaning[tuple([value(i) for i in integers])]
            for meaning, integers in zip(self._meaning, self.parts, strict=True)
        )
