#!/usr/bin/env bash
# What a machine with several GPUs can tell: run it as it is, and send back the folder that it writes.
#
#     benchmarks/gpu.sh                 on all GPUs of this machine (2, 4 or 8 of one kind)
#     benchmarks/gpu.sh --tiny          the same on two CPU processes, models of no size: tries the script
#
# OUT=FOLDER   where the figures go (gpu-figures)         RANKS=N   fewer GPUs than there are
# PYTHON=FILE  the Python to use (.venv/bin/python, else python3)
#
# It needs: Linux; Python 3.11 or newer with this package, transformers and accelerate (`make` sets up
# .venv with all of them, then install the torch for your CUDA there if it took another); NVIDIA GPUs
# with 24 GB each, or more; a C++ compiler; 10 GB in TMPDIR; half an hour. It downloads nothing, and
# writes to OUT and TMPDIR alone. A step that fails is noted, and the others go on.
set -uo pipefail
cd "$(dirname "$0")/.."

TINY=()
[ "${1:-}" = --tiny ] && TINY=(--tiny)
OUT=${OUT:-gpu-figures}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

stop() { echo "$*" >&2; exit 2; }
"$PYTHON" -c 'import torch, transformers, shardwright' ||
    stop "$PYTHON lacks torch, transformers or shardwright: run \`make test\` once, or set PYTHON"
if [ ${#TINY[@]} = 0 ]; then
    FOUND=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    RANKS=${RANKS:-$FOUND}
    [ "$FOUND" -ge 1 ] || stop "torch finds no GPU here: try the script with --tiny"
    [ "$RANKS" -ge 2 ] || echo "one GPU: what takes several is left out" >&2
    DEVICE=cuda PREDICTED=() SPEED=(--device cuda --dtype bfloat16 --large --minutes 20) QUICK=()
else
    RANKS=${RANKS:-2}
    DEVICE=cpu PREDICTED=(--size tiny --models dense) SPEED=(--tiny --rounds 1 --models dense) QUICK=(--quick)
fi
mkdir -p "$OUT" || stop "cannot write to $OUT"
echo -n >"$OUT/summary.txt"

# step NAME COMMAND...: what it prints goes to OUT/NAME.log; whether it went well, to the summary.
step() {
    local name=$1 begun=$SECONDS
    shift
    echo "== $name: $*"
    if "$@" >"$OUT/$name.log" 2>&1; then local how=done; else local how="FAILED ($?)"; fi
    echo "$name: $how, $((SECONDS - begun)) s" | tee -a "$OUT/summary.txt"
}
ranks() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" "$@"; }
sharing() { SHARDWRIGHT_SYMMETRIC_MEMORY=1 ranks "$@"; }

about() {
    git log -1 --format=%H || true
    uname -a
    "$PYTHON" -m torch.utils.collect_env
    if [ "$DEVICE" = cuda ]; then nvidia-smi && nvidia-smi topo -m; fi
}

step about about
step calibrate ranks -m shardwright calibrate "${QUICK[@]}" -o "$OUT/profile.json"
step kernels ranks -m benchmarks.gpu --compiled --device "$DEVICE" "${TINY[@]}" --json "$OUT/kernels.json"
step symmetric sharing -m benchmarks.gpu --compiled --device "$DEVICE" "${TINY[@]}" --json "$OUT/symmetric.json"
step predicted ranks -m benchmarks.gpu_predicted --device "$DEVICE" "${PREDICTED[@]}" --json "$OUT/predicted.json"
if [ "$RANKS" -ge 2 ]; then
    step speed "$PYTHON" -m benchmarks.speed "${SPEED[@]}" --compiled --ranks "$RANKS" --json "$OUT/speed.json"
fi
tar -czf "$OUT.tar.gz" -C "$(dirname "$OUT")" "$(basename "$OUT")" && echo "Send back $OUT.tar.gz"
! grep -q FAILED "$OUT/summary.txt"
