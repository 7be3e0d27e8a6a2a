#!/usr/bin/env bash
# What one and two GPUs do, side by side: `bash benchmarks/scaling.sh`; with DRY=1 two gloo processes of tiny models on a CPU.
#
# Speed and 51 losses of the 124M hybrid under DDP and of a billion parameters under FSDP2, rows of 32k and 256k tokens shared by two
# GPUs, and a run saved at two and continued at one and at two. Every part has its own limit, the whole ends after LIMIT seconds;
# what is known is in $OUT/scaling.txt at once. Expected on two H200: 420 s.
LIMIT=${LIMIT:-480}; PARTS=${PARTS:-speed resume}; PY=${PY:-python}; OUT=${OUT:-out/scaling}; mkdir -p $OUT; W=$(mktemp -d)
export PYTHONPATH=$PWD:$PYTHONPATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
if [ -z "$DRY" ]; then
  M124="--layers=gdn gdn gdn attn(n_head=12)" A124="--block_size=1024 --batch_size=64 --gradient_accumulation_steps=2 --losses=50 --steps=20"
  A1B="--layers=1b --block_size=2048 --batch_size=8 --gradient_accumulation_steps=2 --losses=50 --steps=10 --compile=false"
  MCP="--layers=gdn gdn gdn attn" LONG=32768,262144 ACP="--batch_size=1 --losses=2 --steps=3 --compile=false --activation_checkpointing"
  RES="--n_layer=8 --n_head=4 --n_embd=512 --block_size=1024 --batch_size=8 --learning_rate=1e-3" DEV=
else
  M124="--layers=gdn gdn gdn attn(n_head=2)" A124="--block_size=32 --batch_size=2 --gradient_accumulation_steps=2 --losses=3 --steps=2 --device=cpu"
  A1B="--layers=1b --block_size=32 --batch_size=2 --gradient_accumulation_steps=2 --losses=3 --steps=2 --compile=false --device=cpu"
  MCP="--layers=gdn attn" LONG=64,256 ACP="--batch_size=1 --losses=2 --steps=2 --compile=false --activation_checkpointing --device=cpu"
  RES="--n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --batch_size=2 --learning_rate=1e-3 --device=cpu" DEV=cpu
fi
say() { echo "[${SECONDS}s] $*" | tee -a $OUT/scaling.txt; }
part() {  # NAME SECONDS COMMAND...: within its own limit and the script's
  local name=$1 limit=$2 left=$((LIMIT - SECONDS)) began=$SECONDS; shift 2
  if [ $left -lt 15 ]; then say "$name: no time left"; return 1; fi
  [ $limit -gt $left ] && limit=$left
  PART=$W/$name timeout -k 5 $limit "$@" > $W/$name.log 2>&1; local rc=$?
  if [ $rc -ne 0 ]; then for p in $(grep -lsz "^PART=$W/$name\$" /proc/[0-9]*/environ | cut -d/ -f3); do kill -9 $p 2>/dev/null; done; fi  # workers in sessions of their own
  sed "s/^/$name: /" $W/$name.log | cut -c1-400 | grep -v '^[^ ]* *$' | tail -60 >> $OUT/logs.txt
  say "$name: rc $rc after $((SECONDS - began)) s"
  if [ $rc -eq 0 ]; then grep -B1 -A4 '^model  ' $W/$name.log | grep -v '^--\|written to' | tail -3 >> $OUT/scaling.txt; else grep -i 'error\|killed' $W/$name.log | tail -4 | cut -c1-300 >> $OUT/scaling.txt; fi
  return $rc
}
launch="$PY -m torch.distributed.run --standalone"
{ uname -r; [ -z "$DRY" ] && nvidia-smi topo -m; $PY -c "import torch; print(torch.__version__, torch.cuda.device_count(), torch.cuda.nccl.version() if torch.cuda.is_available() else 'cpu')"; env | grep 'NVLS\|MULTICAST'; } > $W/start.log 2>&1
cat $W/start.log >> $OUT/logs.txt; say "start"

# (a), (b) one GPU each, side by side
(CUDA_VISIBLE_DEVICES=0 part one-124m 150 $launch --nproc_per_node=1 bench.py train "$M124" $A124 --out_dir=$OUT/124m) &
first=$!
(CUDA_VISIBLE_DEVICES=1 part one-1b 150 $launch --nproc_per_node=1 bench.py train $A1B --out_dir=$OUT/1b
 CUDA_VISIBLE_DEVICES=1 part one-long 110 $launch --nproc_per_node=1 bench.py train "$MCP" --block_size=${LONG%,*} $ACP --out_dir=$OUT/long) &
wait $first $!
# (b) two GPUs, the same global batch: speed, and the largest difference of 51 losses
part two-1b-fsdp 90 $launch --nproc_per_node=2 bench.py train $A1B --parallel=fsdp --single=$OUT/1b/train-1.json --out_dir=$OUT/1b
# (d) rows of 32k and 256k shared by two GPUs
part two-long 110 $launch --nproc_per_node=2 bench.py train "$MCP" --block_size=$LONG $ACP --context_parallel=2 --single=$OUT/long/train-1.json --out_dir=$OUT/long
# (a) last: it compiles once more, as DDP cuts the graph where its buckets of gradients end
part two-124m-ddp 120 $launch --nproc_per_node=2 bench.py train "$M124" $A124 --parallel=ddp --single=$OUT/124m/train-1.json --out_dir=$OUT/124m ||
part two-124m-ddp-eager 60 $launch --nproc_per_node=2 bench.py train "$M124" $A124 --parallel=ddp --compile=false --single=$OUT/124m/train-1.json --out_dir=$OUT/124m
case "$PARTS" in *resume*) ;; *) say done; tail -45 $OUT/scaling.txt | cut -c1-230; exit ;; esac
# (c) saved at two (FSDP2), continued at one and at two, beside a run that was never stopped
$PY - $W <<'PY'
import sys
from pathlib import Path
import numpy as np
from data.tokenizer import Tokenizer
from data.tokens import write_tokens
folder, tok, rng = Path(sys.argv[1]) / "data", Tokenizer.from_bytes(), np.random.default_rng(0)
tok.save(folder / "tokenizer.json") if folder.mkdir() is None else None
for split, n in (("train", 2_000_000), ("val", 100_000)):
    x = np.minimum(rng.zipf(1.3, n), 250); x[::700] = tok.eot
    write_tokens(folder / f"{split}.bin", [x], separator="before", eot=tok.eot, vocab_size=tok.vocab_size, tokenizer_hash=tok.hash)
PY
RES="$RES --gradient_accumulation_steps=2 --dropout=0.1 --compile=false --log_interval=1 --eval_interval=8 --eval_iters=2 --warmup_iters=2 --lr_decay_iters=16 --dataset=$W/data"
LAYERS="--layers=gdn attn mamba2(head_dim=32) kda"
(part resume-whole 90 $launch --nproc_per_node=2 train.py "$LAYERS" $RES --parallel=fsdp --max_iters=16 --out_dir=$W/whole) &
first=$!
part resume-half 90 $launch --nproc_per_node=2 train.py "$LAYERS" $RES --parallel=fsdp --max_iters=8 --out_dir=$W/half
wait $first; cp -r $W/half $W/half1
(CUDA_VISIBLE_DEVICES=0 part resume-at-1 60 $PY train.py --resume=$W/half1 --max_iters=16) &
first=$!
part resume-at-2 60 $launch --nproc_per_node=2 train.py --resume=$W/half --max_iters=16
wait $first
$PY - $W <<'PY' | tee -a $OUT/scaling.txt
import json, sys
def losses(run):
    return {m["step"]: (m.get("loss"), m.get("val_loss")) for m in map(json.loads, open(f"{sys.argv[1]}/{run}/metrics.jsonl")) if m.get("loss") is not None}
try:
    whole = losses("whole")
    for run, name in (("half1", "2 GPUs, then 1"), ("half", "2 GPUs, then 2")):
        other = losses(run)
        diff = {s: abs(whole[s][0] - other[s][0]) for s in whole}
        print(f"resume {name}: losses of steps 1-8 differ by {max(diff[s] for s in range(1, 9)):.1e}, 9-16 by {max(diff[s] for s in range(9, 17)):.1e} (last {other[16][0]:.4f})")
except Exception as e:
    print(f"resume: FAILED {type(e).__name__}: {e}")
PY
say done
tail -45 $OUT/scaling.txt | cut -c1-230
