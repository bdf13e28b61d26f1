"""The parts of a plan that say what was asked for and what the plan should cost."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

LARGEST = 2**40
"""Upper limit of sizes and counts in a plan: products of them stay exact."""

MAX_IMBALANCE = 1000
"""Upper limit of what the busiest rank of `ep` gets, as a multiple of the average."""

Phase = Literal["prefill", "decode", "train"]
ObjectiveName = Literal["time", "memory"]
DataParallel = Literal["ddp", "fsdp"]
Draws = Literal["", "training", "always"]

Count = Annotated[int, Field(ge=0)]
Asked = Annotated[int, Field(ge=1, le=LARGEST)]
Speed = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


class Part(BaseModel):
    """An object in a plan. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SparsePart(Part):
    """A part that does not write the keys in `optional` while they have their default."""

    optional: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            key: value
            for key, value in write(self).items()
            if key not in self.optional or value != fields[key].default
        }


class Quantized(Part):
    """Weights that are held as a quantized checkpoint stores them."""

    method: str = Field(description="`quant_method` of the checkpoint's config")
    bits: dict[str, float] = Field(
        description="parameter, * for a layer number -> bits of an element, with its scales"
    )
    blocks: dict[str, list[int]] = Field(
        description="the same -> rows and columns that share a scale, 0 for all of them"
    )


class ModelIdentity(Part):
    """Which model the plan is for; applying it to another is an error that says what differs."""

    architecture: str = Field(description="class of the model, as transformers names it")
    config_hash: str = Field(description="SHA-256 of what decides the model's shape")
    parameters: dict[str, list[int]] = Field(description="unsharded shapes, * for a layer number")


class Workload(SparsePart):
    """What the plan was priced for."""

    optional = frozenset(
        "dp quantized gpus_per_host spread imbalance shares speeds memories recomputed".split()
    )

    batch: Asked
    seq: Asked
    dtype: str
    device: str = Field(description="name of a device profile, or the file it was read from")
    phases: dict[Phase, Asked] = Field(
        default={"prefill": 1}, description="phase -> how often; see planner/cost/phases.py"
    )
    replicas: Asked = Field(
        default=1, description="copies of the model that share the batch as evenly as possible"
    )
    spread: Asked = Field(
        default=1,
        description="how many of those copies share out the experts of mixtures; left out if 1",
    )
    imbalance: float = Field(
        default=1,
        ge=1,
        le=MAX_IMBALANCE,
        allow_inf_nan=False,
        description="tokens of the busiest rank of `ep`, as a multiple of the average; left out "
        "if 1",
    )
    shares: list[Asked] = Field(
        default=[],
        description="parts of sharded axes that the ranks of `tp` hold, in this ratio; left out if "
        "they are equal",
    )
    speeds: list[Speed] = Field(
        default=[],
        description="speeds of the ranks of `tp`, relative to the device; left out if all are 1",
    )
    memories: list[Count] = Field(
        default=[],
        description="bytes that the ranks of `tp` may hold; left out if all may hold the same",
    )
    sequence_parallel: bool = Field(
        default=False, description="hidden states between blocks are sharded along the sequence"
    )
    optimizer_bytes: Count = Field(
        default=8,
        le=LARGEST,
        description="optimizer state per element of a parameter: 8 for Adam's two in float32",
    )
    dp: DataParallel = Field(
        default="ddp",
        description="what copies do: average gradients, or share out some parameters, too, with "
        "gradients and optimizer state (`Plan.fsdp`); left out for 'ddp'",
    )
    recomputed: dict[str, Asked] = Field(
        default={},
        description="list of blocks -> how many of its first blocks keep only their inputs, and "
        "are computed again in the backward pass; left out if none",
    )
    quantized: Quantized | None = Field(
        default=None,
        description="weights that are held as a quantized checkpoint stores them; left out if "
        "all are dense",
    )
    gpus_per_host: Asked | None = Field(
        default=None,
        description="ranks on one host, innermost mesh dims first; left out if all are on one",
    )

    @property
    def slowest(self) -> int | None:
        """The rank of tp that takes longest with its part; None if all ranks are alike."""
        ranks = range(max(len(self.shares), len(self.speeds)))
        parts, speeds = self.shares or [1] * len(ranks), self.speeds or [1.0] * len(ranks)
        return max(ranks, key=lambda r: (parts[r] / speeds[r], 1 / speeds[r]), default=None)

    @property
    def speed(self) -> float:
        """The speed of that rank, relative to the device profile."""
        return self.speeds[self.slowest or 0] if self.speeds else 1

    @property
    def tightest(self) -> int | None:
        """The rank of tp that may hold least; None if all may hold the same."""
        return self.memories.index(min(self.memories)) if self.memories else None


class Objective(Part):
    """What was minimized, and what a byte on a rank counted as."""

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
        default=0, description="at their peak, with those kept for the backward pass"
    )

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(dict(self).values())


Way = Literal["", "ring", "levels"]
"""How a collective over several hosts goes."""


class CollectiveCount(SparsePart):
    """Collectives of one kind in one forward or backward pass of the stated workload.

    Forward without labels (a loss over split logits adds its own), backward to every parameter.
    """

    optional = frozenset({"hosts", "way"})

    phase: Literal["forward", "backward", "decode"] = Field(
        description="'decode' is the forward of one new token, where that is not the only phase"
    )
    kind: str
    count: Count
    bytes: Count = Field(description="bytes that enter them on one rank")
    hosts: Count = Field(default=1, description="hosts that their ranks are on; left out for one")
    way: Way = Field(
        default="",
        description="how they are priced, which is the cheaper way: in one ring over all hosts, or "
        "by levels, within hosts and between them; left out for one host and for an all-to-all",
    )


class Prediction(SparsePart):
    """What the plan should cost, per rank."""

    optional = frozenset({"memory_by_rank"})

    parameter_bytes: list[Count] = Field(description="parameters and buffers of each rank")
    unsharded_bytes: Count = Field(description="the same for the unsplit model")
    memory: Memory | None = None
    memory_by_rank: list[Count] = Field(
        default=[], description="bytes that each rank of `tp` holds; left out if all hold the same"
    )
    time_ns: Count = Field(description="of the whole workload")
    phase_ns: dict[Phase, Count] = Field(default={}, description="of each phase, run once")
    collectives: list[CollectiveCount] = []


class DrawnItem(SparsePart):
    """A step of a block: a module's ops, a redistribution, or blocks within it.

    An item without any key stands for what the block does beside its layers: masks, positions.
    """

    module: str = Field(default="", description="its name within the block")
    slot: str | None = Field(
        default=None, description="of a redistribution: 'in hidden_states', 'out '"
    )
    ops: list[str] = Field(default=[], description="what is computed, the longest first")
    source: str = Field(default="", description="line of the model's code")
    takes: dict[str, str] = Field(
        default={},
        description="number of an item of the block, or slot of what enters it -> placement",
    )
    parts: list[str] = Field(
        default=[], description="what attention uses the parts of its output as, in their order"
    )
    blocks: dict[str, Count] = Field(
        default={}, description="number of a block in the drawing -> how many run here"
    )
    phase_ns: dict[Phase, Count] = Field(default={}, description="of each phase, run once")
    collectives: list[CollectiveCount] = []


DrawnItem.optional = frozenset(DrawnItem.model_fields)


class DrawnBlock(Part):
    """The model, or blocks of it that are alike, step by step."""

    modules: list[str] = Field(description="names; 'layers.0-31' is 32 of them")
    count: Count = Field(description="how many there are")
    items: list[DrawnItem] = Field(description="in the order in which they run")
    gives: dict[str, str] = Field(
        default={}, description="number of an item -> placement of what leaves the block from it"
    )


class MeshChoice(SparsePart):
    """A mesh that was compared for the same hosts and GPUs."""

    optional = frozenset({"dp", "why"})

    mesh: dict[str, int] = Field(description="mesh dim name -> ranks")
    dp: DataParallel = Field(default="ddp", description="what copies do; left out for 'ddp'")
    fits: bool = Field(default=False, description="whether a rank has enough memory")
    memory: Count | None = Field(
        default=None,
        description="bytes that the fullest rank holds; if nothing fits, the fewest known",
    )
    time_ns: Count | None = Field(default=None, description="of all phases; null if nothing fits")
    phase_ns: dict[Phase, Count] = Field(default={}, description="of each phase, run once")
    why: str = Field(default="", description="why it has no plan or does not fit")


class Trial(Part):
    """Another plan that was timed in turn with the one that the planner chose."""

    mesh: dict[str, int] = Field(description="its mesh dim name -> ranks")
    pins: dict[str, str] = Field(description="its pins")
    predicted_ns: Count = Field(description="its predicted time of the whole workload")
    time_ns: Count = Field(description="the measured one: the sum of medians of phases")
    beside_ns: Count = Field(description="the same of the plan that the planner chose")

    @property
    def share(self) -> float:
        """Its measured time, in shares of the other."""
        return self.time_ns / max(self.beside_ns, 1)


class SolverReport(Part):
    """Who found the plan and how good it is known to be."""

    name: str
    found_by: str = Field(default="", description="the solver that had this plan first")
    proved_by: str = Field(default="", description="the solver that proved it optimal")
    status: Literal["optimal", "feasible"]
    objective: list[Count] = Field(
        description="the weighted objective, then its bytes, forward ns and backward ns"
    )
    bound: list[Count] = Field(description="lower bound of the weighted objective")
    gap: Count = Field(default=0, description="weighted objective less its bound: 0 if optimal")
    note: str = ""
