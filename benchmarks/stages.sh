#!/usr/bin/env bash
# From a trained attention model to sparse attention and to a hybrid: `bash benchmarks/stages.sh`; with DRY=1 tiny ones on a CPU.
#
# A dense model and, beside it, two hybrids from scratch; then side by side the dense one trained on, the indexer's warm-up and the
# sparse phase, and the conversion by distillation. Every part has its own limit (what it reached by then is saved and used), the
# whole ends after LIMIT seconds; what is known is in $OUT/stages.txt at once. Expected on one H200: 420 s.
LIMIT=${LIMIT:-420}; PY=${PY:-python}; OUT=${OUT:-out/stages}; W=${W:-$OUT/runs}; DATA=${DATA:-data/english_needles}; mkdir -p $OUT $W
export PYTHONPATH=$PWD:$PYTHONPATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} HF_HUB_OFFLINE=1
HYBRID="--layers=gdn gdn gdn attn"
if [ -z "$DRY" ]; then
  DENSE=${DENSE:-1200} WARM=${WARM:-600} SPARSE=${SPARSE:-600} DISTILL=${DISTILL:-160} AFTER=${AFTER:-320}  # steps
  INDEX="top_k=256, index_heads=8, index_dim=32" SIZE= SMALL="--batch_size=4 --eval_iters=70" EVERY=80 AT= NEEDLES=
else
  DENSE=8 WARM=8 SPARSE=4 DISTILL=4 AFTER=4 INDEX="top_k=16, local=4, index_heads=2, index_dim=8" SMALL="--batch_size=1 --eval_iters=2" EVERY=2
  SIZE="--n_layer=4 --n_head=2 --n_embd=32 --block_size=128 --batch_size=2 --eval_iters=1 --log_interval=2 --device=cpu --warmup_iters=1"
  SLOW=9  # times the limits, for a machine that does other things as well
  AT="--contexts=32,64 --batch_sizes=1 --tokens=4 --rows=2 --device=cpu" NEEDLES="--limit=5 --device=cpu"
fi
SELECT="--layers=dsa($INDEX)"; ALL="--layers=dsa($INDEX, mode=dense)"
say() { echo "[${SECONDS}s] $*" | tee -a $OUT/stages.txt; }
part() {  # NAME SECONDS COMMAND...: within its own limit and the script's; at the limit train.py saves and ends
  local name=$1 limit=$(($2 * ${SLOW:-1})) left=$((LIMIT - SECONDS - ${KEEP:-0})) began=$SECONDS; shift 2
  if [ $left -lt 15 ]; then say "$name: no time left"; return 124; fi
  [ $limit -gt $left ] && limit=$left
  timeout -k 15 $limit "$@" > $W/$name.log 2>&1; local rc=$?
  sed "s/^/$name: /" $W/$name.log | cut -c1-300 | tail -60 >> $OUT/logs.txt
  say "$name: rc $rc after $((SECONDS - began)) s"
  tr '\r' '\n' < $W/$name.log | grep '^step .*validation\|indexers:\|^error\|Error' | tail -2 | cut -c1-300 | tee -a $OUT/stages.txt
  tr '\r' '\n' < $W/$name.log | grep 'tok/s' | tail -1 | cut -c1-200 >> $OUT/stages.txt
  return $rc
}
learn() {  # NAME SECONDS FLAGS...: a run, which leaves time for scores and table; once more without the compiler if that was the trouble
  local name=$1 limit=$2; shift 2
  local KEEP=${DRY:-110} run="$PY train.py configurator/recipes/sparse.py --dataset=$DATA $SIZE --out_dir=$W/$name --overwrite"
  part $name $limit $run "$@"; local rc=$?
  [ $rc -eq 0 ] || [ $rc -eq 124 ] || [ -n "$DRY" ] || [[ "$*" == *--compile=false* ]] || part $name $limit $run "$@" --compile=false
}
needle() { part needle-$1 90 $PY eval.py $W/$1 --tasks=needle_single $NEEDLES && grep '|needle_single\||acc' $W/needle-$1.log >> $OUT/stages.txt; }

if [ ! -f $DATA/meta.json ]; then
  part data 60 $PY data/english/prepare.py --needles=0.1 --out=$DATA || exit 1
fi
say "start: $DATA"
ON="--learning_rate=3e-4"  # of what goes on from a trained model, whose rate ended at half of that
learn scratch 330 "$HYBRID" --max_iters=$DENSE & hybrid=$!
learn short 200 "$HYBRID" $SMALL --max_iters=$((DISTILL + AFTER)) --eval_interval=$EVERY & short=$!
learn dense 170 --max_iters=$DENSE

# side by side, all from the dense model; short runs are over before a compiler would be
(learn continued 200 --init_from=$W/dense $ON --max_iters=$SPARSE
 $PY -c "import lm_eval" 2> /dev/null && needle dense) & dense=$!
(learn warm 100 --init_from=$W/dense "$ALL" --indexer=only $SMALL --learning_rate=${RATE:-5e-3} --max_iters=$WARM --eval_interval=300 --compile=false
 # selections that nothing was trained for: one step of no size, so that there is a checkpoint to score
 for start in warm:unadapted dense:random; do
   learn ${start#*:} 60 --init_from=$W/${start%:*} "$SELECT" --max_iters=1 --warmup_iters=0 --learning_rate=1e-12 --compile=false
 done & untrained=$!
 learn sparse 240 --init_from=$W/warm "$SELECT" --indexer=joint $ON --max_iters=$SPARSE
 wait $untrained) & sparse=$!
(learn distilled 60 --init_from=$W/dense "$HYBRID" --distill=$W/dense $SMALL --learning_rate=1e-3 --max_iters=$DISTILL --eval_interval=$EVERY --compile=false
 learn converted 90 --init_from=$W/distilled "$HYBRID" $SMALL --learning_rate=1e-3 --max_iters=$AFTER --eval_interval=$EVERY
 learn swapped 120 --init_from=$W/dense "$HYBRID" $SMALL --learning_rate=1e-3 --max_iters=$((DISTILL + AFTER)) --eval_interval=$EVERY) & convert=$!
wait $dense $convert $sparse
if $PY -c "import lm_eval" 2> /dev/null; then
  needle unadapted & other=$!
  needle sparse; wait $other
else
  say "needles: not scored, lm-eval is not installed"
fi
wait $hybrid $short
part table 90 $PY -m benchmarks.stages $W --out_dir=$OUT $AT; cat $W/table.log | tee -a $OUT/stages.txt
say done
