"""Sequences of which each rank of `cp` is given its own rows only: `cp="local"`.

What a data loader cut apart is put together before the root sees it: token ids, masks, positions
and labels, 8 bytes a token where a hidden state is thousands. All behind that is the split model as
it is, so positions are right, labels cross the borders, and a loss is that of all tokens. Of what
comes out, each rank is shown its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import CP
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.collectives import all_gather
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.logits.split_logits import SplitLogits
from shardwright.runtime.rows.split_rows import Share, SplitRows

WHOLE, LOCAL = "whole", "local"
"""What each rank of `cp` is given: all of a sequence, or its own rows."""

ROWS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
"""Arguments of shape [batch, sequence] that each rank has its own rows of."""

A_SEQUENCE = "labels", 1
"""An argument of so many dims that has an entry for each sequence: the same on all ranks."""

SHOWN = ("logits", "last_hidden_state")
"""Outputs of shape [batch, sequence, ...] that each rank is shown its own rows of."""


@torch.compiler.disable
def joined_rows(
    positions: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any], group: Group
) -> tuple[tuple[Any, ...], dict[str, Any], Share]:
    """A call of the root with whole sequences in the place of this rank's rows.

    Raises:
        UsageError: ranks were given what does not make a sequence, or tensors of which nobody
            knows where their rows are.
    """
    names = {at: name for name, at in positions.items()}
    named = {names.get(at, f"*{at}"): value for at, value in enumerate(args)}
    if kwargs.get("return_dict") is False:
        raise UsageError('cp="local" finds outputs by name: call with return_dict=True')
    given, share = _joined({**named, **kwargs}, group)
    return tuple(given[name] for name in named), {name: given[name] for name in kwargs}, share


def own_rows_wanted(cp: str, plan: Plan) -> bool:
    """Whether ranks are to pass their own rows.

    Raises:
        UsageError: `cp` is something else, or the plan does not split sequences.
    """
    if cp not in (WHOLE, LOCAL):
        raise UsageError(f"cp='{cp}': ranks pass '{WHOLE}' sequences, or '{LOCAL}' rows of them")
    if cp == LOCAL and CP not in plan.mesh:
        raise UsageError(
            f"cp='{LOCAL}': the plan splits no sequences: plan with mesh={{'cp': ...}}"
        )
    return cp == LOCAL


def _joined(given: Mapping[str, Any], group: Group) -> tuple[dict[str, Any], Share]:
    """Arguments with whole sequences in the place of a rank's rows."""
    own = {name: given[name] for name in ROWS if _has_rows(given.get(name))}
    lengths = {x.shape[1] for x in own.values()}
    unknown = [
        name
        for name, x in given.items()
        if isinstance(x, Tensor) and x.dim() and name not in own and (name, x.dim()) != A_SEQUENCE
    ]
    mine = [
        lengths.pop() if len(lengths) == 1 else 0,
        max((x.shape[0] for x in own.values()), default=0),
        sum(1 << ROWS.index(name) for name in own),
        len(unknown),
    ]
    device = next((x.device for x in own.values()), torch.device("cpu"))
    facts = all_gather(torch.tensor(mine, device=device), group).tolist()
    if unknown:
        raise UsageError(
            f"argument '{unknown[0]}' with cp='{LOCAL}': of {', '.join(ROWS)} each rank gives its "
            f"rows; to give others, apply the plan with cp='{WHOLE}'"
        )
    _check(facts)
    share = Share(group, tuple(length for length, *_ in facts))
    whole = {name: _whole(x, share) for name, x in own.items()}
    if "position_ids" in whole:
        _check_positions(whole["position_ids"])
    return {**given, **whole}, share


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and not x.requires_grad


def _whole(x: Tensor, share: Share) -> Tensor:
    # gloo gathers no truth values.
    return share.joined(x.byte()).bool() if x.dtype == torch.bool else share.joined(x)


def _check(facts: Sequence[Sequence[int]]) -> None:
    """Check that what ranks gave makes a sequence; alike on all of them, so that none waits.

    Raises:
        UsageError: it does not.
    """
    if any(unknown for *_, unknown in facts):
        raise UsageError('another rank of cp gave an argument that cp="local" does not know')
    for rank, (length, batch, names, _) in enumerate(facts):
        if not length:
            raise UsageError(
                f'cp="local": rank {rank} of cp gave no rows, or arguments of several lengths: '
                f"give {', '.join(ROWS)} as [batch, rows of the rank]"
            )
        if [batch, names] != facts[0][1:3]:
            raise UsageError(
                f'cp="local": rank {rank} of cp gave {batch} sequences, as {_named(names)}, rank 0 '
                f"{facts[0][1]}, as {_named(facts[0][2])}: give rows of the same sequences"
            )


def _named(names: int) -> str:
    return ", ".join(name for at, name in enumerate(ROWS) if names >> at & 1)


def _check_positions(whole: Tensor) -> None:
    """Check that ranks have consecutive rows, as far as positions tell: masks go by the order.

    Raises:
        UsageError: positions do not go on by one, stay or begin anew.
    """
    before, behind = whole[:, :-1], whole[:, 1:]
    if not ((behind == before + 1) | (behind == before) | (behind <= 1)).all():
        raise UsageError(
            'cp="local": positions do not go on from one row to the next: give each rank of cp '
            "consecutive rows, in the order of the ranks"
        )


@torch.compiler.disable
def shown_rows(output: Any, share: Share) -> Any:
    """`output` with this rank's rows in the place of whole sequences."""
    if isinstance(output, (Tensor, SplitLogits)):
        return _rows(output, share)
    if not isinstance(output, Mapping):
        raise UsageError('cp="local" finds outputs by name: call with return_dict=True')
    own = {name: _rows(output[name], share) for name in SHOWN if output.get(name) is not None}
    return type(output)(**{**output, **own})


def _rows(output: Any, share: Share) -> Any:
    inner = output.local if isinstance(output, SplitLogits) else output
    return SplitRows(output, share) if inner.dim() > 2 and inner.shape[1] == share.whole else output
