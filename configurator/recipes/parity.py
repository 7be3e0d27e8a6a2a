"""Parity of 3 to 40 bits (Grazzi et al. 2411.12537): two layers, 128 wide; `eval.py --tasks=parity` tests up to 255 bits.

python data/synthetic/prepare.py --task=parity --row=256 --longest=40
python sweep.py configurator/recipes/parity.py --patterns="deltanet(neg_eigval=false); deltanet(neg_eigval=true)" --tasks=parity
"""

dataset = "data/synthetic/parity-256-3-40"
block_size = 256
n_layer = 2
n_head = 4
n_embd = 128

batch_size = 32
max_iters = 6000
warmup_iters = 600
eval_interval = 500
eval_iters = 4
log_interval = 100
learning_rate = 1e-3
weight_decay = 0.0
