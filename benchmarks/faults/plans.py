"""Mutated plans, each with a fresh digest: `check` refuses one, or it computes the same numbers.

A mutant is also applied on meta before it is checked, as `load` would apply it: that may refuse it,
but in one line. What `check` accepts is run on threads in float64, values and gradients, once for
all mutants that do the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import torch

from benchmarks.faults.models import KINDS, Kind, plans
from benchmarks.faults.outcomes import Tally, Wrong
from benchmarks.faults.plan_mutations import mutated
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks.numeric import differences, random_inputs, random_model, run
from shardwright.planner.prove.prover import Prover
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.build import model_class
from shardwright.runtime.modules.apply_modules import apply_modules
from shardwright.runtime.state.gather import full_tensors
from tests.ranks import run_ranks

SECONDS = 60.0
"""Of processor time for one mutant; most take a twentieth of a second."""
RUNTIME = {"model", "mesh", "batch_dims", "sub_axes", "modules", "calls"}


class Subject:
    """One model, what proves its plans, and what it computes unsplit."""

    def __init__(self, kind: Kind) -> None:
        self.tolerance, self.config = kind.tolerance, kind.config()
        self.config.dtype = torch.float64
        self.plans = plans(kind)
        self.prover = Prover(self.config, explain=False)
        self.model = random_model(self.config, torch.float64)
        self.inputs = random_inputs(self.model)
        self.want = run(copy.deepcopy(self.model), **self.inputs)
        with torch.device("meta"):
            cls: Any = model_class(self.config)
            self.on_meta = cls._from_config(copy.deepcopy(self.config))
        self.ran: dict[str, str | None] = {}

    def attempt(self, data: dict[str, Any]) -> None:
        """Read, apply and check a mutant.

        Raises:
            ShardwrightError: it was refused.
            Wrong: it was not, and computes something else.
        """
        plan = Plan.from_json(json.dumps(data)).sealed()
        with suppress(ShardwrightError):
            mesh = Mesh.shape_only(plan.coords(plan.world_size - 1))
            apply_modules(copy.deepcopy(self.on_meta), plan, mesh)
        self.prover.prove(plan)
        what = plan.model_dump_json(include=RUNTIME)
        if what not in self.ran:
            self.ran[what] = self.difference(plan)
        if (wrong := self.ran[what]) is not None:
            raise Wrong(wrong)

    def difference(self, plan: Plan) -> str | None:
        """Run the ranks; what differs from the unsplit model, None if nothing does."""

        def rank(mesh: Mesh) -> tuple[float, float, str]:
            model = apply(copy.deepcopy(self.model), plan, mesh)
            logits, local = run(model, **self.inputs)
            gradients = full_tensors(model, local)
            off, worst = differences(gradients, self.want[1])
            return (logits - self.want[0]).abs().max().item(), off, worst

        for logits, off, worst in run_ranks(plan.world_size, rank, dict(plan.mesh)):
            if not (logits <= self.tolerance and off <= self.tolerance):  # NaN is not, either
                return f"logits differ by {logits:.1e}, the gradient of {worst} by {off:.1e}"
        return None


def campaign(count: int, seed: int, kinds: tuple[str, ...] = ()) -> Iterator[tuple[str, Tally]]:
    """The tally of each kind of model, of so many mutants together."""
    chosen = kinds or tuple(KINDS)
    subjects = {name: Subject(KINDS[name]) for name in chosen}
    others = [json.loads(p.to_json()) for s in subjects.values() for p in s.plans]
    for n, (name, subject) in enumerate(subjects.items()):
        share = count // len(chosen) + (n < count % len(chosen))
        yield name, mutants(subject, Random(f"{seed} {name}"), share, others)


def mutants(subject: Subject, random: Random, count: int, others: list[dict[str, Any]]) -> Tally:
    """What came of so many mutants of the plans of one model, and of those as they are."""
    tally, own = Tally(), [json.loads(p.to_json()) for p in subject.plans]
    for plan in own:
        tally.take("as it is", SECONDS, lambda p=plan: subject.attempt(p))
    for _ in range(count):
        what, data = mutated(random, random.choice(own), [*own, *own, *others])
        tally.take(what, SECONDS, lambda d=data: subject.attempt(d))
    return tally
