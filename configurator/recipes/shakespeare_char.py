"""Tiny Shakespeare by characters at nanoGPT's size and budget: 10.7M parameters, 5000 steps of 16,384 characters, dropout 0.2.

The model is nanoGPT's but for the tanh form of GELU. A hybrid of as many parameters takes flags:

python data/shakespeare_char/prepare.py
python train.py configurator/recipes/shakespeare_char.py
python train.py configurator/recipes/shakespeare_char.py --layers="gdn gdn attn" --learned_positions=false --ffn=swiglu --n_ffn=944
"""

layers = "attn(rope=none, qk_norm=false)"
n_head = 6
norm = "layernorm"
norm_eps = 1e-5
ffn = "gelu"
learned_positions = True
document_mask = False  # the split is one document

n_layer = 6
n_embd = 384
block_size = 256
dropout = 0.2

dataset = "shakespeare_char"
out_dir = "out/shakespeare_char"
batch_size = 64
learning_rate = 1e-3
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
max_iters = 5000
eval_interval = 250
eval_iters = 7  # the whole held-out split: 436 windows
