"""Finds code outside of a mixture that computes with the parameters of its experts.

A rank has only some experts. It may go over their elements, as for an average of weights, but not
add them up: nothing sums over the ranks of `ep`.
"""

from __future__ import annotations

from torch import nn

from shardwright.planner.contract.names import is_within
from shardwright.planner.experts.probe import Mixture
from shardwright.planner.graph.graph import Graph
from shardwright.rules import pointwise


def read_outside(graph: Graph, root: nn.Module, name: str, mixture: Mixture) -> str | None:
    """Return why the experts of the mixture `name` stay: code outside of it reads them in full.

    Modules of one class have the same experts on a rank.
    """
    kind = type(root.get_submodule(name))
    paths = [path for path, module in root.named_modules() if type(module) is kind]
    own = {f"{path}.{parameter}": path for path in paths for parameter in mixture.parameters}
    found = {n: use.fqn for use in graph.uses if use.fqn in own for n in (use.stored, use.used)}
    for op in graph.ops:
        taken = [n for n in op.inputs if n in found]
        if not taken or is_within(op.module, own[found[taken[0]]]):
            continue
        shape = graph.tensors[taken[0]].shape
        others = (graph.tensors[n].shape for n in op.inputs if n not in found)
        alike = all(graph.tensors[n].shape == shape for n in (*taken, *op.outputs))
        if op.call.op not in pointwise.TABLE or not alike or any(others):
            return _why(found[taken[0]])
        found |= dict.fromkeys(op.outputs, found[taken[0]])
    left = {*graph.outputs, *(boundary.source for boundary in graph.crossed)}
    return next((_why(fqn) for n, fqn in found.items() if n in left), None)


def _why(fqn: str) -> str:
    return f"code outside of it computes with '{fqn}', of which a rank has some experts"
