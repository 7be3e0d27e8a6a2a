"""30 million parameters at 2048 tokens, dense: where sparse attention and linear layers start from (benchmarks/stages.sh).

python data/english/prepare.py --needles=0.1 --out=data/english_needles
python train.py configurator/recipes/sparse.py
"""

dataset = "english_needles"
layers = "attn"
n_layer = 8
n_head = 8
n_embd = 512
block_size = 2048

out_dir = "out/dense"
batch_size = 16
max_iters = 1200  # 39 million tokens, 3.6 epochs
warmup_iters = 60
learning_rate = 1.5e-3
eval_interval = 100
eval_iters = 18  # the whole held-out text
log_interval = 20
