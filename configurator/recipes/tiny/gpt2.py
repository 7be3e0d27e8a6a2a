"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases; the 124M configuration."""

layers = "attn(rope=none, qk_norm=false)"
n_head = 3
norm = "layernorm"
norm_eps = 1e-5
ffn = "gelu"
bias = True
learned_positions = True

n_layer = 4
n_embd = 192
block_size = 256
n_ffn = 768

batch_size = 4
learning_rate = 2e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
