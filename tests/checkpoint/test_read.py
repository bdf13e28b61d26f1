"""Each rank reads what slicing the whole tensor would give it, and checks what it reads."""

from pathlib import Path

import pytest
import torch

from benchmarks.loading import memory, peak
from shardwright.errors import CheckpointError
from shardwright.planner.contract.dims import local_ranges
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.checkpoint import mapped
from shardwright.runtime.checkpoint import read as module
from shardwright.runtime.checkpoint.names import Source
from shardwright.runtime.checkpoint.read import Report, Wanted, matches, read_shards
from shardwright.runtime.checkpoint.source import Checkpoint
from tests.checkpoint.make import write

PLACEMENTS = {
    "column": "24@tp*4, 10",
    "row": "10, 24@tp*4",
    "vocab": "507@tp, 6",
    "fused": "12@tp*4 + 12@tp*4 + 12@tp*4, 5",
    "fused columns": "5, 12@tp*4 + 12@tp*4 + 12@tp*4",
    "interleaved": "12*(2@tp + 2@tp + 2@tp)*2, 3",
    "strided": "3, 90*4@tp*2",
    "mixed": "12@tp*4 + 7 + 7, 3",
    "uneven heads": "10@tp*3, 4",
    "whole": "7, 5",
    "vector": "24@tp*4",
    "run-time": "?@tp, 6",
    "experts": "4, 8@tp + 8@tp, 6",
}


def whole_of(text: str) -> torch.Tensor:
    shape = [11 if n is None else n for n in parse(text).shape]
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def sliced(whole: torch.Tensor, placement: Placement, rank: int, ranks: int) -> torch.Tensor:
    from shardwright.planner.contract.dims import resolve

    for d, dim in enumerate(placement.dims):
        ranges = local_ranges(resolve(dim, whole.shape[d]), {"tp": (rank, ranks)})
        index = torch.cat([torch.arange(a, b) for a, b in ranges] or [torch.arange(0)])
        whole = whole.index_select(d, index)
    return whole


def read_one(
    checkpoint: Checkpoint,
    key: str,
    tensor: torch.Tensor,
    placement: str | None,
    rank: int,
    ranks: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, Report]:
    wanted = {"p": Wanted(Source(key), tensor, parse(placement) if placement else None)}
    out, report = read_shards(checkpoint, wanted, {"tp": (rank, ranks)}, dtype=dtype)
    return out["p"], report


@pytest.mark.parametrize("chunk", [64, 8 * 2**20])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("least", [1, mapped.MIN_PIECE_BYTES], ids=["joined", "copied"])
def test_every_rank_reads_its_slice(
    tmp_path: Path, ranks: int, chunk: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MIN_PIECE_BYTES", least)
    cut = module.boxes
    monkeypatch.setattr(module, "boxes", lambda ranges, itemsize: cut(ranges, itemsize, chunk))
    names = list(PLACEMENTS)
    tensors = {name: whole_of(text) for name, text in PLACEMENTS.items()}
    checkpoint = Checkpoint.open(
        write(tmp_path, {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]})
    )
    for rank in range(ranks):
        wanted = {
            n: Wanted(Source(n), tensors[n].to("meta"), parse(text))
            for n, text in PLACEMENTS.items()
        }
        out, report = read_shards(checkpoint, wanted, {"tp": (rank, ranks)})
        for name, text in PLACEMENTS.items():
            assert torch.equal(out[name], sliced(tensors[name], parse(text), rank, ranks)), name
            assert out[name].is_contiguous()
        assert report.held == sum(t.nbytes for t in out.values())
        assert report.tensors == len(PLACEMENTS)
        assert report.read >= report.held


def test_two_mesh_dims(tmp_path: Path) -> None:
    whole = torch.randn(16, 6)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole}))
    wanted = {"a": Wanted(Source("a"), whole.to("meta"), parse("2@kv*4@group*2, 6"))}
    out, _ = read_shards(checkpoint, wanted, {"kv": (1, 2), "group": (0, 2)})
    assert torch.equal(out["a"], whole[8:12])


def test_reads_exactly_the_share_of_contiguous_rows(tmp_path: Path) -> None:
    whole = torch.randn(12, 10, dtype=torch.float64)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole}))
    for placement in ("12@tp, 10", "12, 10@tp", "6@tp + 6@tp, 10"):
        _, report = read_one(checkpoint, "a", whole.to("meta"), placement, 1, 2)
        assert (report.read, report.held) == (whole.nbytes // 2, whole.nbytes // 2)


def test_fills_a_real_tensor_in_place(tmp_path: Path) -> None:
    whole = torch.randn(8, 6)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole}))
    local = torch.zeros(4, 6, requires_grad=True)
    out, _ = read_one(checkpoint, "a", local, "8@tp, 6", 1, 2)
    assert out is local
    assert torch.equal(local, whole[4:])
    backwards = torch.zeros(6, 4).t()  # any strides will do
    out, _ = read_one(checkpoint, "a", backwards, "8@tp, 6", 1, 2)
    assert torch.equal(out, whole[4:])


def test_meta_tensor_may_have_the_local_shape(tmp_path: Path) -> None:
    whole = torch.randn(8, 6)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole}))
    out, _ = read_one(checkpoint, "a", torch.empty(4, 6, device="meta"), "8@tp, 6", 0, 2)
    assert torch.equal(out, whole[:4])


def test_result_owns_its_memory(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.zeros(4)}))
    out, _ = read_one(checkpoint, "a", torch.empty(4, device="meta"), None, 0, 1)
    out.fill_(7)
    again, _ = read_one(checkpoint, "a", torch.empty(4, device="meta"), None, 0, 1)
    assert again.tolist() == [0, 0, 0, 0]


def test_scalar_bool_and_empty(tmp_path: Path) -> None:
    tensors = {"s": torch.tensor(3.0), "b": torch.tensor([True, False]), "e": torch.zeros(0, 4)}
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    for name, tensor in tensors.items():
        out, _ = read_one(checkpoint, name, tensor.to("meta"), None, 0, 1)
        assert torch.equal(out, tensor)
        assert out.dtype == tensor.dtype


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.randn(2, 3)}))
    out, report = read_one(checkpoint, "a", torch.empty(2, 3, device="meta"), "2@tp, 3", 2, 3)
    assert (tuple(out.shape), report.read) == ((0, 3), 0)


def test_dtype_is_kept(tmp_path: Path) -> None:
    whole = torch.randn(8).bfloat16()
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole}))
    out, _ = read_one(checkpoint, "a", torch.empty(8, device="meta"), None, 0, 1)
    assert torch.equal(out, whole)
    assert out.dtype == torch.bfloat16


def test_dtype_is_cast_when_asked(tmp_path: Path) -> None:
    whole, ints = torch.randn(8).bfloat16(), torch.arange(8)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole, "i": ints}))
    out, _ = read_one(checkpoint, "a", torch.empty(8, device="meta"), "8@tp", 1, 2, torch.float32)
    assert torch.equal(out, whole[4:].float())
    real = torch.zeros(8, dtype=torch.float64)
    out, _ = read_one(checkpoint, "a", real, None, 0, 1, torch.float64)
    assert torch.equal(out, whole.double())
    out, _ = read_one(checkpoint, "i", ints.to("meta"), None, 0, 1, torch.float16)
    assert torch.equal(out, ints)  # what is not floating stays as it is
    assert out.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_buffers_keep_the_dtype_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    """Model code that wants a bias in float32 computes with one, whatever was saved."""
    whole = torch.randn(8, dtype=dtype)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole}))
    out, _ = read_one(checkpoint, "a", torch.zeros(8), None, 0, 1)
    assert out.dtype == torch.float32
    assert torch.equal(out, whole.float())


def test_dtype_errors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(8).bfloat16(),
        "i": torch.arange(8),
        "q": torch.ones(8).to(torch.float8_e4m3fn),
    }
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    with pytest.raises(
        CheckpointError, match="a is bfloat16 and the model's p is float32: build the model in"
    ):
        read_one(checkpoint, "a", torch.nn.Parameter(torch.zeros(8)), None, 0, 1)
    with pytest.raises(
        CheckpointError, match="i is int64 and the model's p is float32: no cast between"
    ):
        read_one(checkpoint, "i", torch.zeros(8), None, 0, 1, torch.float32)
    with pytest.raises(CheckpointError, match="i is int64 .* float32: no cast"):
        read_one(checkpoint, "i", torch.empty(8, device="meta"), None, 0, 1)
    for tensor in (torch.zeros(8), torch.empty(8, device="meta")):
        with pytest.raises(CheckpointError, match="q is float8_e4m3fn .* no cast"):
            read_one(checkpoint, "q", tensor, None, 0, 1, torch.float32)


def test_shape_errors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.randn(8, 6)}))
    for placement in ("10@tp, 6", "8, 5", "8@tp", "3*?@tp, 6"):
        with pytest.raises(
            CheckpointError, match=r"safetensors: a has shape \[8, 6\], but .*p is laid out"
        ):
            read_one(checkpoint, "a", torch.empty(8, 6, device="meta"), placement, 0, 2)
    with pytest.raises(CheckpointError, match=r"holds \[4, 6\], but the model's p has \[8, 6\]"):
        read_one(checkpoint, "a", torch.zeros(8, 6), "8@tp, 6", 0, 2)
    with pytest.raises(CheckpointError, match=r"but the model's p has \[9, 6\]"):
        read_one(checkpoint, "a", torch.empty(9, 6, device="meta"), None, 0, 2)


def test_file_damaged_after_opening(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.randn(8, 6)}))
    file = checkpoint.tensors["a"].file
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="cannot read .*fetch the file again"):
        read_one(checkpoint, "a", torch.empty(8, 6, device="meta"), None, 0, 1)


def test_memory_peaks_little_above_the_share(tmp_path: Path) -> None:
    """Also where columns are picked one by one and cast, for which whole chunks are copied."""
    whole = torch.randn(2**12, 2**13).bfloat16()  # 64 MiB
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole}))
    meta = whole.to("meta")
    for placement, dtype in (("4096, 4096*2@tp", torch.float32), ("4096, 8192@tp", None)):
        with peak() as seen:
            out, report = read_one(checkpoint, "a", meta, placement, 1, 2, dtype)
        assert seen["peak"] <= 1.1 * report.held + 50 * 2**20
    assert torch.equal(out, whole[:, 4096:])


@pytest.mark.parametrize("placement", ["1024@tp + 1024@tp, 1024", "2, 512@tp + 512@tp, 1024"])
def test_pieces_on_whole_pages_stay_mapped(tmp_path: Path, placement: str) -> None:
    """Those of a fused weight, and of fused experts: a copy would take as much memory again."""
    shape = [n or 0 for n in parse(placement).shape]
    whole = torch.randn(shape, dtype=torch.float64)  # 16 MiB
    directory = write(tmp_path, {"odd": torch.zeros(3), "a": whole})
    checkpoint, want = Checkpoint.open(directory), sliced(whole, parse(placement), 1, 2)
    before = memory()
    out, report = read_one(checkpoint, "a", whole.to("meta"), placement, 1, 2)
    assert torch.equal(out, want)
    assert memory() - before < out.nbytes // 4
    assert report.read == report.held == out.nbytes
    out.fill_(7)  # its own, also where it is mapped
    again, _ = read_one(checkpoint, "a", whole.to("meta"), placement, 1, 2)
    assert torch.equal(again, want)
    file = checkpoint.tensors["a"].file
    file.write_bytes(file.read_bytes()[: -(2**20)])
    with pytest.raises(CheckpointError, match="truncated.*fetch the file again"):
        read_one(checkpoint, "a", whole.to("meta"), placement, 1, 2)


def test_matches(tmp_path: Path) -> None:
    whole = torch.randn(8, 6)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": whole, "b": torch.zeros(8, 5)}))
    placement, coords = parse("8@tp, 6"), {"tp": (1, 2)}
    assert matches(checkpoint, Source("a"), whole[4:], placement, coords)
    assert not matches(checkpoint, Source("a"), whole[:4], placement, coords)
    assert not matches(checkpoint, Source("b"), whole[4:], placement, coords)
    assert matches(checkpoint, Source("a"), whole[4:], parse("?@tp, 6"), coords)


def test_progress_is_silent_off_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.randn(8)}))
    wanted = {"a": Wanted(Source("a"), torch.empty(8, device="meta"))}
    read_shards(checkpoint, wanted, {}, progress=True)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.randn(8)}))
    wanted = {"a": Wanted(Source("a"), torch.empty(8, device="meta"))}
    read_shards(checkpoint, wanted, {}, progress=True)
    assert capsys.readouterr().out == ""
