"""The calls that a plan is proven for: what else goes into a split model, or out, is refused.

Of a tensor that was in no traced call nobody knows how it lies: it may be a part, or its gradient
one term of a sum, without any error to show it.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract.names import MASKS, slot_pattern
from shardwright.planner.contract.plain_values import CONTAINERS, FREE, is_code
from shardwright.planner.contract.plan_file import TracedCall
from shardwright.runtime.calls.plain_arguments import PlainArguments
from shardwright.runtime.slots import is_own, leaves, positions, returned

STEPS = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")
"""What a step goes on with: the first of these that is given."""

COUNT = "num_items_in_batch"
"""By what losses of transformers are divided, in place of the tokens at hand; they are whole."""

ALIKE = {"StaticCache": "DynamicCache"}
"""A class of caches -> one that holds the same tensors, one call's behind the other's: what has a
fixed size has that of the keys and values that come, and is written at their positions. Both keep
each head for itself (a test holds that), so what is proven of the one is so of the other."""


@dataclass(frozen=True)
class Proven:
    """What the calls of one model had.

    Attributes:
        model: The class of the model.
        given: Arguments that it was called with.
        slots: Those of the tensors that it gave.
        positions: Its arguments by position.
        arguments: All of them.
        always: Those that may be left out, and never were: tensors, and what has some in it.
        plain: What those had that are no tensors.
        defaults: What those are that are left out.
        joins: Whether calls of parts of it are proven by themselves: its code, which is not traced
            then, joins what they give, whole, with whole tensors.
        named: Whether its outputs have names, even where a tuple is asked for.
        state: The classes of caches that calls handed on to each other, by argument.
        several: Whether calls went on with such by several tokens.
        trains: Whether they are proven in training mode, too.
        asks_autocast: Whether code asks for autocast, and is not proven under it.
    """

    model: str
    given: frozenset[str]
    slots: frozenset[str]
    positions: dict[str, int]
    arguments: frozenset[str]
    always: tuple[str, ...]
    plain: PlainArguments
    defaults: Mapping[str, Any]
    joins: bool
    named: bool
    state: dict[str, frozenset[str]]
    several: bool
    trains: bool
    asks_autocast: bool

    @classmethod
    def of(cls, model: nn.Module, calls: Sequence[TracedCall]) -> Proven:
        """What `calls` of `model` had, before it is made a root."""
        forward = type(model).forward
        parameters = inspect.signature(forward).parameters
        own = [call for call in calls if not call.module]
        slots = frozenset(slot for call in own for slot in call.outputs)
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = ("return_dict" in parameters or more) and hasattr(
            getattr(model, "config", None), "return_dict"
        )
        return cls(
            type(model).__name__,
            frozenset(n for call in own for n in call.inputs),
            slots,
            positions(forward)[0],
            frozenset(parameters),
            _always(own, {n for n, p in parameters.items() if p.default is p.empty}),
            PlainArguments(own, defaults),
            defaults,
            any(call.module for call in calls),
            named and not any(slot[:1].isdigit() for slot in slots),
            _by_argument((n, kind) for call in calls for n, kind in call.state.items()),
            any(call.several for call in calls),
            any(call.training and not call.arrays for call in calls),
            any(call.asks_autocast for call in calls),
        )

    def check_modes(self, modules: Iterable[nn.Module], alone: str = "") -> None:
        """Check that `modules` of the model are in a mode in which some call was proven.

        Of the whole model, or of the module `alone` that is called by itself.

        Raises:
            UsageError: one trains; or autocast is on, and their code asks for it.
        """
        if self.asks_autocast and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise UsageError(
                f"the code of {self.model} asks whether autocast is on, and computes otherwise "
                "then, which no call did that its plan was made for: call it without, in the dtype "
                "that you want (model.to(torch.bfloat16) before it is split)"
            )
        if self.trains or not any(module.training for module in modules):
            return
        raise UsageError(
            f"{self.model} is in training mode, and its plan is proven for eval mode alone: "
            "call .eval() on it, or plan it to train (phase='train'), whose plan has a note "
            "if that cannot be"
        )

    def check_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether all that comes in was given in some call.

        Raises:
            UsageError: it was not, and no part of the model takes it; or it is a cache that holds
                something, in no call with one of its class, or in none by several tokens; or a flag
                or number had another value in each; or what each was given is left out.
        """
        given = self._named(args, kwargs)
        if self.plain.known:
            self.plain.check(self.model, given)
        if self.always:
            self._check_all_there(given)
        if self.state and not self.several:
            self._check_tokens(given)
        new = list(self._new(given))
        if not new or (self.joins and not {*new} & {*MASKS}):
            return not new
        raise UsageError(
            f"argument '{new[0]}' of {self.model} was given in no call that the plan was made for, "
            "so parts may be taken for what is whole: plan with example inputs (kwargs) that "
            "have it"
        )

    def _new(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Arguments that no call had, and that matter: real tensors, masks for padding, flags."""
        for name, value in given.items():
            if value is None or type(value).__name__ in self.state.get(name, ()):
                continue  # as in most calls, that are made for each token
            if name in self.given and isinstance(value, Tensor):
                if value.requires_grad and name in MASKS:
                    raise UsageError(self._of_mask(name))
                continue
            if is_code(value) and name not in self.given:
                yield name
                continue
            if is_own(value):
                self._check_state(name, value)
                continue
            if name in self.given or name == COUNT:
                if type(value) in CONTAINERS and (at := self.plain.unknown(name, value)):
                    yield at
                continue
            tensors = [x for _, x in leaves(value) if isinstance(x, Tensor)]
            if any(x.is_floating_point() for x in tensors) or (tensors and name in MASKS):
                yield name
            if not tensors and not self.joins and self._asks(name, value):
                yield name

    def _check_all_there(self, given: Mapping[str, Any]) -> None:
        """Check that what every call was given is given."""
        for name in self.always:
            if given.get(name) is None:
                give = "give it by name" if any(n.startswith("*") for n in given) else "give it"
                raise UsageError(
                    f"argument '{name}' of {self.model} is left out, and was given in each call "
                    "that the plan was made for: without it its code may do what nobody has "
                    f"proven: {give}, or plan with example inputs (kwargs) without it"
                )

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All that is given, by name."""
        names = (*self.positions, *map("*{}".format, range(len(args))))
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _asks(self, name: str, value: Any) -> bool:
        """Whether a value without tensors may ask for other code than if it were left out."""
        default = self.defaults.get(name)
        return name not in FREE and (bool(value) if default is None else value != default)

    def _of_mask(self, name: str) -> str:
        return (
            f"argument '{name}' of {self.model} wants a gradient: as whole numbers it had none in "
            "the calls that the plan was made for, so a rank would have but a term of it: detach it"
        )

    def _check_state(self, name: str, value: Any) -> None:
        """Check that a cache may be given, with what calls before put into it."""
        known, kind = self.state.get(name, ()), type(value).__name__
        if name in self.given and not known:
            return
        if ALIKE.get(kind) in known:
            return
        if _filled(value):
            kinds = " or ".join(sorted(known)) or "none"
            raise UsageError(
                f"argument '{name}' of {self.model} is a {kind}, and the plan is "
                f"proven for steps with {kinds}: give such a cache, or call with use_cache=False"
            )

    def _check_tokens(self, given: Mapping[str, Any]) -> None:
        """Check that what is behind a cache that holds something is one token."""
        found = [given[n] for n in STEPS if isinstance(given.get(n), Tensor)]
        if found and found[0].shape[1] > 1 and any(map(_filled, map(given.get, self.state))):
            raise UsageError(
                f"{found[0].shape[1]} tokens behind what is in the cache of {self.model}, and the "
                "plan is proven for steps by one token: give one at a time, or all without a cache"
            )

    def check_output(self, output: Any) -> None:
        """Check that all that leaves was given out in some call.

        Raises:
            UsageError: it was not.
        """
        for slot, leaf in returned(output, self.arguments):
            known = slot in self.slots or slot_pattern(slot) in self.slots
            if not (known and isinstance(leaf, Tensor)):
                raise UsageError(
                    f"output '{slot}' of {self.model} was given in no call that the plan was made "
                    "for, so a rank may have a part of it or of its gradient: plan with example "
                    "inputs (kwargs) with which the model gives it"
                )


def _filled(state: Any) -> bool:
    """Whether a cache holds something."""
    return any(isinstance(x, Tensor) and x.is_floating_point() for _, x in leaves(state))


def _always(calls: Sequence[TracedCall], needed: Container[str]) -> tuple[str, ...]:
    """What all `calls` were given that is no plain value, and no cache, and could be left out."""
    given = [{*c.inputs} - {*c.values, *c.numbers, *c.state, *FREE} for c in calls]
    return tuple(sorted(n for n in set.intersection(*given) if n not in needed)) if given else ()


def _by_argument(found: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    out: dict[str, frozenset[str]] = {}
    for name, kind in found:
        out[name] = out.get(name, frozenset()) | {kind}
    return out
