"""What a checkpoint calls a tensor and what the model does."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.errors import CheckpointError
from shardwright.runtime.checkpoint.conversion import Conversions
from shardwright.runtime.checkpoint.names import Match, ModelNames, Source, match_names, model_names
from shardwright.runtime.model.build import empty_model
from tests.checkpoint.make import gpt2_config, llama_config


def names(*groups: str, **rest: object) -> ModelNames:
    """A model's names; names that share a parameter are joined by '='."""
    return ModelNames("Net", tuple(tuple(g.split("=")) for g in groups), **rest)  # type: ignore[arg-type]


def matched(
    names: ModelNames,
    held: list[str],
    where: str,
    rename: Any = lambda key: (key, None),
    convert: Any = None,
    allow_surplus: bool = False,
) -> Match:
    return match_names(names, held, where, rename, convert, allow_surplus)


def keys(match: Match) -> dict[str, str]:
    return {name: source.key for name, source in match.sources.items()}


def refused(names: ModelNames, held: list[str], *texts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        matched(names, held, "DIR")
    message = str(caught.value)
    assert "\n" not in message
    for text in texts:
        assert text in message, message


def test_exact() -> None:
    assert keys(matched(names("a", "b.c"), ["b.c", "a"], "DIR")) == {"a": "a", "b.c": "b.c"}


def test_prefix_is_dropped() -> None:
    match = matched(names("a", "b", prefix="base"), ["base.a", "base.b"], "DIR")
    assert keys(match) == {"a": "base.a", "b": "base.b"}


def test_prefix_is_added() -> None:
    match = matched(names("base.a", "head", prefix="base"), ["a", "head"], "DIR")
    assert keys(match) == {"base.a": "a", "head": "head"}


def test_base_model_leaves_the_head_unread() -> None:
    match = matched(names("a", prefix="base"), ["base.a", "head.w"], "DIR")
    assert match.unread == ("head.w",)
    # A tensor inside the base that the model lacks is no head.
    refused(
        names("a", prefix="base"), ["base.a", "base.x", "head.w"], "1 tensor that Net", "base.x"
    )


def test_held_twice() -> None:
    refused(names("a", prefix="base"), ["a", "base.a"], "DIR holds a twice, as a and as base.a")


def test_a_name_that_cannot_be_printed() -> None:
    refused(names("a"), ["a", "b\n\x1b[31mc"], r"no place for: 'b\n\x1b[31mc'")


def test_missing() -> None:
    refused(
        names("a", "b"), ["a"], "DIR lacks 1 of the 2 tensors of Net: b: load it with the class"
    )
    many = [f"p{i}" for i in range(6)]
    refused(names(*many), ["p5"], "DIR lacks 5 of the 6 tensors of Net: p0, p1, p2 and 2 more")


def test_surplus() -> None:
    refused(
        names("a"),
        ["a", "x", "y"],
        "DIR holds 2 tensors that Net has no place for: x, y: ",
        "pass allow_surplus=True",
    )
    match = matched(names("a"), ["a", "x"], "DIR", allow_surplus=True)
    assert match.unread == ("x",)


def test_missing_and_surplus_are_one_message() -> None:
    refused(
        names("a", "b"), ["a", "x"], "lacks 1 of the 2 tensors of Net: b; it holds 1 tensor that"
    )


def test_tied_by_any_of_its_names() -> None:
    tied = names("embed=head", "w")
    assert keys(matched(tied, ["embed", "w"], "DIR")) == {"embed": "embed", "w": "w"}
    assert keys(matched(tied, ["head", "w"], "DIR")) == {"embed": "head", "w": "w"}
    both = matched(tied, ["head", "embed", "w"], "DIR")
    assert keys(both) == {"embed": "embed", "w": "w"}
    assert both.twins == {"embed": (Source("head"),)}
    refused(tied, ["w"], "lacks 1 of the 2 tensors of Net: embed")


def test_patterns_of_the_class() -> None:
    lenient = names("a", "b.pos", may_lack=(r"\.pos$",), may_hold=(r"^old\.",))
    match = matched(lenient, ["a", "old.x"], "DIR")
    assert (match.computed, match.unread) == (("b.pos",), ("old.x",))


def test_buffers_that_checkpoints_held_once() -> None:
    model = names("a", transient=frozenset({"rotary_emb.inv_freq", "h.0.attn.bias"}))
    old = ["a", "layers.0.self_attn.rotary_emb.inv_freq", "transformer.h.1.attn.bias"]
    assert matched(model, old, "DIR").unread == tuple(old[1:])
    refused(model, ["a", "h.0.mlp.bias"], "h.0.mlp.bias")  # a real bias is not such a buffer


def test_renamed_as_transformers_does() -> None:
    def rename(key: str) -> tuple[str, str | None]:
        return key.replace("gamma", "weight"), None

    match = matched(names("norm.weight", "x.gamma"), ["norm.gamma", "x.gamma"], "DIR", rename)
    assert keys(match) == {"norm.weight": "norm.gamma", "x.gamma": "x.gamma"}


def by_pattern(key: str) -> tuple[str, str | None]:
    return ("experts", key.partition(".")[0]) if "." in key else (key, None)


def test_converted_together() -> None:
    asked: list[object] = []

    def convert(name: str, keys: Mapping[str, list[str]]) -> dict[str, Source]:
        asked.append((name, keys))
        return {"experts": Source("x.0 and 2 more"), "other": Source("x.0 and 2 more")}

    held = ["a", "x.0", "y.0", "x.1"]
    match = matched(names("experts", "other", "a"), held, "DIR", by_pattern, convert)
    assert asked == [("experts", {"x": ["x.0", "x.1"], "y": ["y.0"]})]
    assert keys(match) == {"experts": "x.0 and 2 more", "other": "x.0 and 2 more", "a": "a"}
    with pytest.raises(CheckpointError, match=r"no place for: other \(made of x\.0 and 2 more\)"):
        matched(names("experts", "a"), held, "DIR", by_pattern, convert)
    with pytest.raises(CheckpointError, match="holds other twice, as other and as x.0 and 2 more"):
        matched(names("experts", "other"), ["other", "x.0"], "DIR", by_pattern, convert)


def test_names_of_a_plain_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2, bias=False)
            self.two = nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight
            self.register_buffer("kept", torch.ones(1))
            self.register_buffer("made", torch.ones(1), persistent=False)

    got = model_names(Net())
    assert got.title == "Net"
    assert got.groups == (("one.weight", "two.weight"), ("kept",))
    assert got.transient == {"made"}
    plain = Conversions(Net())
    assert plain.rename("a.gamma") == ("a.gamma", None)
    assert plain.order(["b", "a"]) == ["b", "a"]


def test_names_of_transformers_models() -> None:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    gpt2 = model_names(empty_model(GPT2LMHeadModel, gpt2_config()))
    assert gpt2.prefix == "transformer"
    assert ("transformer.wte.weight", "lm_head.weight") in gpt2.groups
    llama = empty_model(LlamaForCausalLM, llama_config())
    assert "model.rotary_emb.inv_freq" in model_names(llama).transient
    assert Conversions(llama).rename("x.LayerNorm.gamma") == ("x.LayerNorm.weight", None)
