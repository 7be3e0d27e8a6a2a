"""Mamba-2 (2405.21060) throughout, without feed-forward layers."""

layers = "mamba2(ffn=none, d_state=64)"
n_head = 3

n_layer = 7
n_embd = 192
block_size = 256

batch_size = 4
learning_rate = 3e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
