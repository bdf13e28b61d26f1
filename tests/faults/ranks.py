"""What ranks do in the tests of this folder; a module of its own, which processes can import."""

from __future__ import annotations

import faulthandler
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication import collectives, processes
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.ranks import rendezvous
from shardwright.runtime.shared_memory.compiled import library
from shardwright.runtime.shared_memory.connect import channel_of

CPU = torch.device("cpu")


def rank() -> int:
    return int(os.environ["RANK"])


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), 9)


# --- at the start


def never_comes(plan: Path, timeout: float) -> None:
    if rank() == 1:
        return
    processes.meet(Plan.load(plan), None, CPU, timeout)[1]


def rank_0_never_comes(plan: Path, timeout: float) -> None:
    if rank() != 0:
        processes.meet(Plan.load(plan), None, CPU, timeout)[1]


def dies_before_it_comes(plan: Path, timeout: float) -> None:
    if rank() == 1:
        die()
    processes.meet(Plan.load(plan), None, CPU, timeout)[1]


def dies_when_all_have_come(plan: Path, timeout: float) -> None:
    if rank() == 1:
        dist.init_process_group = die
    processes.meet(Plan.load(plan), None, CPU, timeout)[1]


def dies_between_groups(plan: Path, timeout: float) -> None:
    """Where one group is all that there is, at the first thing that ranks do together."""
    if rank() == 1:
        processes.init_device_mesh = dist.all_gather = die
    processes.meet(Plan.load(plan), None, CPU, timeout)[1]


def starts(plan: Path, timeout: float) -> None:
    processes.meet(Plan.load(plan), None, CPU, timeout)[1]


def starts_again(model: Path, plan: Path, late: int, victim: int) -> None:
    """With a store that an earlier start has left: one rank is late, so its entries are not new."""
    if rank() == late:
        time.sleep(1)
    split = loaded(model, plan, timeout=30)
    if rank() == victim:
        die()
    print(split(torch.zeros(1, 5, dtype=torch.int64)).logits.abs().sum().item())


def timeouts(plan: Path, timeout: float) -> None:
    """Print those of all groups: the user's, ours of all ranks, and of each mesh dim."""
    mesh = processes.meet(Plan.load(plan), None, CPU, timeout)[1]
    dims = (group.pg for group in mesh.groups.values())
    groups: list[Any] = [dist.group.WORLD, rendezvous.world(), *dims]
    print(*(group._get_backend(CPU).options._timeout.total_seconds() for group in groups))
    wait_for_others(plan.parent)  # rank 0 keeps the store, and others may still form a group


# --- in a forward pass


def loaded(model: Path, plan: Path, timeout: float = 60) -> Any:
    return shardwright.load(model, plan, timeout=timeout)


def waits_for_a_request(model: Path, plan: Path, seconds: float) -> None:
    """Rank 0 has nothing to do for longer than the timeout, and all others wait for it."""
    split = loaded(model, plan, timeout=2)
    if rank() == 0:
        time.sleep(seconds)
    box = [torch.zeros(1, 5, dtype=torch.int64)]
    dist.broadcast_object_list(box)
    print(split(box[0]).logits.shape)


def dies_while_others_wait(model: Path, plan: Path) -> None:
    split = loaded(model, plan, timeout=600)
    if rank() == 1:
        die()
    if rank() == 0:
        time.sleep(1)
        split(torch.zeros(1, 5, dtype=torch.int64))
    else:
        dist.broadcast_object_list([None])


def dies_in_forward(model: Path, plan: Path, victim: int, stays: bool) -> None:
    """With `stays`, those that notice do not leave: nobody else may have to wait for them."""
    split = loaded(model, plan)
    if rank() == victim:
        split.get_submodule("model.layers.1").register_forward_pre_hook(die)
    try:
        split(torch.zeros(1, 5, dtype=torch.int64))
    except shardwright.DistributedError:
        if stays:
            wait_for_others(plan.parent, dead=1)
        raise


def wait_for_others(folder: Path, dead: int = 0) -> None:
    """Until all ranks but so many are here, by files: the group may have ended."""
    be_here(folder)
    for _ in range(300):
        if len([*folder.glob(f"here-{_start()}-*")]) == int(os.environ["WORLD_SIZE"]) - dead:
            print("all here")
            return
        time.sleep(0.1)


def be_here(folder: Path) -> None:
    (folder / f"here-{_start()}-{rank()}").touch()


def _start() -> str:
    return os.environ["MASTER_PORT"]


def hangs_in_forward(model: Path, plan: Path, victim: int) -> None:
    """It goes on when all others have given up."""
    split = loaded(model, plan, timeout=4)
    if rank() == victim:
        late = split.get_submodule("model.layers.1")
        late.register_forward_pre_hook(lambda *_: wait_for_others(plan.parent))
    try:
        split(torch.zeros(1, 5, dtype=torch.int64))
    except shardwright.DistributedError:
        be_here(plan.parent)
        raise


# --- with other things in hand


def loads(model: str, plan: str, options: dict[int, dict[str, Any]]) -> None:
    """Ranks named in `options` load with those."""
    mine = {"model": model, "plan": plan, "timeout": 30, **options.get(rank(), {})}
    shardwright.load(**mine)


def applies(model: Path, plan: Path, other: Path, seeds: dict[int, int]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    mesh = processes.meet(Plan.load(plan), None, CPU, 30)[1]
    torch.manual_seed(seeds.get(rank(), 0))
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    shardwright.apply(whole, other if rank() == 1 else plan, mesh)


def runs(model: Path, plan: Path, shapes: list[tuple[int, ...]]) -> None:
    split = loaded(model, plan, timeout=20)
    split(torch.zeros(shapes[rank()], dtype=torch.int64))


def takes_another_way(model: Path, plan: Path) -> None:
    split = loaded(model, plan, timeout=20)
    if rank() == 1:
        parts = vars(split.model)["_modules"]  # past what notices it
        parts["layers"] = parts["layers"][:1]
    split(torch.zeros(1, 5, dtype=torch.int64))


def gathers_other_names(model: Path, plan: Path) -> None:
    split = loaded(model, plan, timeout=20)
    named: dict[str, Any] = dict(split.named_parameters())
    if rank() == 1:
        named.popitem()
    shardwright.full_tensors(split, named)


def casts_its_model(model: Path, plan: Path) -> None:
    split = loaded(model, plan, timeout=20)
    if rank() == 1:
        split.double()
    split(torch.zeros(1, 5, dtype=torch.int64))


# --- through shared memory


def finds_no_memory(plan: Path) -> None:
    """As under `ulimit -f`, which holds for memory, too. The library is there: it is compiled."""
    library()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, most))
    shares_memory(plan, False)


def shares_memory(plan: Path, expected: bool) -> None:
    """Collectives of each group of a mesh against those of gloo, which run in between."""
    mesh = processes.meet(Plan.load(plan), None, CPU, 30)[1]
    groups = [*mesh.groups.values(), Group.of(rendezvous.world())]
    for turn, group in enumerate(groups * 2):
        assert group.pg is not None
        later = torch.tensor([group.rank])
        waiting: Any = dist.all_reduce(later, group=group.pg, async_op=True)
        torch.manual_seed(group.rank + turn)
        for x in (
            torch.randn(6, 4, dtype=torch.float64).t(),
            torch.randn(2, 0, 3),
            torch.randint(9, (8, 3)),
            torch.tensor(1.5),
            torch.randn(8, dtype=torch.complex64),
            torch.tensor([True, False]),
        ):
            _compare(x, group)
        waiting.wait()
        assert later.item() == sum(range(group.size))
        assert (channel_of(group.pg) is not None) == expected
    maps = Path("/proc/self/maps").read_text()
    assert ("/memfd:shardwright (deleted)" in maps) == expected
    assert "/dev/shm/" not in maps


def _compare(x: torch.Tensor, group: Group) -> None:
    rows = torch.empty(group.size, *x.shape, dtype=x.dtype)
    dist.all_gather_into_tensor(rows.view(-1), x.contiguous().view(-1), group.pg)
    assert torch.equal(collectives.all_gather(x, group), rows)
    send = [(group.rank + 2 * other) % 3 for other in range(group.size)]
    receive = [(other + 2 * group.rank) % 3 for other in range(group.size)]
    travelling = x.expand(sum(send), *x.shape)
    came = x.new_empty(sum(receive), *x.shape)
    dist.all_to_all_single(came, travelling.contiguous(), receive, send, group=group.pg)
    assert torch.equal(collectives.all_to_all(travelling, send, receive, group), came)
    if x.dtype != torch.bool:
        whole = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group.pg)
        torch.testing.assert_close(collectives.all_reduce(x, group), whole)
        mine = collectives.reduce_scatter(torch.stack([x] * group.size), group)
        torch.testing.assert_close(mine, whole)


def computes(model: Path, plan: Path) -> None:
    """Prints the loss and the gradients, to the bit."""
    split = loaded(model, plan)
    ids = torch.arange(12).view(2, 6)
    loss = split(ids, labels=ids).loss
    loss.backward()
    print(loss.item().hex(), [p.grad.double().sum().item().hex() for p in split.parameters()])


def forks(plan: Path) -> None:
    """The child has no part in what the ranks do, and takes nothing away when it ends."""
    mesh = processes.meet(Plan.load(plan), None, CPU, 30)[1]
    x = torch.ones(3)
    collectives.all_reduce(x, mesh["tp"])
    channel = channel_of(rendezvous.world())
    assert channel is not None
    if (child := os.fork()) == 0:
        faulthandler.dump_traceback_later(20, exit=True)  # one that hangs says where
        try:
            channel.run("all_reduce", x, "sum")
        except RuntimeError as error:
            channel.leave()
            os._exit(0 if "is a fork of a rank" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert collectives.all_reduce(x, mesh["tp"]).sum().item() == 6
