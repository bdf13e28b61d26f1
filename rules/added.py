"""Rules added by other packages and by users, such as rules of `torch.library` ops.

A package provides rules in the entry-point group `shardwright.rules`. The entry has the name of the
ops' namespace and points to a `Table` with their bare names. It is read when an op of that
namespace is found. `register_rule` adds a rule for this process alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from shardwright import plugins
from shardwright.errors import PluginError, UsageError

from .call import OWN_NAMESPACE, OpCall, RuleMaker, Table, make_rule, packet_named, qualified
from .notation import Rule, parse

REGISTERED: Table = {}
"""The rules that `register_rule` added, by `name_of`."""


def added(name: str) -> str | RuleMaker | None:
    """Return the added rule of an op; None if there is none.

    Raises:
        PluginError: the installed rules for its namespace cannot be read or are invalid.
    """
    return REGISTERED.get(name) or installed(name.rpartition("::")[0]).get(name)


@cache
def installed(namespace: str) -> Table:
    """Return the rules that an installed package provides for a namespace ("" is ATen's).

    Raises:
        PluginError: the table cannot be read, is not a `Table`, or has an invalid rule.
    """
    namespace = namespace or OWN_NAMESPACE
    table = plugins.load("rules", namespace)
    if not isinstance(table, dict | None):
        raise PluginError(f"the rules for ops of '{namespace}' are no dict of rules: {table!r:.80}")
    found = {qualified(namespace, name): rule for name, rule in (table or {}).items()}
    for name, rule in found.items():
        try:
            check(name, rule)
        except UsageError as error:
            raise PluginError(f"installed rules for ops of '{namespace}': {error}") from None
    return found


def bound(rule: str | RuleMaker, call: OpCall) -> Rule | None:
    """Bind an added rule to the shapes of `call`; None if its function returns None.

    Raises:
        PluginError: the rule does not fit the call. Its author must fix it.
    """
    try:
        return make_rule(rule, call)
    except (ValueError, LookupError) as error:  # DoesNotFit is a ValueError
        raise PluginError(
            f"the rule of op '{call.op}' does not fit a call of it: {error}"
        ) from None


def op_name(op: Any) -> str:
    """Return `name_of` of a custom op, an op of `torch.ops`, or "namespace::name".

    Raises:
        UsageError: `op` is none of these.
    """
    match op:
        case CustomOpDef():
            op = op._qualname
        case OpOverloadPacket():
            op = op._qualified_op_name
        case OpOverload():
            op = op._schema.name
    if not isinstance(op, str) or "::" not in op:
        raise UsageError(
            f"no op: {op!r:.80}; give a torch.library.custom_op, torch.ops.namespace.name, "
            'or "namespace::name"'
        )
    namespace, _, name = op.partition("::")
    return qualified(namespace, name)


def overload_of(op: Any) -> OpOverload:
    """Return the given overload, or the first overload of an op: see `op_name`.

    Raises:
        UsageError: there is no such op.
    """
    if isinstance(op, OpOverload):
        return op
    packet = existing(op_name(op))
    return getattr(packet, packet.overloads()[0])


def existing(name: str) -> OpOverloadPacket:
    """Return the op with that `name_of`.

    Raises:
        UsageError: there is no such op.
    """
    packet = packet_named(name)
    if packet is None:
        raise UsageError(f"there is no op '{name}': import what defines it first")
    return packet


def check(name: str, rule: str | RuleMaker) -> None:
    """Check that a rule can be a rule of an op.

    Raises:
        UsageError: there is no such op, it changes its arguments in place, the rule is not in the
            notation, it has a `lookup`, or it is for another number of tensors.
    """
    packet = existing(name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    if all(schema.is_mutable for schema in schemas):
        raise UsageError(
            f"op '{name}' changes its arguments, so no rule holds: return a new tensor"
        )
    if callable(rule):
        return
    if not isinstance(rule, str):
        raise UsageError(f"the rule of op '{name}' is neither text nor a function: {rule!r:.80}")
    try:
        parsed = parse(rule)
    except ValueError as error:
        raise UsageError(f"the rule of op '{name}' cannot be read: {error}") from None
    if parsed.lookup:
        raise UsageError(
            f"the rule of op '{name}' has a 'lookup': only an nn.Embedding can be replaced by one"
        )
    sides = (len(parsed.operands), len(parsed.results))
    if not any(_takes(schema, *sides) for schema in schemas):
        raise UsageError(
            f"the rule of op '{name}' is for {sides[0]} tensors in and {sides[1]} out: '{rule}'; "
            f"the op is {schemas[0]}"
        )


def _takes(schema: Any, operands: int, results: int) -> bool:
    """Whether a call of an overload may have that many operands and results."""
    kinds = [str(a.type) for a in schema.arguments]
    needed, optional = kinds.count("Tensor"), kinds.count("Optional[Tensor]")
    listed = any("List[" in kind and "Tensor" in kind for kind in kinds)
    enough = needed <= operands and (listed or operands <= needed + optional)
    given = [str(r.type) for r in schema.returns]
    return enough and ("List[Tensor]" in given or len(given) == results)
