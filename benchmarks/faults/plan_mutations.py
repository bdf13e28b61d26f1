"""Mutations of a plan as JSON: of any value, of placements, and of what stands where."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Path = tuple[Any, ...]
Mutation = Callable[[Random, dict[str, Any], list[dict[str, Any]]], str]

PASSIVE = ("versions", "solver", "replicated", "digest")
"""Keys that nobody acts on: seldom mutated."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, 0.5, "", "tp", "?", "²", "\ud800x",
    "a" * 5000, "../x", [], {}, [[]], [1] * 40, {"": ""}, "__class__", "0", "*", "model.*",
)  # fmt: skip
PLACEMENTS = (
    "", "?", "64", "2@tp*2", "?, ?", "?, ?, 32", "?, ?, 32@tp", "?, ?, 32 | partial tp", "²",
    "?, ?, 32 | grad-partial tp", "((((2))))", "(" * 3000 + "1" + ")" * 3000, "2@tp.0", "2@dp",
    "1 + 1@tp", "9" * 5000, "?@tp, ?, 32", "?, ?@tp, 32", "32 | partial tp", "2@.1", "32, 32@tp",
)  # fmt: skip
ATTRIBUTES = ("__class__", "forward", "_modules", "training", "weight", "config", "__dict__.x",
              "config.hidden_size", "num_heads", "out_features", "in_features", "_forward_hooks",
              "config.__class__.x", "head_dim", "layer_idx", "forward.__func__.x", "0", "a.b.c",
              "num_key_value_groups", "scaling", "dtype")  # fmt: skip


def mutated(
    random: Random, plan: dict[str, Any], others: list[dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """A copy of `plan` with one to three mutations, and these in words.

    Args:
        random: Where all chance comes from.
        plan: As JSON.
        others: Plans to take pieces of.
    """
    out, words = copy.deepcopy(plan), list[str]()
    times = random.choice((1, 1, 1, 1, 2, 3))
    while len(words) < times or out == plan:
        words.append(random.choices(MUTATIONS, WEIGHTS)[0](random, out, others))
    return "; ".join(words), out


def places(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place in a JSON value."""
    if at:
        yield at
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if len(at) or key not in PASSIVE:
                yield from places(item, (*at, key))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _pick(random: Random, plan: dict[str, Any], kind: type | None = None) -> Path | None:
    """A place, mostly within the modules."""
    roots = ("modules",) if random.random() < 0.8 else tuple(k for k in plan if k not in PASSIVE)
    root = random.choice(roots)
    if root not in plan:
        return None
    found = [(root, *p) for p in places(plan[root])] or [(root,)]
    if kind is not None:
        found = [p for p in found if type(_at(plan, p)) is kind]
    return random.choice(found) if found else None


def delete(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Some key or entry is gone."""
    path = _pick(random, plan)
    if path is not None:
        del _at(plan, path[:-1])[path[-1]]
    return f"without {path}"


def replace(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Some value is another one."""
    path, value = _pick(random, plan), copy.deepcopy(random.choice(VALUES))
    if path is not None:
        _at(plan, path[:-1])[path[-1]] = value
    return f"{path} = {value!r:.60}"


def number(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Some number is a little off, or far."""
    path = _pick(random, plan, int)
    if path is not None:
        old = _at(plan, path)
        _at(plan, path[:-1])[path[-1]] = random.choice((old + 1, old - 1, old * 2, old // 2, -old))
        return f"{path} = {_at(plan, path)}"
    return "no number"


def reword(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Some placement is another, or one from elsewhere in the plan."""
    found = [p for p in places(plan.get("modules", {})) if _is_placement(p)]
    if not found:
        return "no placement"
    path = ("modules", *random.choice(found))
    old = str(_at(plan, path))
    how = random.randrange(9)
    if how == 0:
        new = random.choice(PLACEMENTS)
    elif how == 1:
        new = str(_at(plan, ("modules", *random.choice(found))))
    elif how == 2:
        new = old.partition(" |")[0]
    elif how == 3:
        new = old.partition(" |")[0] + random.choice((" | partial tp", " | grad-partial tp"))
    elif how == 4:
        new = re.sub(r"@tp(\.\d+)?", "", old, count=random.choice((0, 1)))
    elif how == 5:
        new = re.sub(r"\d+", lambda m: str(int(m[0]) + random.choice((0, 0, 1, -1))), old)
    elif how == 6:
        new = random.choice(("+", "*", ", ")).join(reversed(re.split(r"[+*,]", old)))
    elif how == 7:
        new = re.sub(r"(\d+|\?)(?!@|\d|\.)", r"\1@tp", old, count=1)
    else:
        new = old.replace("@tp", random.choice(("@tp.0", "@tp.1", "@dp")), 1)
    _at(plan, path[:-1])[path[-1]] = new
    return f"{path} = '{new:.60}'"


def _is_placement(path: Path) -> bool:
    return path[-1] in ("placement", "use", "source", "target") or path[-2:-1] == ("attributes",)


def turn(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """A change of placement goes the other way, or nowhere, or both ways, or twice."""
    lists = [
        (n, side)
        for n, m in plan.get("modules", {}).items()
        for side in ("inputs", "outputs")
        if isinstance(m, dict) and isinstance(m.get(side), list) and m[side]
    ]
    if not lists:
        return "no change of placement"
    name, side = random.choice(lists)
    changes = plan["modules"][name][side]
    change, how = random.choice(changes), random.randrange(7)
    if not isinstance(change, dict):
        return "no change of placement"
    if how == 0 and "source" in change and "target" in change:
        change["source"], change["target"] = change["target"], change["source"]
    elif how == 1:
        change["target"] = change.get("source")
    elif how == 2:
        changes.append(copy.deepcopy(change))
    elif how == 3:
        other = "outputs" if side == "inputs" else "inputs"
        plan["modules"][name][other] = [*(plan["modules"][name].get(other) or []), change]
        changes.remove(change)
    elif how == 4:
        change["deferred"] = not change.get("deferred")
    elif how == 5:
        change["slot"] = random.choice(("", "0", "1", "*0", "*x", "*²", "logits", "x.y", "input"))
    else:
        key = random.choice(("before", "length"))
        change[key] = random.choice((None, ".", ".input", "..hidden_states", "input_ids.1", ""))
    return f"{name} {side} changed in way {how}"


def attribute(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """A module replaces an attribute more."""
    modules = [m for m in plan.get("modules", {}).values() if isinstance(m, dict)]
    if not modules:
        return "no module"
    name, dim = random.choice(ATTRIBUTES), random.choice(("4@tp", "32@tp", "48", "2", "?", "8"))
    entry = random.choice(modules)
    if isinstance(entry.get("attributes"), dict):
        entry["attributes"][name] = dim
    return f"attribute {name} = {dim}"


def call(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Other calls are said to be proven, or a tensor to lie otherwise at a module's boundary."""
    calls, slots = plan.get("calls"), ("", "0", "logits", "hidden_states.*", "attention_mask", "x")
    spoken = [c for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
    lists = [c.get(k) for c in spoken for k in ("inputs", "outputs")]
    for m in plan.get("modules", {}).values():
        lists += [m.get(k) for k in ("takes", "gives")] if isinstance(m, dict) else []
    found = [entries for entries in lists if isinstance(entries, list)]
    if not found:
        return "no calls"
    entries = random.choice(found)
    if entries and random.random() < 0.5:
        gone = entries.pop(random.randrange(len(entries)))
        return f"without {gone!r:.60} of other calls"
    slot = random.choice(slots)
    placed = {"slot": slot, "placement": random.choice(PLACEMENTS)}
    entries.append(placed if entries and isinstance(entries[0], dict) else slot)
    return f"{entries[-1]!r:.60} in other calls"


def swap(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """What two places of the same key say is exchanged: two modules', or two placements."""
    found = [p for p in places(plan.get("modules", {}))]
    if not found:
        return "no modules"
    one = random.choice(found)
    alike = [p for p in found if len(p) == len(one) and (len(p) == 1 or p[-1] == one[-1])]
    other = random.choice(alike)
    a, b = ("modules", *one), ("modules", *other)
    first, second = copy.deepcopy(_at(plan, a)), copy.deepcopy(_at(plan, b))
    _at(plan, a[:-1])[a[-1]], _at(plan, b[:-1])[b[-1]] = second, first
    return f"{one} and {other} exchanged"


def rename(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """A module's entry is under another name, or one layer has one of its own."""
    modules = plan.get("modules", {})
    if not isinstance(modules, dict) or not modules:
        return "no modules"
    name = random.choice(sorted(modules))
    how = random.randrange(3)
    if how == 0 and "*" in name:
        own = name.replace("*", random.choice("0123"))
        modules[own] = copy.deepcopy(modules[name])
        entry = modules[own]
        if isinstance(entry, dict) and random.random() < 0.7:
            key = random.choice(sorted(entry))
            entry[key] = type(entry[key])()
        return f"{own} beside {name}"
    if how == 1:
        known = ("lm_head", "model", "", "nowhere", "model.norm", "transformer.h.0", "*.*", "..")
        new = random.choice((*known, random.choice(sorted(modules))))
    else:
        new = random.choice((name.rpartition(".")[0], f"{name}.x", name.replace("*", "0")))
    modules[new] = modules.pop(name)
    return f"{name} is called {new}"


def graft(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """A piece of another plan takes the place of this one's."""
    other = random.choice(others)
    key = random.choice(("modules", "modules", "mesh", "sub_axes", "workload", "pins", "model"))
    if key == "modules":
        own = sorted(set(other["modules"]) | set(plan.get("modules") or {}))
        name = random.choice(own)
        if name in other["modules"] and isinstance(plan.get("modules"), dict):
            plan["modules"][name] = copy.deepcopy(other["modules"][name])
        return f"module {name} of another plan"
    plan[key] = copy.deepcopy(other[key])
    return f"{key} of another plan"


def top(random: Random, plan: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Mesh, sub-axes and the like are others."""
    key, value = random.choice(
        (
            ("batch_dims", ["tp"]), ("batch_dims", []), ("mesh", {"tp": 0}), ("mesh", {"tp": 3}),
            ("mesh", {"tp": 1}), ("mesh", {".1": 2}), ("mesh", {"tp": 10**9}), ("mesh", {}),
            ("mesh", {"tp": 2, "dp": 2}), ("sub_axes", {"tp": [1] * 25 + [2]}), ("sub_axes", {}),
            ("sub_axes", {"tp": [2, 2]}), ("sub_axes", {"tp": [2]}), ("sub_axes", {"x": [2, 2]}),
            ("sub_axes", {"tp": [2] * 16}), ("mesh", {"tp": 4}), ("mesh", {"tp": "2"}),
            ("batch_dims", ["dp", "dp"]), ("pins", {"lm_head": "replicate"}), ("modules", {}),
            ("pins", {"x": "shard:9"}), ("pins", {"": "²"}), ("opaque", {"linear": 1}),
        )
    )  # fmt: skip
    plan[key] = value
    return f"{key} = {value}"


MUTATIONS: tuple[Mutation, ...] = (
    delete, replace, number, reword, turn, attribute, swap, rename, graft, top, call
)  # fmt: skip
WEIGHTS = (3, 2, 1, 4, 3, 1, 2, 2, 2, 1, 2)
