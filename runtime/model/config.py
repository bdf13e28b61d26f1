"""Reads the config of a model, and decides whether code that configs name may run.

A config, or one nested in it, can name code: `auto_map` names classes of a repository, and
`attn_implementation` can name a kernel on the hub. None of it runs, and nobody is asked about it on
the terminal, unless the caller trusts it; then nested configs are trusted as well.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from shardwright.errors import ModelError
from shardwright.planner.contract.files import read_json
from shardwright.runtime.model.hub import USUAL, Hub

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keys that may name code on the hub: `owner/kernel`."""

ASK = "which runs only with --trust-remote-code (trust_remote_code=True)"
"""What messages say of code that is not trusted."""


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
        with trusting(trust_remote_code):
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
    if trust_remote_code:
        _name_nested(config)
    else:
        refuse_kernels(config, name)
    return config


def _name_nested(config: Any) -> None:
    """Say in nested configs that name code where it is: beside that of the config around them."""
    for _, inner in _walk(config):
        if "auto_map" in _fields(inner) and hasattr(inner, "name_or_path"):
            inner.name_or_path = inner.name_or_path or config.name_or_path


def code_named_in(config: Any) -> list[str]:
    """Where a config, or one nested in it, names code, in dotted names: "decoder.auto_map"."""
    return [f"{path}auto_map" for path, inner in _walk(config) if _fields(inner).get("auto_map")]


def refuse_kernels(config: Any, name: str | Path) -> None:
    """Refuse a config that names a kernel, which is code to be fetched from the hub.

    Raises:
        ModelError: it does, or one nested in it.
    """
    for path, inner in _walk(config):
        for key, value in _fields(inner).items():
            if any(str(key).strip("_").startswith(known) for known in IMPLEMENTATIONS):
                for one in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(one, str) and "/" in one:
                        raise ModelError(
                            f"the config of {name} names code on the hub ({path}{key}: {one:.80}), "
                            "which runs only with --trust-remote-code (trust_remote_code=True)"
                        )


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All configs and dicts within `value`, itself first, each with the path that leads there."""
    if fields := _fields(value):
        yield path, value
    elif isinstance(value, list | tuple):
        fields = dict(enumerate(value))
    for key, inner in fields.items():
        yield from _walk(inner, f"{path}{key}.")


def _fields(value: Any) -> dict[Any, Any]:
    """What a config or dict holds; `to_dict` of a config leaves some of it out."""
    fields = vars(value) if hasattr(value, "to_dict") and hasattr(value, "__dict__") else value
    return fields if isinstance(fields, dict) else {}


_trust: ContextVar[bool | None] = ContextVar("_trust", default=None)
"""Whether nested configs may run code, while a model is built; None elsewhere."""

_inside: list[None] = []
"""One entry for each `trusting` that is entered, in any thread."""

_LOCK = threading.Lock()


@contextmanager
def trusting(trust_remote_code: bool) -> Iterator[None]:
    """Within, code that configs name runs if it is trusted, else not; nobody is asked.

    Models build parts of themselves by `AutoModel.from_config(config.decoder)`, to which they pass
    no `trust_remote_code`, and transformers then asks on the terminal. So the function by which
    its auto classes ask is another one for as long as a model is built.
    """
    from transformers import dynamic_module_utils as dynamic
    from transformers.models.auto import auto_factory, configuration_auto

    def resolve(trust: bool | None, *args: Any, **kwargs: Any) -> bool | None:
        known = _trust.get() if trust is None else trust
        return dynamic.resolve_trust_remote_code(known, *args, **kwargs)

    def use(function: Any) -> None:
        auto_factory.resolve_trust_remote_code = function
        configuration_auto.resolve_trust_remote_code = function

    token = _trust.set(trust_remote_code)
    with _LOCK:
        _inside.append(None)
        use(resolve)
    try:
        yield
    finally:
        with _LOCK:
            _inside.pop()
            if not _inside:
                use(dynamic.resolve_trust_remote_code)
        _trust.reset(token)


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


def _in_words(name: str | Path, error: Exception) -> str:
    """What a config's own code raised."""
    if "trust_remote_code" in str(error):
        return f"the config of {name} comes with code of its own, {ASK}"
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
