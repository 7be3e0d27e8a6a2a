"""The smallest runs, for the tests of training: a text of six words, a model of two layers, and what to read of a run."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import train
from configurator import ConfigError
from data.prepare import write_dataset
from data.tokenizer import Tokenizer
from data.tokens import TokenFile, file_sha256, write_tokens

TINY = ["--layers=gdn attn", "--n_layer=2", "--n_embd=16", "--n_head=2", "--block_size=32", "--batch_size=2", "--warmup_iters=2",
        "--eval_iters=2", "--learning_rate=1e-2", "--device=cpu"]  # fmt: skip


def words(seed, n):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(["red", "green", "blue", "one", "two", "three"][i] for i in torch.randint(0, 6, (n,), generator=generator))


def prepare(folder, texts, held_out):
    tokenizer = Tokenizer.from_characters("".join(texts))
    write_dataset(folder, tokenizer, texts[:-held_out], texts[-held_out:], name="tiny", source="test", licence="none")


def prepare_tiny(folder, shards=1):
    """1,453 training tokens in 9 documents, in so many files of unequal size."""
    prepare(folder, [words(i, 5 + 7 * i) for i in range(11)], 2)
    if shards == 1:
        return folder
    file, meta, sums = TokenFile(folder / "train.bin"), json.loads((folder / "meta.json").read_text()), {}
    header = {"eot": file.eot, "separator": file.separator, "vocab_size": file.vocab_size, "tokenizer_hash": file.tokenizer_hash}
    cuts = [file.count * (2 * i + 1) // (2 * shards) for i in range(1, shards)]
    for i, piece in enumerate(np.split(file.read(0, file.count), cuts)):
        path = folder / f"train-{i:03d}.bin"
        write_tokens(path, [piece], **header)
        sums[path.name] = file_sha256(path)
    file.path.unlink()
    (folder / "meta.json").write_text(json.dumps({**meta, "sha256": sums}))
    return folder


def flags(dataset, out, *args):
    return [*TINY, f"--dataset={dataset}", f"--out_dir={out}", *args]


def runner(dataset, tmp_path):
    """run("--max_iters=3", name="a"): train in this process; returns the run folder."""

    def run(*args, name="run"):
        out = tmp_path / name
        resumed = any(a.startswith("--resume") for a in args)
        train.main([*args] if resumed else flags(dataset, out, *args))
        return out

    return run


def fails(main, *argv):
    """The problems `main` reports; fails the test if it does not."""
    with pytest.raises(ConfigError) as e:
        main([str(a) for a in argv])
    assert all("\n" not in line and line for line in e.value.problems)
    return e.value.problems


def weights(out):
    return load_file(checkpoint.resolve(out) / "model.safetensors")


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out, name="loss"):
    """{step: value} of what was logged under `name`."""
    return {m["step"]: m[name] for m in metrics(out) if name in m}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
