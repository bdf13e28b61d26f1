"""The meshes that were compared for a plan: time, tokens a second, memory, and why others lose."""

from __future__ import annotations

from typing import get_args

from rich.table import Table

from shardwright.planner.contract.mesh import mesh_text
from shardwright.planner.contract.plan_figures import MeshChoice, Phase, Workload
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.report import tables
from shardwright.planner.units import human_bytes, human_time

SECOND = 10**9


def mesh_table(plan: Plan) -> Table:
    """Return the rows of `mesh_rows` as a table."""
    heading, *rows = mesh_rows(plan)
    columns = [tables.number(name.upper().replace(" ", "_")) for name in heading[1:-1]]
    ends = tables.name(heading[0].upper()), tables.words(heading[-1].upper())
    table = tables.table(ends[0], *columns, ends[1])
    for row in rows:
        table.add_row(*row)
    return table


def mesh_rows(plan: Plan) -> list[list[str]]:
    """Return headings, and a row for each mesh, best first.

    Tokens a second are those of all GPUs together; for decoding also those of one user.
    """
    phases: list[Phase] = [phase for phase in get_args(Phase) if phase in plan.workload.phases]
    user = ["tokens/s/user"] if "decode" in phases else []
    speeds = [f"{phase} tokens/s" for phase in phases]
    rows = [["mesh", "time", *speeds, *user, "memory", "verdict"]]
    for choice in plan.meshes:
        step = choice.phase_ns.get("decode")
        rows.append(
            [
                mesh_option(choice),
                "" if choice.time_ns is None else human_time(choice.time_ns),
                *(_tokens(plan.workload, choice, phase) for phase in phases),
                *(f"{SECOND / step:,.0f}" if step else "" for _ in user),
                "" if choice.memory is None else human_bytes(choice.memory),
                _verdict(choice, plan),
            ]
        )
    return rows


def mesh_option(choice: MeshChoice) -> str:
    """Return a mesh as an option takes it: `dp=2,tp=8`, and what copies do if not DDP."""
    dims = mesh_text(choice.mesh)
    return dims if choice.dp == "ddp" else f"{dims} ({choice.dp})"


def launch_line(plan: Plan) -> str:
    """Return the start of the command that starts a plan's ranks on each host."""
    per_host = min(plan.workload.gpus_per_host or plan.world_size, plan.world_size)
    hosts = -(-plan.world_size // per_host)
    here = f"torchrun --nproc-per-node {per_host} "
    if hosts > 1:
        here += f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint HOST0 "
    return f"{here}…"


def _tokens(load: Workload, choice: MeshChoice, phase: Phase) -> str:
    """Return the tokens a second of all GPUs in a phase; "" if the mesh has no plan."""
    time = choice.phase_ns.get(phase)
    tokens = load.batch * (1 if phase == "decode" else load.seq)
    return f"{tokens * SECOND / time:,.0f}" if time else ""


def _verdict(choice: MeshChoice, plan: Plan) -> str:
    """Return why a mesh is the plan's, or how much more it takes of what was minimized."""
    best = plan.meshes[0]
    if choice is best:
        return "the plan" if choice.fits else f"the plan, for least memory: {choice.why}"
    if not choice.fits or not best.fits:
        return choice.why
    if plan.objective.name == "time":
        times = f"{(choice.time_ns or 0) / max(best.time_ns or 0, 1):.2f}x the time"
        return f"{times}, {choice.why}" if choice.why else times
    return f"{(choice.memory or 0) / max(best.memory or 0, 1):.2f} times the bytes"
