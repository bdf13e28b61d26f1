"""Reads a model's config, and decides whether code that configs name may run.

A config, or one nested in it, can name code: `auto_map` names classes of a repository, and
`attn_implementation` can name a kernel on the Hub. No such code runs, and there is no prompt on the
terminal, unless the caller trusts it. Nested configs are then trusted as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.errors import ModelError, first_line
from shardwright.planner.contract.files import read_json
from shardwright.runtime.model.hub import USUAL, Hub
from shardwright.runtime.model.packages import package_config
from shardwright.runtime.model.pipelines import component
from shardwright.runtime.scopes import Patch

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keys that may name code on the Hub, as `owner/kernel`."""

ASK = "which runs only with --trust-remote-code (trust_remote_code=True)"
"""What messages say about code that is not trusted."""


def read_config(name: str | Path, hub: Hub = USUAL) -> Any:
    """Return the config of a Hub id or a local directory.

    Args:
        name: The id, or the directory.
        hub: Options for the Hub, and whether to run code that is shipped with the model.

    Raises:
        ModelError: there is no config, it is invalid, transformers does not know its architecture,
            or it is shipped with code that is not trusted.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    trusted = hub.trusted
    name = component(name, hub)
    _check_file(name)
    if (own := package_config(name)) is not None:
        return own
    try:
        with trusting(trusted):
            how = {"trust_remote_code": trusted, **hub.options()}
            config = AutoConfig.from_pretrained(name, **how)
    except StrictDataclassError as error:
        text = str(error).splitlines()[-1].strip().partition(": ")[2]
        raise ModelError(f"the config of {name} is not valid: {text}") from None
    except OSError:
        raise ModelError(
            f"cannot find the config of {name}{hub.at}: no such directory, and the hub has no such "
            "model or cannot be reached (offline?)"
        ) from None
    except Exception as error:  # the config's code may raise anything
        raise ModelError(_in_words(name, error)) from None
    if trusted:
        _name_nested(config)
    else:
        refuse_kernels(config, name)
    return config


def _name_nested(config: Any) -> None:
    """Give nested configs that name code the outer config's location, if they have none."""
    for _, inner in _walk(config):
        if "auto_map" in _fields(inner) and hasattr(inner, "name_or_path"):
            inner.name_or_path = inner.name_or_path or config.name_or_path


def code_named_in(config: Any) -> list[str]:
    """Return the dotted paths at which a config or a nested one names code: "decoder.auto_map"."""
    return [f"{path}auto_map" for path, inner in _walk(config) if _fields(inner).get("auto_map")]


def refuse_kernels(config: Any, name: str | Path) -> None:
    """Refuse a config that names a kernel, which is code from the Hub.

    Raises:
        ModelError: the config, or one nested in it, names a kernel.
    """
    for path, inner in _walk(config):
        for key, value in _fields(inner).items():
            if any(str(key).strip("_").startswith(known) for known in IMPLEMENTATIONS):
                for one in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(one, str) and "/" in one:
                        raise ModelError(
                            f"the config of {name} names code on the hub ({path}{key}: {one:.80}), "
                            f"{ASK}"
                        )


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `value` and all configs and dicts inside it, each with its path."""
    if fields := _fields(value):
        yield path, value
    elif isinstance(value, list | tuple):
        fields = dict(enumerate(value))
    for key, inner in fields.items():
        yield from _walk(inner, f"{path}{key}.")


def _fields(value: Any) -> dict[Any, Any]:
    """Return the fields of a config or dict; a config's `to_dict` leaves some of them out."""
    fields = vars(value) if hasattr(value, "to_dict") and hasattr(value, "__dict__") else value
    return fields if isinstance(fields, dict) else {}


_trust: ContextVar[bool | None] = ContextVar("_trust", default=None)
"""Whether nested configs may run code while a model is built; None at other times."""


@contextmanager
def trusting(trust_remote_code: bool) -> Iterator[None]:
    """Inside, code that configs name runs only if trusted, without a prompt on the terminal.

    Models build parts of themselves with `AutoModel.from_config(config.decoder)`, without
    `trust_remote_code`, and transformers then prompts on the terminal. The function with which its
    auto classes prompt is therefore replaced while a model is built.
    """
    models, configs = _prompts()
    with models.active(_trust, trust_remote_code), configs.active():
        yield


@cache
def _prompts() -> tuple[Patch, Patch]:
    """The patches of the functions with which auto classes of transformers prompt."""
    from transformers import dynamic_module_utils as dynamic
    from transformers.models.auto import auto_factory, configuration_auto

    def resolve(trust: bool | None, *args: Any, **kwargs: Any) -> bool | None:
        known = _trust.get() if trust is None else trust
        return dynamic.resolve_trust_remote_code(known, *args, **kwargs)

    functions = {"resolve_trust_remote_code": resolve}
    return Patch(auto_factory, functions), Patch(configuration_auto, functions)


def _check_file(name: str | Path) -> None:
    """Refuse an invalid model name, and a directory without a readable config."""
    path = Path(name)
    if not str(name):
        raise ModelError("the model's name is empty: give a directory or a hub id")
    try:
        local = path.exists()
    except (OSError, ValueError):  # the name is too long, or contains a NUL
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
    except json.JSONDecodeError:
        found = None
    except ValueError as error:
        raise ModelError(f"{name}/config.json is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{name}/config.json is damaged: it does not hold a JSON object")


def _in_words(name: str | Path, error: Exception) -> str:
    """Explain what reading a config raised."""
    if "trust_remote_code" in str(error):
        return f"the config of {name} comes with code of its own, {ASK}"
    kind = _model_type(Path(name))
    if kind and str(kind) in str(error) and isinstance(error, ValueError):
        return (
            f"transformers does not know the architecture '{kind:.80}' of {name}: upgrade it, "
            "or build the module yourself and plan that"
        )
    return f"cannot read the config of {name}: {first_line(error):.300}"


def _model_type(path: Path) -> str | None:
    try:
        found = read_json(path / "config.json").get("model_type")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, str) else None
