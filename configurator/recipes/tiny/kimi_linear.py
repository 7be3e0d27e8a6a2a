"""Kimi Linear (2510.26692): three Kimi Delta Attention layers to one of latent attention, no positions anywhere."""

layers = "kda*3 mla(rope=none, kv_rank=64, nope_dim=64, rope_dim=32, v_dim=64)"
n_head = 3

n_layer = 4
n_embd = 192
block_size = 256
n_ffn = 480

batch_size = 4
learning_rate = 3e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
