"""Trace a module on meta into an ATen graph in which every module border is a node.

`torch.export` runs the module's own Python code, so hooks can put two markers into the graph: one
where a tensor enters or leaves a module (`planner/borders.py`), and one where an integer that comes
from an attribute becomes a size (`planner/origins.py`). Markers are identities.
"""

from __future__ import annotations

import inspect
import operator
import re
import warnings
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind

from shardwright.errors import ModelError, ShardwrightError
from shardwright.rules.call import OpCall, Operand

from . import borders, origins
from .graph import Border, Graph, Op, SizeArgument, Tensor, Use

aten = torch.ops.aten

LEAVES = (
    aten.linear.default,
    aten.scaled_dot_product_attention.default,
    aten.embedding.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.group_norm.default,
    aten.cross_entropy_loss.default,
)
"""Ops that have a rule of their own and so are not decomposed."""

IGNORED = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Trace `module(*args, **kwargs)` without running it on data.

    Use distinct primes for sizes that vary at run time (batch, sequence), so that they can be told
    from sizes of the model.

    Raises:
        ModelError: the module cannot be exported; the message names the place.
    """
    return build_graph(export(module, args, kwargs), module)


def export(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedProgram:
    """Export with markers, decomposed to ATen but for LEAVES."""
    table = default_decompositions()
    for leaf in LEAVES:
        table.pop(leaf, None)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with borders.marked(module), origins.marked(module):
                program = torch.export.export(module, args, dict(kwargs), strict=False)
            return program.run_decompositions(table)
        except ShardwrightError:
            raise
        except Exception as error:
            text = str(error).strip().split("\n")[0][:300]
            raise ModelError(
                f"cannot trace {type(module).__name__}: {type(error).__name__}: {text}; "
                "give inputs with which its forward runs on meta tensors"
            ) from error


def build_graph(program: ExportedProgram, module: nn.Module) -> Graph:
    """Translate an exported program into a `Graph`."""
    graph = Graph()
    alias: dict[str, str] = {}
    constants = program.constants
    held: dict[str, torch.Tensor] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}  # type: ignore[union-attr]
    trainable = {n for n, p in module.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    identity = {n: id(p) for n, p in module.named_parameters(remove_duplicate=False)}
    first: dict[int, str] = {}
    owners = {n for n, m in module.named_modules() if any(True for _ in m.parameters(recurse=False))}

    def add(name: str, value: torch.Tensor, differentiable: bool) -> None:
        shape = tuple(int(s) for s in value.shape)
        can = differentiable and value.dtype.is_floating_point
        graph.tensors[name] = Tensor(name, shape, value.dtype, can)

    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            if not isinstance(value, torch.Tensor):
                continue
            spec = specs[node.name]
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                fqn, is_buffer = str(spec.target), spec.kind is InputKind.BUFFER
                stored = first.setdefault(identity.get(fqn, -len(first) - 1), node.name + ".stored")
                add(stored, value, fqn in trainable)
                add(node.name, value, fqn in trainable)
                graph.uses.append(Use(fqn, stored, node.name, is_buffer))
            else:
                add(node.name, value, False)
                graph.inputs.append(node.name)
                if spec.kind is InputKind.CONSTANT_TENSOR and spec.target in constants:
                    held[node.name] = constants[spec.target]
        elif node.op == "call_function":
            _add_node(graph, node, value, alias, held, add, owners)
        elif node.op == "output":
            flat = torch.utils._pytree.tree_leaves(node.args)
            graph.outputs = [alias.get(n.name, n.name) for n in flat if isinstance(n, torch.fx.Node)
                             and isinstance(n.meta.get("val"), torch.Tensor)]
    _read_own_alias(graph)
    graph.pinned = set(origins.PINNED)
    graph.carried = _carried(graph, module)
    _prune_borders(graph)
    _name_literals(graph)
    if "labels" in inspect.signature(module.forward).parameters:
        graph.logits = _logits(graph)
    return graph


def _add_node(graph: Graph, node: torch.fx.Node, value: Any, alias: dict[str, str],
              held: Mapping[str, torch.Tensor], add: Any, owners: Set[str]) -> None:
    if node.target is operator.getitem:
        alias[node.name] = f"{alias.get(node.args[0].name, node.args[0].name)}.{node.args[1]}"  # type: ignore[union-attr]
        return
    target: Any = node.target
    name = target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    if name in IGNORED:
        return
    sources = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    differentiable = any(graph.tensors[alias.get(n.name, n.name)].differentiable for n in sources)
    results = value if isinstance(value, (tuple, list)) else [value]
    outputs = []
    for i, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            out = f"{node.name}.{i}" if isinstance(value, (tuple, list)) else node.name
            add(out, result, differentiable)
            outputs.append(out)
    if name == borders.OP and isinstance(target, torch._ops.OpOverload):
        source = alias.get(node.args[0].name, node.args[0].name)  # type: ignore[union-attr]
        module, side, slot = borders.read_tag(str(node.args[1]))
        graph.borders.append(Border(module, side, slot, source, outputs[0], module in owners))
        return
    if name == origins.OP:
        source = alias.get(node.args[0].name, node.args[0].name)  # type: ignore[union-attr]
        for expression, dim, bound in origins.read_tag(str(node.args[1])):
            graph.sizes.append(SizeArgument(expression, source, dim, bound))
        del graph.tensors[outputs[0]]
        alias[node.name] = source
        return
    call, inputs = _op_call(node, name, alias, graph, outputs, held)
    graph.ops.append(Op(node.name, call, tuple(inputs), tuple(outputs), *_place(node)))


def _op_call(node: torch.fx.Node, name: str, alias: Mapping[str, str], graph: Graph, outputs: list[str],
             held: Mapping[str, torch.Tensor]) -> tuple[OpCall, list[str]]:
    inputs: list[str] = []

    def swap(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            if not isinstance(arg.meta.get("val"), torch.Tensor):
                return arg.meta.get("val")
            inputs.append(alias.get(arg.name, arg.name))
            return Operand(len(inputs) - 1)
        if isinstance(arg, (list, tuple)):
            return [swap(a) for a in arg]
        return arg

    schema = getattr(node.target, "_schema", None)
    arguments: dict[str, Any] = {}
    if schema is None:
        arguments = {str(i): swap(a) for i, a in enumerate(node.args)} | {k: swap(v) for k, v in node.kwargs.items()}
    else:
        for i, parameter in enumerate(schema.arguments):
            if i < len(node.args):
                arguments[parameter.name] = swap(node.args[i])
            elif parameter.name in node.kwargs:
                arguments[parameter.name] = swap(node.kwargs[parameter.name])
            elif parameter.has_default_value():
                arguments[parameter.name] = parameter.default_value
    tensors = graph.tensors
    return OpCall(
        op=name,
        arguments=arguments,
        operands=tuple(tensors[t].shape for t in inputs),
        results=tuple(tensors[t].shape for t in outputs),
        operand_dtypes=tuple(tensors[t].dtype for t in inputs),
        result_dtypes=tuple(tensors[t].dtype for t in outputs),
        constants={i: held[t] for i, t in enumerate(inputs) if t in held},
    ), inputs


def _place(node: torch.fx.Node) -> tuple[str, str]:
    """Innermost module path and source line of a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = re.sub(r"@\d+", "", str(stack[-1][0])) if stack else ""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    frames = [f for f in frames if "/torch/" not in f[0] and "/shardwright/" not in f[0]]
    return module.removeprefix("L['self']."), (f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else "")


def _read_own_alias(graph: Graph) -> None:
    """Export reads tied parameters by any of their names: let each module read its own."""
    twins: dict[str, dict[str, str]] = {}
    for use in graph.uses:
        twins.setdefault(use.stored, {})[use.fqn.rpartition(".")[0]] = use.used
    stored = {u.used: u.stored for u in graph.uses}
    for i, op in enumerate(graph.ops):
        own = [twins[stored[n]].get(op.module, n) if n in stored else n for n in op.inputs]
        if own != list(op.inputs):
            graph.ops[i] = replace(op, inputs=tuple(own))


def _carried(graph: Graph, root: nn.Module) -> set[str]:
    """Tensors between blocks of a `ModuleList` in which each block takes what the one before gives."""
    leaves, enters = {}, []
    for border in graph.borders:
        stack, _, number = border.module.rpartition(".")
        if not number.isdigit() or not isinstance(root.get_submodule(stack), nn.ModuleList):
            continue
        if not any(True for _ in root.get_submodule(border.module).children()):
            continue
        if border.side == "out":
            leaves[border.target] = (stack, int(number))
        elif graph.tensors[border.source].differentiable:
            enters.append((border, stack, int(number)))
    out: set[str] = set()
    chains = set()
    for border, stack, number in enters:
        if leaves.get(border.source) == (stack, number - 1):
            out.add(border.source)
            chains.add((stack, border.slot))
    # The first block's input and the last block's output are of the same kind.
    out |= {b.source for b, stack, number in enters if number == 0 and (stack, b.slot) in chains}
    stacks = {stack for stack, _ in chains}
    last = {stack: max(n for s, n in leaves.values() if s == stack) for stack in stacks}
    slots = {b.slot for b in graph.borders if b.target in out}
    out |= {b.target for b in graph.borders if b.target in leaves and b.slot in slots
            and leaves[b.target][0] in stacks and leaves[b.target][1] == last[leaves[b.target][0]]}
    return out


def _prune_borders(graph: Graph) -> None:
    """Of borders in a row with nothing between them keep the first: one reshard there is enough."""
    consumers: dict[str, int] = {}
    for op in graph.ops:
        for name in op.inputs:
            consumers[name] = consumers.get(name, 0) + 1
    for border in graph.borders:
        consumers[border.source] = consumers.get(border.source, 0) + 1
    for name in graph.outputs:
        consumers[name] = consumers.get(name, 0) + 1
    made_by_border = {b.target for b in graph.borders}
    rename: dict[str, str] = {}
    kept = []
    for border in graph.borders:
        source = rename.get(border.source, border.source)
        if source in made_by_border and consumers[border.source] == 1:
            rename[border.target] = source
            consumers[source] = consumers.get(border.target, 0)
            del graph.tensors[border.target]
        else:
            kept.append(replace(border, source=source))
    graph.watched = [(b.module, b.slot, rename.get(b.target, b.target)) for b in graph.borders if b.side == "out"]
    graph.borders = kept
    graph.ops = [replace(op, inputs=tuple(rename.get(n, n) for n in op.inputs)) for op in graph.ops]
    graph.outputs = [rename.get(n, n) for n in graph.outputs]
    graph.carried = {rename.get(n, n) for n in graph.carried}
    graph.sizes = [replace(s, tensor=rename.get(s.tensor, s.tensor)) for s in graph.sizes]


def _logits(graph: Graph) -> set[str]:
    """The outputs, and what they are made of by ops that keep shape and have one operand that counts."""
    producers = graph.producers()
    origin = {b.target: b.source for b in graph.borders}
    out: set[str] = set()
    queue = list(graph.outputs)
    while queue:
        name = queue.pop()
        out.add(name)
        op = producers.get(name)
        if name in origin:
            queue.append(origin[name])
        elif op is not None:
            sources = [n for n in op.inputs if graph.tensors[n].differentiable]
            if len(sources) == 1 and graph.tensors[sources[0]].shape == graph.tensors[name].shape:
                queue.append(sources[0])
    return out


def _name_literals(graph: Graph) -> None:
    """Find the slice bounds that come neither from an attribute nor from a size read off a tensor."""
    producers = graph.producers()
    known: set[tuple[str, str]] = set()
    for size in graph.sizes:
        op = slice_of(producers, size)
        if op is not None:
            known.add((op.name, size.bound))
    for i, op in enumerate(graph.ops):
        if op.call.op in ("slice", "select"):
            bounds = ("index",) if op.call.op == "select" else ("start", "stop")
            graph.ops[i] = replace(op, literals=frozenset(b for b in bounds if (op.name, b) not in known))


def slice_of(producers: Mapping[str, Op], size: SizeArgument) -> Op | None:
    """The slice or select that `size` is a bound of; one indexing expression makes several in a row."""
    if not size.bound:
        return None
    value = origins.evaluate(size.expression, {})
    key = {"start": "start", "stop": "end", "index": "index"}[size.bound]
    op = producers.get(size.tensor)
    while op is not None and op.call.op in ("slice", "select", "unsqueeze"):
        if op.call.op != "unsqueeze" and key in op.call.arguments and op.call.arguments[key] == value:
            return op
        op = producers.get(op.inputs[0])
    return None
