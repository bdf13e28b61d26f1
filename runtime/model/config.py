"""The config of a model by its name: a hub id or a directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.errors import ModelError
from shardwright.planner.contract.files import read_json
from shardwright.runtime.model.hub import USUAL, Hub

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keys that may name code on the hub: `owner/kernel`."""


def read_config(name: str | Path, trust_remote_code: bool = False, hub: Hub = USUAL) -> Any:
    """The config of a hub id or a local directory.

    Args:
        name: The id, or the directory.
        trust_remote_code: Whether to run code that comes with it.
        hub: Where the id leads.

    Raises:
        ModelError: there is none, it does not hold, transformers does not know its architecture, or
            it comes with code and that is not trusted.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _check_file(name)
    try:
        # Never asked on the terminal, as transformers does by default.
        how = {"trust_remote_code": trust_remote_code, **hub.options()}
        config = AutoConfig.from_pretrained(name, **how)
    except StrictDataclassError as error:
        text = str(error).splitlines()[-1].strip().partition(": ")[2]
        raise ModelError(f"the config of {name} does not hold: {text}") from None
    except OSError:
        raise ModelError(
            f"cannot find the config of {name}{hub.at}: no such directory, and the hub has no such "
            "model or cannot be reached (offline?)"
        ) from None
    except Exception as error:  # whatever the code of a config raises
        raise ModelError(_in_words(name, error)) from None
    if not trust_remote_code:
        _check_code(name, config)
    return config


def _check_file(name: str | Path) -> None:
    """Refuse what is no name of a model, and a directory without a config that can be read."""
    path = Path(name)
    try:
        local = path.exists()
    except (OSError, ValueError):  # too long, or with a zero in it
        raise ModelError(f"'{str(name)[:40]!s}...' is no name of a directory or model") from None
    if local and not (path / "config.json").is_file():
        raise ModelError(f"{name} is not a model directory: it has no config.json")
    if not local and str(name).count("/") != 1 and ("/" in str(name) or str(name)[:1] == "."):
        raise ModelError(f"{name} does not exist: give a directory with a config.json, or a hub id")
    if not local:
        return
    try:
        found = read_json(path / "config.json")
    except OSError as error:
        raise ModelError(f"cannot read {name}/config.json: {error.strerror}") from None
    except ValueError as error:
        found, text = None, str(error)
        if not isinstance(error, json.JSONDecodeError):
            raise ModelError(f"{name}/config.json is damaged: {text}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{name}/config.json is damaged: it does not hold a JSON object")


def _check_code(name: str | Path, config: Any) -> None:
    """Refuse a config that names code to be fetched from the hub."""
    for key, value in _implementations(config):
        if isinstance(value, str) and "/" in value:
            raise ModelError(
                f"the config of {name} names code on the hub ({key}: {value:.80}), which runs only "
                "with --trust-remote-code (trust_remote_code=True)"
            )


def _implementations(value: Any) -> Iterator[tuple[str, Any]]:
    """What a config and those in it have under such keys; `to_dict` leaves them out."""
    fields = vars(value) if hasattr(value, "to_dict") else value
    if isinstance(fields, dict):
        for key, item in fields.items():
            if any(str(key).strip("_").startswith(known) for known in IMPLEMENTATIONS):
                found = item.values() if isinstance(item, dict) else [item]
                yield from ((str(key), one) for one in found)
            else:
                yield from _implementations(item)


def _in_words(name: str | Path, error: Exception) -> str:
    """What a config's own code raised."""
    if "trust_remote_code" in str(error):
        return (
            f"the config of {name} comes with code of its own, which runs only with "
            "--trust-remote-code (trust_remote_code=True)"
        )
    kind = _model_type(Path(name))
    if kind and str(kind) in str(error) and isinstance(error, ValueError):
        return (
            f"transformers does not know the architecture '{kind:.80}' of {name}: upgrade it, "
            "or build the module yourself and plan that"
        )
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"cannot read the config of {name}: {text:.300}"


def _model_type(path: Path) -> str | None:
    try:
        found = read_json(path / "config.json").get("model_type")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, str) else None
