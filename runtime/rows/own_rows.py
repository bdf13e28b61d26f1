"""Implements `cp="local"`: each rank of `cp` passes only its own rows of a sequence.

Inputs that a data loader has sharded are all-gathered before the root sees them: token ids, masks,
positions and labels. They are 8 bytes a token, where a hidden state is thousands. The split model
then runs as usual, so positions are right, labels may be shifted across shards, and a loss is that
of all tokens. Each rank sees its own rows of the outputs.
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
from shardwright.runtime.rows.split_rows import RowShare, SplitRows
from shardwright.runtime.slots import names_of

WHOLE, LOCAL = "whole", "local"
"""What each rank of `cp` passes: full sequences, or its own rows."""

ROWS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
"""Arguments of shape [batch, sequence] of which each rank passes its own rows."""

A_SEQUENCE = "labels", 1
"""An argument and its number of dims, with an entry for each sequence: the same on all ranks."""

SHOWN = ("logits", "last_hidden_state")
"""Outputs of shape [batch, sequence, ...] of which each rank sees its own rows."""


@torch.compiler.disable
def joined_rows(
    positions: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any], group: Group
) -> tuple[tuple[Any, ...], dict[str, Any], RowShare]:
    """Gather the arguments of a call of the root from the rows of all ranks.

    Args:
        positions: The index of each argument that may be given by position.
        args: Positional arguments with this rank's rows.
        kwargs: Keyword arguments with this rank's rows.
        group: The ranks of `cp`.

    Returns:
        The arguments with full sequences, and which rows each rank has.

    Raises:
        UsageError: the rows of the ranks do not make a sequence, a tensor has unknown rows, or
            outputs are to have no names.
    """
    named = dict(zip(names_of(args, positions), args, strict=True))
    if kwargs.get("return_dict") is False:
        raise UsageError('cp="local" finds outputs by name: call with return_dict=True')
    given, share = _joined({**named, **kwargs}, group)
    return tuple(given[name] for name in named), {name: given[name] for name in kwargs}, share


def own_rows_wanted(cp: str, plan: Plan) -> bool:
    """Whether ranks pass their own rows: `cp` is "local".

    Raises:
        UsageError: `cp` is neither "whole" nor "local", or the plan does not shard sequences.
    """
    if cp not in (WHOLE, LOCAL):
        raise UsageError(f"cp='{cp}': ranks pass '{WHOLE}' sequences, or '{LOCAL}' rows of them")
    if cp == LOCAL and CP not in plan.mesh:
        raise UsageError(
            f"cp='{LOCAL}': the plan splits no sequences: plan with mesh={{'cp': ...}}"
        )
    return cp == LOCAL


def _joined(given: Mapping[str, Any], group: Group) -> tuple[dict[str, Any], RowShare]:
    """Gather arguments by name; also returns which rows each rank has."""
    known = {name: given[name] for name in ROWS if isinstance(given.get(name), Tensor)}
    own = {name: x for name, x in known.items() if x.dim() == 2 and not x.requires_grad}
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
    share = RowShare(group, tuple(length for length, *_ in facts))
    whole = {name: _whole(x, share) for name, x in own.items()}
    if "position_ids" in whole:
        _check_positions(whole["position_ids"])
    return {**given, **whole}, share


def _whole(x: Tensor, share: RowShare) -> Tensor:
    # gloo cannot gather bool tensors.
    return share.joined(x.byte()).bool() if x.dtype == torch.bool else share.joined(x)


def _check(facts: Sequence[Sequence[int]]) -> None:
    """Check that the rows of the ranks make a sequence. All ranks raise, so that none waits.

    Raises:
        UsageError: they do not.
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
    """Check by the positions that ranks have consecutive rows, as masks assume.

    Raises:
        UsageError: a position is neither the one before, nor the next, nor a new start (0 or 1).
    """
    before, behind = whole[:, :-1], whole[:, 1:]
    if not ((behind == before + 1) | (behind == before) | (behind <= 1)).all():
        raise UsageError(
            'cp="local": positions do not go on from one row to the next: give each rank of cp '
            "consecutive rows, in the order of the ranks"
        )


@torch.compiler.disable
def shown_rows(output: Any, share: RowShare) -> Any:
    """Return `output` with this rank's rows in place of full sequences.

    Raises:
        UsageError: outputs have no names.
    """
    if isinstance(output, (Tensor, SplitLogits)):
        return _rows(output, share)
    if not isinstance(output, Mapping):
        raise UsageError('cp="local" finds outputs by name: call with return_dict=True')
    own = {name: _rows(output[name], share) for name in SHOWN if output.get(name) is not None}
    return type(output)(**{**output, **own})


def _rows(output: Any, share: RowShare) -> Any:
    inner = output.local if isinstance(output, SplitLogits) else output
    return SplitRows(output, share) if inner.dim() > 2 and inner.shape[1] == share.whole else output
