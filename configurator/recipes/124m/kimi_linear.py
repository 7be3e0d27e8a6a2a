"""Kimi Linear (2510.26692): three Kimi Delta Attention layers to one of latent attention, no positions anywhere."""

layers = "kda*3 mla(rope=none, kv_rank=256, nope_dim=128, rope_dim=64, v_dim=128)"
n_head = 6

n_layer = 12
n_embd = 768
vocab_size = 50304
block_size = 1024
n_ffn = 1984  # chosen so that the parameters match the other recipes of this folder

batch_size = 32
gradient_accumulation_steps = 16  # 524,288 tokens a step
learning_rate = 1e-3
warmup_iters = 700
max_iters = 19073  # 10 billion tokens
eval_interval = 500
eval_iters = 50
