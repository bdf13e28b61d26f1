"""Device profiles: those that come along, those from files, and what a collective takes."""

import json
from pathlib import Path

import pytest

from shardwright.errors import UsageError
from shardwright.planner.devices.device import Device, device, names, sent

KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def cpu() -> dict:
    return device("cpu-gloo").model_dump()


def write(folder: Path, data: object) -> str:
    path = folder / "profile.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_the_profiles_that_come_along() -> None:
    machines = {name.split("-")[0] for name in names()}
    assert machines >= {"h100", "h200", "a100", "b200", "l4", "mi300x", "cpu"}
    assert {"h100-nvlink", "cpu-gloo"} <= set(names())


@pytest.mark.parametrize("name", names())
def test_a_profile_says_where_it_has_its_figures(name: str) -> None:
    profile = device(name)
    assert "data sheet" in profile.source or name == "cpu-gloo"
    assert 0 < profile.kernel_ns < 10_000
    assert "assumption" in profile.source
    flops = profile.flops_per_s
    assert flops.bfloat16 >= flops.float32
    if name == "h100-nvlink":  # as measured
        assert (flops.float32, flops.float64) == (52 * 10**12, 56 * 10**12)
    else:
        assert flops.float32 >= flops.float64


MOVED = [("all_reduce", 1.5), ("all_gather", 3), ("reduce_scatter", 0.75)]


@pytest.mark.parametrize("kind, moved", MOVED)
def test_a_collective_over_four_ranks_by_hand(kind: str, moved: float) -> None:
    profile = device("h100-nvlink")
    size = 450 * 10**6  # what the link sends in a millisecond
    assert profile.collective(kind, size, 4) == 8000 + int(moved * 10**6)
    assert profile.collective(kind, size, 1) == 0


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_grows_with_bytes_and_ranks(name: str, kind: str) -> None:
    profile = device(name)
    for ranks in (2, 4, 8):
        times = [profile.collective(kind, size, ranks) for size in (0, 10**5, 10**7, 10**9)]
        assert times == sorted(times) and times[0] < times[-1]
    if not profile.peer_links:
        times = [profile.collective(kind, 10**7, ranks) for ranks in (1, 2, 4, 8, 16)]
        assert times == sorted(set(times))


def test_an_all_to_all_is_a_reduce_scatter_unless_it_was_measured() -> None:
    data = device("h100-nvlink").model_dump()
    data["links"]["all_to_all"] = {"latency_ns": 50_000, "bytes_per_s": 10**9}
    measured, usual = Device.model_validate(data), device("h100-nvlink")
    assert usual.collective("all_to_all", 4000, 4) == usual.collective("reduce_scatter", 4000, 4)
    assert measured.collective("all_to_all", 4000, 4) == 50_000 + 3000
    assert measured.collective("reduce_scatter", 4000, 4) < 50_000


def test_more_devices_use_more_links_of_their_own() -> None:
    profile = device("mi300x-infinity-fabric")
    two, eight = (profile.collective("all_reduce", 64 * 10**9, n) for n in (2, 8))
    assert two == 10**9 + 10_000
    assert eight == 250 * 10**6 + 10_000  # 7/8 as much twice, over seven times the links


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    whole = sent("reduce_scatter", 8000, 4) + sent("all_gather", 2000, 4)
    assert sent("all_reduce", 8000, 4) == whole


def test_compute_is_the_longer_of_arithmetic_and_traffic() -> None:
    profile = device("h100-nvlink")
    assert profile.compute(792 * 10**9, 10, "bfloat16", 0) == 10**6
    assert profile.compute(52 * 10**9, 10, "float32", 0) == 10**6
    assert profile.compute(10, 3000 * 10**6, "bfloat16", 0) == 10**6
    assert profile.compute(52 * 10**9, 10, "int64", 0) == 10**6  # as float32: no figure of its own
    assert profile.compute(792 * 10**9, 10, "bfloat16", 3) == 10**6 + 3 * profile.kernel_ns


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    data = cpu() | {"memory_bytes": 12345}
    assert device(write(tmp_path, data)) == Device.model_validate(data)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"speed": 3}, "speed: Extra inputs are not permitted"),
        ({"memory_bytes": -1}, "memory_bytes: Input should be greater than 0"),
        ({"memory_bytes": 1.5}, "memory_bytes: Input should be a valid integer"),
        ({"links": {}}, "links.all_reduce: Field required"),
        ({"flops_per_s": {"float32": 1}}, "flops_per_s.bfloat16: Field required"),
    ],
)
def test_a_file_that_does_not_hold_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    with pytest.raises(UsageError, match=r"profile\.json is not valid: ") as error:
        device(write(tmp_path, cpu() | change))
    assert says in str(error.value)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read device profile .*No such file"):
        device(str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(UsageError, match=r"text\.json is not JSON"):
        device(str(tmp_path / "text.json"))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"bytes\.json is not JSON"):
        device(str(tmp_path / "bytes.json"))
    with pytest.raises(UsageError, match=r"profile\.json is not valid: the profile: "):
        device(write(tmp_path, [1]))
    with pytest.raises(UsageError, match="unknown device 'abacus'; known: a100-.*calibrate"):
        device("abacus")
