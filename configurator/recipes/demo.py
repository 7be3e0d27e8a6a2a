"""A small hybrid that learns readable English prose on two CPU cores in about three minutes (`make demo`)."""

layers = "gdn gdn gdn attn"
n_layer = 4
n_head = 3
n_embd = 192
block_size = 256

out_dir = "out/demo"
batch_size = 4  # many small steps: at equal time half the batch gave 1.75 bits per byte, where 8 gave 1.88
learning_rate = 3e-3
warmup_iters = 40
max_iters = 800
log_interval = 20
eval_interval = 200
eval_iters = 20
