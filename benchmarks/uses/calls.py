"""Calls of a model, and gradients of what it returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.compare import weighing_loss
from benchmarks.uses.subject import Subject, Unfit, base, blocks, padding, tensors, use, weigh
from benchmarks.zoo_case import CASTS
from shardwright.runtime.state.gather import full_tensors


@use()
def forward_and_gradients(s: Subject) -> Any:
    """As everybody does."""
    out = s.call()
    weighing_loss(out).backward() if s.inputs else weigh(out).backward()
    return out


@use()
def every_output(s: Subject) -> Any:
    """A loss of all outputs at once."""
    out = s.call()
    weigh(out).backward()
    return out


@use()
def hidden_states(s: Subject) -> Any:
    """All hidden states, and a loss of all of them."""
    s.known()
    out = s.call(output_hidden_states=True)
    found = {name: value for name, value in out.items() if name.endswith("hidden_states")}
    weigh(found).backward()
    return found


@use()
def last_hidden_state(s: Subject) -> Any:
    """One hidden state, as embeddings and distillation take it."""
    s.known()
    out = s.call(output_hidden_states=True)
    state = next(out[n] for n in ("hidden_states", "decoder_hidden_states") if n in out)[-1]
    state.pow(2).sum().backward()
    return state


@use()
def middle_hidden_state_and_loss(s: Subject) -> Any:
    """A loss of a hidden state added to that of the logits."""
    s.known()
    out = s.call(output_hidden_states=True)
    (out.hidden_states[1].pow(2).sum() + weighing_loss(out)).backward()
    return [out.logits, out.hidden_states[1]]


@use(may_refuse=True)
def attentions(s: Subject) -> Any:
    """Attention weights as outputs."""
    s.known()
    out = s.call(output_attentions=True)
    found = [a for a in out.attentions or () if a is not None]
    if not found:
        raise Unfit
    weigh(found).backward()
    return found


@use()
def base_model_alone(s: Subject) -> Any:
    """The model without its head, called from outside."""
    s.known()
    out = base(s.model)(*s.args, **s.inputs)
    weigh(out[0]).backward()
    return out[0]


@use()
def base_model_with_hidden_states(s: Subject) -> Any:
    """The same with all hidden states."""
    s.known()
    out = base(s.model)(*s.args, **s.inputs, output_hidden_states=True)
    found = {name: value for name, value in out.items() if name.endswith("hidden_states")}
    weigh(found).backward()
    return found


@use()
def each_block_alone(s: Subject) -> Any:
    """Each block called from outside with what the whole model gives it, and gradients of that."""
    wanted = {name: [_learns(a) for a in args] for name, (args, _) in _given_to_blocks(s).items()}
    with torch.no_grad():
        calls = _given_to_blocks(s)
    outs = []
    for name, (args, kwargs) in calls.items():
        given = [
            a.detach().clone().requires_grad_(learns) if isinstance(a, Tensor) else a
            for a, learns in zip(args, wanted[name], strict=True)
        ]
        out = s.model.get_submodule(name)(*given, **kwargs)
        first = tensors(out)[0]
        first.pow(2).sum().backward()
        outs += [first, *(a.grad for a in given if isinstance(a, Tensor) and a.grad is not None)]
    return outs


def _given_to_blocks(s: Subject) -> dict[str, Any]:
    """What each block gets in its first call by the whole model: by position, and by name."""
    calls: dict[str, Any] = {}
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls.setdefault(name, (args, kwargs)) and None,
            with_kwargs=True,
        )
        for name, block in blocks(s.whole)
        if block is not None
    ]
    if not hooks:
        raise Unfit
    s.whole(*s.args, **s.inputs)
    for hook in hooks:
        hook.remove()
    return calls


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@use()
def embeddings_alone(s: Subject) -> Any:
    """The table of tokens called from outside."""
    out = s.text().get_input_embeddings()(s.ids)
    weigh(out).backward()
    return out


@use()
def head_alone(s: Subject) -> Any:
    """The head on a hidden state of the user's own."""
    head = s.text().get_output_embeddings()
    width = s.whole.get_output_embeddings().weight.shape[1]
    given = torch.linspace(-1, 1, 6 * width, dtype=next(s.whole.parameters()).dtype)
    given = given.view(2, 3, width).requires_grad_()
    out = head(given)
    weigh(out).backward()
    return [out, given.grad]


@use(tolerance=CASTS)
def labels(s: Subject) -> Any:
    """Loss by the model, and its logits."""
    s.text()
    out = s.call(labels=s.ids)
    out.loss.backward()
    return [out.loss, out.logits]


@use(tolerance=CASTS)
def ignored_labels(s: Subject) -> Any:
    """Most labels left out."""
    s.text()
    marked = s.ids.clone()
    marked[:, : s.ids.shape[1] - 3] = -100
    out = s.call(labels=marked)
    out.loss.backward()
    return out.loss


@use(tolerance=CASTS)
def class_labels(s: Subject) -> Any:
    """Loss by a classifier."""
    s.known()
    batch = next(v for v in s.inputs.values() if isinstance(v, Tensor)).shape[0]
    out = s.call(labels=torch.arange(batch) % s.whole.config.num_labels)
    out.loss.backward()
    return [out.loss, out.logits]


@use(tolerance=CASTS)
def own_loss_of_some_logits(s: Subject) -> Any:
    """A loss by the user over some positions."""
    s.text()
    logits = s.call().logits[:, 2:-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), s.ids[:, 3:].flatten())
    loss.backward()
    return [logits, loss]


@use()
def tuple_outputs(s: Subject) -> Any:
    """`return_dict=False`."""
    s.known()
    out = s.call(return_dict=False)
    weigh(out[0]).backward()
    return out[0]


@use()
def inputs_embeds(s: Subject) -> Any:
    """Embeddings given by the user, and their gradients."""
    s.text()
    table = s.whole.get_input_embeddings().weight
    given = table.detach()[s.ids].clone().requires_grad_()
    rest = {k: v for k, v in s.inputs.items() if k != "input_ids"}
    out = s.model(inputs_embeds=given, **rest)
    weighing_loss(out).backward()
    return [out.logits, given.grad]


@use()
def padding_on_the_left(s: Subject) -> Any:
    """A mask as tokenizers give it for generation."""
    s.text()
    more = padding(s, "left")
    logits = s.call(**more).logits[more["attention_mask"].bool()]
    weigh(logits).backward()
    return logits


@use()
def padding_on_the_right(s: Subject) -> Any:
    """A mask as tokenizers give it for training."""
    s.text()
    more = padding(s, "right")
    logits = s.call(**more).logits[more["attention_mask"].bool()]
    weigh(logits).backward()
    return logits


@use()
def position_ids(s: Subject) -> Any:
    """Positions by the user."""
    s.text()
    places = torch.arange(s.ids.shape[1]).flip(0).expand_as(s.ids).contiguous()
    return s.call(position_ids=places).logits


@use()
def last_logits_only(s: Subject) -> Any:
    """`logits_to_keep`."""
    s.text()
    return s.call(logits_to_keep=2).logits


@use()
def other_batch_and_length(s: Subject) -> Any:
    """Another shape than that of planning or of a call before."""
    s.text()
    s.call()
    out = s.call(input_ids=s.ids.repeat(2, 1)[:3, :7])
    weighing_loss(out).backward()
    return out.logits


@use()
def without_gradients(s: Subject) -> Any:
    """`torch.no_grad`, then `torch.inference_mode`."""
    with torch.no_grad():
        first = tensors(s.call())
    with torch.inference_mode():
        return [first, [t.clone() for t in tensors(s.call())]]


@use()
def backward_twice(s: Subject) -> Any:
    """`retain_graph`, and two losses one after the other."""
    out = tensors(s.call())[0]
    out.sum().backward(retain_graph=True)
    out.pow(2).sum().backward()
    return out


@use()
def gradients_by_autograd_grad(s: Subject) -> Any:
    """`torch.autograd.grad` for some parameters; by name, whole."""
    named = dict(list(s.model.named_parameters())[:6])
    found = torch.autograd.grad(weigh(s.call()), list(named.values()), allow_unused=True)
    grads = {n: g for n, g in zip(named, found, strict=True) if g is not None}
    return full_tensors(s.model, grads)


@use(may_refuse=True)
def functional_gradients(s: Subject) -> Any:
    """`torch.func`."""
    named = {n: p.detach() for n, p in s.model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return weigh(torch.func.functional_call(s.model, parameters, s.args, dict(s.inputs)))

    return full_tensors(s.model, torch.func.grad(loss)(named))
