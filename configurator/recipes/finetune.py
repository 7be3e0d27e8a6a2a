"""Continue from a trained model on a text of your own: --init_from=RUN (or gpt2), --dataset=FOLDER."""

out_dir = "out/finetune"
learning_rate = 1e-4  # a tenth of a first training's, and no decay: it is short
decay_lr = False
warmup_iters = 20
max_iters = 200
eval_interval = 50
eval_iters = 20
