"""Reads tensor-parallel plans of transformers: module or parameter names with style names.

The styles are defined in transformers/distributed/tensor_parallel.py (5.23): how the parameters of
a module are sharded, and how its inputs and outputs are redistributed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from shardwright.errors import UsageError
from shardwright.planner.contract.names import fold
from shardwright.planner.problem.tp_moves import (
    ADDED_ONCE,
    COPIED,
    GATHERED,
    SAME,
    SLICED,
    SUMMED,
    SUMMED_BACK,
    TERM,
)

OWN = "auto"
"""Means the model's own plan, as in transformers."""


class Style(NamedTuple):
    """What a style of transformers does. What happens to tensors is named as in `MOVES`.

    Args:
        dim: The dim to shard a parameter along, from its end if negative; None for replicated.
        vectors: Whether parameters of one dim are sharded too. If not, no bias is.
        parts: Number of equal parts of the dim; each part is sharded by itself.
        enters: What happens to inputs of the module.
        leaves: What happens to its output.
        uses: What happens to its replicated parameters when the module reads them.
    """

    dim: int | None = None
    vectors: bool = True
    parts: int = 1
    enters: str = SAME
    leaves: str = SAME
    uses: str = SAME

    @property
    def cuts_rows(self) -> bool:
        """Whether the output is gathered at once, so that any sharding of the rows is right."""
        return self.leaves == GATHERED


COLUMN = Style(-2, enters=COPIED)
ROW = Style(-1, vectors=False, leaves=SUMMED, uses=ADDED_ONCE)

STYLES: dict[str, Style] = {
    "colwise": COLUMN,
    "colwise_gather_output": COLUMN._replace(leaves=GATHERED),
    "colwise_rep": COLUMN._replace(leaves=GATHERED),
    "rowwise": ROW,
    "rowwise_split_input": ROW._replace(enters=SLICED),
    "rowwise_rep": ROW._replace(enters=SLICED),
    "packed_colwise": COLUMN._replace(parts=2),
    "packed_rowwise": Style(-1, vectors=False, parts=2),
    "embedding_rowwise": Style(0, leaves=SUMMED),
    "embedding_colwise": Style(1, leaves=GATHERED),
    "moe_tp_experts": Style(enters=COPIED, leaves=SUMMED),
    "moe_identity_expert": Style(enters=TERM),
    "mla_kv_a_proj": Style(leaves=SUMMED_BACK),
    "all_reduce": Style(leaves=SUMMED),
    "replicated_with_grad_allreduce": Style(uses=COPIED),
    "local_params": Style(),
    "replicate": Style(),
}
"""Styles that shard sequences (sequence_parallel) or experts (grouped_gemm, ep_...) are left out.
The input of an identity expert becomes a term of the sum over experts. For the output of
mla_kv_a_proj, transformers all-reduces the gradient of the last part, and that of the first part
behind its norm, at kv_b_proj. The style here all-reduces the gradient of the full output and that
of the norm's weight: as many all-reduces, and one vector more."""


class Rules(NamedTuple):
    """A plan that was read: style names of modules and of parameters, and rules that fit nothing.

    A parameter has the style of its own rule, else the style of its module.
    """

    modules: dict[str, str]
    parameters: dict[str, str]
    unused: list[str]


def table_of(value: object, module: nn.Module) -> dict[str, str]:
    """Return `value` as a table of names and styles; "auto" means the model's own plan.

    Raises:
        UsageError: `value` is not such a table, or the model has no plan.
    """
    name = type(module).__name__
    if value == OWN:
        value = getattr(module, "tp_plan", None)
        if not value:
            raise UsageError(f"{name} has no tensor-parallel plan in transformers")
    if not isinstance(value, Mapping) or not value:
        raise UsageError("a tensor-parallel plan is a table of module names and styles")
    for key, style in value.items():
        if not isinstance(key, str) or not isinstance(style, str):
            raise UsageError(f"the tensor-parallel plan has {key!r}: {style!r}, no name and style")
    return dict(value)


def read(table: Mapping[str, str], module: nn.Module) -> Rules:
    """Match the rules of a plan to modules and parameters, as transformers does.

    Names may lack the prefix of the base model, as in a config's `base_model_tp_plan`.

    Raises:
        UsageError: no rule matches anything.
    """
    names = {n for n, _ in module.named_modules()}
    parameters = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    prefix: Any = getattr(module, "base_model_prefix", "")
    full: dict[str, str] = {}
    present = {general(n) for n in (*names, *parameters)} | names | set(parameters)
    unused = []
    for key, style in table.items():
        keys = [k for k in (key, f"{prefix}.{key}") if k in present]
        if keys:
            full[keys[0]] = style
        else:
            unused.append(key)
    if not full:
        raise UsageError("no rule of the tensor-parallel plan fits a module of this model")

    def rule(name: str) -> str | None:
        return full.get(name, full.get(general(name)))

    styled = {n: style for n in sorted(names) if (style := rule(n))}
    own = {n: rule(n) or styled.get(n.rpartition(".")[0]) for n in parameters}
    return Rules(styled, {n: s for n, s in own.items() if s}, unused)


def general(name: str) -> str:
    """Replace each part of `name` that is a number by `*`, as transformers does.

    A leading number stays, and of two numbers in a row the second stays.
    """
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


def style_of(name: str) -> Style:
    """Return the style of that name.

    Raises:
        UsageError: the style is unknown or has no counterpart here.
    """
    if name not in STYLES:
        raise UsageError(f"style '{name}' has no counterpart here")
    return STYLES[name]


def split_dim(style: Style, parameter: str, ndim: int) -> int | None:
    """Return the dim along which a style shards a parameter; None if it stays replicated."""
    if style.dim is None:
        return None
    if ndim == 1:
        return 0 if style.vectors else None
    if parameter.rpartition(".")[2] == "bias" and not style.vectors:
        return None
    return style.dim if style.dim >= 0 else ndim + style.dim


def pins(table: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """Return pins for the parameters that a plan's rules match. Other parameters get no pin.

    Raises:
        UsageError: no rule matches, or a style has no counterpart.
    """
    shapes = {n: p.dim() for n, p in module.named_parameters(remove_duplicate=False)}
    found: dict[str, str] = {}
    for name, style in read(table, module).parameters.items():
        dim = split_dim(style_of(style), name, shapes[name])
        found[name] = "replicate" if dim is None else f"shard:{dim}"
    return fold(found, shapes)
