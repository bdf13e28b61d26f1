"""A problem as a CP-SAT model: an integer for each part of a variable, tables over these.

Behind the integers stand literals: one for each value of a variable, which says what all of its
parts are, and one for each row of a table. Rows that hold a value sum to its literal. With
implications in place of sums the bound of the linear relaxation is lost, and optimality is not
proven in minutes; with sums it is proven at the root, or near to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.errors import SolverError
from shardwright.planner.solvers.problem import Factor, Problem


class PartModel:
    """The model of a problem whose tables all have rows; `parts` are what its solution is.

    Attributes:
        model: CP-SAT's.
        parts: Per variable the integers of its parts.
        values: Per variable and value a literal.
        rows: Per factor a literal for each row: those of the values, where it has one variable.

    Raises:
        SolverError: two values of a variable have the same parts.
    """

    def __init__(self, problem: Problem) -> None:
        from ortools.sat.python import cp_model  # in the thread that proves, beside a dry run

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
            model.add(self._sum(list(literals.values()), column) == integers[-1])
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

    def _sum(self, terms: Sequence[Any], weights: Sequence[int]) -> Any:
        return self.cp.LinearExpr.weighted_sum(terms, weights)

    def hint(self, assignment: Sequence[int]) -> None:
        """Tell where to begin: what each integer and literal is under an assignment."""
        told: list[tuple[Any, int]] = []
        parts = zip(self.problem.parts, self.parts, self.values, assignment, strict=True)
        for meant, integers, literals, value in parts:
            told += [(i, part.values[value]) for part, i in zip(meant, integers, strict=True)]
            told += [(literal, x == value) for x, literal in literals.items()]
        for factor, rows in zip(self.problem.factors, self.rows, strict=True):
            values = tuple(assignment[v] for v in factor.scope)
            if len(factor.scope) > 1:  # else they are those of the values
                pairs = zip(rows, factor.rows, strict=True)
                told += [(literal, row.values == values) for literal, row in pairs]
        self.model.clear_hints()
        hint = self.model.proto.solution_hint  # `add_hint` takes ten times as long
        hint.vars.extend([of.index for of, _ in told])
        hint.values.extend([int(is_now) for _, is_now in told])

    def read(self, value: Callable[[Any], int]) -> tuple[int, ...]:
        """The assignment that the integers of the parts say, where `value` tells each of them."""
        return tuple(
            meaning[tuple([value(i) for i in integers])]
            for meaning, integers in zip(self._meaning, self.parts, strict=True)
        )
