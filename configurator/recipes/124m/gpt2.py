"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases; the 124M configuration."""

layers = "attn(rope=none, qk_norm=false)"
n_head = 12
norm = "layernorm"
norm_eps = 1e-5
ffn = "gelu"
bias = True
learned_positions = True

n_layer = 12
n_embd = 768
vocab_size = 50304
block_size = 1024
n_ffn = 3072

batch_size = 32
gradient_accumulation_steps = 16  # 524,288 tokens a step
learning_rate = 6e-4
warmup_iters = 700
max_iters = 19073  # 10 billion tokens
eval_interval = 500
eval_iters = 50
