"""Says which model of a pipeline was planned, if nobody asked for one."""

from __future__ import annotations

from pathlib import Path

from shardwright.runtime.model.pipelines import component, components


def chosen_component(model: str) -> str | None:
    """Return a sentence on the model that stands for a pipeline; None if `model` is no pipeline."""
    found = Path(component(model))
    if found == Path(model):
        return None
    others = ", ".join(name for name in components(Path(model)) if name != found.name)
    more = f" (--subfolder plans another: {others})" if others else ""
    return f"{model} is a pipeline, and the plan is for its {found.name}{more}"
