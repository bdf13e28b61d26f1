"""Costs of redistributions: collectives and copies, by the table of transitions.

`planner/contract/transitions.py` has the actions of a transition and the bytes that they move. This
module applies them to states of tensors, in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch

from shardwright.planner.contract.mesh import hosts_of
from shardwright.planner.contract.names import made_once
from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.contract.transitions import (
    ALL_GATHER,
    APART,
    BUCKET,
    IDENTITY,
    REDUCE_SCATTER,
    Action,
    Collective,
    Order,
    Work,
)
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.recomputation import Recomputation
from shardwright.planner.cost.tensor_sizes import TensorSizes
from shardwright.planner.devices.device import Device
from shardwright.planner.graph.axes import factors_of, find
from shardwright.planner.graph.graph import Boundary, Graph, once_a_graph
from shardwright.planner.strategies.mask_steps import MaskStep, steps, without
from shardwright.planner.strategies.state import REPLICATED, State, cut_of, made_partial
from shardwright.planner.strategies.states import States

Edge = tuple[str, str, str]
"""(before, source, target) of a redistribution: see `RedistributionCosts.inner`."""

Averaged = tuple[torch.dtype, Collective]
"""What gradients that share buckets have in common: a dtype, and an all-reduce without bytes."""


class Traffic(NamedTuple):
    """The collectives of one redistribution, forward and backward.

    `copied` and `copied_back` are the bytes that local copies read and write, forward and backward.
    `waits` and `waits_back` count how often the host waits for a value. `averaged` is an all-reduce
    of a gradient over copies of the model, if it were alone: most go together, in buckets.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    copied: int = 0
    copied_back: int = 0
    waits: int = 0
    waits_back: int = 0
    averaged: Collective | None = None

    def repeated(self) -> Traffic:
        """Return this traffic if the forward is computed again in the backward pass."""
        return self._replace(
            backward=self.forward + self.backward,
            copied_back=self.copied + self.copied_back,
            waits_back=self.waits + self.waits_back,
        )


class TransitionCost(NamedTuple):
    """Nanoseconds of a redistribution in all passes.

    `backward` is the time of a backward pass if the workload has none; it breaks ties.
    """

    time: int
    backward: int


class RedistributionCosts:
    """Prices redistributions of the tensors of one graph.

    Args:
        graph: The traced model.
        states: Domains of its tensors.
        sizes: Sizes of its tensors.
        workload: The workload. Its copies of the model average gradients.
        device: The times of collectives and copies.
        recomputation: What runs again in the backward pass.
    """

    def __init__(
        self,
        graph: Graph,
        states: States,
        sizes: TensorSizes,
        workload: Workload,
        device: Device,
        recomputation: Recomputation,
    ) -> None:
        self.recomputation = recomputation
        self.graph, self.states, self.sizes = graph, states, sizes
        self.workload, self.device = workload, device
        self._kinds: dict[str, tuple[object, ...]] = {}
        self._known: dict[object, Traffic | None] = {}
        self._steps: dict[tuple[State, State, tuple[int, int]], list[MaskStep] | None] = {}
        self._costs: dict[object, TransitionCost | None] = {}
        self._times: dict[tuple[tuple[Collective, ...], int, int], int] = {}
        self._on_hosts: dict[object, int] = {}

    def traffic(
        self, name: str, source: State, target: State, run: Pass | None = None
    ) -> Traffic | None:
        """Return the traffic of redistributing tensor `name`; None if it is not possible.

        Args:
            name: The tensor.
            source: Its state before.
            target: Its state after.
            run: The pass that sizes are of; by default the first of the workload.
        """
        source = source.in_copy
        if source == target:
            return Traffic()
        if (found := self._way(name, source, target)) is None:
            return None
        work = [self._work(name, step, run or self.sizes.passes[0]) for step in found]
        forward, copied = _collectives_and_copies(
            (s.transition.forward, w) for s, w in zip(found, work, strict=True)
        )
        if not self.graph.tensors[name].differentiable:
            return Traffic(forward, copied=copied)
        back, copied_back = _collectives_and_copies(
            (s.transition.backward, w) for s, w in zip(found, work, strict=True)
        )
        return Traffic(forward, back, copied, copied_back)

    def possible(self, name: str, before: State, source: State, target: State) -> bool:
        """Whether the redistribution that `inner` prices is possible."""
        start = _start(before, source, target)
        return start == target or self._way(name, start, target) is not None

    def _way(self, name: str, source: State, target: State) -> list[MaskStep] | None:
        """Return the steps from one state of a tensor to another; None if it is not possible."""
        if not (self._plain(name, source) and self._plain(name, target)):
            return None
        covered = self.states.covered(name, source.shards), self.states.covered(name, target.shards)
        at, sub = (source, target, covered), self.states.sub
        return made_once(self._steps, at, lambda: steps(*at, sub.bits, sub.along))

    def _plain(self, name: str, state: State) -> bool:
        """Whether no sequence axis is sharded within a larger dim: the runtime cannot cut there."""
        if self.states.sequence is None:
            return True
        opened = self.states.sequence.axes
        dims = self.sizes.axes.dims[name]
        return all(a not in opened or find(dims[d]).id == a for d, a, _ in state.shards)

    def _work(self, name: str, step: MaskStep, run: Pass) -> Work:
        """Return the work of a step: the tensor's bytes with and without the step's sharding."""
        most = step.before | step.after
        part = self.sizes.bytes(name, State(most), run)
        whole = self.sizes.bytes(name, State(without(most, step.mask)), run)
        order = APART if step.before == step.after else self._order(name, step, run)
        return Work(part, whole, self.states.sub.size(step.mask), order, self.hosts(step.mask))

    def hosts(self, mask: int) -> int:
        """Return how many hosts the ranks of some sub-axes are on; for 0, the copies."""
        sub = self.states.sub

        def found() -> int:
            inner = tuple(bool(mask & (1 << i)) for i in range(len(sub.sizes)))
            return self._hosts(bool(mask & sub.along), mask == 0, mask == 0, inner)

        return made_once(self._on_hosts, mask, found)

    def _hosts(self, cp: bool, dp: bool, ep: bool, inner: tuple[bool, ...] = ()) -> int:
        """Return how many hosts ranks are on that differ only in these dims and sub-axes."""
        load, sub = self.workload, self.states.sub
        if load.gpus_per_host is None:
            return 1
        chosen = (cp, dp, ep, *(inner or [False] * len(sub.sizes)))
        sizes = (sub.cp, load.replicas // load.spread, load.spread, *sub.sizes)
        given = sizes, chosen, load.gpus_per_host
        return made_once(self._on_hosts, chosen, lambda: hosts_of(*given))

    def _order(self, name: str, step: MaskStep, run: Pass) -> Order:
        """Return how the shards of a step are laid out in the gathered tensor."""
        kept, changed = step.before & step.after, step.before ^ step.after
        ranks, longer = self.states.sub.size(step.mask), 1
        for k, dim in enumerate(self.sizes.axes.dims[name]):
            for factor in factors_of(dim):
                size = self.sizes.length(factor, cut_of(kept, k), run, False)
                if changed == {(k, factor.id, step.mask)}:
                    return Order(False, longer == 1 and size % ranks == 0)
                longer = max(longer, size)
        return Order(True, False)

    def inner(
        self, name: str, before: State, source: State, target: State, run: Pass | None = None
    ) -> Traffic | None:
        """Return the traffic of a tensor that an enclosing module took from `before` to `source`.

        If the enclosing module made it a Partial sum (a residual that is added to Partial sums, for
        one all-reduce), the tensor in the state `before` still exists, and may be redistributed
        instead.

        Returns:
            The traffic; None if it is not possible.
        """
        at = (self.kind(name), before, source, target, run)
        if at not in self._known:
            self._known[at] = self.traffic(name, _start(before, source, target), target, run)
        return self._known[at]

    def kind(self, name: str) -> tuple[object, ...]:
        """Return a key that is equal for tensors whose redistributions cost the same."""
        if name not in self._kinds:
            tensor = self.graph.tensors[name]
            self._kinds[name] = self.sizes.alike(name), tensor.dtype, tensor.differentiable
        return self._kinds[name]

    def sends(self, boundary: Boundary, before: State, source: State, target: State) -> bool:
        """Whether a redistribution at a boundary has a collective, forward or backward."""
        traffic = self.inner(boundary.source, before, source, target)
        return traffic is not None and bool(traffic.forward or traffic.backward)

    def nanoseconds(self, traffic: Traffic) -> tuple[int, int]:
        """Return the time of a redistribution, forward and backward."""
        ahead = traffic.forward, traffic.copied, traffic.waits
        back = traffic.backward, traffic.copied_back, traffic.waits_back
        return self._nanoseconds(*ahead), self._nanoseconds(*back) + self._share(traffic.averaged)

    def _share(self, averaged: Collective | None) -> int:
        """Return the nanoseconds of a gradient: its share in a full bucket, if it is not larger."""
        if averaged is None:
            return 0
        bucket = averaged._replace(bytes=max(BUCKET, averaged.bytes))
        return -(-self.device.collective(*bucket) * averaged.bytes // bucket.bytes)

    def _nanoseconds(self, collectives: tuple[Collective, ...], copied: int, waits: int) -> int:
        if (at := (collectives, copied, waits)) not in self._times:
            sent = sum(self.device.collective(*call) for call in collectives)
            moved = self.device.compute(0, copied, "float32", kernels=bool(copied))
            self._times[at] = sent + moved + waits * self.device.host_wait_ns
        return self._times[at]

    def cost(
        self, name: str, before: State, source: State, target: State, again: bool = False
    ) -> TransitionCost | None:
        """Return the cost of `inner` in all passes; None if it is not possible.

        With `again`, the forward is computed again in the backward pass.
        """
        given = before, source, target, again
        at = self.kind(name), *given
        return made_once(self._costs, at, lambda: self._cost(name, *given))

    def _cost(
        self, name: str, before: State, source: State, target: State, again: bool
    ) -> TransitionCost | None:
        found = []
        for run in self.sizes.passes:
            traffic = self.inner(name, before, source, target, run)
            if traffic is None:
                return None
            found.append(traffic.repeated() if again and run.trains else traffic)
        return self._of_passes(found)

    def _of_passes(self, found: Iterable[Traffic]) -> TransitionCost:
        """Return the cost of the traffic in each pass."""
        time, backward = 0, 0
        for i, (run, traffic) in enumerate(zip(self.sizes.passes, found, strict=True)):
            ahead, back = self.nanoseconds(traffic)
            time += run.times * (ahead + back * run.trains)
            backward += back * (i == 0)
        trains = any(run.trains for run in self.sizes.passes)
        return TransitionCost(time, 0 if trains else backward)

    def averaging(self, name: str, state: State) -> Traffic | None:
        """Return the traffic between copies of the model for a stored tensor; None if none.

        They average the gradient of a parameter that each of them has. If they share it out, it is
        gathered in each pass, and its gradient is reduce-scattered.
        """
        copies, trained = self.workload.replicas, self.graph.tensors[name].differentiable
        if spread := name in self.sizes.spread:
            copies //= self.workload.spread
        if copies < 2 or name not in self.read:
            return None
        size = self.sizes.of_own_experts(name, self.sizes.bytes(name, state))
        if state.shared:
            work = Work(self.sizes.at_rest(name, state), size, copies, hosts=self.hosts(0))
            ahead, copied = _collectives_and_copies([(ALL_GATHER, work)])
            back, copied_back = _collectives_and_copies(
                [(ALL_GATHER, work)] + [(REDUCE_SCATTER, work)] * trained
            )
            return Traffic(ahead, back, copied, copied_back)
        if not trained:
            return None
        hosts = self._hosts(False, dp=True, ep=not spread)
        call = Collective("all_reduce", size, copies, hosts)
        # It is divided: into the bucket, from which it is copied back, or in place.
        copied = 4 * size if size <= BUCKET else 2 * size
        return Traffic(copied_back=copied, averaged=call)

    def averaged(self, state: Callable[[str], State]) -> dict[Averaged, list[int]]:
        """Return the bytes of each gradient that copies average, by what may share a bucket.

        Args:
            state: Returns the state of a stored tensor.
        """
        out: dict[Averaged, list[int]] = {}
        for name in dict.fromkeys(use.stored for use in self.graph.uses):
            found = self.averaging(name, state(name))
            if found is not None and (call := found.averaged) is not None:
                kind = self.graph.tensors[name].dtype, call._replace(bytes=0)
                out.setdefault(kind, []).append(call.bytes)
        return out

    @cached_property
    def averaging_latency(self) -> int:
        """Nanoseconds that a backward pass takes however little copies average.

        They say which gradients they have, and each kind of gradients takes a bucket.
        """
        kinds = self.averaged(lambda name: REPLICATED)
        flags = Collective("all_reduce", 0, self.workload.replicas, self.hosts(0))
        every = [flags, *(call for _, call in kinds)]
        return sum(self.device.collective(*call) for call in every) if kinds else 0

    @cached_property
    def travellers(self) -> Mapping[str, tuple[int, int]]:
        """Tokens that travel to their experts, or back -> experts of each, and all experts."""
        return dict(self.graph.marks.travelling)

    def travelling(self, name: str, state: State, run: Pass) -> Traffic:
        """Return the traffic of tokens that travel to their experts and back, in a pass.

        Ranks first tell each other how many tokens each expert gets, and the host waits for it.
        Each token is sent once for each of its experts, with a weight. If tokens lie by expert,
        each is sent once, and what comes back is counted by itself. The rank that gets most tokens
        counts.
        """
        tensor, ranks = self.graph.tensors[name], self.workload.spread
        chosen, count = self.travellers[name]
        size = int(self.sizes.bytes(name, state, run) * self.workload.imbalance)
        weights = size // tensor.shape[-1] * chosen
        sent = (chosen * size, weights, chosen * size) if chosen else (size,)
        hosts = self._hosts(False, dp=False, ep=True)
        sends = [Collective("all_to_all", n, ranks, hosts) for n in sent]
        counts = Collective("all_gather", count * torch.int64.itemsize, ranks, hosts)
        told = (counts,) if count else ()
        # sorted, put back in order, and summed; or turned, from rank by expert to expert by rank
        copied = (5 * chosen + 1 if chosen else 2) * size
        found = Traffic((*told, *sends), tuple(sends), copied, copied, waits=len(told))
        again = run.trains and name in self.recomputation.again
        return found.repeated() if again else found

    def travelling_cost(self, name: str, state: State) -> TransitionCost:
        """Return the cost of `travelling` in all passes."""
        return self._of_passes([self.travelling(name, state, run) for run in self.sizes.passes])

    def averaging_cost(self, name: str, state: State) -> TransitionCost:
        """Return the cost of `averaging` in all passes."""
        found = self.averaging(name, state) or Traffic()
        return self._of_passes([found] * len(self.sizes.passes))

    @cached_property
    def read(self) -> frozenset[str]:
        """The stored tensors that a priced op or boundary reads."""
        graph = self.graph
        found = {n for op in graph.ops if graph.priced(op) for n in op.inputs}
        found |= {b.source for b in graph.boundaries if graph.priced(b)}
        return frozenset(u.stored for u in graph.uses if u.used in found)

    @cached_property
    def edges(self) -> list[Edge]:
        """All edges of the graph where a tensor may be redistributed."""
        return edges(self.graph)

    @cached_property
    def unpriced(self) -> frozenset[str]:
        """Targets of the redistributions that are not priced."""
        graph = self.graph
        return frozenset(b.target for b in graph.boundaries if not graph.priced(b))


@once_a_graph
def edges(graph: Graph) -> list[Edge]:
    """Return all edges of a graph where a tensor may be redistributed: uses and boundaries."""
    out, outer = [], graph.outer()
    readings = graph.readings()  # each reading of a parameter has a gradient of its own
    for use in graph.uses:
        out += [(use.stored, use.stored, use.used)] * max(readings[use.used], 1)
    for boundary in graph.boundaries:
        around = outer.get(boundary.target)
        before = around.source if around else boundary.source
        out.append((before, boundary.source, boundary.target))
    return out


def _start(before: State, source: State, target: State) -> State:
    """Return what is redistributed: the tensor before an enclosing module made it a Partial sum."""
    return before if made_partial(before, source) and target != source else source


def _collectives_and_copies(
    work: Iterable[tuple[Action, Work]],
) -> tuple[tuple[Collective, ...], int]:
    """Return the collectives of some actions, and the bytes that local copies move."""
    done = [(action, on) for action, on in work if action is not IDENTITY]
    calls = (action.collective(on) for action, on in done)
    return tuple(c for c in calls if c), sum(action.copies(on) for action, on in done)
