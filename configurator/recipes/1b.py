"""One billion parameters, three Gated DeltaNet layers to one of attention: 16 GB of weights, gradients and moments.

torchrun --nproc_per_node=8 train.py configurator/recipes/1b.py --parallel=fsdp
"""

out_dir = "out/1b"
layers = "gdn gdn gdn attn"
n_layer = 16
n_embd = 2048
n_head = 16
n_ffn = 5888  # a multiple of 128, so that the parameters come to one billion
vocab_size = 50304
block_size = 2048

batch_size = 8
gradient_accumulation_steps = 32  # 524,288 tokens a step
learning_rate = 6e-4
warmup_iters = 1000
max_iters = 38147  # 20 billion tokens, 20 a parameter
eval_interval = 500
eval_iters = 50
