"""Instances made up in the shape of the contest's large ones: a seed, a number of nodes, a file.

    python -m benchmarks.contest_made FILE --nodes 100000 --seed 1

The graph has layers, forward and back; blocks of a few kinds repeat, as in an unrolled model. The
strategies of a node are splits of its tensors. Pairs that agree cost nothing, others cost what it
takes to convert one to the other, and some are forbidden. Weights are in use all the time, and
results of the forward half until the backward half has passed them. The limit lies between the
least memory and the memory of the cheapest solution. A solution within it is known to exist, but is
not stored.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

FORBIDDEN = 10**18
BLOCK = 40
"""Nodes of a block."""
KINDS = 3
WEIGHTS = 0.02
"""Share of the nodes that are weights, in use all the time."""


def make(nodes: int, seed: int, tight: float = 0.35) -> dict[str, Any]:
    """Return an instance in the contest's format.

    Args:
        nodes: The number of nodes; at least two blocks.
        seed: The same seed makes the same instance.
        tight: Where the limit lies, from the least memory (0) to that of a cheap solution (1).
    """
    random_ = random.Random(seed)
    kinds = [_kind(random_) for _ in range(KINDS)]
    count = max(nodes // BLOCK, 2)
    order = [kinds[k % KINDS] for k in range(count)]
    costs: list[list[int]] = []
    usages: list[list[int]] = []
    intervals: list[list[int]] = []
    pairs: list[list[int]] = []
    tables: list[list[int]] = []
    layouts: list[list[int]] = []
    total = count * BLOCK
    for b, kind in enumerate(order):
        base = b * BLOCK
        for i in range(BLOCK):
            layout = kind["layouts"][i]
            layouts.append(layout)
            costs.append(kind["costs"][i])
            usages.append(kind["usages"][i])
            start = base + i
            if kind["weight"][i]:
                intervals.append([0, total])
            elif b < count // 2 and kind["saved"][i]:
                intervals.append([start, min(total - start, total)])
            else:
                intervals.append([start, min(start + kind["life"][i], total)])
        for i, j in kind["edges"]:
            pairs.append([base + i, base + j])
        if b:  # the residual stream, and what the backward half reads from the forward half
            pairs.append([base - 1, base])
        if b > count // 2:
            mirror = (count - 1 - b) * BLOCK
            pairs.extend([mirror + i, base + i] for i in kind["read"])
    for a, c in pairs:
        tables.append(_table(layouts[a], layouts[c], (a * 31 + c) % 7))
    least = _peak(intervals, [min(u) for u in usages], total)
    cheap = [min(range(len(c)), key=lambda s, c=c: (c[s], s)) for c in costs]
    most = _peak(intervals, [u[s] for u, s in zip(usages, cheap, strict=True)], total)
    limit = int(least + max(tight * (most - least), 0.05 * least))
    return {
        "problem": {
            "name": f"made-{nodes}-{seed}",
            "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
            "edges": {"nodes": pairs, "costs": tables},
            "usage_limit": limit,
        }
    }


def _kind(random_: random.Random) -> dict[str, Any]:
    """Make one kind of block: nodes with strategies, and edges between them."""
    kind: dict[str, Any] = {
        key: []
        for key in ("layouts", "costs", "usages", "weight", "saved", "life", "edges", "read")
    }
    for i in range(BLOCK):
        size = random_.choice([3, 4, 6, 8, 9, 12, 16, 20])
        weight = i > 0 and random_.random() < WEIGHTS * 3
        amount = 2 ** random_.randint(8, 20 if weight else 18)
        layout = [0] + [random_.randrange(8) for _ in range(size - 1)]
        parts = [1 if q == 0 else random_.choice([2, 4, 8]) for q in layout]
        kind["layouts"].append(layout)
        kind["usages"].append([max(amount // p, 1) for p in parts])
        work = random_.choice([0, 0, 100, 1000, 10_000])
        kind["costs"].append(
            [work // p + (random_.randrange(work // 10 + 1) if p > 1 else 0) for p in parts]
        )
        kind["weight"].append(weight)
        kind["saved"].append(random_.random() < 0.04)
        kind["life"].append(random_.choice([1, 2, 3, 5, 20]))
        if i:
            kind["edges"].append([random_.randrange(max(0, i - 4), i), i])
            if random_.random() < 0.3 and i > 4:
                kind["edges"].append([random_.randrange(0, i - 3), i])
    kind["read"] = random_.sample(range(BLOCK), 2)
    return kind


def _table(first: list[int], second: list[int], shape: int) -> list[int]:
    """Return the cost of converting one layout to the other."""
    price = [300, 700, 1500, 4000, 9000, 20_000, 60_000][shape]
    out = []
    for p in first:
        for q in second:
            if p == q:
                out.append(0)
            elif p and q and (p + q + shape) % 5 == 0:
                out.append(FORBIDDEN)
            else:
                out.append(price if q == 0 else price // 2 if p == 0 else 2 * price)
    return out


def _peak(intervals: list[list[int]], amounts: list[int], total: int) -> int:
    """Return the most in use at any time."""
    change = [0] * (total + 2)
    for (start, stop), amount in zip(intervals, amounts, strict=True):
        if start < stop:
            change[start] += amount
            change[stop] -= amount
    used = most = 0
    for c in change:
        used += c
        most = max(most, used)
    return most


def main() -> None:
    """Write an instance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="ends in .json or .json.gz")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    text = json.dumps(make(args.nodes, args.seed)).encode()
    args.file.write_bytes(gzip.compress(text, 1) if args.file.suffix == ".gz" else text)


if __name__ == "__main__":
    main()
