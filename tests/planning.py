"""Plans of small models for tests: for least memory, so that they are split.

Least time, the default, leaves models whole that are too small to be worth a collective. CP-SAT
would only prove again what backtracking finds, in a quarter of the time of such a plan.
"""

from __future__ import annotations

from functools import partial

import shardwright
from shardwright.planner.search.solution import SolverOptions

proven = partial(shardwright.plan, objective="memory")
"""As the command line plans: also for benchmarks, and where a test is about solvers."""
plan = partial(proven, solver="backtracking")
ASKED = SolverOptions(objective="memory")
