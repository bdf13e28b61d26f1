"""Layers made by `apply_module` compute what whole ones do, gradients included."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportReturnType=false

import copy

import pytest
import torch
from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ModulePlan, ParameterPlan, Placed, Redistribution
from shardwright.runtime.boundary.module_boundary import placements
from shardwright.runtime.boundary.root import wrap_root
from shardwright.runtime.communication.audit import count_collectives, counts, total_bytes
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.layers import (
    LocalModule,
    apply_module,
)
from shardwright.runtime.modules.parameters import LocalTensors
from shardwright.runtime.state.gather import full_tensors
from tests.ranks import run_ranks

F64 = torch.float64


def plan(
    layer="LocalModule", parameters=None, inputs=(), outputs=(), attributes=None
) -> ModulePlan:
    """A ModulePlan in short: parameters name -> placement or (placement, use)."""
    entries = {}
    for name, entry in (parameters or {}).items():
        placement, use = entry if isinstance(entry, tuple) else (entry, None)
        entries[name] = ParameterPlan(placement=placement, use=use)
    return ModulePlan(
        layer=layer,
        parameters=entries,
        inputs=[Redistribution(slot=s, source=a, target=b) for s, a, b in inputs],
        outputs=[Redistribution(slot=s, source=a, target=b) for s, a, b in outputs],
        attributes=attributes or {},
    )


def column(out: int, inp: int, input_name="input") -> ModulePlan:
    return plan(
        "ColumnParallelLinear",
        {"weight": f"{out}@tp, {inp}", "bias": f"{out}@tp"},
        [(input_name, f"?, {inp}", f"?, {inp} | grad-partial tp")],
    )


def row(out: int, inp: int) -> ModulePlan:
    return plan(
        "RowParallelLinear",
        {"weight": f"{out}, {inp}@tp", "bias": (f"{out}", f"{out} | partial tp")},
        outputs=[("", f"?, {out} | partial tp", f"?, {out}")],
    )


class Mlp(nn.Module):
    def __init__(self, width=6, hidden=10):
        super().__init__()
        self.up, self.down = (
            nn.Linear(width, hidden, dtype=F64),
            nn.Linear(hidden, width, dtype=F64),
        )

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def apply(model: nn.Module, specs: dict[str, ModulePlan], mesh: Mesh, **more) -> nn.Module:
    """A split copy of `model`."""
    model, tensors = copy.deepcopy(model), LocalTensors()
    for name, spec in specs.items():
        apply_module(model.get_submodule(name), spec, mesh, tensors=tensors, path=name, **more)
    tensors.check_ties(model)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters()}


def assert_same(model, specs, x, ranks=(2, 3), **more) -> None:
    """Outputs, input gradient, parameter gradients: split equals whole."""
    x = x.clone().requires_grad_(x.is_floating_point())
    whole = copy.deepcopy(model)
    out = whole(x)
    out.backward(seed := torch.randn_like(out))

    def work(mesh):
        split = apply(model, specs, mesh, **more)
        mine = x.detach().clone().requires_grad_(x.requires_grad)
        got = split(mine)
        got.backward(seed)
        torch.testing.assert_close(got, out)
        if x.requires_grad:
            torch.testing.assert_close(mine.grad, x.grad)
        grads = full_tensors(split, gradients(split))
        for name, grad in gradients(whole).items():
            torch.testing.assert_close(grads[name], grad, msg=lambda m, n=name: f"{n}: {m}")
        values = full_tensors(split, dict(split.named_parameters()))
        for name, value in whole.named_parameters():
            assert torch.equal(values[name], value)
        return split

    for n in ranks:
        run_ranks(n, work)


def test_mlp_equals_the_whole_with_one_all_reduce_each_way():
    model, x = Mlp(), torch.randn(4, 6, dtype=F64)
    specs = {"up": column(10, 6), "down": row(6, 10)}
    assert_same(model, specs, x, ranks=(2, 3, 4))

    def work(mesh):
        split = apply(model, specs, mesh)
        with count_collectives() as forward:
            out = split(x.clone().requires_grad_())
        with count_collectives() as backward:
            out.sum().backward()
        return counts(forward), counts(backward), total_bytes(forward + backward)

    one = {"all_reduce": 1}
    assert run_ranks(2, work) == [(one, one, {"all_reduce": 2 * 4 * 6 * 8})] * 2


@pytest.mark.parametrize("padding", [None, 0, 5, 12, -1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_embedding_and_padding(padding, ranks):
    torch.manual_seed(0)
    whole = nn.Embedding(13, 4, padding, dtype=F64)
    ids = torch.tensor([0, 3, 5, 12, 6, 7, 1, 12])
    whole(ids).pow(2).sum().backward()

    def work(mesh):
        layer = apply(whole, {"": vocab("13@tp", 4)}, mesh)
        assert layer.padding_idx == whole.padding_idx
        out = layer(ids)
        torch.testing.assert_close(out, whole(ids))
        out.pow(2).sum().backward()
        torch.testing.assert_close(
            full_tensors(layer, gradients(layer))["weight"], whole.weight.grad
        )
        for bad in (13, -1):
            with pytest.raises(IndexError):
                layer(torch.tensor([bad]))

    run_ranks(ranks, work)


def vocab(rows: str, width: int) -> ModulePlan:
    size = parse(rows).shape[0]
    assert size
    return plan(
        "VocabParallelEmbedding",
        {"weight": f"{rows}, {width}"},
        outputs=[("", f"?, {width} | partial tp", f"?, {width}")],
    )


class Scaled(nn.Embedding):
    """Gemma's way: the plain lookup, then a scale."""

    def forward(self, input):
        return super().forward(input) * 3.0


class OwnLookup(nn.Embedding):
    def forward(self, input):
        return nn.functional.embedding(input, self.weight)


@pytest.mark.parametrize("cls", [nn.Embedding, Scaled])
@pytest.mark.parametrize("rows", ["11@tp", "7@tp + 4@tp", "2@tp*3 + 5@tp"])
def test_embedding_subclasses_and_strided_rows(cls, rows):
    model = nn.Sequential(cls(11, 4, padding_idx=8, dtype=F64))
    assert_same(model, {"0": vocab(rows, 4)}, torch.tensor([0, 10, 5, 8, 6, 7]))
    split = apply(model, {"0": vocab(rows, 4)}, Mesh.shape_only({"tp": (0, 2)}))
    assert isinstance(split[0], cls)


def test_embeddings_that_cannot_be_split_by_rows():
    mesh = Mesh.shape_only({"tp": (0, 2)})
    with pytest.raises(PlanError, match="computes by itself what VocabParallelEmbedding"):
        apply_module(OwnLookup(6, 2), vocab("6@tp", 2), mesh)
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(PlanError, match=next(iter(option))):
            apply_module(nn.Embedding(6, 2, **option), vocab("6@tp", 2), mesh)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4, dtype=F64), nn.Linear(4, 11, False, dtype=F64)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


HEAD = plan(
    "ColumnParallelLinear",
    {"weight": "11@tp, 4"},
    [("input", "?, 4", "?, 4 | grad-partial tp")],
    [("", "?, 11@tp", "?, 11")],
)


def test_tied_weights_stay_tied():
    assert_same(Tied(), {"embed": vocab("11@tp", 4), "head": HEAD}, torch.tensor([1, 10, 3]))
    mesh = Mesh.shape_only({"tp": (1, 2)})
    split = apply(Tied(), {"embed": vocab("11@tp", 4), "head": HEAD}, mesh)
    assert split.embed.weight is split.head.weight
    assert len(list(split.parameters())) == 1 and split.head.weight.shape == (5, 4)
    with pytest.raises(
        PlanError, match=r"'head.weight' is tied to a parameter that the plan splits"
    ):
        apply(Tied(), {"embed": vocab("11@tp", 4)}, mesh)
    other = HEAD.model_copy(update={"parameters": {"weight": ParameterPlan(placement="11, 4@tp")}})
    with pytest.raises(PlanError, match=r"tied to a parameter laid out as '11@tp, 4'"):
        apply(Tied(), {"embed": vocab("11@tp", 4), "head": other}, mesh)


class Attention(nn.Module):
    """gpt2's way: one Conv1D for q|k|v (weight [in, out]), here with one k and v for all heads."""

    def __init__(self, heads=4, width=8):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.config = type("Config", (), {"num_attention_heads": heads, "other": 1})()
        self.num_heads, self.head_dim = heads, width // heads
        self.split = (width, self.head_dim, self.head_dim)
        self.qkv = Conv1D(width + 2 * self.head_dim, width).double()
        self.norm = nn.LayerNorm(self.head_dim, dtype=F64)
        self.out = Conv1D(width, width).double()
        nn.init.normal_(self.qkv.bias)

    def forward(self, hidden_states, *, scale=1.0):
        n, d = hidden_states.shape[0], self.head_dim
        q, k, v = self.qkv(hidden_states).split(self.split, -1)
        q = self.norm(q.view(n, self.config.num_attention_heads, d).transpose(0, 1))
        scores = q @ k.T * scale
        return self.out(
            (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, self.num_heads * d)
        ), None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return x + self.attn(hidden_states=x)[0]


def test_fused_projection_mixed_shards_attributes_and_norm_gradient():
    qkv = "4@tp*2 + 2 + 2"
    specs = {
        "attn.qkv": plan(
            parameters={
                "weight": (f"8, {qkv}", f"8, {qkv} | grad-partial tp"),
                "bias": (qkv, f"{qkv} | grad-partial tp"),
            },
            attributes={"nf": qkv},
        ),
        "attn.norm": plan(
            parameters={n: ("2", "2 | grad-partial tp") for n in ("weight", "bias")},
        ),
        "attn.out": plan(
            parameters={"weight": "4@tp*2, 8", "bias": ("8", "8 | partial tp")},
            outputs=[("", "?, 8 | partial tp", "?, 8")],
        ),
        "attn": plan(
            inputs=[("hidden_states", "?, 8", "?, 8 | grad-partial tp")],
            attributes={
                "num_heads": "4@tp",
                "config.num_attention_heads": "4@tp",
                "split.0": "4@tp*2",
            },
        ),
    }
    model = Block()
    assert_same(model, specs, torch.randn(5, 8, dtype=F64), ranks=(2, 4))
    split = apply(model, specs, Mesh.shape_only({"tp": (0, 2)}))
    assert split.attn.config.num_attention_heads == 2 and split.attn.config.other == 1
    assert model.attn.config.num_attention_heads == 4
    assert split.attn.split == (4, 2, 2)
    assert set(split.state_dict()) == set(model.state_dict())
    wrong = plan(attributes={"num_heads": "6@tp"})
    with pytest.raises(PlanError, match="'num_heads' is 4; the plan is for 6"):
        apply(model, {"attn": wrong}, Mesh.shape_only({"tp": (0, 2)}))


class Slots(nn.Module):
    def forward(self, a, b=None, *rest, c=None, **more):
        return {"sum": a + (0 if b is None else b[1]), "rest": rest, "c": c, "more": more}


def test_slots_by_name_and_position():
    change = ("4", "4@tp")
    slots = ["a", "b.1", "*0", "c", "d.x"]
    spec = plan(
        inputs=[(s, *change) for s in slots], outputs=[("sum", "4@tp", "4"), ("none.0", "4", "4")]
    )
    mesh = Mesh.shape_only({"tp": (0, 2)})
    module = Slots()
    apply_module(module, spec, mesh)
    x = torch.arange(4.0)
    by_position = module(x, (0, x), x, c=x, d={"x": x})
    assert by_position["sum"].shape == (4,) and by_position["rest"][0].shape == (2,)
    assert by_position["c"].shape == (2,) and by_position["more"]["d"]["x"].shape == (2,)
    by_name = module(b=[0, x], a=x)
    assert by_name["sum"].shape == (4,) and by_name["c"] is None
    assert module(a=x)["sum"].shape == (4,)
    with pytest.raises(PlanError, match="tensor 'a' of '': expected a tensor, found str"):
        module("no")
    with pytest.raises(PlanError, match=r"should have shape \[4\] here, not \[5\]"):
        module(torch.zeros(5))


def test_model_output_slots():
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Model(nn.Module):
        def forward(self, x, return_dict=True):
            return BaseModelOutputWithPast(last_hidden_state=x) if return_dict else (x,)

    module = Model()
    spec = plan(outputs=[("last_hidden_state", "4", "4@tp"), ("hidden_states.1", "4", "4@tp")])
    apply_module(module, spec, Mesh.shape_only({"tp": (0, 2)}))
    out = module(torch.zeros(4))
    assert out.last_hidden_state.shape == (2,) and isinstance(out, BaseModelOutputWithPast)
    with pytest.raises(PlanError, match="return_dict=True"):
        module(torch.zeros(4), return_dict=False)


def test_parameters_are_leaves_of_local_shape():
    mesh = Mesh.shape_only({"tp": (1, 2)})
    layer = nn.Linear(4, 6)
    layer.weight.requires_grad_(False)
    layer.weight.mark = "kept"
    apply_module(layer, column(6, 4), mesh)
    assert layer.weight.shape == (3, 4) and not layer.weight.requires_grad
    assert layer.weight.mark == "kept" and layer.weight.is_leaf
    assert layer.weight.shardwright_placement == parse("6@tp, 4")
    assert (layer.in_features, layer.out_features) == (4, 3)
    assert repr(layer).startswith(
        "ColumnParallelLinear(in_features=4, out_features=3, bias=True, weight: [3, 4] of [6, 4]"
    )
    assert placements(layer) == {"weight": parse("6@tp, 4"), "bias": parse("6@tp")}
    row_ = nn.Linear(6, 4, device="meta")
    apply_module(row_, row(4, 6), mesh)
    assert dict(row_.named_parameters())["bias"].is_leaf and row_.weight.is_meta
    assert row_.weight.shape == (4, 3) and row_.bias.shape == (4,)
    assert row_(torch.empty(5, 3, device="meta")).shape == (5, 4)


def test_a_split_model_can_be_copied_cast_and_loaded():
    def work(mesh):
        split = apply(Mlp(), {"up": column(10, 6), "down": row(6, 10)}, mesh)
        other = copy.deepcopy(split).float()
        other.load_state_dict(split.state_dict())
        assert other.down.weight is not split.down.weight
        return other(torch.ones(2, 6)).dtype

    assert run_ranks(2, work) == [torch.float32] * 2


def test_what_apply_module_refuses():
    mesh = Mesh.shape_only({"tp": (0, 2)})
    layer = nn.Linear(4, 6)
    apply_module(layer, column(6, 4), mesh, path="up")
    with pytest.raises(PlanError, match="'up' is split already"):
        apply_module(layer, column(6, 4), mesh, path="up")
    with pytest.raises(
        PlanError, match=r"'up.weight' has shape \[4, 4\]; the plan is for \[6, 4\]"
    ):
        apply_module(nn.Linear(4, 4), column(6, 4), mesh, path="up")
    with pytest.raises(
        PlanError, match="'up' is a LayerNorm, which cannot become a ColumnParallel"
    ):
        apply_module(nn.LayerNorm(4), column(6, 4), mesh, path="up")
    with pytest.raises(PlanError, match="known are"):
        apply_module(nn.Linear(4, 4), plan("Magic"), mesh)
    with pytest.raises(PlanError, match="splits 'bias', which the model does not have"):
        apply_module(nn.Linear(4, 6, bias=False), column(6, 4), mesh)
    with pytest.raises(PlanError, match="mesh dim 'tp'; the mesh has: dp"):
        apply_module(nn.Linear(4, 6), column(6, 4), Mesh.shape_only({"dp": (0, 2)}))
    hooked = nn.Linear(4, 6)
    hooked.forward = hooked.forward
    with pytest.raises(PlanError, match="replaced on the instance"):
        apply_module(hooked, column(6, 4), mesh)


def test_full_tensors_checks_names_and_shapes():
    def work(mesh):
        split = apply(Mlp(), {"up": column(10, 6), "down": row(6, 10)}, mesh)
        step = torch.tensor(3.0)
        assert full_tensors(split, {"up.weight": step, "up.bias": None})["up.weight"] is step
        with pytest.raises(PlanError, match="no parameter or buffer 'up.wait'"):
            full_tensors(split, {"up.wait": step})
        with pytest.raises(PlanError, match=r"has shape \[10, 6\]; this rank's part has \[5, 6\]"):
            full_tensors(split, {"up.weight": torch.zeros(10, 6)})
        assert isinstance(split.up, LocalModule)

    run_ranks(2, work)


def test_a_module_alone_takes_other_sizes_of_what_is_not_split() -> None:
    """That of the trace need not be the model's: three images of 25 patches are 75 rows."""
    torch.manual_seed(0)
    whole = nn.Linear(8, 6).double()
    x = torch.randn(50, 8).double()
    spec = plan("ColumnParallelLinear", {"weight": "6@tp, 8", "bias": "6@tp"}).model_copy(
        update={
            "takes": [Placed(slot="input", placement="75, 8 | grad-partial tp")],
            "gives": [Placed(slot="", placement="75, 6@tp")],
        }
    )

    def rank(mesh: Mesh) -> None:
        local = nn.Sequential(copy.deepcopy(whole))
        apply_module(local[0], spec, mesh)
        wrap_root(local)
        torch.testing.assert_close(local[0](x), whole(x), rtol=0, atol=1e-12)

    run_ranks(2, rank)
