"""`ProvenCalls`: the calls that a plan is proven for. Other inputs and outputs are refused.

The plan has no placement for a tensor that was in no traced call. It may be local, or its gradient
a partial sum, and no error would show it.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract import plain_values
from shardwright.planner.contract.length_comparisons import holds, names_in
from shardwright.planner.contract.names import (
    MASKS,
    PAGED,
    PAGED_CACHES,
    PAGED_EAGER,
    grouped,
    is_batched,
    slot_pattern,
)
from shardwright.planner.contract.plain_values import BLOCK_MASK, FREE, WITH_ANY
from shardwright.planner.contract.plan_file import TracedCall
from shardwright.runtime.calls.paged import KERNEL_LENGTHS, is_paged
from shardwright.runtime.calls.plain_arguments import PlainArguments
from shardwright.runtime.slots import is_own, leaves, returned

TOKEN_ARGUMENTS = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")
"""Arguments with the tokens of a step: the first of these that is given."""

LOSS_DIVISOR = "num_items_in_batch"
"""The argument by which losses of transformers are divided instead of by the number of tokens.
Losses are full, so it is allowed."""

ALIKE = {"StaticCache": "DynamicCache"}
"""A cache class -> one with the same tensors. A static cache takes its sizes from the keys and
values that it is given, and writes them at their positions; a dynamic one appends them. Both keep
heads apart (a test checks that), so a proof for one also holds for the other."""

EQUAL_BY_VALUE = (bool, int, str, type(None))
"""Classes of arguments that are equal if their values are."""

MAX_KINDS_OF_CALLS = 256
"""Most kinds of calls that are remembered as proven."""


class ProvenCalls:
    """Facts about all calls of one model for which its plan is proven.

    Args:
        model: The model, before it is made a root.
        calls: The calls of the plan.
    """

    def __init__(self, model: nn.Module, calls: Sequence[TracedCall]) -> None:
        self.model, self.config = type(model).__name__, getattr(model, "config", None)
        parameters = inspect.signature(type(model).forward).parameters
        own = [call for call in calls if not call.module]
        self.arguments = frozenset(parameters)
        self.defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        self.given = frozenset(
            n for c in own for n in c.inputs if n != PAGED or not is_batched(c.state)
        )
        """The arguments that some call had. Paged caches prove no others of that name."""
        self.always = _always(own, parameters.keys() - self.defaults.keys())
        """Optional arguments with tensors that every call had."""
        self.plain = PlainArguments(own, self.defaults)
        every = frozenset.intersection(*map(frozenset, (c.inputs for c in own))) if own else ()
        self.apart = self.given.difference(every, MASKS, WITH_ANY, *(c.state for c in calls))
        """Arguments that some calls had and others had not: what they turn on may not combine."""
        self.together = [
            {n for n in c.inputs if c.values.get(n, True) not in (False, None)} for c in own
        ]
        """The arguments of each call, without flags that were off."""
        self.slots = frozenset(slot for call in own for slot in call.outputs)
        """The slots of the output tensors of some call."""
        more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = ("return_dict" in parameters or more) and hasattr(self.config, "return_dict")
        named |= self.defaults.get("return_dict") is True and "" not in self.slots
        self.named = named and not any(slot[:1].isdigit() for slot in self.slots)
        """Whether outputs have names, even if the caller wants a tuple."""
        self.joins = any(call.module for call in calls)
        """Whether submodules are proven by themselves. The model's own code is not traced then; it
        combines their full outputs with full tensors."""
        self.state = grouped(
            (n, k) for c in calls for n, k in c.state.items() if k not in PAGED_CACHES
        )
        """The classes of caches that calls passed on to the next, by argument."""
        self.several = any(call.several for call in calls)
        """Whether a call with such a cache had several tokens."""
        self.pages = any(is_batched(call.state) for call in own)
        """Whether a call of continuous batching is proven."""
        self.trains = any(call.training for call in calls)
        self.asks_autocast = any(call.asks_autocast for call in calls)
        self.off = tuple(
            n for n in plain_values.SWITCHES if any(c.values.get(n) is False for c in own)
        )
        """Flags that no call had on."""
        self.lengths = {text: where for call in own for text, where in call.lengths.items()}
        """Comparisons of lengths that hold in all calls -> their places in the code."""
        self._compared = [(text, [*map(_named, names_in(text))]) for text in self.lengths]
        self._held: dict[str, list[int]] = {}
        """Comparisons -> the sizes for which they held last."""
        self.checked: dict[Any, bool] = {}
        """Kinds of calls that were checked before, and what `check_given` returned for them."""

    def check_modes(self, modules: Iterable[nn.Module]) -> None:
        """Check that `modules` of the model are in a mode for which a call is proven.

        Raises:
            UsageError: one is in training mode, and no call was; or autocast is on, and the model's
                code checks for it.
        """
        if self.asks_autocast and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise UsageError(
                f"the code of {self.model} checks whether autocast is on, and no call that its "
                "plan was made for had it on: call it without autocast, in the dtype "
                "that you want (model.to(torch.bfloat16) before it is split)"
            )
        if self.trains or not any(module.training for module in modules):
            return
        raise UsageError(
            f"{self.model} is in training mode, and its plan is proven for eval mode alone: "
            "call .eval() on it, or plan it with phase='train'; if training is not possible, that "
            "plan has a note with the reason"
        )

    def check_given(self, given: Mapping[str, Any]) -> bool:
        """Check the arguments of a call; returns whether some proven call had each of them.

        Raises:
            UsageError: an argument was in no call (unless submodules are proven by themselves, and
                it is not a mask); a filled cache is of a class that no call had, or has several
                tokens after it, which no call had; a flag or number had no such value in any call;
                or an argument is missing that every call had.
        """
        if is_paged(given.get(PAGED)):
            self.check_batches()
            given = {n: v for n, v in given.items() if n not in (PAGED, *KERNEL_LENGTHS)}
        elif self.pages and getattr(self.config, "_attn_implementation", None) == PAGED_EAGER:
            raise UsageError(
                f"attention of {self.model} is '{PAGED_EAGER}', and the call has no paged cache: "
                "leave such calls to continuous batching, or set it back to 'eager'"
            )
        if self.state and not self.several:
            self._check_tokens(given)
        for name in self.off:
            if plain_values.is_on(name, given, self.defaults.get(name), self.config):
                raise UsageError(
                    f"{name} of {self.model} is on{'' if name in given else ' by its config'}, and "
                    "was off in all calls that the plan was made for. With it the code may keep "
                    "tensors and read them again, and a rank may have only shards of them: "
                    f"call with {name}=False"
                )
        if self.lengths:
            self._check_lengths(given)
        if torch.compiler.is_compiling():  # its guards would see `checked` change
            return self._check(given)
        kind = self._kind(given)
        if kind in self.checked:
            return self.checked[kind]
        known = self._check(given)
        if kind is not None and len(self.checked) < MAX_KINDS_OF_CALLS:
            self.checked[kind] = known
        return known

    def check_batches(self) -> None:
        """Check that continuous batching is proven.

        Raises:
            UsageError: it is not.
        """
        if not self.pages:
            raise UsageError(
                f"the plan of {self.model} is not proven for continuous batching: plan it with "
                "continuous_batching=True (--continuous-batching)"
            )

    def _kind(self, given: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What decides whether a call is proven; None if the content of an argument does, too."""
        out = []
        for name, value in given.items():
            kind, known = type(value), self.state.get(name, ())
            if isinstance(value, Tensor):
                out.append((name, value.dtype, value.requires_grad))
            elif kind in EQUAL_BY_VALUE:
                out.append((name, kind, value))
            elif kind.__name__ in known or ALIKE.get(kind.__name__) in known:
                out.append((name, kind))
            else:
                return None
        return tuple(out)

    def _check(self, given: Mapping[str, Any]) -> bool:
        """Check arguments as `check_given` does, without what it remembers of earlier calls."""
        if self.plain.known:
            self.plain.check(self.model, given)
        if self.always:
            self._check_all_there(given)
        if len(self.apart) > 1 and not self.joins:
            self._check_together(given)
        new = list(self._new(given))
        if not new or (self.joins and not {*new} & {*MASKS}):
            return not new
        raise UsageError(
            f"argument '{new[0]}' of {self.model} was given in no call that the plan was made for, "
            "so a shard may be taken for a full tensor: plan with example inputs (kwargs) that "
            "have it, of several calls (a list) if others lack it"
        )

    def _new(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Arguments that no call had and that matter: float tensors, padding masks, flags, code."""
        for name, value in given.items():
            if value is None or type(value).__name__ in self.state.get(name, ()):
                continue
            if name in self.given and isinstance(value, Tensor):
                if value.requires_grad and name in MASKS:
                    raise UsageError(
                        f"argument '{name}' of {self.model} requires a gradient, which it did not "
                        "in the calls that the plan was made for, so a rank would have only a term "
                        "of it: detach it"
                    )
                continue
            if type(value).__name__ == BLOCK_MASK or (
                plain_values.is_code(value) and name not in self.given
            ):
                yield name
                continue
            if is_own(value):
                self._check_state(name, value)
                continue
            if name in self.given or name == LOSS_DIVISOR:
                if type(value) in plain_values.CONTAINERS and (
                    at := self.plain.unknown(name, value)
                ):
                    yield at
                continue
            tensors = [x for _, x in leaves(value) if isinstance(x, Tensor)]
            if any(map(_of_numbers, tensors)) or (tensors and name in MASKS):
                yield name
            if not tensors and not self.joins and self._asks(name, value):
                yield name

    def _check_all_there(self, given: Mapping[str, Any]) -> None:
        """Check that all arguments are given that every proven call had."""
        for name in self.always:
            if given.get(name) is None:
                give = "give it by name" if any(n.startswith("*") for n in given) else "give it"
                raise UsageError(
                    f"argument '{name}' of {self.model} is left out, and was given in each call "
                    "that the plan was made for: without it its code may take a path that was "
                    f"not traced: {give}, or plan with example inputs (kwargs) of several calls, "
                    "one without it"
                )

    def _check_together(self, given: Mapping[str, Any]) -> None:
        """Check that some call had all floating tensors and flags that not every call had.

        What one call makes may stay sharded there, and what another adds to it be full.
        """
        found = {n for n in self.apart if _turns_on(given.get(n))}
        if len(found) < 2 or any(found <= had for had in self.together):
            return
        raise UsageError(
            f"arguments {' and '.join(sorted(found))} of {self.model} were given together in no "
            "call that the plan was made for, so a shard may meet a full tensor: plan with example "
            "inputs (kwargs) of several calls (a list), one of them with these"
        )

    def _asks(self, name: str, value: Any) -> bool:
        """Whether code may behave differently with a non-tensor value than with its default."""
        default = self.defaults.get(name)
        return name not in FREE and (bool(value) if default is None else value != default)

    def _check_state(self, name: str, value: Any) -> None:
        """Check that a cache of this class, with its content, may be passed."""
        known, kind = self.state.get(name, ()), type(value).__name__
        if name in self.given and not known:
            return
        if ALIKE.get(kind) in known:
            return
        if _filled(value):
            kinds = " or ".join(sorted({*known})) or "none"
            raise UsageError(
                f"argument '{name}' of {self.model} is a {kind}, and the plan is "
                f"proven for steps with {kinds}: give such a cache, or call with use_cache=False"
            )

    def _check_lengths(self, given: Mapping[str, Any]) -> None:
        """Check that code decides by lengths as in the calls that the plan was made for.

        With a filled cache it may add what is in the cache, which the comparisons do not have.
        Masks of four dims, which `generate` makes for static caches, models take as they are.
        """
        for text, named in self._compared:  # each call runs this: no functions of ours
            sizes: list[int] = []
            for argument, dim in named:
                x = given.get(argument)
                if not isinstance(x, Tensor) or (dim is not None and x.dim() <= dim):
                    break
                if self.config is not None and argument in MASKS and x.dim() == 4:
                    break
                sizes.append(x.dim() if dim is None else x.shape[dim])
            else:
                if self._held.get(text) != sizes:
                    self._check_length(text, sizes, given)

    def _check_length(self, text: str, sizes: list[int], given: Mapping[str, Any]) -> None:
        """Check one comparison, for the sizes that it names."""
        found = dict(zip(names_in(text), sizes, strict=True))
        if holds(text, found):
            if not torch.compiler.is_compiling():  # its guards would see this change
                self._held[text] = sizes
        elif not any(is_own(value) and _filled(value) for value in given.values()):
            now = ", ".join(f"{name} is {size}" for name, size in found.items())
            raise UsageError(
                f"code of {self.model} ({self.lengths[text]}) decides by a length: {text} held in "
                f"all calls that the plan was made for, and {now}: give lengths for which it "
                "holds, or plan with example inputs of such lengths"
            )

    def _check_tokens(self, given: Mapping[str, Any]) -> None:
        """Check that a call with a filled cache has only one token."""
        found = [given[n] for n in TOKEN_ARGUMENTS if isinstance(given.get(n), Tensor)]
        if found and found[0].shape[1] > 1 and any(map(_filled, map(given.get, self.state))):
            raise UsageError(
                f"{found[0].shape[1]} tokens after a filled cache of {self.model}, and the plan is "
                "proven for steps of one token only: pass one token at a time, or no cache"
            )

    def check_output(self, output: Any) -> None:
        """Check that every output was an output of some proven call.

        Raises:
            UsageError: one was not.
        """
        for slot, leaf in returned(output, self.arguments):
            known = slot in self.slots or slot_pattern(slot) in self.slots
            if not (known and isinstance(leaf, Tensor)):
                raise UsageError(
                    f"output '{slot}' of {self.model} was returned in no call that the plan was "
                    "made for, so a rank may have a shard of it or a term of its gradient: plan "
                    "with example inputs (kwargs) for which the model returns it"
                )


def _turns_on(value: Any) -> bool:
    """Whether an argument may turn on a part: a tensor of numbers, or a flag that is on."""
    return _of_numbers(value) if isinstance(value, Tensor) else value is True


def _of_numbers(x: Tensor) -> bool:
    """Whether a tensor has floating or complex numbers: code does more with it than take rows."""
    return x.is_floating_point() or x.is_complex()


def _named(size: str) -> tuple[str, int | None]:
    """The argument and the dim of `x.shape[1]`; no dim of `x.ndim`."""
    name, _, rest = size.rpartition(".")
    return name, None if rest == "ndim" else int(rest[len("shape[") : -1])


def _filled(state: Any) -> bool:
    """Whether a cache holds tensors of numbers."""
    return any(isinstance(x, Tensor) and _of_numbers(x) for _, x in leaves(state))


def _always(calls: Sequence[TracedCall], needed: Container[str]) -> tuple[str, ...]:
    """Optional arguments that all `calls` had and that are neither plain values nor caches."""
    given = [{*c.inputs} - {*c.values, *c.numbers, *c.state, *FREE} for c in calls]
    return tuple(sorted(n for n in set.intersection(*given) if n not in needed)) if given else ()
