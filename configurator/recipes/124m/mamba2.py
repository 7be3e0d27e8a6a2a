"""Mamba-2 (2405.21060) throughout, without feed-forward layers."""

layers = "mamba2(ffn=none)"  # 23 layers where the published 130M has 24: its parameters are matched by depth
n_head = 12

n_layer = 23
n_embd = 768
vocab_size = 50304
block_size = 1024

batch_size = 32
gradient_accumulation_steps = 16  # 524,288 tokens a step
learning_rate = 1e-3
warmup_iters = 700
max_iters = 19073  # 10 billion tokens
eval_interval = 500
eval_iters = 50
