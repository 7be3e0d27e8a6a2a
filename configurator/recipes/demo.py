"""A small hybrid that learns readable English prose on a laptop's CPU: about 5 minutes, about 2.0 bits per byte."""

layers = "gdn gdn gdn attn"
n_layer = 4
n_head = 3
n_embd = 192
block_size = 256

out_dir = "out/demo"
batch_size = 8
learning_rate = 2e-3
warmup_iters = 50
max_iters = 600
eval_interval = 200
eval_iters = 10
