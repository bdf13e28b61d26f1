"""Values that cannot be meant, in files of others and on the command line: one line, and its text.

What mutations find is in `benchmarks/faults/`; here is each kind once.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import CheckpointError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model import build
from tests import planning
from tests.cli.conftest import Run, tiny
from tests.cli.test_errors import error_line


def usage(text: str) -> str:
    """The last line, where click shows how a command is used before."""
    return text.strip().splitlines()[-1].removeprefix("Error: ")


BUILD = "cannot build a LlamaForCausalLM of this config: "


@pytest.mark.parametrize(
    "change, text",
    [
        ({"hidden_act": "nope"}, BUILD + "KeyError: 'nope'"),
        ({"rope_parameters": {"rope_type": "nope"}}, BUILD + "KeyError: 'nope'"),
        ({"dtype": "float99"}, "cannot read the config of {}: module 'torch' has no attribute"),
        ({"vocab_size": -1}, BUILD + "RuntimeError: Trying to create tensor with negative"),
        ({"num_attention_heads": 0}, "cannot read the config of {}: integer modulo by zero"),
        ({"num_hidden_layers": 10**7}, "a LlamaForCausalLM of this config has more than 4,096"),
        ({"head_dim": "²"}, "the config of {} is not valid: Field 'head_dim' with value '²'"),
        ({"architectures": ["Path"]}, "transformers {version} has no class Path: check"),
        ({"model_type": "../x"}, "transformers does not know the architecture '../x' of {}"),
        ({"model_type": "x" * 5000}, "transformers does not know the architecture 'xxx"),
    ],
)
def test_configs(
    run: Run, tmp_path: Path, change: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(build, "MAX_MODULES", 4096)  # the true one takes 20 s to be reached
    config = {**json.loads(tiny().to_json_string(use_diff=False)), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = text.replace("{}", str(tmp_path)).replace("{version}", transformers.__version__)
    assert error_line(run("plan", tmp_path, "--tp", 2)).startswith(text)


CONTENTS = {
    "deep": ('{"a": ' * 80 + "1" + "}" * 80, "it is nested deeper than 64 levels"),
    "digits": ('{"a": ' + "1" * 4301 + "}", "it has a number of 4,301 digits"),
    "name": ('{"' + "a" * 5000 + '": 1}', "it has a name of 5,000 characters: 'aaa"),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    "where, option, code",
    [
        ("damaged", None, 1),
        ("not JSON", "--pins", 2),
        ("not JSON", "--device", 2),
        ("not JSON", "--tp-plan", 2),
    ],
)
def test_json_without_bounds(
    run: Run, small: Path, tmp_path: Path, content: str, where: str, option: str | None, code: int
) -> None:
    """In configs, pins, profiles and tables of transformers; plans are in `test_consistency.py`."""
    file, (text, why) = tmp_path / "config.json", CONTENTS[content]
    file.write_text(text)
    words = ["--compare-tp-plan"] if option == "--tp-plan" else []
    given = [tmp_path] if option is None else [small, option, file, *words]
    line = error_line(run("plan", *given, "--tp", 2), code)
    assert f"{file} is {where}: {why}" in line


@pytest.mark.parametrize(
    "words, text",
    [
        (["--memory", "1" * 400], "' is not a size: write it as 24GiB, 24GB, 500MB or plain bytes"),
        (["--memory", "nan"], "'nan' is not a size"),
        (["--tp", "1000000000"], "tp=1000000000 is too large: 65,536 ranks are the most"),
        (["--tp", "9" * 4301], "is not a valid integer range"),
        (["--mesh", "dp=1000000,tp=2"], "dp=1000000 is too large: 65,536 ranks are the most"),
        (["--mesh", ".1=2"], "'.1"),
        (["--batch", "9" * 400], "is not in the range 1<=x<=1099511627776"),
        (["--optimizer-bytes", "9" * 400], "is not in the range 0<=x<=1099511627776"),
        (["--time-limit", "nan"], "time_limit must be above 0 seconds, not nan"),
        (["--phase", "decode:²"], "'decode:²': how often 'decode' is run is a number from 1 on"),
        (["--pin", "lm_head=shard:²"], "'lm_head=shard:²' is not a pin: write NAME=replicate"),
        (["--pin", "[=shard:0"], "no parameter or module of the model is named '['"),
    ],
)
def test_command_lines(run: Run, small: Path, words: list[str], text: str) -> None:
    ranks = [] if words[0] in ("--tp", "--mesh") else ["--tp", "2"]
    result = run("plan", small, *ranks, *words)
    assert result.exit_code == 2 and result.stdout == ""
    assert text in usage(result.stderr)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"batch": 10**5000}, "batch must be from 1 to 1,099,511,627,776"),
        ({"seq": 0}, "seq must be from 1 to 1,099,511,627,776"),
        ({"optimizer_bytes": -1}, "optimizer_bytes must be from 0 to 1,099,511,627,776"),
        ({"time_limit": float("nan")}, "time_limit must be above 0 seconds, not nan"),
    ],
)
def test_arguments(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=f"^{text}$"):
        planning.plan(nn.Linear(4, 4), 2, args=(torch.zeros(3, 4),), **given)


def test_names_of_any_length_in_an_index(tmp_path: Path, plan: Plan) -> None:
    tiny().save_pretrained(tmp_path)
    table = {"weight_map": {"a" * 5000: "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="index.json is not a safetensors index"):
        load_alone(tmp_path, plan)


@pytest.mark.parametrize(
    "text, why",
    [
        ("[]", "it holds no JSON object"),
        ("{", "Expecting property name"),
        ('{"max_new_tokens": -1}', "`max_new_tokens` must be greater than 0"),
        ('{"a": ' * 80 + "1" + "}" * 80, "it is nested deeper than 64 levels"),
    ],
)
def test_generation_settings(tmp_path: Path, plan: Plan, text: str, why: str) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(tiny()).save_pretrained(tmp_path)  # type: ignore[arg-type]
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=f"{file} cannot be used: {why}"):
        load_alone(tmp_path, plan)


def load_alone(folder: Path, plan: Plan) -> nn.Module:
    """What rank 0 has after `load`, without the other."""
    from benchmarks.faults.checkpoints import local_part

    return local_part(folder, plan, Mesh.shape_only({"tp": (0, 2)}))
