"""The plan file, which `shardwright plan` writes and the runtime applies. Needs no torch or solver.

docs/plan-format.md documents it, and `consistency.py` checks what must be true of any plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract import consistency
from shardwright.planner.contract.files import (
    LARGEST_PLAN,
    parse_json,
    read_bytes,
    write_atomically,
)
from shardwright.planner.contract.mesh import Coords, coords_of
from shardwright.planner.contract.names import is_batched, lookup, pattern, taken_as
from shardwright.planner.contract.plain_values import PlainValue
from shardwright.planner.contract.plan_figures import (
    LARGEST,
    Count,
    DrawnBlock,
    Draws,
    MeshChoice,
    ModelIdentity,
    Objective,
    Part,
    Prediction,
    SolverReport,
    SparsePart,
    Trial,
    Workload,
)

FORMAT = "shardwright.plan"
VERSION = 4


class Redistribution(Part):
    """A tensor that changes its placement while it enters or leaves a module.

    `slot` names it: an argument of `forward` ("hidden_states"), an element of a nested one
    ("position_embeddings.0"), an element of the output ("0", "logits"), "" for the sole output.
    Where a module has several for one slot, a tensor takes that for as many dims as it has.
    """

    slot: str
    source: str = Field(description="placement before, in layout notation")
    target: str = Field(description="placement after")
    before: str | None = Field(
        default=None,
        description="take the tensor as it came into a module around, before that one's "
        "redistribution: a dot for each module up, then the slot there ('.hidden_states')",
    )
    length: str | None = Field(
        default=None,
        description="the run-time axis that is split on one side, by the input that has it "
        "('input_ids.1'): redistributions that name the same one split the same length",
    )
    deferred: bool = Field(
        default=False, description="scores of a loss: stay split while one is computed"
    )


class Placed(Part):
    """A tensor that enters or leaves a module unchanged, and its placement there."""

    slot: str = Field(description="as in `Redistribution`, * for a number within")
    placement: str


class ParameterPlan(SparsePart):
    """A parameter or buffer: how it is stored, and how its module sees it if that differs."""

    optional = frozenset({"assigned"})

    placement: str
    use: str | None = None
    assigned: bool = Field(default=False, description="whether code sets its `data`")


class RandomNumbers(SparsePart):
    """Random numbers that a module draws, such as those of dropout."""

    optional = frozenset({"always"})

    placement: str = Field(description="of the numbers: ranks draw all of them and keep this part")
    length: str | None = Field(default=None, description="the run-time axis that is split, if any")
    always: bool = Field(default=False, description="whether it draws in eval mode, too")


class Dispatch(SparsePart):
    """How a mixture's tokens travel to the ranks of `ep` that hold their experts, and back.

    Each slot names an argument of the module's `forward`.
    """

    optional = frozenset({"columns", "counts", "width"})

    tokens: str = Field(description="the hidden states, of which each row is a token")
    experts: str | None = Field(
        default=None,
        description="the numbers of each token's experts; null if tokens lie by expert",
    )
    weights: str | None = Field(default=None, description="how much each of them counts, likewise")
    count: int = Field(ge=2, le=LARGEST, description="experts of the module")
    columns: int = Field(
        default=1,
        ge=1,
        le=2,
        description="experts that the code gets for each received token: 1, or 2 if it fails with "
        "1, and the second is the first again, with weight 0; left out if 1",
    )
    counts: str | None = Field(
        default=None,
        description="how many tokens each expert has, if they lie by expert; left out if as many "
        "for each",
    )
    width: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST,
        description="elements of what the module gives for a token; left out if those of a token",
    )


class ModulePlan(SparsePart):
    """What changes in one module; modules that a plan does not name stay as they are."""

    optional = frozenset(
        "attention checked dispatch draws flags keeps no_gradient sizes unknown varies".split()
    )

    layer: str = Field(
        default="LocalModule",
        description="layer style; 'package:name' for one that another package brings; 'Unchanged' "
        "for a module that runs as before, whose `takes` and `gives` hooks need",
    )
    parameters: dict[str, ParameterPlan] = {}
    inputs: list[Redistribution] = []
    outputs: list[Redistribution] = []
    attention: list[Redistribution] = Field(
        default=[],
        description="redistributions of what the module's code passes to attention, by argument "
        "of `scaled_dot_product_attention`; left out if no sequence is split over ranks",
    )
    keeps: list[Redistribution] = Field(
        default=[],
        description="redistributions of tensors that the module's code sets as its attributes, "
        "which users may read after the call, by attribute; left out if empty",
    )
    takes: list[Placed] = Field(
        default=[], description="tensors that enter unchanged: needed to call the module directly"
    )
    gives: list[Placed] = Field(default=[], description="tensors that leave unchanged")
    flags: dict[str, list[PlainValue]] = Field(
        default={},
        description="argument that is neither a tensor nor a size -> the values it had in the "
        "traced calls: a direct call of the module may give no other; left out if empty",
    )
    checked: bool = Field(
        default=False,
        description="whether its flags may depend on data: they are then compared in calls that "
        "the model makes, too; left out if false",
    )
    varies: bool = Field(
        default=False,
        description="whether some call has other placements than `takes` and `gives`; left out if "
        "false",
    )
    no_gradient: list[str] = Field(
        default=[],
        description="tensors that have a gradient in no call, nor one that follows from others', "
        "by side and slot ('in attention_mask', 'out 1'); left out if empty",
    )
    unknown: list[str] = Field(
        default=[],
        description="integers and complex numbers that no op reads, by side and slot: each rank "
        "has its own value; left out if empty",
    )
    attributes: dict[str, str] = Field(
        default={},
        description="integers to replace by local ones, as dims: {'num_heads': '4@tp'}; "
        "'config.x' is read through the module's own copy of its config",
    )
    sizes: dict[str, str] = Field(
        default={},
        description="sizes that calls in the module's own code are given, to replace by local "
        "ones: {'forward.view.0': '?, ?, 4@tp'} is the first call of a `view` in the source of "
        "`forward`; left out if empty",
    )
    draws: list[RandomNumbers] = Field(
        default=[],
        description="random numbers that its own code draws, in order, if ranks keep parts of any; "
        "left out if empty",
    )

    dispatch: Dispatch | None = Field(
        default=None,
        description="its tokens travel to the ranks that hold their experts; left out if not",
    )

    @property
    def boundary(self) -> list[Redistribution]:
        """Return all redistributions of tensors that enter, leave, or are set as attributes."""
        return [*self.inputs, *self.outputs, *self.keeps]

    @property
    def changes(self) -> bool:
        """Return whether the module runs differently than without a plan."""
        said = (self.parameters, self.boundary, self.attention, self.attributes)
        return any((*said, self.sizes, self.draws, self.dispatch))


class TracedCall(SparsePart):
    """A call that the plan is proven for."""

    optional = frozenset(
        "values numbers lengths state several training draws asks_autocast".split()
    )

    module: str = Field(default="", description="the module that was called; empty for the model")
    inputs: list[str] = Field(default=[], description="arguments given, by name or number")
    values: dict[str, PlainValue] = Field(
        default={},
        description="argument -> its value, of those that are no tensors and may decide what code "
        "does, 'name.key' of a dict's, 'name.0' of a list's; left out if empty",
    )
    numbers: list[str] = Field(
        default=[], description="arguments that may be any number; left out if empty"
    )
    lengths: dict[str, str] = Field(
        default={},
        description="comparison of lengths that holds in every call ('x.shape[1] > 10') -> place "
        "in the code that decides by it; left out if empty",
    )
    outputs: list[str] = Field(default=[], description="slots of what was returned")
    state: dict[str, str] = Field(
        default={},
        description="argument -> class of the cache that the call continues; left out if empty",
    )
    several: bool = Field(
        default=False,
        description="whether it continues the cache by several tokens; left out if false",
    )
    training: bool = Field(
        default=False, description="whether it is proven in training mode; left out if false"
    )
    draws: Draws = Field(
        default="", description="when it draws random numbers; left out if it draws none"
    )
    asks_autocast: bool = Field(
        default=False,
        description="whether its code reads the autocast mode, and is not proven under autocast; "
        "left out if false",
    )

    def as_called(self, takes: Container[str]) -> TracedCall:
        """Return the call with the name that a forward has for its cache.

        transformers may have renamed it since the plan was made.

        Args:
            takes: The arguments of the forward.
        """
        new = {} if is_batched(self.state) else {n: taken_as(n, takes) for n in self.state}
        if all(old == now for old, now in new.items()):
            return self
        inputs = sorted(new.get(name, name) for name in self.inputs)
        state = {new[name]: kind for name, kind in self.state.items()}
        return self.model_copy(update={"inputs": inputs, "state": state})


class Replicated(Part):
    """A large parameter that every rank holds whole, and why."""

    parameter: str
    bytes: Count
    reason: str


DIGEST = "digest"
"""The key of a plan that the digest does not cover: the digest."""


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a plan's content as canonical JSON: sorted keys, no spaces, ASCII.

    It shows that a plan was edited, not who wrote it (see SECURITY.md).
    """
    rest = {key: value for key, value in content.items() if key != DIGEST}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a plan's JSON object to the current version; unchanged if its version is unknown."""
    if type(data.get("version")) is not int:
        return data
    if data["version"] == 1:
        renamed = {"sub_dims": "sub_axes", "whole": "replicated"}
        data = {renamed.get(key, key): value for key, value in data.items()} | {"version": 2}
        if isinstance(predicted := data.get("predicted"), dict):
            words = {"whole_bytes": "unsharded_bytes"}
            data["predicted"] = {words.get(key, key): value for key, value in predicted.items()}
    if data["version"] == 2:
        data = data | {"version": 3, "objective": {"name": "memory"}}  # the only one at that time
    if data["version"] == 3:
        modules = data.get("modules")
        if isinstance(modules, dict) and all(isinstance(spec, dict) for spec in modules.values()):
            modules = {n: {k: v for k, v in s.items() if k != "each"} for n, s in modules.items()}
        data = data | {"version": 4, "modules": modules}
    return data


class Plan(SparsePart):
    """How to split one model over one mesh."""

    optional = frozenset({"fsdp", "meshes", "trials"})

    format: Literal["shardwright.plan"] = FORMAT
    version: Literal[4] = VERSION
    model: ModelIdentity
    mesh: dict[str, int] = Field(description="mesh dim name -> ranks")
    batch_dims: list[str] = Field(
        default=[],
        description="mesh dims whose ranks take different sequences: each holds the whole model, "
        "split over the other dims, and gradients are averaged over these",
    )
    sub_axes: dict[str, list[int]] = Field(
        default={},
        description="mesh dim -> sizes of its sub-axes, major first, where layouts name them: "
        "[2, 2] makes tp.0 and tp.1 of 4 ranks",
    )
    workload: Workload
    objective: Objective = Field(description="what was minimized")
    modules: dict[str, ModulePlan] = Field(description="module name, * for a layer number")
    fsdp: list[str] = Field(
        default=[],
        description="parameters that copies of the model share out, as torch's fully_shard does, * "
        "for a layer number; left out if none",
    )
    calls: list[TracedCall] = Field(
        default=[], description="what it is proven for; the first is priced"
    )
    drawing: list[DrawnBlock] = Field(
        default=[], description="of the first call; the model itself first, then its blocks"
    )
    replicated: list[Replicated] = []
    opaque: dict[str, Count] = Field(default={}, description="ops without a rule -> occurrences")
    pins: dict[str, str] = Field(
        default={},
        description="what the user asked for: parameter or module -> replicate or shard:DIM",
    )
    predicted: Prediction
    meshes: list[MeshChoice] = Field(
        default=[],
        description="all meshes that were compared, this plan's first; left out if it was given",
    )
    trials: list[Trial] = Field(
        default=[],
        description="other plans that `--tune` timed on ranks, the fastest first; left out if none",
    )
    solver: SolverReport
    versions: dict[str, str] = {}
    digest: str = Field(
        default="",
        description="SHA-256 of all other keys as canonical JSON, by the planner or by "
        "`shardwright check --accept`: a plan that was edited since is not applied",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        try:
            consistency.check(self)  # pyright: ignore[reportArgumentType]
        except PlanError as error:
            raise PydanticCustomError("plan", "{text}", {"text": str(error)}) from None
        return self

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the mesh."""
        return prod(self.mesh.values())

    def coords(self, rank: int) -> Coords:
        """Return a rank's coordinates on mesh dims and sub-axes; the last dim varies fastest."""
        return coords_of(self.mesh, self.sub_axes, rank)

    def module(self, name: str) -> ModulePlan | None:
        """Return the entry for module `name`, or else for its pattern."""
        return lookup(self.modules, name)

    def parameter(self, name: str) -> ParameterPlan | None:
        """Return the entry for the parameter or buffer `name`; None if it is replicated."""
        owner, _, key = name.rpartition(".")
        spec = self.module(owner)
        return spec.parameters.get(key) if spec else None

    def reason(self, name: str) -> str | None:
        """Return why the large parameter `name` is replicated; None if it is not."""
        listed = ((r.parameter, r.reason) for r in self.replicated)
        return next((reason for n, reason in listed if pattern(n) == pattern(name)), None)

    def is_shared(self, name: str) -> bool:
        """Whether copies of the model share out the parameter `name`."""
        return name in self.fsdp or pattern(name) in self.fsdp

    def noted(self, text: str) -> Plan:
        """Return the plan with one more note, sealed."""
        note = f"{self.solver.note}; {text}" if self.solver.note else text
        solver = self.solver.model_copy(update={"note": note})
        return self.model_copy(update={"solver": solver}).sealed()

    def sealed(self) -> Plan:
        """Return the plan with the digest of its content. Only for callers that have proven it."""
        return self.model_copy(update={DIGEST: digest_of(self.model_dump())})

    def unedited(self, where: str | Path = "the plan") -> Plan:
        """Return this plan if its content still matches its digest.

        Raises:
            PlanError: it was edited, or an older release wrote it without a digest.
        """
        if self.digest == digest_of(self.model_dump()):
            return self
        why = "was edited since it was written" if self.digest else "carries no digest"
        raise PlanError(
            f"{where} {why}: `shardwright check --accept PLAN.JSON MODEL` proves that it is right "
            "for the model, and writes its digest"
        )

    def to_json(self) -> str:
        """Return the plan as text: sorted keys, two spaces, byte-identical for equal plans."""
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the plan") -> Plan:
        """Read a plan from text.

        Raises:
            PlanError: it is not JSON or not a plan, has another version, or has unknown keys.
        """
        try:
            data: Any = parse_json(text, plain=True)
        except ValueError as error:
            raise PlanError(f"{where} is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f'{where} is not a Shardwright plan: "format" should be "{FORMAT}"')
        # What version 4 drops is of no use to the runtime. Older plans lack what it needs.
        resealed = data.get("version") == 3 and data.get(DIGEST) == digest_of(data)
        data = upgraded(data)
        if data.get("version") != VERSION:
            raise PlanError(
                f"{where} has plan version {data.get('version')!r:.20}; this Shardwright reads "
                f"versions 1 to {VERSION}: make the plan again with `shardwright plan`"
            )
        try:
            plan = cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"{key}: " for key in [".".join(map(str, first["loc"]))] if key)
            raise PlanError(f"{where} is not valid: {place}{first['msg']}") from None
        return plan.sealed() if resealed else plan

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` atomically."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path | Plan) -> Plan:
        """Read a plan from `path`; a plan itself is given back.

        Raises:
            PlanError: the file is missing or is not a plan.
            UsageError: `path` is neither a plan nor a name.
        """
        if isinstance(path, Plan):
            return path
        if not isinstance(path, str | PathLike):
            raise UsageError(f"a plan or its file is needed, and not a {type(path).__name__}")
        try:
            text = read_bytes(Path(path), LARGEST_PLAN).decode()
        except OSError as error:
            raise PlanError(f"cannot read plan {path}: {error.strerror}") from None
        except ValueError as error:
            why = "it is not text" if isinstance(error, UnicodeDecodeError) else error
            raise PlanError(f"{path} is no plan: {why}") from None
        return cls.from_json(text, where=str(path))
