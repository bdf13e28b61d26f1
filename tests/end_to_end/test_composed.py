"""Tools of others on a split model, on two real ranks: as on the whole one, or refused."""

from pathlib import Path

from benchmarks.forked import run_forked

from . import composed


def test_tools_of_others(tmp_path: Path) -> None:
    """Those that want processes; what threads can do is in `tests/runtime/`."""
    for end in run_forked(2, composed.main, (), tmp_path, limit=300):
        assert end.how == "well", (end.text, end.log)
