"""Gemma 3: five layers of sliding windows to one of full attention, norms on both sides, a longer RoPE where it is full."""

layers = "swa(window=64)*5 attn(rope_theta=1e6)"
residual = "sandwich"
norm = "rmsnorm1p"
n_head = 3

n_layer = 6
n_embd = 192
block_size = 256
n_ffn = 272

batch_size = 4
learning_rate = 2e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
