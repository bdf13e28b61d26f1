"""The config of a model by its name: a hub id or a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.errors import ModelError


def read_config(name: str | Path) -> Any:
    """The config of a hub id or a local directory.

    Raises:
        ModelError: there is none, or transformers does not know its architecture.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(name)
    if path.exists() and not (path / "config.json").is_file():
        raise ModelError(f"{name} is not a model directory: it has no config.json")
    if path.exists() and not isinstance(_read_json(path / "config.json"), dict):
        raise ModelError(f"{name}/config.json is damaged: it does not hold a JSON object")
    if (
        not path.exists()
        and str(name).count("/") != 1
        and ("/" in str(name) or str(name).startswith("."))
    ):
        raise ModelError(f"{name} does not exist: give a directory with a config.json, or a hub id")
    try:
        # Never asked on the terminal, as transformers does by default: code is not run at all.
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"the config of {name} comes with code of its own, and Shardwright runs no "
                "downloaded code: import it yourself, build the module and plan that"
            ) from None
        kind = _model_type(path)
        if kind and kind in str(error):
            raise ModelError(
                f"transformers does not know the architecture '{kind}' of {name}: upgrade it, "
                "or build the module yourself and plan that"
            ) from None
        raise ModelError(
            f"cannot read the config of {name}: {str(error).splitlines()[0]}"
        ) from None
    except StrictDataclassError as error:
        text = str(error).splitlines()[-1].strip().partition(": ")[2]
        raise ModelError(f"the config of {name} does not hold: {text}") from None
    except OSError:
        raise ModelError(
            f"cannot find the config of {name}: no such directory, and the hub has no such model "
            "or cannot be reached (offline?)"
        ) from None


def _model_type(path: Path) -> str | None:
    config = _read_json(path / "config.json")
    return config.get("model_type") if isinstance(config, dict) else None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
