"""All tables in one, and the only question the planner asks: which rule does this call have?"""

from __future__ import annotations

from typing import Any

from shardwright.errors import UsageError

from . import contraction, indexing, normalization, pointwise, reduction, shape
from .added import REGISTERED, added, bound, check, op_name
from .call import OpCall, RuleMaker, Table, make_rule
from .notation import DoesNotFit, Rule

TABLE: Table = {}
for _family in (contraction, indexing, normalization, pointwise, reduction, shape):
    _twice = TABLE.keys() & _family.TABLE.keys()
    assert not _twice, f"two rules for {sorted(_twice)}"
    TABLE.update(_family.TABLE)


def rule_for(call: OpCall) -> Rule | None:
    """The rule of `call` bound to its shapes; None for an op without one, which must stay whole.

    Raises:
        PluginError: the rule that somebody added does not fit the call, or cannot be read.
    """
    entry = TABLE.get(call.op)
    if entry is None or call.op in REGISTERED:
        rule = added(call.op)
        return None if rule is None else bound(rule, call)
    try:
        return make_rule(entry, call)
    except (DoesNotFit, LookupError):
        # An overload that the table does not foresee: no reason to refuse the model.
        return None


def register_rule(op: Any, rule: str | RuleMaker, *, replace: bool = False) -> None:
    """Say what an op does to sharded tensors, in this process.

    A package says it to all its users by an entry point: see CONTRIBUTING.

        shardwright.register_rule(my_lib.gated, "... h, h -> ... h | linear 0")

    Args:
        op: A `torch.library.custom_op`, what `torch.ops` has of any op, or "namespace::name".
        rule: Text as in `rules/notation.py`, or a function of the call (`rules/call.py`) that
            returns it, or None for a call that has no rule.
        replace: This rule counts from now on, although the op has one.

    Raises:
        UsageError: there is no such op, the rule is not in the notation or not for as many tensors,
            or the op has one.
    """
    name = op_name(op)
    check(name, rule)
    if not replace and (name in TABLE or added(name) is not None):
        raise UsageError(f"op '{name}' has a rule: replace=True puts yours in its place")
    REGISTERED[name] = rule
