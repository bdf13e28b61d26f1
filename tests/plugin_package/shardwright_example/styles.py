"""When a `Gate` becomes a `ParallelGate`; imports no torch, since reports read it too."""

from shardwright.planner.contract.styles import LayerStyle

PARALLEL_GATE = LayerStyle(
    module="shardwright_example.layers:Gate",
    dim=0,
    word="channels",
    layer="shardwright_example.layers:ParallelGate",
)
