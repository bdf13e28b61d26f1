"""Loading a checkpoint onto two ranks: memory, bytes read, time; beside transformers' own loader.

    python -m benchmarks.loading [--json FILE] [--ranks 2] [--layers 10]
    python -m benchmarks.loading --quantized fp8     or int4: held as stored, and dequantized

Each way of loading runs in fresh processes on the same llama-shaped checkpoint (about 200 M
parameters in bfloat16, made for the run). "peak" is the peak of anonymous memory during loading,
minus what the process had before it began to build the model: the cost of loading beyond imports.
transformers leaves a CPU model's weights in the mapped file, where they are read on first use. Its
comparable figures therefore come later: "resident" is the growth of all memory since the start,
including mapped files, once every parameter was used, and "used" is the time until then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

MIB = 2**20


def config(layers: int) -> Any:
    """Return a llama config with about 65 M + 13 M x `layers` parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


def make(directory: Path, layers: int, how: str | None = None) -> None:
    """Write the checkpoint in several files, quantized as `how` says."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config(layers), dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="100MB")
    if how is not None:
        from benchmarks.quantize import DENSE, quantize

        quantize(directory, how, block=(128, 128))
        shutil.rmtree(directory / DENSE)


LAYOUTS = {
    r"\.(q|k|v)_proj\.weight$": "16@tp*64, 1024",
    r"\.(gate|up)_proj\.weight$": "2816@tp, 1024",
    r"\.o_proj\.weight$": "1024, 16@tp*64",
    r"\.down_proj\.weight$": "1024, 2816@tp",
    r"(embed_tokens|lm_head)\.weight$": "32000@tp, 1024",
}


def shardwright(directory: Path, rank: int, ranks: int, keep: bool = False) -> tuple[Any, int]:
    """Load with this project; return the model and the bytes requested from the files.

    Args:
        directory: Of the checkpoint.
        rank: This rank.
        ranks: How many there are.
        keep: Hold quantized weights as they are stored.
    """
    from transformers import AutoConfig

    from shardwright.planner.contract.notation import parse
    from shardwright.runtime.checkpoint.load import load_weights
    from shardwright.runtime.checkpoint.source import Checkpoint
    from shardwright.runtime.model.build import empty_model, model_class
    from shardwright.runtime.quantized.config import drop_quantization, read_quantization

    checkpoint = Checkpoint.open(directory)
    cfg = AutoConfig.from_pretrained(directory)
    dtype: Any = checkpoint.dtype
    if (quantization := read_quantization(cfg)) is not None:
        drop_quantization(cfg)
        dtype = cfg.dtype
        checkpoint = checkpoint.dequantized(quantization, dtype)
    model = empty_model(model_class(cfg), cfg, dtype=dtype)
    placements = {
        name: parse(text)
        for name in checkpoint.tensors
        for pattern, text in LAYOUTS.items()
        if re.search(pattern, name)
    }
    report = load_weights(model, checkpoint, placements, {"tp": (rank, ranks)}, keep=keep)
    return model, report.read


def transformers_whole(directory: Path, rank: int, ranks: int) -> tuple[Any, int]:
    """Load with transformers without tensor parallelism."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory), _file_bytes(directory)


def transformers_tp(directory: Path, rank: int, ranks: int) -> tuple[Any, int | None]:
    """Load with transformers' own tensor-parallel plan, on gloo ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(tp_size=ranks, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(directory, distributed_config=distributed), None


def _file_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


WAYS: dict[str, tuple[Callable[..., tuple[Any, int | None]], bool]] = {
    # name -> (loader, whether it runs on all ranks)
    "shardwright": (shardwright, True),
    "transformers, whole": (transformers_whole, False),
    "transformers, tp": (transformers_tp, True),
    "held as stored": (partial(shardwright, keep=True), True),
    "dequantized": (shardwright, True),
}

DENSE = ("shardwright", "transformers, whole", "transformers, tp")
QUANTIZED = ("held as stored", "dequantized")


def memory(field: str = "RssAnon") -> int:
    """Return this process's memory in bytes: VmRSS includes pages of mapped files, RssAnon not."""
    with open("/proc/self/status") as status:  # noqa: PTH123 (sampled often)
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status: this benchmark needs Linux")


@contextmanager
def peak() -> Iterator[dict[str, int]]:
    """Sample anonymous memory every millisecond; the yielded "peak" is the rise above the start."""
    base, out, done = memory(), {"peak": 0}, threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            out["peak"] = max(out["peak"], memory() - base)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield out
    finally:
        done.set()
        thread.join()
        out["peak"] = max(out["peak"], memory() - base)


def local_tensors(model: Any) -> list[Any]:
    """Return what this rank holds of all parameters and buffers."""
    import torch

    tensors = [*model.parameters(), *model.buffers()]
    local = [(t.to_local() if hasattr(t, "to_local") else t).detach() for t in tensors]
    stored = (t.held.tensors() if hasattr(t, "held") else [t] for t in local)
    return [t.view(torch.uint8) if t.itemsize == 1 else t for ts in stored for t in ts]


def use(tensors: list[Any]) -> None:
    """Read a value from every page."""
    for tensor in tensors:
        tensor.flatten()[::1024].sum()


def measure(way: str, directory: str, rank: int, ranks: int, port: int, results: Any) -> None:
    """Run one rank, in a process of its own."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
    )
    try:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)
        loader = WAYS[way][0]
        if ranks > 1:
            torch.distributed.init_process_group("gloo")
        # Imports are not loading: do them before the clock starts.
        from transformers import (  # noqa: F401
            AutoModelForCausalLM,
            LlamaForCausalLM,
            conversion_mapping,  # noqa: F401
        )

        import shardwright.runtime.checkpoint.load  # noqa: F401

        if ranks > 1:
            torch.distributed.barrier()
        start, resident = time.perf_counter(), memory("VmRSS")
        with peak() as sampled:
            model, read = loader(Path(directory), rank, ranks)
        seconds = time.perf_counter() - start
        tensors = local_tensors(model)
        use(tensors)
        used = time.perf_counter() - start
        results.put(
            {
                "way": way,
                "rank": rank,
                "held": sum(t.nbytes for t in tensors),
                "peak": sampled["peak"],
                "read": read,
                "seconds": round(seconds, 3),
                "used": round(used, 3),
                "resident": memory("VmRSS") - resident,
            }
        )
        if ranks > 1:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        results.put({"way": way, "rank": rank, "error": f"{type(error).__name__}: {first[:200]}"})


def run(way: str, directory: Path, ranks: int) -> list[dict[str, Any]]:
    """Run all ranks of one way of loading."""
    ranks = ranks if WAYS[way][1] else 1
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    processes = [
        context.Process(target=measure, args=(way, str(directory), rank, ranks, port, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    rows = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        if process.is_alive():  # it waits for a rank that failed
            process.terminate()
    return sorted(rows, key=lambda row: row["rank"])


def show(rows: list[dict[str, Any]]) -> None:
    """Print the figures as a table, sizes in MiB and times in seconds."""
    heads = ("RANK", "HELD", "PEAK", "PEAK/HELD", "RESIDENT", "READ", "TIME", "USED")
    print(" " * 20 + "".join(f"{head:>10}" for head in heads))
    for row in rows:
        if "error" in row:
            print(f"{row['way']:20}{row['rank']:>10}  failed: {row['error']}")
            continue
        sizes = {k: row[k] / MIB for k in ("held", "peak", "resident")}
        cells = (
            str(row["rank"]),
            f"{sizes['held']:.0f}",
            f"{sizes['peak']:.0f}",
            f"{row['peak'] / row['held']:.2f}",
            f"{sizes['resident']:.0f}",
            "-" if row["read"] is None else f"{row['read'] / MIB:.0f}",
            f"{row['seconds']:.2f}",
            f"{row['used']:.2f}",
        )
        print(f"{row['way']:20}" + "".join(f"{cell:>10}" for cell in cells))


def main() -> None:
    """Make the checkpoint, run every way of loading it, print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=1, help="rounds over all ways")
    parser.add_argument("--quantized", choices=["fp8", "int4"], help="quantize the checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        work = (directory, options.layers, options.quantized)
        maker = mp.get_context("spawn").Process(target=make, args=work)
        maker.start()
        maker.join()
        whole = _file_bytes(directory)
        files = len(list(directory.glob("*.safetensors")))
        print(f"{whole / MIB:.0f} MiB in {files} files, just written and so in cache")
        rows = [
            row
            for _ in range(options.repeat)
            for way in (QUANTIZED if options.quantized else DENSE)
            for row in run(way, directory, options.ranks)
        ]
    show(rows)
    if options.json:
        from shardwright.planner.contract.files import write_atomically

        result = {"bytes": whole, "files": files, "rows": rows}
        write_atomically(options.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
