"""How many attention layers a hybrid needs: 9 million parameters, four epochs of ten million tokens (data/english/prepare.py).

python sweep.py configurator/recipes/ratio.py --patterns="gdn; gdn*3 attn; attn" --match=parameters --seeds=1,2,3
"""

dataset = "english"
block_size = 512
n_layer = 8
n_head = 4
n_embd = 256

batch_size = 32
_tokens = 9_877_253
max_iters = 4 * _tokens // (batch_size * block_size)
warmup_iters = 100
eval_interval = 600
eval_iters = 20
log_interval = 50
learning_rate = 3e-3  # 0.04 to 0.09 bits better than 1e-3 for each of gdn, 7:1, 3:1, 1:1, attn after two epochs
