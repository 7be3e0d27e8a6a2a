"""OLMo-Hybrid: three Gated DeltaNet layers with negative eigenvalues to one of attention normed after, OLMo 2's way."""

layers = "gdn(neg_eigval=true, head_dim=48, value_head_dim=96)*3 attn(residual=post, qk_norm=full)"
n_head = 3

n_layer = 4
n_embd = 192
block_size = 256
n_ffn = 432

batch_size = 4
learning_rate = 3e-3
warmup_iters = 40
max_iters = 800
eval_interval = 200
eval_iters = 20
