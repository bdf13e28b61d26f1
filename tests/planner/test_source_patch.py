"""Tables as a diff of transformers' sources: it applies, and sets what it says, where it should."""

import ast
import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, GPT2Config, GPT2LMHeadModel, LlamaConfig

from shardwright.planner.exports.stock.source_patch import patch

TABLE = {"h.*.attn.c_attn": "embedding_rowwise", "h.*.mlp.c_fc": "colwise"}
MODELS = Path(inspect.getfile(LlamaConfig)).parents[1]


def applied(tmp_path: Path, diff: str) -> dict[str, dict[str, Any]]:
    """File -> the plain attributes of its classes, in sources that the diff was applied to."""
    names = [line.split("b/", 1)[1] for line in diff.splitlines() if line.startswith("+++ ")]
    for name in names:
        to = tmp_path / name
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text((MODELS / name.split("/models/")[1]).read_text())
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    return {Path(n).name: _attributes((tmp_path / n).read_text()) for n in names}


def _attributes(text: str) -> dict[str, Any]:
    return {
        f"{node.name}.{ast.unparse(item.targets[0])}": ast.literal_eval(item.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Dict)
        and "plan" in ast.unparse(item.targets[0])
    }  # fmt: skip


def test_what_is_not_there_is_added(tmp_path: Path) -> None:
    """Of the config and of the model around it, each in its own file."""
    head = {"lm_head": "colwise_gather_output"}
    changes: list[Any] = [
        (GPT2Config, "base_model_tp_plan", TABLE), (GPT2LMHeadModel, "_tp_plan", head),
    ]  # fmt: skip
    diff = patch(changes, {"h.*.attn.c_attn": "gathered: uses num_heads"})
    assert '"h.*.attn.c_attn": "embedding_rowwise",  # gathered: uses num_heads' in diff
    assert applied(tmp_path, diff) == {
        "configuration_gpt2.py": {"GPT2Config.base_model_tp_plan": TABLE},
        "modeling_gpt2.py": {"GPT2LMHeadModel._tp_plan": head},
    }


@pytest.mark.parametrize("cls", [LlamaConfig, Gemma2Config])
def test_what_is_there_is_replaced_also_where_a_file_is_generated_from(cls, tmp_path: Path) -> None:
    found = applied(tmp_path, patch([(cls, "base_model_tp_plan", TABLE)], {}))
    name = cls.__name__.removesuffix("Config").lower()
    generated = {f"modular_{name}.py"} if cls is Gemma2Config else set()
    assert set(found) == {f"configuration_{name}.py"} | generated
    for attributes in found.values():
        assert attributes[f"{cls.__name__}.base_model_tp_plan"] == TABLE


def test_nothing_to_set_is_no_diff() -> None:
    assert patch([(GPT2LMHeadModel, "_tp_plan", {})], {}) == ""
