"""The table of all rules, `rule_for` to look one up, and `register_rule` to add one."""

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
    """Return the rule of `call`, bound to its shapes; None if it has none.

    A registered rule comes before that of the table. The tensors of an op without a rule must be
    replicated.

    Raises:
        PluginError: an added rule does not fit the call, or cannot be read.
    """
    entry = TABLE.get(call.op)
    if entry is None or call.op in REGISTERED:
        rule = added(call.op)
        return None if rule is None else bound(rule, call)
    try:
        return make_rule(entry, call)
    except (DoesNotFit, LookupError):
        # An overload that the table does not cover has no rule; the model is not refused.
        return None


def register_rule(op: Any, rule: str | RuleMaker, *, replace: bool = False) -> None:
    """Register the sharding rule of an op in this process.

    A package can provide rules to its users by an entry point: see CONTRIBUTING.

        shardwright.register_rule(my_lib.gated, "... h, h -> ... h | linear 0")

    Args:
        op: A `torch.library.custom_op`, an op of `torch.ops`, or "namespace::name".
        rule: Text as in `rules/notation.py`, or a function of the call (`rules/call.py`) that
            returns the text, or None for a call without a rule.
        replace: Whether to replace a rule that the op already has.

    Raises:
        UsageError: there is no such op, the rule is not in the notation, it is for another number
            of tensors, or the op already has a rule.
    """
    name = op_name(op)
    check(name, rule)
    if not replace and (name in TABLE or added(name) is not None):
        raise UsageError(f"op '{name}' has a rule: replace=True puts yours in its place")
    REGISTERED[name] = rule
