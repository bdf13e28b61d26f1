"""Collectives through shared memory: what they compute, and how they end; ranks are threads here.

Each has a mapping of its own and waits outside of Python, as processes do; those are in
`tests/faults/test_shared_memory.py`.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.runtime.shared_memory import compiled
from shardwright.runtime.shared_memory.channel import DTYPES, Channel, size

if sys.platform != "linux":
    pytest.skip("memory without a name is Linux's", allow_module_level=True)

SMALL = 128
"""Room for little, so that most messages go in pieces."""


def patient(_: float) -> None:
    """Wait on."""


def run(
    ranks: int,
    fn: Callable[[Channel, int], Any],
    room: int = SMALL,
    look: Callable[[float], None] = patient,
) -> list[Any]:
    """`fn(channel, rank)` on threads; what each gives or raises, by rank."""
    file = os.memfd_create("test")
    os.ftruncate(file, size(ranks, room))
    channels = [Channel(file, rank, ranks, look, room) for rank in range(ranks)]
    os.close(file)
    out: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        try:
            out[rank] = fn(channels[rank], rank)
        except RuntimeError as error:
            out[rank] = str(error)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return out


def summed(terms: list[Tensor]) -> Tensor:
    """In the order of the ranks; of 16 bits in float32, rounded once."""
    wide = torch.float32 if terms[0].dtype.itemsize == 2 else terms[0].dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total.to(terms[0].dtype)


def drawn(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return (values * torch.logspace(-3, 3, count, dtype=torch.float64)).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["sum", "max", "min", "gather", "scatter"]),
        st.sampled_from(list(DTYPES)),
        st.one_of(st.integers(0, 70), st.integers(30_000, 30_100)),
    ),
    min_size=1,
    max_size=6,
)


def rows(count: int) -> int:
    """In how many rows a tensor of so many elements is gathered here."""
    return next(n for n in (7, 3, 1) if count % n == 0)


@settings(max_examples=30)
@given(st.integers(2, 5), CALLS, st.sampled_from([SMALL, 1 << 20]))
def test_results_are_those_of_torch_on_all_ranks(
    ranks: int, calls: list[tuple[str, torch.dtype, int]], room: int
) -> None:
    """One call after the other; also of nothing, of a piece and one more, and of sums that are
    shared."""

    def inputs(at: int) -> list[Tensor]:
        kind, dtype, count = calls[at]
        count *= ranks if kind == "scatter" else 1
        return [drawn(count, dtype, 10 * at + rank) for rank in range(ranks)]

    def work(channel: Channel, rank: int) -> list[Tensor]:
        out = []
        for at, (kind, _, _) in enumerate(calls):
            x = inputs(at)[rank]
            if kind == "gather":
                out.append(channel.run("all_gather", x, rows=rows(x.numel())))
            elif kind == "scatter":
                out.append(channel.run("reduce_scatter", x))
            else:
                out.append(channel.run("all_reduce", x, kind))
        return out

    for rank, got in enumerate(run(ranks, work, room)):
        for at, (kind, _, count) in enumerate(calls):
            terms = inputs(at)
            if kind == "gather":
                parts = [term.view(rows(count), -1 if count else 0) for term in terms]
                want = torch.cat(parts, 1).flatten()
            elif kind == "scatter":
                want = summed([term.view(ranks, count)[rank] for term in terms])
            elif kind == "sum":
                want = summed(terms)
            else:
                want = getattr(torch.stack(terms), f"a{kind}")(0)
            assert same(got[at], want), (calls[at], rank)


@settings(max_examples=30)
@given(
    st.integers(2, 5).flatmap(
        lambda n: st.lists(
            st.lists(
                st.lists(st.one_of(st.integers(0, 40), st.just(1000)), min_size=n, max_size=n),
                min_size=n,
                max_size=n,
            ),
            min_size=1,
            max_size=3,
        )
    ),
    st.sampled_from(list(DTYPES)),
)
def test_an_all_to_all_brings_what_each_rank_sent(
    tables: list[list[list[int]]], dtype: torch.dtype
) -> None:
    """`tables[call][rank][other]`: elements from a rank to another; nothing, or several pieces."""

    def sent(at: int, rank: int) -> Tensor:
        return drawn(sum(tables[at][rank]), dtype, 10 * at + rank)

    def work(channel: Channel, rank: int) -> list[Tensor]:
        out = []
        for at, table in enumerate(tables):
            sizes = table[rank], [row[rank] for row in table]
            out.append(channel.run("all_to_all", sent(at, rank), sizes=sizes))
            out.append(channel.run("all_reduce", drawn(3, dtype, rank)))
        return out

    ranks = len(tables[0])
    for rank, got in enumerate(run(ranks, work)):
        for at, table in enumerate(tables):
            parts = [sent(at, k).split(table[k])[rank] for k in range(ranks)]
            assert same(got[2 * at], torch.cat(parts)), (at, rank)
            assert same(got[2 * at + 1], summed([drawn(3, dtype, k) for k in range(ranks)]))


@pytest.mark.parametrize("count", [5, 30_000])
def test_what_is_spent_has_the_sum_in_it(count: int) -> None:
    terms = [drawn(count, torch.float32, rank) for rank in range(3)]

    def work(channel: Channel, rank: int) -> Tensor:
        x = terms[rank].clone()
        assert channel.run("all_reduce", x, "sum", spent=True) is x
        return x

    for got in run(3, work):
        assert same(got, summed(terms))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_16_bits_round_as_torch_does(dtype: torch.dtype) -> None:
    """Of each number there is and another one: subnormals, infinities, what overflows."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    want = (every.float() + shuffled.float()).to(dtype)
    for got in run(2, lambda c, rank: c.run("all_reduce", (every, shuffled)[rank], "sum"), 1 << 20):
        assert torch.equal(got.isnan(), want.isnan())
        assert same(got[~got.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_what_is_no_number_shows_on_all_ranks(op: str) -> None:
    x = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])]
    for got in run(2, lambda channel, rank: channel.run("all_reduce", x[rank], op)):
        assert got.isnan().all()


def test_many_calls_out_of_step() -> None:
    """Ranks that are early and late in turn never see the data of another call."""

    def work(channel: Channel, rank: int) -> list[float]:
        out = []
        for turn in range(300):
            if (turn * 7 + rank * 3) % 11 == 0:
                time.sleep(0.0005)
            out.append(
                channel.run("all_reduce", torch.full((5,), float(turn + rank)), "sum").sum().item()
            )
        return out

    for got in run(3, work):
        assert got == [5.0 * (3 * turn + 3) for turn in range(300)]


@pytest.mark.parametrize(
    "other",
    [
        lambda c: c.run("all_reduce", torch.ones(5), "sum"),
        lambda c: c.run("all_reduce", torch.ones(2, dtype=torch.float64), "sum"),
        lambda c: c.run("all_reduce", torch.ones(4), "max"),
        lambda c: c.run("all_gather", torch.ones(4)),
        lambda c: c.run("reduce_scatter", torch.ones(4)),
        lambda c: c.run("all_to_all", torch.ones(4), sizes=((2, 2), (2, 2))),
    ],
    ids=["size", "dtype", "reduction", "gather", "scatter", "exchange"],
)
def test_ranks_that_do_different_things_are_told(other: Callable[[Channel], Tensor]) -> None:
    """And nothing works afterwards: what one would take for an answer is another question's."""

    def work(channel: Channel, rank: int) -> list[str]:
        out = []
        for call in (other if rank else lambda c: c.run("all_reduce", torch.ones(4), "sum"),) * 2:
            with pytest.raises(RuntimeError) as caught:
                call(channel)
            out.append(str(caught.value))
        return out

    first, second = zip(*run(2, work), strict=True)
    assert any("called another collective" in text for text in first)
    assert set(second) == {"another rank has given up"}


def test_ranks_that_expect_other_sizes_are_told() -> None:
    def work(channel: Channel, rank: int) -> Tensor:
        return channel.run("all_to_all", torch.ones(4), sizes=((2, 2), (2 + rank, 2)))

    ends = run(2, work)
    assert any("called another collective" in str(end) for end in ends)


def test_a_wait_ends_when_the_other_rank_leaves() -> None:
    def work(channel: Channel, rank: int) -> None:
        if rank == 1:
            time.sleep(0.1)
            channel.leave()
        else:
            channel.run("all_reduce", torch.ones(1), "sum")

    assert run(2, work)[0] == "another rank has given up"


def test_a_wait_ends_when_looking_says_so_and_all_others_are_told() -> None:
    def look(seconds: float) -> None:
        if seconds > 0.05:
            raise RuntimeError("Timed out")

    def work(channel: Channel, rank: int) -> None:
        if rank != 1:
            channel.run("all_reduce", torch.ones(1), "sum")

    ends = run(3, work, look=look)
    assert "Timed out" in (ends[0], ends[2])
    assert {ends[0], ends[2]} <= {"Timed out", "another rank has given up"}


def test_an_interrupt_while_waiting_is_raised() -> None:
    def look(_: float) -> None:
        raise KeyboardInterrupt

    def work(channel: Channel, rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(KeyboardInterrupt):
            channel.run("all_reduce", torch.ones(1), "sum")
        return "interrupted"

    assert run(2, work, look=look)[0] == "interrupted"


def test_a_rank_that_ends_after_its_last_call_ends_no_other() -> None:
    """Its answer is there, though it is gone."""

    def work(channel: Channel, rank: int) -> float:
        if rank == 1:
            time.sleep(0.1)
        out = channel.run("all_reduce", torch.ones(3), "sum").sum().item()
        if rank == 0:
            channel.leave()
        return out

    assert run(2, work) == [6.0, 6.0]


# --- the library


@pytest.fixture
def empty(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A home without a library, and a compiler that takes a third of the time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [flag.replace("-O3", "-O0") for flag in compiled.FLAGS]
    monkeypatch.setattr(compiled, "FLAGS", tuple(flags))
    return tmp_path / "shardwright"


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_without_a_compiler_there_is_no_library(
    empty: Any, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(compiled.UnavailableError, match=compiler):
        compiled.library.__wrapped__()
    assert [path.name for path in empty.iterdir()] == ["lock"]


PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void run() { std::fclose(std::fopen("TRACE", "w")); }
"""


@pytest.fixture
def planted(empty: Path, tmp_path: Path) -> Path:
    """A library in the cache, by the right name, that leaves a trace when it is loaded."""
    source = tmp_path / "planted.cpp"
    source.write_text(PLANTED.replace("TRACE", str(tmp_path / "ran")))
    empty.mkdir(mode=0o700)
    file = empty / f"collectives-{compiled.version()}.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", str(file), str(source)], check=True)
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_library_that_others_can_write_is_compiled_anew(
    planted: Path, tmp_path: Path, mode: int
) -> None:
    planted.chmod(mode)
    assert compiled.library.__wrapped__().shardwright_state() > 0
    assert not (tmp_path / "ran").exists()
    assert planted.stat().st_mode & 0o777 == planted.stat().st_mode & 0o755


@pytest.mark.parametrize("what", ["the file", "the folder", "the folder above", "a link"])
def test_a_library_of_another_owner_is_not_loaded(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nor one in a folder that another owns, or that is a link to another place."""
    if what == "a link":
        elsewhere = tmp_path / "elsewhere.so"
        planted.rename(elsewhere)
        planted.symlink_to(elsewhere)
    elif os.getuid():
        pytest.skip("only root can give files away")
    else:
        place = {"the file": planted, "the folder": planted.parent}.get(what, tmp_path)
        os.chown(place, 12345, 12345)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert compiled.library.__wrapped__().shardwright_state() > 0
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_others_can_write_holds_no_library(planted: Path, tmp_path: Path) -> None:
    planted.parent.chmod(0o777)
    assert compiled.library.__wrapped__().shardwright_state() > 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x7fELF", None])
def test_a_library_that_is_none_is_compiled_anew(planted: Path, content: bytes | None) -> None:
    """It was written in part, or lacks a function as this does; the next process keeps one."""
    if content is not None:
        planted.write_bytes(content)
    assert compiled.library.__wrapped__().shardwright_state() > 0
    assert not planted.exists()
    if content is not None:  # within one process, the loader goes by the name of what it has loaded
        assert compiled.library.__wrapped__().shardwright_state() > 0
        assert planted.stat().st_size > 10_000


def test_the_library_is_compiled_once(empty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all ranks want it at once; and a later process needs no compiler."""
    threads = [threading.Thread(target=compiled.library.__wrapped__) for _ in range(3)]
    calls: list[Any] = []
    compile_ = compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda out: (calls.append(out), compile_(out)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert compiled.library.__wrapped__().shardwright_state() > 0
    assert len([*empty.iterdir()]) == 2
