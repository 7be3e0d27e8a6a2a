"""Qwen3-Next: three Gated DeltaNet layers to one of gated attention with partial RoPE, norms of 1 + w."""

_gdn = "gdn(n_head=6, n_key_head=3, head_dim=64)"
_attn = "attn(n_head=4, n_kv_head=1, head_dim=64, gate=true, rope=partial)"
layers = _gdn + "*3 " + _attn
n_head = 3
norm = "rmsnorm1p"
rope_theta = 1e7

n_layer = 4
n_embd = 192
block_size = 256
n_ffn = 320

batch_size = 4
learning_rate = 3e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
