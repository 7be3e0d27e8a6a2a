"""MiniMax-01 (2501.08313): seven lightning layers to one of attention, DeepNorm residuals on the normed stream."""

_scale = "alpha=2, ffn_alpha=2"  # (2 n_layer)^0.25
layers = "lightning(" + _scale + ")*7 attn(qk_norm=false, rope=partial, rope_fraction=0.5, " + _scale + ")"
residual = "normed"
n_head = 3
n_kv_head = 1

n_layer = 8
n_embd = 192
block_size = 256
n_ffn = 96

batch_size = 4
learning_rate = 2e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
