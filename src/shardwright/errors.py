"""Every error that Shardwright raises on purpose.

    ShardwrightError
    ├── UsageError            an argument that cannot be meant (exit code 2)
    ├── ModelError            the model cannot be read, built or traced
    ├── PlanError             a plan file is damaged, of another version, or of another model
    ├── InfeasibleError       no plan satisfies the constraints (memory, pins)
    ├── SolverError           a solver is missing, failed, or disagrees with the checker
    ├── PluginError           what another package adds cannot be loaded or does not hold
    ├── CheckpointError       weights are missing, surplus, truncated or of another shape or dtype
    └── DistributedError      too few ranks, ranks that disagree, a rank that died

A message is one line: what is wrong, where, and what to do instead.
"""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def in_one_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message, if it has one."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"


class ShardwrightError(Exception):
    """Root of all errors that are the user's to mend; the command line prints it as one line."""

    exit_code = 1


class UsageError(ShardwrightError):
    """An argument that cannot be meant as it stands."""

    exit_code = 2


class ModelError(ShardwrightError):
    """The model cannot be read, built or traced."""


class PlanError(ShardwrightError):
    """A plan file is damaged, of another version, or made for another model or world size."""


class InfeasibleError(ShardwrightError):
    """No plan satisfies what was asked for."""


class SolverError(ShardwrightError):
    """A solver is missing, failed, or returned what the checker refuses."""


class PluginError(ShardwrightError):
    """A rule, layer style, solver, profile or format of another package does not hold."""


class CheckpointError(ShardwrightError):
    """Weights are missing, surplus, truncated, or of another shape or dtype."""


class DistributedError(ShardwrightError):
    """Too few ranks, ranks that disagree, or a rank that died."""
