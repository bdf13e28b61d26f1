"""When a `Gate` becomes a `ParallelGate`; imports no torch, since reports read it too."""

from shardwright.planner.contract.styles import Style

PARALLEL_GATE = Style(
    word="channels",
    module="shardwright_example.layers:Gate",
    dim=0,
    layer="shardwright_example.layers:ParallelGate",
)
