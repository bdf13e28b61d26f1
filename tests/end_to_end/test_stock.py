"""Tools of torch on a split model, on real ranks: what they give is that of the unsplit model."""

from pathlib import Path

from benchmarks.demo_launch import torchrun


def test_fsdp2_clipping_and_distributed_checkpoints(tmp_path: Path):
    """q/k norms and norms under sequence parallelism train; a state of dp 2 x tp 2 goes to tp 4.

    Copies average their gradients by themselves, and are left to FSDP2 where it is around them.
    """
    torchrun("tests.end_to_end.stock", [tmp_path / "state"], ranks=4)
