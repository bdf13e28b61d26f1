"""From an exported FX program to the planner's `Graph`, node by node."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils._pytree import tree_leaves

from shardwright.planner import borders, origins
from shardwright.planner.graph import Border, Graph, Op, SizeArgument, Tensor, Use
from shardwright.rules.call import OpCall, Operand

IGNORED = {
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range_for_size",
}


def translate(program: ExportedProgram, module: nn.Module) -> Graph:
    """The `Graph` of an exported `module`, with a border for each marker of borders.py."""
    translator = _Translator(module)
    specs = {getattr(s.arg, "name", ""): s for s in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "placeholder" and _is_tensor(node):
            translator.placeholder(node, specs[node.name])
        elif node.op == "call_function":
            translator.call(node)
        elif node.op == "output":
            nodes = [n for n in tree_leaves(node.args) if _is_tensor(n)]
            translator.graph.outputs = [translator.name_of(n) for n in nodes]
    return translator.graph


def _is_tensor(node: object) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


class _Translator:
    """The graph so far, and which node stands for which tensor."""

    def __init__(self, module: nn.Module) -> None:
        self.graph = Graph()
        self.alias: dict[str, str] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self.identity = {n: id(p) for n, p in parameters.items()}
        self.trainable = {n for n, p in parameters.items() if p.is_floating_point()}
        self.stored: dict[int | str, str] = {}
        self.owners = {n.rpartition(".")[0] for n in parameters}

    def name_of(self, node: Any) -> str:
        """The tensor that `node` stands for."""
        name: str = node.name
        return self.alias.get(name, name)

    def add(self, name: str, value: torch.Tensor, differentiable: bool) -> None:
        """Put a tensor into the graph."""
        can = differentiable and value.dtype.is_floating_point
        shape = tuple(int(s) for s in value.shape)
        self.graph.tensors[name] = Tensor(name, shape, value.dtype, can)

    def placeholder(self, node: torch.fx.Node, spec: InputSpec) -> None:
        """A parameter, a buffer or an input."""
        value = node.meta["val"]
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            # The caller may want its gradient: of embeddings, of another module's output.
            self.add(node.name, value, spec.kind is InputKind.USER_INPUT)
            self.graph.inputs.append(node.name)
            return
        fqn = str(spec.target)
        key = self.identity.get(fqn, fqn)
        stored = self.stored.setdefault(key, node.name + ".stored")
        for name in (stored, node.name):
            self.add(name, value, fqn in self.trainable)
        self.graph.uses.append(Use(fqn, stored, node.name, spec.kind is InputKind.BUFFER))

    def call(self, node: torch.fx.Node) -> None:
        """An op, or a marker."""
        target: Any = node.target
        if target is operator.getitem:
            self.alias[node.name] = f"{self.name_of(node.args[0])}.{node.args[1]}"
            return
        known = isinstance(target, torch._ops.OpOverload)
        name = target._opname if known else getattr(target, "__name__", str(target))
        if name in IGNORED:
            return
        outputs = self.results(node)
        if name == borders.OP:
            module, side, slot = borders.read_tag(str(node.args[1]))
            source = self.name_of(node.args[0])
            self.graph.borders.append(
                Border(module, side, slot, source, outputs[0], module in self.owners)
            )
        elif name == origins.READ_OP:
            source, tensors, numbers = node.args
            for n, tensor in zip(numbers, tensors, strict=True):  # type: ignore[arg-type]
                self.graph.reads[n] = self.name_of(tensor)
            del self.graph.tensors[outputs[0]]
            self.alias[node.name] = self.name_of(source)
        elif name == origins.OP:
            source = self.name_of(node.args[0])
            self.graph.sizes += [
                SizeArgument(expression, source, dim, bound)
                for expression, dim, bound in origins.read_tag(str(node.args[1]))
            ]
            del self.graph.tensors[outputs[0]]
            self.alias[node.name] = source
        else:
            call, inputs = self.op_call(node, name, outputs)
            op = Op(node.name, call, tuple(inputs), tuple(outputs), *_place(node))
            self.graph.ops.append(op)

    def results(self, node: torch.fx.Node) -> list[str]:
        """Put the tensors that `node` makes into the graph and return their names."""
        value = node.meta.get("val")
        sources = [self.name_of(n) for n in node.all_input_nodes if _is_tensor(n)]
        differentiable = any(self.graph.tensors[n].differentiable for n in sources)
        several = isinstance(value, (tuple, list))
        names = []
        for i, result in enumerate(value if several else [value]):
            if isinstance(result, torch.Tensor):
                names.append(f"{node.name}.{i}" if several else node.name)
                self.add(names[-1], result, differentiable)
        return names

    def op_call(
        self, node: torch.fx.Node, name: str, outputs: list[str]
    ) -> tuple[OpCall, list[str]]:
        """The call as rules see it, and the tensors that go in."""
        inputs: list[str] = []

        def swap(arg: Any) -> Any:
            if _is_tensor(arg):
                inputs.append(self.name_of(arg))
                return Operand(len(inputs) - 1)
            if isinstance(arg, torch.fx.Node):
                return arg.meta.get("val")
            return [swap(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

        arguments = {k: swap(v) for k, v in named_arguments(node).items()}
        tensors = self.graph.tensors
        call = OpCall(
            op=name,
            arguments=arguments,
            operands=tuple(tensors[t].shape for t in inputs),
            results=tuple(tensors[t].shape for t in outputs),
            operand_dtypes=tuple(tensors[t].dtype for t in inputs),
            result_dtypes=tuple(tensors[t].dtype for t in outputs),
        )
        return call, inputs


def named_arguments(node: torch.fx.Node) -> Mapping[str, Any]:
    """The arguments of a call by their names in the op's schema, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    out: dict[str, Any] = {}
    for i, parameter in enumerate(schema.arguments):
        if i < len(node.args):
            out[parameter.name] = node.args[i]
        elif parameter.name in node.kwargs:
            out[parameter.name] = node.kwargs[parameter.name]
        elif parameter.has_default_value():
            out[parameter.name] = parameter.default_value
    return out


def _place(node: torch.fx.Node) -> tuple[str, str]:
    """Innermost module path and source line of a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = re.sub(r"@\d+", "", str(stack[-1][0])) if stack else ""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    frames = [f for f in frames if "/torch/" not in f[0] and "/shardwright/" not in f[0]]
    source = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""
    return module.removeprefix("L['self']."), source
