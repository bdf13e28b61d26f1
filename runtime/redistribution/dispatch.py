"""Sends a mixture's tokens to the ranks that hold their experts, and sums what comes back.

The ranks of the mesh dim `ep` have different tokens, and each holds some of the experts. A *pair*
is a token and one of its experts. Each rank sorts its pairs by expert, so that those for one rank
are consecutive, and sends the token and the weight of each. The module's own code then computes
with the rank's own experts on what has come, one expert for each token. The results travel back,
and each token's are added in the order of its experts. `planner/experts/` proves that a module may
be run like this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import shard_range
from shardwright.planner.contract.mesh import EP
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.communication.collectives import all_gather, all_to_all
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.slots import find_argument, index_of, positions


class Route(NamedTuple):
    """How many rows this rank sends to each rank of a group, and receives from it."""

    group: Group
    send: tuple[int, ...]
    receive: tuple[int, ...]

    @property
    def back(self) -> Route:
        """The way back of what was received."""
        return Route(self.group, self.receive, self.send)


class _Exchange(torch.autograd.Function):
    """Sends rows along a route. The gradient travels back along it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:  # type: ignore[override]
        """Return the rows that have come."""
        ctx.route = route
        return all_to_all(rows, route.send, route.receive, route.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient of the rows that were sent."""
        return _Exchange.apply(grad, ctx.route.back), None


class _After(torch.autograd.Function):
    """Returns `made`. Its backward pass reaches all of `others`, which get no gradient from it.

    Ranks to which no token came thus run the same collectives in the backward pass as the others.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        """Return `made`."""
        ctx.others = len(others)
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient of `made`."""
        return grad, *(None,) * ctx.others


class Dispatcher:
    """The plan's `dispatch` of one module, prepared for this rank.

    Args:
        spec: The plan's entry for the module, with `dispatch`.
        mesh: The mesh.
        forward: The forward of the module's own class.
        path: The name of the module, for messages.
    """

    def __init__(
        self, spec: ModulePlan, mesh: Mesh, forward: Callable[..., Any], path: str
    ) -> None:
        assert (plan := spec.dispatch) is not None
        self.group, self.count, self.path = mesh[EP], plan.count, path
        self.columns = plan.columns
        names, varargs = positions(forward)
        self.lying, self.made = plan.experts is None, plan.width
        slots = filter(None, (plan.tokens, plan.experts, plan.weights, plan.counts))
        self.arguments = [(slot, index_of(slot, names, varargs)) for slot in slots]
        ranks = range(self.group.size)
        self.held = [shard_range(plan.count, rank, self.group.size) for rank in ranks]
        """The experts of each rank."""
        made = [change.source for change in spec.outputs] + [out.placement for out in spec.gives]
        self.width = parse(made[0]).local_shape(mesh.coords)[-1] if made else None
        """Elements of each row that the module returns here, if tp may change them."""

    def _run(
        self,
        code: Callable[..., Any],
        module: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Run the module's own code on the tokens of this rank's experts.

        Shapes: tokens [..., H], experts and weights [T, k] -> [..., H], with T tokens in all.

        Raises:
            UsageError: an argument is missing, or a token's expert is none of the module's.
        """
        if self.group.size == 1:
            return code(module, *args, **kwargs)
        given, named = [*args], {**kwargs}
        places = [self._place(*argument, given, named) for argument in self.arguments]
        if self.lying:
            return self._lying(lambda: code(module, *given, **named), module, *places)
        tokens, experts, weights = (where[at] for at, where in places)
        chosen, of_each = experts.reshape(-1), experts.shape[-1]
        order = chosen.argsort(stable=True)
        route, here = self._route(torch.bincount(chosen, minlength=self.count), len(chosen))
        rows = tokens.reshape(-1, tokens.shape[-1])[order // of_each]
        came = _Exchange.apply(rows, route)
        weigh = _Exchange.apply(weights.reshape(-1, 1)[order], route)
        columns = here.to(chosen).unsqueeze(-1).repeat(1, self.columns)
        told = columns, pad(weigh, (0, self.columns - 1))
        for (at, where), value in zip(places, (came, *told), strict=True):
            where[at] = value
        made = self._computed(lambda: code(module, *given, **named), module, came, weigh)
        back = _Exchange.apply(made, route.back)
        in_turn = torch.empty_like(order)
        in_turn[order] = torch.arange(len(order), device=order.device)
        return back[in_turn].view(*experts.shape, back.shape[-1]).sum(1).view(tokens.shape)

    run: Any = torch.compiler.disable(_run)

    def _lying(
        self,
        compute: Callable[[], Tensor],
        module: nn.Module,
        place: tuple[Any, Any],
        of_counts: tuple[Any, Any] | None = None,
    ) -> Tensor:
        """Run the module's own code on tokens that lie by expert.

        Shapes: as many for each, [E * T, H] or [E, T, H]; or [T, H] with counts [E]. The output has
        the same but for its last dim.

        Raises:
            UsageError: the rows are not as many as all experts have.
        """
        at, where = place
        tokens = where[at]
        rows = tokens.reshape(-1, tokens.shape[-1])
        if of_counts is None:
            told = [len(rows) // self.count] * self.count
        else:
            told = of_counts[1][of_counts[0]]
        counts = torch.as_tensor(told, dtype=torch.int64, device=rows.device)
        route, here = self._route(counts, len(rows))
        came = _Exchange.apply(rows, route)
        by_expert = here.argsort(stable=True)
        turned = came[by_expert]
        first, last = self.held[self.group.rank]
        if tokens.dim() == 3 and len(turned):
            turned = turned.view(last - first, -1, turned.shape[-1])
        where[at] = turned
        if of_counts is not None:
            own = here.bincount(minlength=last - first)
            of_counts[1][of_counts[0]] = own.to(told) if isinstance(told, Tensor) else own.tolist()
        made = self._computed(compute, module, came)
        back = _Exchange.apply(made[by_expert.argsort()], route.back)
        return back.view(*tokens.shape[:-1], back.shape[-1])

    def _place(
        self, name: str, index: int | None, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the key of an argument, and `args` or `kwargs`."""
        at, where = find_argument(name, index, args, kwargs)
        if at is None:
            raise UsageError(f"'{self.path}' was called without '{name}', by which tokens travel")
        return at, where

    def _route(self, counts: Tensor, rows: int) -> tuple[Route, Tensor]:
        """Return the route of this rank's pairs, and its own number for the expert of each to come.

        The counts of its pairs for each expert wait for the device once in each call.

        Raises:
            UsageError: there are counts for other experts, or for other than `rows` pairs.
        """
        if len(counts) != self.count:
            raise UsageError(
                f"'{self.path}' was given expert {len(counts) - 1}, and it has {self.count}"
            )
        every = all_gather(counts, self.group).cpu()
        if (found := int(every[self.group.rank].sum())) != rows:
            raise UsageError(
                f"'{self.path}' was given {rows} rows, and its {self.count} experts have {found}"
            )
        own, (first, last) = self.group.rank, self.held[self.group.rank]
        send = tuple(int(every[own, a:b].sum()) for a, b in self.held)
        mine = every[:, first:last]
        numbers = torch.arange(last - first).repeat(self.group.size)
        here = numbers.repeat_interleave(mine.reshape(-1)).to(counts.device)
        return Route(self.group, send, tuple(mine.sum(1).tolist())), here

    def _computed(
        self, compute: Callable[[], Tensor], module: nn.Module, came: Tensor, *weigh: Tensor
    ) -> Tensor:
        """Return what `compute` makes of the pairs that have come, a row for each."""
        needed = [came, *weigh]
        if len(came):
            made = compute().reshape(len(came), -1)
        else:
            made = came.new_empty(0, self.width or self.made or came.shape[-1])
            trained = any(p.requires_grad for p in module.parameters())
            needed += [torch.zeros((), requires_grad=True)] * trained
        return _After.apply(made, *needed) if torch.is_grad_enabled() else made
