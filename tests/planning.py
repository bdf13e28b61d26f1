"""Plans of small models for tests: for least memory, so that they are split.

Least time, the default, leaves models whole that are too small to be worth a collective.
"""

from __future__ import annotations

from functools import partial

import shardwright
from shardwright.planner.search.solution import SolverOptions

plan = partial(shardwright.plan, objective="memory")
ASKED = SolverOptions(objective="memory")
