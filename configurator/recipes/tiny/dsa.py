"""Attention that reads a selection: DeepSeek sparse attention (2512.02556) over grouped-query attention."""

layers = "dsa(top_k=64, index_heads=8, index_dim=16)"
n_head = 3
n_kv_head = 1

n_layer = 4
n_embd = 192
block_size = 256
n_ffn = 576

batch_size = 4
learning_rate = 2e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
