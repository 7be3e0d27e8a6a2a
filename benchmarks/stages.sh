#!/usr/bin/env bash
# From a trained attention model to sparse attention and to a hybrid: `bash benchmarks/stages.sh`; with DRY=1 tiny ones on a CPU.
#
# A dense model; then side by side the dense one trained on, the indexer's warm-up and the sparse phase, the conversion by distillation
# and hybrids from scratch. With two GPUs visible the second one takes the hybrids, and that from scratch begins at once. Every part
# has its own limit (what it reached by then is saved and used), the whole ends after LIMIT seconds: 520 on one GPU, 400 on two. What
# is known is in $OUT/stages.txt at once. Nothing else should use the GPUs. Nothing is compiled: a step of 32k tokens keeps a GPU busy
# as it is, two compilations take longer than the steps that they save, and a run cannot stop before a compilation ends.
#
# PARTS="sparse" or "convert" makes one half. LAYERS is the dense model's pattern, whose `attn` becomes sparse, MODEL further flags of all
# models, TRAIN of the dense one's training; a finished $W/dense is used as it is.
CARDS=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | paste -sd,)}
FIRST=${CARDS%%,*} SECOND=${CARDS#*,} SECOND=${SECOND%%,*}  # the same one where there is one, or none
if [ "$FIRST" = "$SECOND" ]; then LIMIT=${LIMIT:-520}; else LIMIT=${LIMIT:-400}; fi
on() { if [ -n "$1" ]; then export CUDA_VISIBLE_DEVICES=$1; fi; }
on $FIRST
PY=${PY:-python}; OUT=${OUT:-out/stages}; W=${W:-$OUT/runs}; DATA=${DATA:-data/english_needles}; mkdir -p $OUT $W
export PYTHONPATH=$PWD:$PYTHONPATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} HF_HUB_OFFLINE=1
HYBRID="--layers=gdn gdn gdn attn" LAYERS=${LAYERS:-attn} PARTS=${PARTS:-sparse convert}
if [ -z "$DRY" ]; then
  DENSE=${DENSE:-1200} WARM=${WARM:-600} SPARSE=${SPARSE:-400} DISTILL=${DISTILL:-160} AFTER=${AFTER:-320}  # steps
  INDEX=${INDEX:-top_k=256, index_heads=8, index_dim=64} SIZE= SMALL="--batch_size=4 --eval_iters=70" EVERY=80 AT= NEEDLES=
  GRAPH=--cuda_graph  # not of what selects: that has not been captured yet
else
  DENSE=8 WARM=8 SPARSE=4 DISTILL=4 AFTER=4 INDEX="top_k=16, local=4, index_heads=2, index_dim=8" SMALL="--batch_size=1 --eval_iters=2" EVERY=2
  SIZE="--n_layer=4 --n_head=2 --n_embd=32 --block_size=128 --batch_size=2 --eval_iters=1 --log_interval=2 --device=cpu --warmup_iters=1"
  SLOW=9  # times the limits, for a machine that does other things as well
  AT="--contexts=32,64 --batch_sizes=1 --tokens=4 --rows=2 --device=cpu" NEEDLES="--limit=5 --device=cpu"
fi
indexed() { local layers=${LAYERS//attn(/dsa($1, }; echo "--layers=${layers//attn/dsa($1)}"; }
DENSE_LAYERS="--layers=$LAYERS" SELECT=$(indexed "$INDEX") ALL=$(indexed "$INDEX, mode=dense")
say() { echo "[${SECONDS}s] $*" | tee -a $OUT/stages.txt; }
part() {  # NAME SECONDS COMMAND...: within its own limit and the script's; at the limit train.py saves and ends
  local name=$1 limit=$(($2 * ${SLOW:-1})) left=$((LIMIT - SECONDS - ${KEEP:-0})) began=$SECONDS; shift 2
  if [ $left -lt 15 ]; then say "$name: no time left"; return 124; fi
  [ $limit -gt $left ] && limit=$left
  timeout -k 30 $limit "$@" > $W/$name.log 2>&1; local rc=$?
  sed "s/^/$name: /" $W/$name.log | cut -c1-300 | tail -60 >> $OUT/logs.txt
  say "$name: rc $rc after $((SECONDS - began)) s"
  tr '\r' '\n' < $W/$name.log | grep '^step .*validation\|indexers:\|^error\|Error' | tail -2 | cut -c1-300 | tee -a $OUT/stages.txt
  tr '\r' '\n' < $W/$name.log | grep 'tok/s' | tail -1 | cut -c1-200 >> $OUT/stages.txt
  return $rc
}
learn() {  # NAME SECONDS FLAGS...: a run that leaves KEEP seconds for what comes after it
  local name=$1 limit=$2 KEEP=${KEEP:-${DRY:-110}}; shift 2
  part $name $limit $PY train.py configurator/recipes/sparse.py --dataset=$DATA $SIZE $MODEL --compile=false --out_dir=$W/$name --overwrite "$@"
}
needle() { KEEP=${DRY:-50} part needle-$1 90 $PY eval.py $W/$1 --tasks=needle_single $NEEDLES && grep '|needle_single\||acc' $W/needle-$1.log >> $OUT/stages.txt; }

if [ ! -f $DATA/meta.json ]; then
  part data 60 $PY data/english/prepare.py --needles=0.1 --out=$DATA || exit 1
fi
say "start: $DATA, GPUs ${CARDS:-none}, $LIMIT s"
ON="--learning_rate=3e-4"  # of what goes on from a trained model, whose rate ended at half of that
FAST="$SMALL --learning_rate=1e-3 --eval_interval=$EVERY"
wanted() { [[ " $PARTS " = *" $1 "* ]]; }
scratch() { wanted convert && KEEP=${DRY:-60} learn scratch 330 "$HYBRID" $GRAPH --max_iters=$DENSE; }

if [ "$FIRST" != "$SECOND" ]; then (on $SECOND; scratch) & fi
[ -f $W/dense/best ] || learn dense 220 "$DENSE_LAYERS" $GRAPH $TRAIN --max_iters=$DENSE

# side by side, all from the dense model
(wanted sparse && learn continued 150 --init_from=$W/dense "$DENSE_LAYERS" $GRAPH $ON --max_iters=$SPARSE
 if [ "$FIRST" = "$SECOND" ]; then scratch; fi
 needle dense) &
wanted sparse && (learn warm 120 --init_from=$W/dense "$ALL" --indexer=only $SMALL --learning_rate=${RATE:-5e-3} --max_iters=$WARM --eval_interval=300
 # selections that nothing was trained for: one step of no size, so that there is a checkpoint to score
 for start in warm:unadapted dense:random; do
   KEEP=${DRY:-70} learn ${start#*:} 60 --init_from=$W/${start%:*} "$SELECT" --max_iters=1 --warmup_iters=0 --learning_rate=1e-12
 done & untrained=$!
 learn sparse 240 --init_from=$W/warm "$SELECT" --indexer=joint $ON --max_iters=$SPARSE
 wait $untrained
 needle unadapted & other=$!
 needle sparse; wait $other) &
wanted convert && (on $SECOND
 learn distilled 60 --init_from=$W/dense "$HYBRID" --distill=$W/dense $FAST --max_iters=$DISTILL
 learn converted 90 --init_from=$W/distilled "$HYBRID" $GRAPH $FAST --max_iters=$AFTER
 learn swapped 90 --init_from=$W/dense "$HYBRID" $GRAPH $FAST --max_iters=$((DISTILL + AFTER))
 learn short 90 "$HYBRID" $GRAPH $SMALL --max_iters=$((DISTILL + AFTER)) --eval_interval=$EVERY) &
wait
part table 90 $PY -m benchmarks.stages $W --out_dir=$OUT $AT; cat $W/table.log | tee -a $OUT/stages.txt
say done
