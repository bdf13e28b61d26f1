"""Compares an op on shards with the op on full tensors: values and gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..notation import Dims, Rule, letters
from .concrete import Concrete, Tensors
from .parts import Split, add_at, covered, take


def check_split(call: Concrete, rule: Rule, split: Split) -> None:
    """Check that values and gradients on shards equal those on full tensors.

    Raises:
        AssertionError: they differ.
    """
    used = split[0].keys()
    reduced = bool(used & (rule.sum | rule.lookup))
    additive = added_operands(rule, used) if reduced else set()
    inputs = [
        leaf(t, call.has_gradient and i not in call.fixed) for i, t in enumerate(call.tensors)
    ]
    # Clones, because some ops return or change their inputs.
    whole = call.run([t.clone() for t in inputs])
    local_inputs, local = [], []
    for rank, parts in enumerate(split):
        mine = [
            leaf(
                t * (rank == 0) if i in additive else take(t, dims, rule.sizes, parts),
                t.requires_grad,
            )
            for i, (t, dims) in enumerate(zip(inputs, rule.operands, strict=True))
        ]
        local_inputs.append(mine)
        local.append(call.local(rule, [t.clone() for t in mine], parts))
    for k, dims in enumerate(rule.results):
        if reduced:
            close(sum_of([results[k] for results in local]), whole[k], call)
            continue
        for parts, results in zip(split, local, strict=True):
            want = take(whole[k], dims, rule.sizes, parts)
            assert results[k].shape == want.shape, f"{results[k].shape} instead of {want.shape}"
            if call.values_matter:
                close(results[k], want, call)
    if call.has_gradient:
        check_gradients(
            call, rule, split, (inputs, whole), list(zip(local_inputs, local, strict=True))
        )


def check_gradients(
    call: Concrete,
    rule: Rule,
    split: Split,
    whole: tuple[Tensors, Tensors],
    local: list[tuple[Tensors, Tensors]],
) -> None:
    """Check that gradients of shards are parts of the full gradient, and add up to it elsewhere.

    If the results are Partial, each rank gets the full gradient of the result. If they are not
    sharded, each rank gets one term of it, like a grad-Partial tensor of
    `planner/contract/transitions.py`.

    Raises:
        AssertionError: the gradients differ.
    """
    used = split[0].keys()
    reduced = bool(used & (rule.sum | rule.lookup))
    additive = added_operands(rule, used) if reduced else set()
    upstream = [torch.randn_like(t) if has_numbers(t) else t for t in whole[1]]
    terms = [
        [u] * len(split) if reduced else term_of(u, dims, rule, split)
        for u, dims in zip(upstream, rule.results, strict=True)
    ]
    want = gradients_of(*whole, upstream)
    got = [
        gradients_of(
            *sides,
            [
                t[rank] if reduced else take(t[rank], dims, rule.sizes, split[rank])
                for t, dims in zip(terms, rule.results, strict=True)
            ],
        )
        for rank, sides in enumerate(local)
    ]
    for i, dims in enumerate(rule.operands):
        if want[i] is None:
            assert all(g[i] is None for g in got)
        elif i in additive:
            for g in got:
                close(g[i], want[i], call)
        else:
            total = torch.zeros_like(want[i])
            for g, parts in zip(got, split, strict=True):
                add_at(total, g[i], dims, rule.sizes, parts)
            close(total, want[i], call)


def term_of(upstream: torch.Tensor, dims: Dims, rule: Rule, split: Split) -> Tensors:
    """Return for each rank the gradient of a result where it is sharded, and a term elsewhere."""
    if not has_numbers(upstream):
        return [upstream] * len(split)
    mask = torch.zeros(upstream.shape, dtype=torch.bool)
    for d, expr in enumerate(dims):
        shape = [-1 if i == d else 1 for i in range(upstream.ndim)]
        mask = mask | covered(expr, rule.sizes, split[0]).view(shape)
    terms = [torch.randn_like(upstream) for _ in split[1:]]
    terms.append(upstream - sum(terms))
    return [torch.where(mask, upstream, t) for t in terms]


def gradients_of(inputs: Tensors, results: Tensors, upstream: Tensors) -> list:
    """Return the gradients of the inputs: None without a gradient, zeros for unused inputs."""
    pairs = [(r, u) for r, u in zip(results, upstream, strict=True) if r.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [r for r, _ in pairs],
        wanted,
        [u for _, u in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    of = dict(zip(map(id, wanted), found, strict=True))
    return [of.get(id(t)) for t in inputs]


def added_operands(rule: Rule, used: Iterable[str]) -> set[int]:
    """Return the operands that are added to a Partial sum: only one rank may hold them."""
    axes = [axes_of(dims) for dims in rule.operands]
    have = {i for i, a in enumerate(axes) if a & set(used)}
    return {i for g in rule.linear if g & have for i in g - have}


def axes_of(dims: Dims) -> set[str]:
    """Return the axes in the dims of a tensor."""
    return {a for e in dims for a in letters(e)}


def close(got: torch.Tensor, want: torch.Tensor, call: Concrete) -> None:
    """Check that two tensors are equal up to rounding.

    Raises:
        AssertionError: they differ.
    """
    single = any(t.dtype == torch.float32 for t in call.tensors + call.results)
    eps = (1e-4 if single else 1e-12) if has_numbers(want) else 0
    alike = got.shape == want.shape and got.dtype == want.dtype
    if alike and torch.allclose(got, want, rtol=eps, atol=eps, equal_nan=True):
        return  # several times as fast as what follows, which says where they differ
    torch.testing.assert_close(got, want, rtol=eps, atol=eps, equal_nan=True)


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def leaf(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Return a detached copy, which requires a gradient if it is `wanted` and possible."""
    return tensor.detach().clone().requires_grad_(wanted and has_numbers(tensor))


def sum_of(tensors: Tensors) -> torch.Tensor:
    """Return the sum of tensors in their dtype; for booleans, the count of true values."""
    total = torch.stack(tensors).sum(0)
    return total if tensors[0].dtype == torch.bool else total.to(tensors[0].dtype)
