"""Nemotron-H: Mamba-2, squared-ReLU feed-forward and a few attention layers without positions, one mixer a layer."""

_m = "mamba2(ffn=none)"
_a = "attn(ffn=none, rope=none, qk_norm=false)"
_front = _m + " mlp " + _m + " mlp " + _m + " mlp " + _m + " " + _a + " mlp "
_back = _m + " mlp " + _m + " mlp"
layers = _front + _back  # twice over: 12 Mamba-2, 12 feed-forward, 2 attention
ffn = "relu2"
n_head = 12
n_kv_head = 4

n_layer = 26
n_embd = 768
vocab_size = 50304
block_size = 1024
n_ffn = 2016  # chosen so that the parameters match the other recipes of this folder

batch_size = 32
gradient_accumulation_steps = 16  # 524,288 tokens a step
learning_rate = 1e-3
warmup_iters = 700
max_iters = 19073  # 10 billion tokens
eval_interval = 500
eval_iters = 50
