"""Nemotron-H: Mamba-2, squared-ReLU feed-forward and a few attention layers without positions, one mixer a layer."""

_m = "mamba2(ffn=none, d_state=64)"
_a = "attn(ffn=none, rope=none, qk_norm=false)"
layers = _m + " mlp " + _m + " " + _a + " mlp " + _m + " mlp"
ffn = "relu2"
n_head = 3
n_kv_head = 1

n_layer = 7
n_embd = 192
block_size = 256
n_ffn = 832

batch_size = 4
learning_rate = 3e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
