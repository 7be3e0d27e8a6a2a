"""Multi-query recall at Zoology's size (2312.04927): two mixers without FFN, one head, at most 8 epochs of 100,000 rows.

python data/synthetic/prepare.py --task=mqar --row=256 --pairs=32
python sweep.py configurator/recipes/mqar.py --patterns="attn(qk_norm=false, ffn=none); gdn(ffn=none)" --learning_rates=1e-3,2e-3

Attention alone has no convolution to see the token before and finds it late and suddenly: it needs biases, no QK-norm, a rate near
2e-3 and most of the steps. On a GPU `--compile=false --cuda_graph`: the steps are mostly launches.
"""

dataset = "data/synthetic/mqar-256-32"
block_size = 256
n_layer = 2
n_head = 1
n_embd = 64
bias = True

batch_size = 256
_rows = 100_000
max_iters = 8 * _rows // batch_size
warmup_iters = max_iters // 10
eval_interval = _rows // batch_size
eval_iters = 4
log_interval = 100
stop_loss = 0.03  # nats an answer: more than 99% of them are right
weight_decay = 0.1
