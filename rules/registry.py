"""All tables in one, and the only question the planner asks: which rule does this call have?"""

from __future__ import annotations

from . import contraction, indexing, normalization, pointwise, reduction, shape
from .call import OpCall, Table, make_rule
from .notation import DoesNotFit, Rule

TABLE: Table = {}
for _family in (contraction, indexing, normalization, pointwise, reduction, shape):
    _twice = TABLE.keys() & _family.TABLE.keys()
    assert not _twice, f"two rules for {sorted(_twice)}"
    TABLE.update(_family.TABLE)


def rule_for(call: OpCall) -> Rule | None:
    """The rule of `call` bound to its shapes; None for an op without one, which must stay whole."""
    entry = TABLE.get(call.op)
    if entry is None:
        return None
    try:
        return make_rule(entry, call)
    except (DoesNotFit, LookupError):
        # An overload that the table does not foresee: no reason to refuse the model.
        return None
