"""From a model to the graph of its calls: the order in which things happen to a model.

1. `model/`: `read_source` builds the model, or copies it, on the meta device, without weights.
2. `inputs/`: it is given example inputs, made up where the user gives none.
3. `runs/`: the calls that the plan must hold for are chosen: the plain call, calls with masks,
   labels and caches, decoding steps, training mode, towers that the plain call does not use.
4. `record/`: the model's own code runs once for each of them, on fake tensors; each ATen call and
   each module boundary is recorded.
5. While it runs, the code's questions are answered and noted: `queries/` (training mode, gradients,
   autocast, flags), `data_queries/` (values of tensors), `sizes/` (integers, and what they are
   computed from), `state/` (what modules keep between calls). What cannot be traced is one op:
   `opaque/`.
6. `to_graph/`: the record becomes the planner's graph, with facts about its tensors.
7. `fold/`: steps 4 to 6 see one block of each kind, which stands for the blocks that are like it.

`trial/` serves the dry run of a plan: the split model on fake tensors, compared with the unsplit.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import ModelError
from shardwright.planner.problem.pins import Pin
from shardwright.planner.trace.fold.folded_trace import Traced, trace_all
from shardwright.planner.trace.model.source import Source


def trace_model(
    source: Source, pins: Sequence[Pin] = (), ends: bool = False, folds: bool = True
) -> Traced:
    """Trace what `read_source` gave: steps 3 to 7.

    A model that cannot be traced without data is traced with the values of the integers and masks
    among its example inputs. As with sizes, the plan then holds for what the code does with them.

    Raises:
        ModelError: the model cannot be traced.
    """
    try:
        return trace_all(source, pins, ends, folds)
    except ModelError:
        valued = source.with_values()
        if valued is None:
            raise
        return trace_all(valued, pins, ends, folds)
