"""A plan as a change to transformers: a diff, and in words what a maintainer would ask.

For architectures that have no table there, or one that leaves much whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.proven import Model, Proven, proven
from shardwright.planner.exports.stock.source_patch import patch
from shardwright.planner.exports.stock.styles import BY_TORCH, COLUMN
from shardwright.planner.exports.stock.table import WHOLE
from shardwright.planner.exports.stock.to_transformers import by_class
from shardwright.planner.on_ranks.stock import Table
from shardwright.planner.problem.tp_plan import general


def emit(plan: Plan, model: Any = None, **how: Any) -> str:
    """A text in Markdown: the change, what it was measured to do, a script that measures it again.

    Args:
        plan: The plan.
        model: What it was made for, as `shardwright.plan` takes it.
        **how: `trust_remote_code`, and where a hub id leads, as `plan` takes them.

    Raises:
        PlanError: there is no table that is right, or one that holds no more than the plan; or the
            model's code is not part of transformers.
    """
    subject = Model.read(plan, model, **how)
    whole: Any = subject.whole
    if not type(whole).__module__.startswith("transformers.models."):
        raise PlanError(f"the code of {plan.model.architecture} is no part of transformers")
    found = proven(plan, subject, Table)
    stock: Mapping[str, str] = getattr(whole, "tp_plan", None) or {}
    if stock and set(stock) <= {k for k, s in found.table.items() if s != WHOLE}:
        raise PlanError(
            f"transformers has a table for {plan.model.architecture} that splits as much already"
        )
    base, head = by_class(found.table, whole)
    if isinstance(getattr(whole.base_model, "embed_tokens", None), nn.Embedding):
        base = {k: s for k, s in base.items() if (k, s) != ("embed_tokens", BY_TORCH)}  # implied
    notes = _notes(found, whole)
    prefix = f"{whole.base_model_prefix}."
    notes = {key.removeprefix(prefix): note for key, note in notes.items()}
    config, lost = type(whole.config), found.lost()
    changes = [(config, "base_model_tp_plan", base), (type(whole), "_tp_plan", head)]
    return _TEXT.format(
        architecture=plan.model.architecture,
        before="has no tensor parallel plan" if not stock else
               f"has a tensor parallel plan of {len(stock)} rules, which leaves more whole",
        name=config.__module__.split(".")[2],
        share=lost["bytes_a_rank"]["table"] / lost["bytes_a_rank"]["unsplit"],
        tp=plan.mesh["tp"],
        diff=patch(changes, notes),
        forward=lost["collectives_forward"]["table"],
        gathered=_GATHERED if notes else "",
        logits=found.ran.logits,
        gradients=found.ran.gradients,
        script=_script(found, whole),
        ranks=found.ranks,
    )  # fmt: skip


def _notes(found: Proven, model: nn.Module) -> dict[str, str]:
    """Why layers in blocks are split in memory only, by the key of their rule."""
    notes: dict[str, str] = {}
    for name, module in model.named_modules():
        style = found.table.get(general(name), "") if "*" in pattern(name) else ""
        if style == BY_TORCH and not isinstance(module, nn.Embedding):
            notes[general(name)] = f"gathered: a {type(module).__name__}"
        elif style == COLUMN[1]:
            counted = _counted(found.plan, name)
            notes[general(name)] = f"gathered: {f'uses {counted}' if counted else 'taken apart'}"
    return notes


def _counted(plan: Plan, name: str) -> str:
    """Integers that the code around a layer computes with, which the plan would make local."""
    while name := name.rpartition(".")[0]:
        spec = plan.module(name)
        if spec and spec.attributes:
            return ", ".join(sorted(spec.attributes))
    return ""


def _script(found: Proven, model: nn.Module) -> str:
    small: Any = found.model.small
    config = small.config.to_diff_dict()
    drop = {"architectures", "transformers_version", "dtype", "model_type"}
    kept = {k: v for k, v in config.items() if k not in drop}
    vocabulary = small.config.get_text_config().vocab_size
    inputs = ",\n    ".join(
        f"{name}={_value(value, vocabulary)}" for name, value in found.model.inputs.items()
    )
    experts: Any = getattr(model, "get_experts_implementation", dict)()
    return _SCRIPT.format(
        experts=_EXPERTS if "grouped_mm" in experts.values() else "",
        tolerance=found.ran.tolerance,
        cls=type(model).__name__,
        config=type(small.config).__name__,
        settings="".join(f'    "{k}": {_literal(v)},\n' for k, v in kept.items()),
        inputs=inputs,
        ranks=found.ranks,
    )


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _value(value: Any, vocabulary: int) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_floating_point():
        return f"torch.randn({tuple(value.shape)}, dtype=torch.float64)"
    return f"torch.randint({vocabulary}, {tuple(value.shape)})"


_GATHERED = """
Rules with a comment split a weight in memory only: what the layer makes is gathered, since the code
that takes it counts heads by a number of its own or takes it apart, or since no style is made for
such a layer. `embedding_rowwise` is used for the latter: it takes and gives whole tensors, and has
torch compute with DTensors in between. They cost an all-gather each; changing that code, or a style
for it, would save that.
"""

_TEXT = """# Add a tensor parallel plan for {architecture}

`{architecture}` {before}. With this one a rank holds {share:.0%} of the bytes at `tp_size={tp}`.

```diff
{diff}```

A forward pass takes {forward} collectives.
{gathered}
## How it was tested

On {ranks} gloo ranks on CPU, in float64: a small random model of the same structure, saved and read
with `from_pretrained(..., distributed_config=DistributedConfig(tp_size={ranks}))`, has the logits
of the unsplit model within {logits:.0e}, and each gradient within {gradients:.0e} of its largest
entry. The script below does that again. Not run: GPUs, real weights, `generate`, quantized weights;
run `pytest tests/models/{name} -k "tp_plan or tensor_parallel"` besides.

<details><summary>torchrun --nproc-per-node {ranks} check_tp.py</summary>

```python
{script}```

</details>
"""

_EXPERTS = """\
    model.set_experts_implementation("batched_mm")  # torch's grouped product has no float64
"""

_SCRIPT = """import tempfile

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import {cls}, {config}
from transformers.distributed import DistributedConfig

SETTINGS = {{
{settings}}}


def full(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def run(model):
{experts}    logits = model.eval()(**inputs).logits
    logits.sin().sum().backward()
    used = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    return full(logits), {{name: full(gradient) for name, gradient in used}}


dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = dict(
    {inputs},
)
whole = {cls}({config}(**SETTINGS)).double()
for parameter in whole.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
box = [tempfile.mkdtemp()]
dist.broadcast_object_list(box)
if dist.get_rank() == 0:
    whole.save_pretrained(box[0])
dist.barrier()
split = {cls}.from_pretrained(
    box[0], dtype=torch.float64, distributed_config=DistributedConfig(tp_size={ranks})
)
(want, gradients), (got, others) = run(whole), run(split)
torch.testing.assert_close(got, want, rtol=0, atol={tolerance:.0e})
assert gradients.keys() == others.keys()
largest = max(float(g.abs().max()) for g in gradients.values())
for name, gradient in gradients.items():
    atol = {tolerance:.0e} * max(float(gradient.abs().max()), 0.01 * largest)
    torch.testing.assert_close(others[name], gradient, rtol=0, atol=atol)
held = [sum(getattr(p, "_local_tensor", p).numel() for p in m.parameters()) for m in (split, whole)]
print(f"rank {{dist.get_rank()}}: equal, {{held[0] / held[1]:.0%}} of the parameters")
dist.destroy_process_group()
"""
