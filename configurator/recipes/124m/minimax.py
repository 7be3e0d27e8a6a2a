"""MiniMax-01 (2501.08313): seven lightning layers to one of attention, DeepNorm residuals on the normed stream."""

_scale = "alpha=2.378, ffn_alpha=2.378"  # (2 n_layer)^0.25
layers = "lightning(" + _scale + ")*7 attn(qk_norm=false, rope=partial, rope_fraction=0.5, " + _scale + ")"
residual = "normed"
n_head = 12
n_kv_head = 3

n_layer = 16
n_embd = 768
vocab_size = 50304
block_size = 1024
n_ffn = 1120  # chosen so that the parameters match the other recipes of this folder

batch_size = 32
gradient_accumulation_steps = 16  # 524,288 tokens a step
learning_rate = 6e-4
warmup_iters = 700
max_iters = 19073  # 10 billion tokens
eval_interval = 500
eval_iters = 50
