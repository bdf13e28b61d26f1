"""Tools of torch on a split model, on real ranks: what they give is that of the unsplit model."""

from pathlib import Path

from benchmarks.forked import run_forked

from . import stock


def test_fsdp2_clipping_and_distributed_checkpoints(tmp_path: Path):
    """q/k norms and norms under sequence parallelism train; a state of dp 2 x tp 2 goes to tp 4.

    It is saved while ranks go on. Copies average their gradients by themselves, and are left to
    FSDP2 where it is around them; such a model is written whole, too.
    """
    for end in run_forked(4, stock.main, (tmp_path,), tmp_path, limit=300):
        assert end.how == "well", (end.text, end.log)
