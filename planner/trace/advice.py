"""What to do instead, for errors of code that cannot be traced."""

from __future__ import annotations

ON_META = (
    "its forward must run on meta tensors, which have shapes but no data: give inputs with which "
    "it does, or change this line"
)
"""If the root does not run on meta."""
IN_A_MODULE = (
    "give example inputs with integers that have values, not on meta, and on which its forward "
    "runs, or move the code that depends on data into a submodule, which then stays replicated"
)
"""If the root's own code depends on data."""
NO_KERNEL = (
    "move the op into a submodule, which then stays replicated, or say which shapes it gives: "
    "torch.library.register_fake"
)
"""If an op has no kernel for meta."""
NESTED = (
    "it makes nested (jagged) tensors: give padded tensors and a mask, or make and use them in a "
    "module of its own, which then stays replicated"
)
"""If there are nested tensors."""

FOR_TEXTS = {
    "support the deepcopy protocol": "a forward cannot copy modules or parameters: make the copy "
    "in __init__, and write to it (with torch.no_grad(): p.copy_(q), for each parameter)",
    "does not require grad and does not have a grad_fn": "a forward cannot run backward() or "
    "torch.autograd.grad: take gradients outside of the model, or by torch.func.grad of a function "
    "that calls no modules",
    "_local_scalar_dense": "compute and index with tensors (buffer[(at + torch.arange(n)) "
    f"% size] = x); else {IN_A_MODULE}",
    "can't retain_grad": "a forward cannot keep gradients of what it computes: take them by "
    "register_full_backward_hook of a module, or h.register_hook(function)",
    "do not track version counter": "a forward cannot ask for the version of a tensor: compute "
    "anew what depends on it",
    "it changes what it is given, or keeps something": "let the module whose code depends on data "
    "return what it changes or keeps, and write it in the module around it",
    "it hands on what it is given": "let the module that depends on data return x.clone() in place "
    "of its input x (FakeQuantize: write x + (quantized - x).detach() in ops), or move it and the "
    "code around it into a submodule, which then stays replicated",
}
"""Advice for errors whose text contains the key."""


def on(text: str, needs_data: bool, needs_memory: bool) -> str:
    """Return the advice for an error of this `text`."""
    found = (advice for key, advice in FOR_TEXTS.items() if key in text)
    return next(found, IN_A_MODULE if needs_data else NO_KERNEL if needs_memory else ON_META)
