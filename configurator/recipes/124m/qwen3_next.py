"""Qwen3-Next: three Gated DeltaNet layers to one of gated attention with partial RoPE, norms of 1 + w."""

_gdn = "gdn(n_head=12, n_key_head=6, head_dim=128)"  # keys as wide as the model, values twice
_attn = "attn(n_head=6, n_kv_head=1, head_dim=256, gate=true, rope=partial)"
layers = _gdn + "*3 " + _attn
n_head = 6
norm = "rmsnorm1p"
rope_theta = 1e7

n_layer = 12
n_embd = 768
vocab_size = 50304
block_size = 1024
n_ffn = 1152  # chosen so that the parameters match the other recipes of this folder

batch_size = 32
gradient_accumulation_steps = 16  # 524,288 tokens a step
learning_rate = 1e-3
warmup_iters = 700
max_iters = 19073  # 10 billion tokens
eval_interval = 500
eval_iters = 50
