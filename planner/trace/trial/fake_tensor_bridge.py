"""Run a module on fake tensors and log the calls of its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from shardwright.planner.graph.buffer_values import number_of
from shardwright.planner.trace.data_queries.queries import DataQueries
from shardwright.planner.trace.model.argument_trees import tree_leaves, tree_map
from shardwright.planner.trace.model.input_values import pairs
from shardwright.planner.trace.model.module_copies import duplicated
from shardwright.planner.trace.model.skeletons import Hollow
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.opaque.random_inputs import Spec
from shardwright.planner.trace.record.fake_mode import META, LikeReal, OnMeta
from shardwright.planner.trace.record.wrapped_forwards import Forward, put_around
from shardwright.planner.trace.runs.run import Run, Runner, cast
from shardwright.planner.trace.state.code_state import isolated
from shardwright.planner.trace.thread_patches import patched_in_this_thread
from shardwright.planner.trace.torch_features.traceable import traceable
from shardwright.planner.trace.trace_lock import alone
from shardwright.planner.trace.trial.call_log import Calls, Entered, Notes
from shardwright.planner.trace.trial.non_tensor_outputs import UsersValues
from shardwright.planner.trace.trial.origins import Origin, name_parameters, origins_of, set_origin
from shardwright.runtime.modules.attention import split_by_heads


def calls_of(
    root: nn.Module,
    runs: Sequence[Run],
    opaque: Opaque,
    change: Callable[[nn.Module], None],
    hollow: Hollow,
) -> Calls | None:
    """Return the calls of each module's code in `runs` of a copy of `root`; None if it fails.

    `change` is applied to the copy first. Modules in `hollow` are copied without contents.
    """
    with duplicated(root, hollow) as module:
        split_by_heads(module)  # before `follow` looks at its forwards
        change(module)
        entered = follow(module)
        try:
            with hollow.guarded(entered):
                return run_and_note(module, runs, entered, opaque)
        except Exception:  # any exception of model code: the model of a rank will raise it again
            return None


def follow(
    root: nn.Module, leave: Callable[[str, Any], None] = lambda name, output: None
) -> Entered:
    """Wrap the modules of `root` permanently; `leave` gets the name and output of each call.

    Returns the paths of the modules that currently run, the innermost last.
    """
    entered = Entered()

    def following(name: str, forward: Forward) -> Forward:
        @wraps(forward)
        def followed(*args: Any, **kwargs: Any) -> Any:
            entered.enter(name)
            taken = origins_of((args, kwargs))
            output = forward(*args, **kwargs)
            entered.leave((*taken, *origins_of(output)))
            leave(name, output)
            return output

        return followed

    for name, module in root.named_modules():
        put_around(module, partial(following, name))
    return entered


def run_and_note(module: nn.Module, runs: Sequence[Run], entered: Entered, opaque: Opaque) -> Calls:
    """Make `runs` of `module`, which `follow` has wrapped, and return the calls of its code."""
    with Notes(entered) as notes:
        run_on_fake(module, runs, opaque, UsersValues(module, notes.found))
    return notes.found


def _on_fake(module: nn.Module, fake: OnMeta) -> None:
    """Make parameters and buffers fake, because code may set their `data` to computed tensors."""
    made: dict[int, Any] = {}
    with torch._C.DisableTorchFunction():  # these calls must not be logged
        for part in module.modules():
            stores: list[dict[str, Any]] = [part._parameters, part._buffers]
            for store in stores:
                for name, tensor in store.items():
                    if tensor is not None and type(tensor) in (torch.Tensor, nn.Parameter):
                        if id(tensor) not in made:
                            made[id(tensor)] = _fake(tensor, fake)
                            if (value := number_of(tensor)) is not None:
                                fake.known.keep_number(made[id(tensor)], value)
                        store[name] = made[id(tensor)]
    name_parameters(module)


def _fake(tensor: torch.Tensor, fake: OnMeta) -> FakeTensor:
    """Do the same as `fake.from_tensor` in a tenth of the time, for tensors that are no views."""
    if tensor.device != META:
        how: dict[str, Any] = {"requires_grad": tensor.requires_grad}
        how["_is_param"] = isinstance(tensor, nn.Parameter)
        return FakeTensor(fake, tensor.detach(), tensor.device, **how)
    is_parameter = {"_is_param": True} if isinstance(tensor, nn.Parameter) else {}
    return fake.fake(tensor.detach(), requires_grad=tensor.requires_grad, **is_parameter)


def _convert(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Convert a module (`.to(dtype)`) by giving it new parameters.

    Torch would swap fake parameters in place, which fails while there are weak references to them,
    and fake modes keep such references.
    """
    for child in module.children() if recurse else ():
        _convert(child, fn)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            changed = nn.Parameter(fn(parameter), requires_grad=parameter.requires_grad)
            module._parameters[name] = changed
    module._buffers.update({k: fn(b) for k, b in module._buffers.items() if b is not None})
    return module


def run_on_fake(
    module: nn.Module,
    runs: Sequence[Run],
    opaque: Opaque,
    users: UsersValues | None = None,
    most: int | None = None,
) -> None:
    """Make `runs` of `module`, which is on meta, on fake tensors.

    Modules in `opaque` do not run. Modules that run in another dtype keep that dtype afterwards.
    `users` logs the values that users would see. After `most` ops, if given, it raises TooManyOps.

    Fake tensors are used instead of plain meta tensors because model code recognizes them and does
    not read their values.
    """
    fake = LikeReal(most)
    runs = opaque.made(runs)
    plain = [(run.args, dict(run.kwargs)) for run in runs]
    given = tree_map(lambda v: fake.from_tensor(v) if isinstance(v, torch.Tensor) else v, plain)
    valued = [*pairs(plain, given)]
    for i, value in enumerate(tree_leaves(given)):
        set_origin(value, Origin({f"input {i}"}))
    given = [r._replace(args=a, kwargs=k) for r, (a, k) in zip(runs, given, strict=True)]
    cast(module, runs)
    _on_fake(module, fake)

    def empty(_name: str, _taken: list[torch.Tensor], given: list[Spec]) -> list[torch.Tensor]:
        return [spec.empty() for spec in given]

    for tensor, value in valued:
        fake.known.keep(tensor, value)
    with (
        alone(),
        isolated(module),
        torch.no_grad(),
        patched_in_this_thread([(nn.Module, "_apply", _convert)]),
        opaque.standing_in(module, empty, fake.known),
        fake,
        DataQueries(opaque, fake.known),
        traceable(module),
    ):
        (Runner(module, on_fake=True) if users is None else users.runner(given))(given)
