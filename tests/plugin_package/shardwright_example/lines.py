"""An output format: one line a split parameter."""

from shardwright import Plan


def emit(plan: Plan, *, separator: str = " = ") -> str:
    """The plan as `name = placement` lines."""
    return "".join(
        f"{module}.{name}".lstrip(".") + f"{separator}{entry.placement}\n"
        for module, spec in plan.modules.items()
        for name, entry in spec.parameters.items()
    )
