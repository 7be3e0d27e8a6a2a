"""From a trained attention model: sparse attention in its phases, and layers swapped for others."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from tiny import fails, flags, metrics, prepare_tiny, runner, same, weights

import checkpoint
import monitor
import preflight
import swap
import train
from configurator import ModelConfig, TrainConfig
from data.loader import Batch, heldout_batches
from data.tokens import Dataset
from model import Model

OPTIONS = "top_k=8,local=2,index_heads=2,index_dim=8"
DENSE, SPARSE = f"--layers=dsa({OPTIONS},mode=dense)", f"--layers=dsa({OPTIONS})"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_tiny(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(dataset, tmp_path):
    return runner(dataset, tmp_path)


def indexer(name):
    return ".index_" in name


def config_of(layers, **others):
    return ModelConfig(**{"layers": layers, "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 20, "block_size": 32, **others})


def saved(model, folder):
    """The weights of `model` as a checkpoint folder, as far as `swap` reads it."""
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text(json.dumps({"model": model.config.model_dump()}))
    checkpoint.save_file({n: p.detach().clone() for n, p in model.named_parameters()}, folder / "model.safetensors")
    return folder


def test_three_phases(run, capsys):
    """Dense training, then the indexer alone, which changes no other weight, then both; each goes on bit for bit when resumed."""
    dense = run("--layers=attn", "--max_iters=4", name="dense")
    warm = ("--indexer=only", DENSE, f"--init_from={dense}", "--eval_interval=20", "--learning_rate=1e-2")
    capsys.readouterr()
    b = run(*warm, "--max_iters=60", name="b")
    out = capsys.readouterr().out
    assert (
        "layers 0, 1: attn -> dsa(top_k=8, local=2, index_heads=2, index_dim=8, mode=dense): takes over q, k, v, out, q_norm" in out
    )
    assert "; new: index_q_proj.weight, index_k_proj.weight," in out and "dropped" not in out
    assert "indexers: attention recalled" in out
    before, after = weights(dense), weights(b)
    assert {n for n in after if not indexer(n)} == set(before) and same(before, {n: after[n] for n in before})
    kl = [m["health"]["0"]["kl"] for m in metrics(b) if "health" in m]
    assert len(kl) == 3 and kl[-1] < kl[0]
    assert not (b / "best").exists()  # of scores that do not move the first would be the best

    joint = ("--indexer=joint", SPARSE, f"--init_from={b}")
    c = run(*joint, "--max_iters=4", name="c")
    assert "dsa(top_k=8, local=2, index_heads=2, index_dim=8): takes over q, k, v, out, q_norm" in capsys.readouterr().out
    assert all(not torch.equal(x, after[n]) for n, x in weights(c).items())
    health = metrics(c)[-1]["health"]["1"]
    assert 0 < health["recall"] <= 1 and 0 < health["overlap"] <= 1 and health["kl"] >= 0

    for phase, name in ((warm, "b"), (joint, "c")):
        whole, half = (
            run(*phase, "--max_iters=4", name=f"{name}4"),
            run(*phase, "--max_iters=2", "--lr_decay_iters=4", name=f"{name}2"),
        )
        train.main([f"--resume={half}", "--max_iters=4"])
        assert same(weights(whole), weights(half))


def gradients(layers, total, learns=True, **options):
    """{parameter: gradient} of the language model's loss, or of the indexers' alone."""
    torch.manual_seed(1)
    model = Model(config_of(layers))
    for layer in train.indexed(model):
        layer.learns = learns
    tokens = torch.randint(0, 20, (2, 32))
    ids = torch.ones_like(tokens, dtype=torch.int32).cumsum(1) // 20 + 1
    output = model(tokens, tokens, segment_ids=ids, total=True)
    (output.loss if total else output.aux["indexer_kl"]).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_each_loss_reaches_its_own_parameters(mode):
    layers = f"dsa({OPTIONS},mode={mode})"
    kl, nll, alone = gradients(layers, False), gradients(layers, True), gradients(layers, True, learns=False)
    assert kl and all(indexer(n) for n in kl) and all(g.abs().sum() > 0 for n, g in kl.items() if "k_norm.bias" not in n)
    assert not any(indexer(n) for n in nll) and same(nll, alone)
    assert set(kl) | set(nll) == {n for n, _ in Model(config_of(layers)).named_parameters()}


def test_the_step_is_the_mean_over_tokens_and_layers(run):
    """Split over micro-batches or recomputed layer by layer, the indexers take the same steps."""
    flags = ("--indexer=only", DENSE, "--max_iters=3", "--optimizer=adamw", "--grad_clip=0")
    a = weights(run(*flags, "--batch_size=4", name="a"))
    b = weights(run(*flags, "--batch_size=1", "--gradient_accumulation_steps=4", name="b"))
    c = weights(run(*flags, "--batch_size=4", "--activation_checkpointing", name="c"))
    for n, x in a.items():
        assert torch.allclose(x, b[n], atol=1e-5) and torch.allclose(x, c[n], atol=1e-5), n


def test_an_indexer_that_learns_changes_no_step_of_the_rest(run):
    """While all keys are read; the gradients are clipped, where the indexers' norm must not count."""
    flags = (DENSE, "--max_iters=4", "--grad_clip=0.05")
    alone, joint = run(*flags, name="alone"), run(*flags, "--indexer=joint", name="joint")
    norms = [[m["grad_norm"] for m in metrics(folder) if "grad_norm" in m] for folder in (alone, joint)]
    assert all(0.05 < a < b for a, b in zip(*norms, strict=True))
    before, after = weights(alone), weights(joint)
    assert {n for n in after if not torch.equal(after[n], before[n])} == {n for n in after if indexer(n)}


def test_it_is_traced_whole():
    model = Model(config_of(f"dsa({OPTIONS})"))
    for layer in train.indexed(model):
        layer.learns = True
    tokens = torch.randint(0, 20, (1, 32))
    traced = torch.compile(model, backend="eager", fullgraph=True)
    results = [m(tokens, tokens, total=True) for m in (model, traced)]
    assert torch.allclose(results[0].aux["indexer_kl"], results[1].aux["indexer_kl"])


def test_sparse_with_room_for_all_is_dense(tmp_path):
    dense = Model(config_of("attn"))
    sparse = Model(config_of("dsa(top_k=32)"))
    swap.load_weights(sparse, saved(dense, tmp_path / "a"))
    tokens = torch.randint(0, 20, (2, 32))
    with torch.no_grad():
        assert torch.allclose(dense(tokens).logits, sparse(tokens).logits, atol=1e-5)


@pytest.mark.parametrize(
    "before, after, says",
    [
        ("attn", "swa(window=8)", "takes over q, k, v, out, q_norm.weight, k_norm.weight"),
        ("attn", "gdn", "takes over q, k, v, out; new: silu gate, conv_weight, A_log, dt_bias, ba_proj.weight, ba_proj.bias, "),
        ("attn(gate=true)", "lightning", "takes over q, k, v, sigmoid gate, out; new: norm.weight; dropped: q_norm.weight, "),
        ("attn(n_kv_head=1)", "kda", "takes over q, k, v, out; new: conv_weight"),
        ("attn", "mamba2(expand=1, head_dim=8, d_state=8, groups=2)", "takes over v, k, q, out; new: silu gate, the rest of "),
        ("attn", "mamba2(head_dim=16)", "takes over nothing; new: silu gate, v, k, q, out, the rest of in_proj"),
        ("attn", "mla", "takes over nothing; new: q_proj.weight"),
        ("gdn", "gdn(neg_eigval=true)", "takes over q, k, v, silu gate, out, conv_weight"),
        ("gdn", "mlp", "takes over nothing; dropped: q, k, v, silu gate, out, "),
    ],
)  # fmt: skip
def test_swapping_says_what_it_does(tmp_path, before, after, says):
    """And does it: what is taken over is equal head by head, everything else as in a new model."""
    old = Model(config_of(before, bias=True))
    model = Model(config_of(after, bias=True))
    with torch.no_grad():
        for p in old.parameters():
            p.normal_()
    fresh = copy.deepcopy(model)
    (line,) = swap.load_weights(model, saved(old, tmp_path / "a"))
    assert line.startswith(f"layers 0, 1: {before} -> {after}: ") and says in line, line
    assert torch.equal(model.embedding.weight, old.embedding.weight)
    for was, new, block in zip(old.blocks, fresh.blocks, model.blocks, strict=True):
        assert torch.equal(block.ffn.down_proj.weight, was.ffn.down_proj.weight)
        a, b = swap.parts(was.mixer), swap.parts(new.mixer)
        for role, (module, first, heads, width) in b.items():
            mine, other = (getattr(m.mixer, module).weight for m in (block, new))
            if f" {role}," not in line.partition("takes over")[2].partition(";")[0] + ",":
                assert torch.equal(mine[first : first + heads * width], other[first : first + heads * width]), role
            elif role == "out":
                assert torch.equal(mine, was.mixer.out_proj.weight) and torch.equal(
                    block.mixer.out_proj.bias, was.mixer.out_proj.bias
                )
            else:
                source, at, fewer, _ = a[role]
                theirs = getattr(was.mixer, source).weight[at : at + fewer * width].view(fewer, width, -1)
                mine = mine[first : first + heads * width].view(heads, width, -1)
                assert all(torch.equal(mine[h], theirs[h * fewer // heads]) for h in range(heads)), role


def test_the_same_layers_say_nothing(tmp_path):
    old, new = Model(config_of("gdn attn")), Model(config_of("gdn attn"))
    assert swap.load_weights(new, saved(old, tmp_path / "a")) == []
    assert all(torch.equal(p, q) for p, q in zip(old.parameters(), new.parameters(), strict=True))


def test_a_swapped_model_trains_on(run, capsys):
    first = run("--layers=attn", "--max_iters=2", name="first")
    capsys.readouterr()
    second = run("--layers=gdn attn", "--max_iters=2", f"--init_from={first}", name="second")
    assert "layer 0: attn -> gdn: takes over q, k, v, out; new: silu gate," in capsys.readouterr().out
    assert checkpoint.load_model(second)[2]["model"]["layers"] == "gdn attn"


def test_distillation_brings_mixers_to_the_teachers(run, dataset):
    """Nothing but the swapped mixers moves, their error falls, and a resumed run takes the same steps."""
    first = run("--layers=attn", "--max_iters=20", name="first")
    flags = ("--layers=gdn attn", f"--init_from={first}", f"--distill={first}", "--learning_rate=1e-2", "--log_interval=1")
    out = run(*flags, "--max_iters=60", "--eval_interval=60", name="out")
    before, after = weights(first), weights(out)
    moved = {n for n, x in after.items() if n not in before or not torch.equal(x, before[n])}
    assert moved == {n for n in after if n.startswith("blocks.0.mixer.")}
    student, teacher = (checkpoint.load_model(folder)[0] for folder in (out, first))
    start = Model(student.config)
    swap.load_weights(start, checkpoint.resolve(first, ("best",)))
    batch = next(heldout_batches(Dataset.open(dataset).val, 32, 4))
    errors = [swap.Teacher(teacher, m).loss(m, batch).item() for m in (start, student)]
    assert errors[1] < 0.5 * errors[0], errors
    whole, half = run(*flags, "--max_iters=4", name="whole"), run(*flags, "--max_iters=2", "--lr_decay_iters=4", name="half")
    train.main([f"--resume={half}", "--max_iters=4"])
    assert same(weights(whole), weights(half))


def test_distillation_that_cannot_be_is_refused(run, dataset, tmp_path):
    first = run("--layers=attn", "--max_iters=2", name="first")
    start = flags(dataset, tmp_path / "x", f"--distill={first}")
    assert "no layer differs" in fails(train.main, *start, "--layers=attn")[0]
    problems = fails(train.main, *start, "--layers=dsa", "--n_layer=3", "--indexer=joint")
    assert "n_layer=3 differs from the 2" in problems[0] and problems[1] == "distill does not go with indexer='joint'"


def test_health_of_a_selection(dataset):
    """Recall, overlap and KL as they are defined, pair by pair, in two documents and with padding."""
    model = Model(config_of("dsa(top_k=4,local=1,index_heads=2,index_dim=8)", n_layer=1))
    tokens = torch.randint(0, 20, (1, 24))
    ids = torch.tensor([[1] * 10 + [2] * 11 + [0] * 3], dtype=torch.int32)
    seen = {}
    with train.kernels.observe(lambda op, args, kwargs, result: seen.setdefault(op, (args, kwargs))), torch.no_grad():
        model.eval()(tokens, segment_ids=ids)
    (q, k, _, *index), _ = seen["sparse_attention"]
    scores, recalls, most, overlaps = train.kernels.indexer_scores(*index)[0], [], [], []
    for start, end in ((0, 10), (10, 21)):
        for t in range(start, end):
            p = torch.stack([(q[0, t, h] @ k[0, start : t + 1, h].T * q.shape[-1] ** -0.5).softmax(-1) for h in range(2)]).mean(0)
            if t - start + 1 > 4:
                own = scores[t, start : t + 1].clone()
                own[-1] = torch.inf
                chosen, best = set(own.topk(4).indices.tolist()), set(p.topk(4).indices.tolist())
                recalls.append(sum(p[s].item() for s in chosen))
                most.append(sum(p[s].item() for s in best))
                overlaps.append(len(chosen & best) / 4)
    figures = monitor.health(model, Batch(tokens, tokens, ids), None)["0"]
    assert figures["recall"] == pytest.approx(sum(recalls) / len(recalls), rel=1e-5)
    assert figures["most"] == pytest.approx(sum(most) / len(most), rel=1e-5) and figures["most"] > figures["recall"]
    assert figures["overlap"] == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-5)
    kl = train.kernels.indexer_kl(q, k, *index, top_k=4, local=1, segment_ids=ids).sum() / 21
    assert figures["kl"] == pytest.approx(kl.item(), rel=1e-5)
    full = Model(config_of("dsa(top_k=32)", n_layer=1))
    assert monitor.health(full, Batch(tokens, tokens, ids), None)["0"]["recall"] is None


def test_an_indexer_that_is_not_there_cannot_be_trained(dataset, tmp_path):
    (line,) = fails(train.main, "--indexer=joint", "--layers=attn", f"--dataset={dataset}", f"--out_dir={tmp_path / 'x'}")
    assert line.startswith("indexer='joint' has no effect without a dsa layer")
    config = TrainConfig(gradient_accumulation_steps=2, layers="dsa", indexer="joint", parallel="fsdp")
    resolved = SimpleNamespace(config=config, sources=dict.fromkeys(TrainConfig.model_fields, "default"))
    assert any("use --parallel=ddp" in line for line in preflight._conflicts(resolved, SimpleNamespace(world=2)))
