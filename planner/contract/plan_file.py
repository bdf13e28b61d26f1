"""The plan: what `shardwright plan` writes and the runtime applies. No torch, no solver in here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shardwright.errors import PlanError
from shardwright.planner.contract import consistency
from shardwright.planner.contract.bounded import parse_json
from shardwright.planner.contract.digest import DIGEST, digest_of
from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.mesh import Coords, coords_of
from shardwright.planner.contract.names import lookup
from shardwright.planner.contract.part import Part
from shardwright.planner.contract.plain_values import PlainValue
from shardwright.planner.contract.traced_call import TracedCall
from shardwright.planner.contract.versions import upgraded

FORMAT = "shardwright.plan"
VERSION = 3
LARGEST_FILE = 1 << 26
"""Bytes of a plan that is read: those of the largest models have a hundredth of that."""

Phase = Literal["prefill", "decode", "train"]
ObjectiveName = Literal["time", "memory"]

Count = Annotated[int, Field(ge=0)]
Asked = Annotated[int, Field(ge=1, le=consistency.LARGEST)]


class ModelIdentity(Part):
    """Which model the plan is for; applying it to another is an error that says what differs."""

    architecture: str = Field(description="class of the model, as transformers names it")
    config_hash: str = Field(description="SHA-256 of what decides the model's shape")
    parameters: dict[str, list[int]] = Field(description="whole shapes, * for a layer number")


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
    """A tensor that a module takes or gives as it is, and how it lies there."""

    slot: str = Field(description="as in `Redistribution`, * for a number within")
    placement: str


class ParameterPlan(Part):
    """A parameter or buffer: how it is stored, and how its module sees it if that differs."""

    placement: str
    use: str | None = None


class RandomNumbers(Part):
    """What a module draws random numbers for, such as those by which dropout drops."""

    placement: str = Field(description="of the numbers: ranks draw them whole, and keep this part")
    length: str | None = Field(
        default=None, description="the axis of run-time size that is split, if one is"
    )


SELDOM = frozenset("attention draws each flags keeps no_gradient sizes unknown varies".split())
"""Keys of a module's plan that are not written where they say nothing."""


class ModuleCall(Part):
    """How tensors lie in one call of a module, of those that do not change around it."""

    takes: list[Placed] = []
    gives: list[Placed] = []
    at: list[str] = Field(
        default=[],
        description="where in code it is: function, line in it, last column, and a digest of where "
        "all of the function stands; of no use to who runs another version of that code",
    )


class ModulePlan(Part):
    """What changes in one module; modules that are not named in a plan stay as they are."""

    layer: str = Field(
        default="LocalModule",
        description="layer style; 'package:name' for one that another package brings; 'Unchanged' "
        "for a module that stays as it is, of which `takes` and `gives` are needed for hooks",
    )
    parameters: dict[str, ParameterPlan] = {}
    inputs: list[Redistribution] = []
    outputs: list[Redistribution] = []
    attention: list[Redistribution] = Field(
        default=[],
        description="what changes as the module's code gives it to attention, by the names of "
        "arguments of `scaled_dot_product_attention`; left out where no sequence is shared",
    )
    keeps: list[Redistribution] = Field(
        default=[],
        description="what changes of tensors that the module's code sets as its attributes, by "
        "their names: users may read them behind the call; left out where there are none",
    )
    takes: list[Placed] = Field(
        default=[], description="what enters as it is: needed where it is called by itself"
    )
    gives: list[Placed] = Field(default=[], description="what leaves as it is")
    flags: dict[str, list[PlainValue]] = Field(
        default={},
        description="argument that is neither tensor nor size of one, or would not be where it is "
        "left out -> what it was in the calls of the module: one that calls it by itself may give "
        "no other; left out where there is none",
    )
    varies: bool = Field(
        default=False,
        description="whether tensors lie otherwise in some call of it than `takes` and `gives` "
        "say; left out where they do not",
    )
    each: list[ModuleCall] = Field(
        default=[],
        description="how tensors lie in each of its calls, where it varies: hooks know by where it "
        "is called, and by the sizes of a rank's tensors, and are refused where these do not tell",
    )
    no_gradient: list[str] = Field(
        default=[],
        description="what has a gradient in no call, and none that follows from others', by side "
        "and slot ('in attention_mask', 'out 1'): a rank may have a term of one alone; left out "
        "where there is none",
    )
    unknown: list[str] = Field(
        default=[],
        description="integers and complex numbers that nobody takes, by side and slot, of which "
        "ranks have what they make of parts; left out where there are none",
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
        "`forward`; left out where there are none",
    )
    draws: list[RandomNumbers] = Field(
        default=[],
        description="what its own code draws random numbers for, in order, where ranks have parts "
        "of some of it; left out where there is none",
    )

    @property
    def boundary(self) -> list[Redistribution]:
        """What changes of the tensors that come into it, and of those that are had from it."""
        return [*self.inputs, *self.outputs, *self.keeps]

    @property
    def changes(self) -> bool:
        """Whether it says of anything that it changes."""
        said = (self.parameters, self.boundary, self.attention, self.attributes)
        return any((*said, self.sizes, self.draws))

    @model_serializer(mode="wrap")
    def _without_what_is_not(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is not, of keys that are seldom needed, is not written."""
        out = write(self)
        return {k: v for k, v in out.items() if v or k not in SELDOM}


class Replicated(Part):
    """A large parameter that no rank can do without, and why."""

    parameter: str
    bytes: Count
    reason: str


class CollectiveCount(Part):
    """Collectives of one kind in one forward or backward pass of the stated workload.

    Forward without labels (a loss over split logits adds its own), backward to every parameter.
    """

    phase: Literal["forward", "backward", "decode"] = Field(
        description="'decode' is the forward of one new token, where that is not the only phase"
    )
    kind: str
    count: Count
    bytes: Count = Field(description="bytes that enter them on one rank")


DataParallel = Literal["ddp", "fsdp"]


class Workload(Part):
    """What the plan was priced for."""

    batch: Asked
    seq: Asked
    dtype: str
    device: str = Field(description="name of a device profile, or file that one was read from")
    phases: dict[Phase, Asked] = Field(
        default={"prefill": 1}, description="phase -> how often; see planner/cost/phases.py"
    )
    replicas: Asked = Field(
        default=1, description="copies of the model that share the batch, as equally as can be"
    )
    sequence_parallel: bool = Field(
        default=False, description="hidden states between blocks are sharded along the sequence"
    )
    optimizer_bytes: Count = Field(
        default=8,
        le=consistency.LARGEST,
        description="state of a parameter's element: Adam's two in float32",
    )
    dp: DataParallel = Field(
        default="ddp",
        description="what copies do: average gradients, or share out parameters, gradients and "
        "optimizer state as torch's fully_shard does; left out where they average",
    )

    @model_serializer(mode="wrap")
    def _without_ddp(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in write(self).items() if (k, v) != ("dp", "ddp")}


class Objective(Part):
    """What was to be least, and what a byte on a rank was counted as."""

    name: ObjectiveName
    byte_price_ns: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="nanoseconds: a power of two; null in plans before version 3",
    )
    memory_bytes: Count | None = Field(
        default=None, description="what a rank may hold: the device's memory, or --memory"
    )


class Memory(Part):
    """Bytes that the fullest rank holds with the stated workload."""

    parameters: Count = Field(description="and buffers")
    gradients: Count = 0
    optimizer: Count = 0
    cache: Count = Field(default=0, description="keys and values of `seq` tokens")
    activations: Count = Field(
        default=0, description="between ops, at their most; with those kept for a backward pass"
    )

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dict(self).values())


class Prediction(Part):
    """What the plan should cost, per rank."""

    parameter_bytes: list[Count] = Field(description="parameters and buffers of each rank")
    unsharded_bytes: Count = Field(description="the same for the unsplit model")
    memory: Memory | None = None
    time_ns: Count = Field(description="of all that the workload asks for")
    phase_ns: dict[Phase, Count] = Field(default={}, description="of each phase, run once")
    collectives: list[CollectiveCount] = []


class DrawnItem(Part):
    """Something that a block does: a module's ops, a change of placement, or blocks within it.

    Keys that say nothing are left out. One without any is what is aside: masks, positions.
    """

    module: str = Field(default="", description="its name within the block")
    slot: str | None = Field(
        default=None, description="of a change of placement: 'in hidden_states', 'out '"
    )
    ops: list[str] = Field(default=[], description="what is computed, what takes longest first")
    source: str = Field(default="", description="line of the model's code")
    takes: dict[str, str] = Field(
        default={},
        description="number of an item of the block, or slot of what enters it -> placement",
    )
    parts: list[str] = Field(
        default=[], description="what attention takes the parts of its output for, in their order"
    )
    blocks: dict[str, Count] = Field(
        default={}, description="number of a block in the drawing -> how many stand here"
    )
    phase_ns: dict[Phase, Count] = Field(default={}, description="of each phase, run once")
    collectives: list[CollectiveCount] = []

    @model_serializer(mode="wrap")
    def _brief(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        defaults = type(self).model_fields
        return {k: v for k, v in serialize(self).items() if v != defaults[k].default}


class DrawnBlock(Part):
    """The model, or blocks of it that are alike, as a person draws them."""

    modules: list[str] = Field(description="names; 'layers.0-31' is 32 of them")
    count: Count = Field(description="how many there are")
    items: list[DrawnItem] = Field(description="in the order in which they run")
    gives: dict[str, str] = Field(
        default={}, description="number of an item -> placement of what leaves the block from it"
    )


class SolverReport(Part):
    """Who found the plan and how good it is known to be."""

    name: str
    found_by: str = Field(default="", description="the solver that had this plan first")
    proved_by: str = Field(default="", description="the solver that proved that none is better")
    status: Literal["optimal", "feasible"]
    objective: list[Count] = Field(
        description="the weighed objective, then its bytes, forward ns and backward ns"
    )
    bound: list[Count] = Field(description="least value that the weighed objective can have")
    gap: Count = Field(default=0, description="weighed objective less its bound: 0 where optimal")
    note: str = ""


class Plan(Part):
    """How to split one model over one mesh."""

    format: Literal["shardwright.plan"] = FORMAT
    version: Literal[3] = VERSION
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
    objective: Objective = Field(description="what was to be least")
    modules: dict[str, ModulePlan] = Field(description="module name, * for a layer number")
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
        """Ranks that one copy of the model takes."""
        n = 1
        for size in self.mesh.values():
            n *= size
        return n

    def coords(self, rank: int) -> Coords:
        """Where a rank stands on each mesh dim and sub-axis; the last mesh dim varies fastest."""
        return coords_of(self.mesh, self.sub_axes, rank)

    def module(self, name: str) -> ModulePlan | None:
        """The entry for module `name`: its own, else that of its pattern."""
        return lookup(self.modules, name)

    def noted(self, text: str) -> Plan:
        """The same with one more note, sealed."""
        note = f"{self.solver.note}; {text}" if self.solver.note else text
        solver = self.solver.model_copy(update={"note": note})
        return self.model_copy(update={"solver": solver}).sealed()

    def sealed(self) -> Plan:
        """The same with the digest of its content: for those who know that it is right."""
        return self.model_copy(update={DIGEST: digest_of(self.model_dump())})

    def unedited(self, where: str | Path = "the plan") -> Plan:
        """This plan, if it is as it was when its digest was written: what is applied must be.

        Raises:
            PlanError: it was edited since, or an older release wrote it, without a digest.
        """
        if self.digest == digest_of(self.model_dump()):
            return self
        why = "was edited since it was written" if self.digest else "carries no digest"
        raise PlanError(
            f"{where} {why}: `shardwright check --accept PLAN.JSON MODEL` proves that it is right "
            "for the model, and writes its digest"
        )

    def to_json(self) -> str:
        """The plan as text: sorted keys, two spaces, byte-identical for equal plans."""
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the plan") -> Plan:
        """Read a plan.

        Raises:
            PlanError: not JSON, not a plan, of another version, or with keys that are not known.
        """
        try:
            data: Any = parse_json(text, plain=True)
        except ValueError as error:
            raise PlanError(f"{where} is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f'{where} is not a Shardwright plan: "format" should be "{FORMAT}"')
        data = upgraded(data, VERSION)
        if data.get("version") != VERSION:
            raise PlanError(
                f"{where} has plan version {data.get('version')!r:.20}; this Shardwright reads "
                f"versions 1 to {VERSION}: make the plan again with `shardwright plan`"
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"{key}: " for key in [".".join(map(str, first["loc"]))] if key)
            raise PlanError(f"{where} does not hold: {place}{first['msg']}") from None

    def save(self, path: str | Path) -> None:
        """Write the plan to `path`, all of it or nothing."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from `path`.

        Raises:
            PlanError: the file is missing or is not a plan.
        """
        try:
            with Path(path).open("rb") as stream:
                content = stream.read(LARGEST_FILE + 1)
            text = content.decode()
        except OSError as error:
            raise PlanError(f"cannot read plan {path}: {error.strerror}") from None
        except ValueError:  # no name of a file, or no text
            raise PlanError(f"{path} is not a text file, so not a plan") from None
        if len(content) > LARGEST_FILE:
            raise PlanError(f"{path} has more than {LARGEST_FILE:,} bytes, so it is no plan")
        return cls.from_json(text, where=str(path))
