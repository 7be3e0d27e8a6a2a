"""Gemma 3: five layers of sliding windows to one of full attention, norms on both sides, a longer RoPE where it is full."""

layers = "swa(window=512)*5 attn(rope_theta=1e6)"
residual = "sandwich"
norm = "rmsnorm1p"
n_head = 12
n_kv_head = 6

n_layer = 12
n_embd = 768
vocab_size = 50304
block_size = 1024
n_ffn = 2336  # chosen so that the parameters match the other recipes of this folder

batch_size = 32
gradient_accumulation_steps = 16  # 524,288 tokens a step
learning_rate = 1e-3
warmup_iters = 700
max_iters = 19073  # 10 billion tokens
eval_interval = 500
eval_iters = 50
