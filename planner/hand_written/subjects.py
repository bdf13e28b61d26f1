"""Lists the models of the installed transformers that have hand-written parallel tables.

A table is on a config class (`base_model_tp_plan`, and `base_model_ep_plan` for experts) or on a
class of models (`_tp_plan`: its head).
The heads of models with several towers are left out: the configs of their towers have the tables.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from shardwright.errors import ModelError, UsageError, first_line

MODEL_CLASSES = ("ForCausalLM", "ForMaskedLM", "Model", "ForConditionalGeneration")
"""Endings of the classes that are tried, in this order, if no class has a table of its own."""

FILLED: Mapping[str, Callable[[Any], int]] = {
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "num_key_value_heads": lambda config: config.num_attention_heads,
    **dict.fromkeys(("n_routed_experts", "num_experts"), lambda _: 8),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), lambda _: 2),
    "n_shared_experts": lambda _: 1,
    "moe_intermediate_size": lambda config: config.intermediate_size,
}
"""Entries that some default configs leave open, though the code needs them -> usual numbers."""

EXPERT_COUNTS = (
    "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num",
)  # fmt: skip
"""Entries with how many experts there are."""
CHOSEN_COUNTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
"""Entries with how many experts a token is sent to."""
FEWEST_EXPERTS = 16


class Subject(NamedTuple):
    """A config class with tables: its model type and the class."""

    name: str
    config_class: Any

    def config(self) -> Any:
        """Return a config of default sizes that names the class of its model.

        Sizes that it leaves open are filled in.

        Raises:
            ModelError: transformers has no model for it, or its defaults make no config.
        """
        found = _models(self.config_class)
        if not found:
            raise ModelError(f"transformers has no model of a {self.config_class.__name__}")
        try:
            config = self.config_class()
        except Exception as error:  # the class may raise anything
            raise ModelError(f"no config of default sizes: {first_line(error):.200}") from error
        config.architectures = [found[0].__name__]
        for name, usual in FILLED.items():
            if vars(config).get(name, 0) is None:
                setattr(config, name, usual(config))
        return config


def with_few_experts(config: Any, ranks: int) -> Any:
    """Return a copy with fewer experts, of which ranks hold equally many if they did before.

    A table says the same of any number of experts, and a trace has a pass for each.
    """
    out = copy.deepcopy(config)
    counts = {k: n for k in EXPERT_COUNTS if type(n := vars(out).get(k)) is int and n}
    chosen = [n for k in CHOSEN_COUNTS if type(n := vars(out).get(k)) is int]
    least = max([FEWEST_EXPERTS, *(2 * n for n in chosen)])

    def fits(factor: int) -> bool:
        return all(
            n % factor == 0 and n // factor >= least and (n % ranks or n // factor % ranks == 0)
            for n in counts.values()
        )

    factor = max((1 << k for k in range(12) if fits(1 << k)), default=1)
    for name, count in counts.items():
        setattr(out, name, count // factor)
    return out


def subjects(names: Sequence[str] = ()) -> list[Subject]:
    """Return the config classes with a table, or those of these model types.

    Raises:
        UsageError: a name is no model type with a table.
    """
    every = dict(_subjects(names))
    if unknown := [name for name in names if name not in every]:
        near = get_close_matches(unknown[0], list(every) or _types(), 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"transformers has no table for '{unknown[0]}'{hint}")
    return [Subject(name, every[name]) for name in names or sorted(every)]


def _subjects(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    seen = set()
    for name in names or _types():
        if name not in CONFIG_MAPPING:
            continue
        cls: Any = CONFIG_MAPPING[name]
        of_head = not cls.sub_configs and any(model._tp_plan for model in _models(cls))
        if cls not in seen and (cls.base_model_tp_plan or cls.base_model_ep_plan or of_head):
            seen.add(cls)
            yield name, cls


def _types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING)


def _models(cls: Any) -> list[Any]:
    """Return the model classes of a config class: those with a table of their own first."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LISTED

    try:
        code = importlib.import_module(cls.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:  # the code is that of another model type
        other = getattr(transformers, str(LISTED.get(cls.model_type)), None)
        return [] if other is None else [other]
    found = [
        model
        for model in vars(code).values()
        if isinstance(model, type)
        and issubclass(model, transformers.PreTrainedModel)
        and model.config_class is cls
        and model.__module__ == code.__name__
        and not model.__name__.endswith("PreTrainedModel")
    ]
    return sorted(found, key=lambda m: (not m._tp_plan, _rank(m.__name__)))


def _rank(name: str) -> int:
    ends = (i for i, end in enumerate(MODEL_CLASSES) if name.endswith(end))
    return next(ends, len(MODEL_CLASSES))
