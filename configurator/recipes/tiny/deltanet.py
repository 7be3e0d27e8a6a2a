"""DeltaNet (2406.06484) throughout."""

layers = "deltanet"
n_head = 3

n_layer = 4
n_embd = 192
block_size = 256
n_ffn = 528

batch_size = 4
learning_rate = 3e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
