"""Three Gated DeltaNet layers to one of DeepSeek sparse attention."""

layers = "gdn(n_head=6)*3 dsa(top_k=256, index_heads=8, index_dim=32)"
n_head = 12
n_kv_head = 4

n_layer = 12
n_embd = 768
vocab_size = 50304
block_size = 1024
n_ffn = 1936  # chosen so that the parameters match the other recipes of this folder

batch_size = 32
gradient_accumulation_steps = 16  # 524,288 tokens a step
learning_rate = 1e-3
warmup_iters = 700
max_iters = 19073  # 10 billion tokens
eval_interval = 500
eval_iters = 50
