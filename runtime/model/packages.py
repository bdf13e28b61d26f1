"""Models of other packages than transformers: diffusers and timm.

Their configs name a class of the package, or a model in its registry. It is built by the installed
package alone: code that a config names and that the package does not have never runs. Neither
package is required. What is not one of these configs is left to transformers.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.errors import ModelError, first_line
from shardwright.planner.contract.files import read_json
from shardwright.runtime.model.pipelines import is_directory

CLASS, ARCHITECTURE = "_class_name", "architecture"
"""Keys of config.json by which diffusers and timm say what is to be built."""

TRANSFORMERS = "model_type"
"""The key by which transformers does."""

OWNER = "timm/"
"""What names of timm's models begin with; the rest is a name in its registry."""

INSTALL = {"diffusers": "pip install diffusers", "timm": "pip install timm torchvision"}

FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16
}  # fmt: skip
"""Names that safetensors gives to floating dtypes."""

STEMS = {"diffusers": "diffusion_pytorch_model", "timm": "model"}
"""Package -> how the names of its weight files begin."""


@dataclass(frozen=True)
class PackageConfig:
    """What a config of diffusers or timm says, in the form of a config of transformers.

    Attributes:
        package: The package that builds the model.
        title: The class, or the name in the registry.
        fields: What config.json holds.
        make: Builds the model with the package. It can be pickled, and so sent to ranks.
        name_or_path: Where the config is from.
        dtype: That of most of the weights beside it, as configs of transformers say it; else None.
    """

    package: str
    title: str
    fields: Mapping[str, Any]
    make: Callable[[], nn.Module] | None = None
    name_or_path: str = ""
    dtype: torch.dtype | None = None

    @property
    def __name__(self) -> str:
        """The name of what is built, as a class has it."""
        return self.title

    @property
    def stem(self) -> str:
        """How the names of weight files begin."""
        return STEMS[self.package]

    @property
    def in_parts(self) -> bool:
        """Whether the package reads weights that are in several files."""
        return self.package != "timm"

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json holds."""
        return dict(self.fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PackageConfig:
        """Return a config that is only compared with others."""
        return cls("", "", fields)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json into a directory."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=self.package == "diffusers")
        (Path(directory) / "config.json").write_text(text + "\n")

    def _from_config(
        self, _config: Any, dtype: torch.dtype | None = None, **more: Any
    ) -> nn.Module:
        """Build the model with random weights. The name is that of transformers' method."""
        if more:
            name = next(iter(more))
            raise ModelError(f"models of {self.package} are built as their config says: no {name}")
        assert self.make is not None
        with default_dtype(dtype):
            return self.make()


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make `dtype` that of new floating tensors; None leaves it as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def package_config(name: str | Path) -> PackageConfig | None:
    """Return the config of a model of diffusers or timm; None for any other name.

    Args:
        name: A directory with a config.json, or `timm/NAME` for a model of timm's registry.

    Raises:
        ModelError: the package is not installed, or does not have what the config names.
    """
    path = Path(name)
    if is_directory(path):
        fields = _fields(path)
        if TRANSFORMERS in fields:
            return None
        if isinstance(fields.get(CLASS), str):
            return _of_diffusers(path, fields)
        return _of_timm_directory(path, fields) if ARCHITECTURE in fields else None
    text = str(name)
    return _of_timm(text) if text.startswith(OWNER) else None


def _fields(directory: Path) -> dict[str, Any]:
    try:
        found = read_json(directory / "config.json")
    except (OSError, ValueError):  # transformers' reader says what is wrong
        return {}
    return found if isinstance(found, dict) else {}


def _stored(directory: Path) -> torch.dtype | None:
    """Return the floating dtype of most numbers in the weight files of a directory.

    What is wrong with these files is said where they are loaded.
    """
    from safetensors import safe_open

    counts: Counter[str] = Counter()
    for path in directory.glob("*.safetensors"):
        with suppress(Exception), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                counts[tensor.get_dtype()] += prod(tensor.get_shape())
    known = (FLOATS[kind] for kind, _ in counts.most_common() if kind in FLOATS)
    return next(known, None)


def _imported(package: str, wanted_by: str | Path) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as error:  # imports of other packages may raise anything
        raise ModelError(
            f"{wanted_by} is a model of {package}, which cannot be imported ({first_line(error)}): "
            f"{INSTALL[package]}"
        ) from None


def _of_diffusers(directory: Path, fields: dict[str, Any]) -> PackageConfig:
    """Return the config of a component that diffusers saved.

    Raises:
        ModelError: diffusers is not installed, has no such class, or that is no model.
    """
    diffusers = _imported("diffusers", directory)
    name = fields[CLASS]
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        what = "is no model" if isinstance(found, type) else "is not in it"
        raise ModelError(
            f"{directory} names the class {name:.80} of diffusers, which {what} "
            f"(diffusers {diffusers.__version__}): install the version that saved it "
            f"({fields.get('_diffusers_version', 'not said')}), or give the directory of a model"
        )
    if fields.get("quantization_config") is not None:
        raise ModelError(
            f"{directory} is quantized, and quantized weights are read of models of transformers "
            "only: use the checkpoint that it was made from"
        )
    make = partial(_from_config, found, fields)
    return PackageConfig("diffusers", name, fields, make, str(directory), _stored(directory))


def _from_config(cls: Any, fields: Mapping[str, Any]) -> nn.Module:
    return cls.from_config({**fields})  # a copy: what builds the model may change it


def _of_timm_directory(directory: Path, fields: dict[str, Any]) -> PackageConfig:
    """Return the config of a model that timm saved; timm reads the directory itself.

    Raises:
        ModelError: timm is not installed, or has no such model.
    """
    timm = _imported("timm", directory)
    title = fields[ARCHITECTURE]
    if not (isinstance(title, str) and timm.is_model(title)):
        raise ModelError(
            f"{directory} names the model {title!s:.80} of timm, which timm {timm.__version__} "
            "does not have: install the version that saved it"
        )
    make = partial(timm.create_model, f"local-dir:{directory.resolve()}", pretrained=False)
    return PackageConfig("timm", title, fields, make, str(directory), _stored(directory))


def _of_timm(name: str) -> PackageConfig | None:
    """Return the config of `timm/NAME`; None if timm has no such model, which the Hub may have.

    Raises:
        ModelError: timm is not installed.
    """
    timm, title = _imported("timm", name), name.removeprefix(OWNER)
    if not timm.is_model(title):
        return None
    make = partial(timm.create_model, title, pretrained=False)
    return PackageConfig("timm", title, {ARCHITECTURE: title}, make, name)


def config_of(model: nn.Module) -> PackageConfig | None:
    """Return the config to save with a model of another package; None if it has none.

    A model of diffusers has its own. To others `load` gives the one that they were built from.
    """
    built = vars(model).get(BUILT_FROM)
    if is_of_diffusers(model):
        return PackageConfig("diffusers", type(model).__name__, own_fields(model))
    return built


def own_fields(model: nn.Module) -> dict[str, Any]:
    """Return what config.json of a model of diffusers holds."""
    return json.loads(model.to_json_string())  # type: ignore[operator]


def is_of_diffusers(model: nn.Module) -> bool:
    """Return whether a model has a config as diffusers' models have."""
    return hasattr(model, "to_json_string") and hasattr(model, "register_to_config")


def is_of_timm(model: nn.Module) -> bool:
    """Return whether timm made a model."""
    return type(model).__module__.partition(".")[0] == "timm" and hasattr(model, "pretrained_cfg")


BUILT_FROM = "_shardwright_config"
"""The attribute of a model with the `PackageConfig` that it was built from."""
