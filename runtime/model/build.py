"""Builds models whose parameters take no memory and whose buffers are real, with right values.

Buffers that are made from parameters and that checkpoints hold are on meta, like parameters.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import ModelError, UsageError, first_line, in_one_line
from shardwright.runtime.model.config import ASK, code_named_in, refuse_kernels, trusting
from shardwright.runtime.model.hub import USUAL, Hub
from shardwright.runtime.model.packages import PackageConfig, default_dtype
from shardwright.runtime.model.unregistered import refuse_unregistered
from shardwright.runtime.scopes import replaced

M = TypeVar("M", bound=nn.Module)

_PATCHING = threading.RLock()
"""Held while torch's globals are patched: ranks may be threads of one process in tests."""


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype that may be given by name; None for None and "auto".

    Raises:
        UsageError: torch has no such dtype, or it is not one of weights.
    """
    if dtype is None or dtype == "auto":
        return None
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    found = getattr(torch, name, None) if name else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(
            f"torch has no floating dtype '{dtype!s:.40}': give 'bfloat16', 'float16', 'float32', "
            "or 'auto' for that of the checkpoint"
        )
    return found


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on meta; all other tensors are real, on the CPU.

    A parameter moves to meta when it is registered, before anything fills it: by then
    `torch.empty` has reserved addresses but touched no memory. Sending factory functions to meta
    would also send the buffers made with them to meta, and lose their values.
    """
    thread = threading.get_ident()
    moved: Any = WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta and threading.get_ident() == thread:
            # A parameter registered under two names must stay one parameter.
            if param not in moved:
                moved[param] = _to_meta(param)
            self._parameters[name] = moved[param]

    with _PATCHING:
        register = nn.Module.register_parameter
        meanwhile = replaced(nn.Module, register_parameter=register_on_meta)
        with meanwhile, _on_cpu(), _NoFilling():
            yield


def _on_cpu() -> AbstractContextManager[Any]:
    """Put new tensors on the CPU; does nothing if that is the default, as a mode costs time."""
    usual = torch.get_default_device() == torch.device("cpu")
    return nullcontext() if usual else torch.device("cpu")


class _NoFilling(TorchFunctionMode):
    """Skips the fill functions of `torch.nn.init` for meta tensors.

    Torch computes the result of random fills on meta in Python, 0.3 ms a weight.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # transformers patches functions of `nn.init` while it builds a model.
        if func in FILLS or getattr(nn.init, getattr(func, "__name__", ""), None) is func:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)


FILLS = {torch.Tensor.uniform_, torch.Tensor.normal_}


def _to_meta(param: nn.Parameter) -> nn.Parameter:
    out = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
    vars(out).update(vars(param))
    return out


def empty_model(
    factory: Callable[..., M], *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> M:
    """Call `factory(*args, **kwargs)` with parameters on meta and real buffers on the CPU.

    Args:
        factory: a model class or a function that builds a model.
        *args: its arguments.
        dtype: the default dtype of new floating tensors (`Checkpoint.dtype`, for example).
        **kwargs: its keyword arguments.

    Raises:
        ModelError: a buffer that no checkpoint holds depends on a parameter's value and therefore
            could not be computed; or modules are where no checkpoint holds their parameters.
    """
    with parameters_on_meta(), default_dtype(dtype):
        model = factory(*args, **kwargs)
    move_to_meta(model)
    refuse_unregistered(model)
    if lost := [name for name, buffer in _transient(model) if buffer.is_meta]:
        raise ModelError(
            f"buffer {lost[0]} of {type(model).__name__} is computed from parameters, which "
            "have no values yet: compute it from the config, or after loading"
        )
    return model


def _transient(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the non-persistent buffers by name."""
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            if (buffer := module._buffers.get(name)) is not None:
                yield f"{path}.{name}".lstrip("."), buffer


@torch.no_grad()
def compute_buffers(model: nn.Module) -> None:
    """Compute the buffers that no checkpoint holds again, as `from_pretrained` does.

    It lets the class compute them in the default dtype, and rounds the result. A model that is
    built in bfloat16 has computed them in bfloat16, and angles of late positions are then wrong.
    """
    owners = {name.rpartition(".")[0]: name for name, _ in _transient(model)}
    for path, buffer in owners.items():
        inner = initializing(model, buffer)
        if hasattr(inner, "_init_weights"):
            inner._init_weights(model.get_submodule(path))


def initializing(model: nn.Module, name: str) -> Any:
    """Return the innermost transformers model that holds `name`: it initialises its own modules."""
    inner = found = model
    for step in name.split(".")[:-1]:
        inner = getattr(inner, step)
        found = inner if hasattr(inner, "_init_weights") else found
    return found


def move_to_meta(model: nn.Module) -> None:
    """Move parameters to meta that are not there yet, such as those of `torch.Tensor(n)`."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not param.is_meta:
                module._parameters[name] = moved.setdefault(id(param), _to_meta(param))


def model_class(config: Any, hub: Hub = USUAL) -> Any:
    """Return the model class that `config` names; of other packages, what builds the model.

    Args:
        config: The result of `read_config`.
        hub: Whether the class may come from code that is shipped with the model, and where that is
            fetched from.

    Raises:
        ModelError: the config names no class, or one that neither transformers nor trusted code
            has.
    """
    import transformers

    if isinstance(config, PackageConfig):
        return config
    names = getattr(config, "architectures", None) or _causal(config)
    if not isinstance(names, list | tuple) or not isinstance(next(iter(names), None), str):
        raise ModelError(
            f"the config (model_type {getattr(config, 'model_type', None)}) names no class: add "
            '"architectures": ["..."] to its config.json, or pass the class'
        )
    own = getattr(config, "auto_map", None)
    if own and hub.trusted:
        return _own_class(config, names[0], hub)
    found = getattr(transformers, names[0], None) or _unlisted(config, names[0])
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    if own:
        todo = "its code comes with the model and " + ASK.removeprefix("which ")
    else:
        todo = (
            'check "architectures" in its config.json, install the transformers version that '
            "has it, or pass the class"
        )
    raise ModelError(f"transformers {transformers.__version__} has no class {names[0]:.80}: {todo}")


def _unlisted(config: Any, name: str) -> Any:
    """Return a class that transformers does not export, such as an encoder that was saved alone."""
    package, _, file = type(config).__module__.rpartition(".configuration_")
    if not package.startswith("transformers."):
        return None
    try:
        return getattr(importlib.import_module(f"{package}.modeling_{file}"), name, None)
    except ImportError:
        return None


def _causal(config: Any) -> list[str]:
    """Return the causal language model class for a config that names no class, if it is one."""
    from transformers.models.auto import modeling_auto as auto

    kind = getattr(config, "model_type", None)
    found = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if not isinstance(found, str) or kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return []
    warnings.warn(f"the config names no class, so {found} is used", stacklevel=4)
    return [found]


def _own_class(config: Any, name: str, hub: Hub) -> type[nn.Module]:
    """Return the class `name` from the code that is shipped with a config; runs that code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    found = {k: v for k, v in config.auto_map.items() if k.startswith("AutoModel")}
    named = [ref for ref in found.values() if str(ref).rpartition(".")[2] == name]
    references = [*named, *(found[k] for k in sorted(found))]
    if not references:
        raise ModelError(f"the code that comes with {config.name_or_path} has no model")
    try:
        how = hub.options()
        cls = get_class_from_dynamic_module(references[0], config.name_or_path, **how)
    except Exception as error:  # that code may raise anything
        text = first_line(error)
        raise ModelError(f"the code that comes with {config.name_or_path} fails: {text}") from error
    if not issubclass(cls, nn.Module) or not hasattr(cls, "_from_config"):
        raise ModelError(f"{cls.__name__}, of the code that comes with the model, is no model")
    return cls


MAX_MODULES = 1 << 18
"""Most modules of a model: the largest models have half as many, counting each expert."""


@contextmanager
def building(config: Any, hub: Hub = USUAL) -> Iterator[Any]:
    """Build a model of the class that a config names: the context yields the class.

    Code that the config, or one nested in it, names runs only if it is trusted.

    Raises:
        ModelError: no model can be built from the config, it has too many modules, or it needs
            code that is not trusted.
    """
    trusted = hub.trusted
    cls = model_class(config, hub)
    if not trusted:
        refuse_kernels(config, getattr(config, "name_or_path", "") or cls.__name__)
    count, thread = 0, threading.get_ident()

    def counted(*_: Any) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            if count > MAX_MODULES:
                raise ModelError(
                    f"a {cls.__name__} of this config has more than {MAX_MODULES:,} modules"
                )

    handle = register_module_module_registration_hook(counted)
    try:
        with trusting(trusted):
            yield cls
    except ModelError:
        raise
    except Exception as error:  # the model's code may raise anything
        what = f"cannot build a {cls.__name__} of this config"
        if "trust_remote_code" in str(error) and (named := code_named_in(config)):
            where = ", ".join(named)
            raise ModelError(f"{what}: it names code of its own ({where}), {ASK}") from None
        raise ModelError(f"{what}: {in_one_line(error):.300}") from error
    finally:
        handle.remove()
