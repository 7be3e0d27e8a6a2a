"""The functions behind heldout_bpb.yaml: the held-out documents of a checkpoint's data set, each scored on its own.

    bits per byte = sum of NLL / (ln 2 * UTF-8 bytes), both summed over all documents (not a mean of ratios)

The first token of a document is predicted from the separator (EOT), the separator itself is never a target: neither its NLL nor
any byte for it counts. Training's own figure also leaves it out, but takes the split as one stream cut into windows; here every
document starts with a fresh window, so the two differ in how much context a token has.
"""

from pathlib import Path

import datasets
import numpy as np

import checkpoint
from configurator import ConfigError
from data.tokens import Dataset


def documents(pretrained=None, **_):
    """`{"test": documents}` of the checkpoint or run `pretrained`, in the order of the split; empty documents are left out.

    lm-eval passes the task's metadata: `eval.py` and `model_args="pretrained=RUN"` both put the checkpoint there. ConfigError
    if there is none, if it was converted, or if the data set is missing or has another held-out split than the run's.
    """
    if pretrained is None:
        how = "pass model_args='pretrained=RUN' or metadata={'pretrained': RUN}"
        raise ConfigError(f"task heldout_bpb needs to know the checkpoint: {how}")
    meta = checkpoint.read_meta(checkpoint.resolve(pretrained, ("best", "last")))
    folder = meta["dataset_folder"]
    if folder is None:
        how = f"name another one with --tasks, or score a data set's held-out split: train.py --init_from={pretrained} --eval_only"
        raise ConfigError(f"task heldout_bpb: {pretrained} was converted and has no data set of its own: {how} --dataset=FOLDER")
    dataset = Dataset.open(folder if Path(folder).is_dir() else meta["dataset"])  # a checkpoint may come from another machine
    if dataset.meta.get("val_sha256") != meta["val_sha256"]:
        problem = f"{dataset.val.path} is not the held-out split of this run (another sha256)"
        raise ConfigError(f"{problem}: prepare the data as it was then")
    tokens = np.asarray(dataset.val.tokens)
    pieces = np.split(tokens, np.flatnonzero(tokens == dataset.val.eot))  # all but the first begin with EOT, which is no text
    texts = [dataset.tokenizer.decode(piece[piece != dataset.val.eot]) for piece in pieces]
    return {"test": datasets.Dataset.from_dict({"text": [text for text in texts if text]})}


def text(doc):
    return doc["text"]


def process_results(doc, results):
    """(log-likelihood, bytes) of one document; the metrics add up both."""
    (loglikelihood,) = results
    n_bytes = len(doc["text"].encode("utf-8"))
    return {"bits_per_byte": (loglikelihood, n_bytes), "byte_perplexity": (loglikelihood, n_bytes)}
