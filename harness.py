"""A checkpoint as a model of the LM Evaluation Harness, named "hybrid" there.

    lm_eval.simple_evaluate(model="hybrid", model_args="pretrained=out/demo", tasks=["arc_easy"])      # after `import harness`
    python harness.py run --model hybrid --model_args pretrained=out/demo --tasks arc_easy              # lm-eval's own command line
    python eval.py out/demo --tasks=arc_easy                                                            # ours

Nothing that is computed for a batch depends on what lies beside it: rows end in padding, which no state takes in.
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from tqdm import tqdm

import checkpoint
from configurator import ConfigError
from preflight import resolve_device
from sample import Engine, Generator, complete, drawable

TASKS = Path(__file__).resolve().parent / "tasks"
SHARED = 16  # a context of at least so many tokens that several continuations share is read once
AUTO_TOKENS = {"cpu": 2**13, "cuda": 2**17}  # tokens of a batch that batch_size=auto begins with; other devices as the CPU
logger = logging.getLogger(__name__)


@register_model("hybrid")
class HybridLM(TemplateLM):
    """Log-likelihoods in right-padded batches, generation on carried states.

    pretrained: a run (its best checkpoint, else the last) or checkpoint folder. No window is longer than `max_length`, by default
    the block_size of training: a context is cut on the left, text beyond it is scored in several windows. Where training put the
    separator before each document, every context begins with it, as every document did, unless `add_bos_token` says otherwise.
    `policy` records both.

    batch_size "auto" fills batches to a number of tokens, which is halved when memory runs out; max_batch_size limits it. Under
    torchrun each process scores its share of the requests and gets what the others scored: lm-eval sees one process on each. Its
    own division fails where a process gets no document, or none of those that a metric is for.
    """

    max_gen_toks = 256  # where a task does not say

    def __init__(
        self, pretrained, batch_size=16, max_batch_size=None, device=None, dtype=None, max_length=None, add_bos_token=None
    ):  # fmt: skip
        super().__init__()
        self.process, self.processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.batch_size, self.max_batch_size = _size("batch_size", batch_size), _size("max_batch_size", max_batch_size)
        if self.processes > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")  # it carries results, not tensors of the model
        if dtype not in (None, "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype={dtype!r}: choose one of float32, bfloat16, float16, or none")
        local = int(os.environ.get("LOCAL_RANK", 0)) if self.processes > 1 else None
        self._device, self.dtype = resolve_device(SimpleNamespace(device=device, dtype=dtype), local)
        self.model, self.codec, self.meta = checkpoint.load_model(pretrained, self._device)
        self.auto_tokens = AUTO_TOKENS.get(self._device.type, AUTO_TOKENS["cpu"])
        self.max_length = self._longest(max_length)
        if str(add_bos_token).lower() not in ("none", "true", "false"):  # lm-eval's model_args may pass text
            raise ConfigError(f"add_bos_token={add_bos_token!r}: choose true, false or none")
        bos = self.meta["separator"] == "before" if add_bos_token is None else str(add_bos_token).lower() == "true"
        self.policy = {"bos": bos, "truncation": "left", "max_length": self.max_length}
        self._engine = None

    def _longest(self, max_length):
        trained = self.model.config.block_size
        try:
            longest = trained if max_length is None else int(max_length)
        except ValueError:
            longest = 0
        if longest < 1:
            raise ConfigError(f"max_length={max_length}: must be a whole number of tokens, at least 1")
        if self.model.position_embedding is not None and longest > trained:
            raise ConfigError(f"max_length={longest}: the model has {trained} learned positions, use at most that")
        return longest

    @property
    def eot_token_id(self):
        return self.codec.eot

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        """Token ids of plain text: a marker such as `<|endoftext|>` in it is text, and no special token is added here."""
        return self.codec.encode(string)

    def get_model_info(self):
        """What lm-eval stores beside the results."""
        return {
            "checkpoint": self.meta["folder"], "step": self.meta["step"], "layers": self.model.config.layers,
            "parameters": self.model.n_params(), "weights_sha256": checkpoint.weights_sha256(Path(self.meta["folder"])),
            "tokenizer_hash": self.meta["tokenizer_hash"], "dataset": self.meta["dataset"], "val_sha256": self.meta["val_sha256"],
            "policy": self.policy, "device": str(self._device), "dtype": self.dtype, "processes": self.processes,
        }  # fmt: skip

    # -- batches --

    def _run(self, items, width, score, bar):
        """(item, result) of all items, longest first: `score(batch)` gives the results of a batch; `width(item)` is its tokens."""
        items = sorted(items, key=width, reverse=True)
        if self.processes == 1:
            yield from self._run_here(items, width, score, bar)
            return
        mine = [result for _, result in self._run_here(items[self.process :: self.processes], width, score, bar)]
        gathered = [None] * self.processes
        torch.distributed.all_gather_object(gathered, (len(items), mine))
        if len({n for n, _ in gathered}) > 1:  # a response cache of one process, say
            raise RuntimeError(f"the processes were asked for {', '.join(str(n) for n, _ in gathered)} results: they must be alike")
        bar.update(len(items) - len(mine))
        for process, (_, results) in enumerate(gathered):
            yield from zip(items[process :: self.processes], results, strict=True)

    def _run_here(self, items, width, score, bar):
        start = 0
        while start < len(items):
            size = self._fitting(width(items[start]))
            batch = items[start : start + size]
            try:
                results = score(batch)
            except torch.OutOfMemoryError:
                if self.batch_size != "auto" or len(batch) == 1:
                    raise
                self.auto_tokens = max(1, len(batch) * width(items[start]) // 2)
                torch.cuda.empty_cache()
                continue
            yield from zip(batch, results, strict=True)
            bar.update(len(batch))
            start += len(batch)

    def _fitting(self, width):
        if self.batch_size != "auto":
            return self.batch_size
        return max(1, min(self.auto_tokens // max(width, 1), self.max_batch_size or sys.maxsize))

    def _bar(self, method, total, disable):
        return tqdm(total=total, desc=method, disable=True if disable or self.process else None)

    def _autocast(self):
        return torch.autocast(self._device.type, dtype=getattr(torch, self.dtype), enabled=self.dtype != "float32")

    def _padded(self, rows, fill):
        """Rows of ids as one right-padded (B, T) int64 tensor, and segment ids (1, padding 0); None if nothing is padded."""
        width = max(map(len, rows))
        ids = torch.tensor([row + [fill] * (width - len(row)) for row in rows], device=self._device)
        if min(map(len, rows)) == width:
            return ids, None
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        return ids, (torch.arange(width, device=self._device) < lengths[:, None]).to(torch.int32)

    def _logits(self, rows, state=None, last_only=False):
        tokens, segment_ids = self._padded(rows, self.eot_token_id)
        with self._autocast():
            return self.model(tokens, segment_ids=segment_ids, state=state, last_only=last_only).logits

    # -- log-likelihood --

    def _encode_pair(self, context, continuation):
        """lm-eval's joint encoding, the context after EOT where training has it so.

        If a token straddles the two so that nothing is left of the continuation, the continuation is encoded by itself.
        """
        context_ids, target_ids = super()._encode_pair(context, continuation)
        if continuation and not target_ids:
            target_ids = self.tok_encode(continuation)
        return self._after_separator(context_ids), target_ids

    def _after_separator(self, ids):
        return [self.eot_token_id, *ids] if self.policy["bos"] or not ids else ids

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """Per request `(key, context ids, target ids)`: (log-probability of the targets, whether each is the most likely token)."""
        windows = [self._windows(context, targets) for _, context, targets in requests]
        pairs = [pair for of_one in windows for pair in of_one]
        owners = [owner for owner, of_one in enumerate(windows) for _ in of_one]
        results, left = [(0.0, True)] * len(requests), [len(of_one) for of_one in windows]
        alone, shared = _group(_rows(pairs))
        with torch.inference_mode(), self._bar("loglikelihood", len(alone) + len(shared), disable_tqdm) as bar:
            scored = itertools.chain(
                self._run(alone, lambda row: len(row.inputs), self._score_rows, bar),
                self._run(shared, lambda group: len(group.context) * len(group.rows), self._score_shared, bar),
            )
            for _, found in scored:
                for pair, logprob, likely in found:
                    owner = owners[pair]
                    results[owner] = (results[owner][0] + logprob, results[owner][1] and likely)
                    left[owner] -= 1
                    if not left[owner]:  # what is complete goes to lm-eval's response cache at once
                        self.cache_hook.add_partial("loglikelihood", requests[owner][0], results[owner])
        return results

    def _windows(self, context, targets):
        """[(context, targets)]: every target once, at most max_length inputs a window, as much left context as fits."""
        if len(targets) <= self.max_length:
            return [(context[-(self.max_length + 1 - len(targets)) :], targets)] if targets else []
        return [make_disjoint_window(w) for w in get_rolling_token_windows(targets, context[-1], self.max_length, 1)]

    def _score_rows(self, rows):
        """Per row [(pair, log-probability, most likely)], of all pairs that can be read off the row's logits."""
        results = []
        for row, logits in zip(rows, self._logits([row.inputs for row in rows]), strict=True):
            of_row = [(pair, *self._judge(logits[at : at + len(targets)], targets)) for pair, at, targets in row.pairs]
            results.append(of_row)
        return results

    def _score_shared(self, groups):
        """The same for groups of rows: their context is read once, its state forked, the rest of each row read on the copies."""
        most = max(len(group.rows) for group in groups)
        rests = [row.inputs[len(group.context) :] for group in groups for row in _filled(group.rows, most)]
        width, longest = max(map(len, rests)), max(len(group.context) for group in groups)
        state = self.model.init_state(len(groups), longest + width, self._device, getattr(torch, self.dtype))
        first = self._logits([group.context for group in groups], state, last_only=True).repeat_interleave(most, 0)
        logits = first if not width else torch.cat([first, self._logits(rests, state.fork(most))], 1)
        results = []
        for i, group in enumerate(groups):
            found, before = [], len(group.context) - 1
            for row, of_row in zip(group.rows, logits[i * most :], strict=False):
                for pair, at, targets in row.pairs:
                    found.append((pair, *self._judge(of_row[at - before : at - before + len(targets)], targets)))
            results.append(found)
        return results

    def _judge(self, logits, targets):
        """(log-probability, whether each is the most likely token) of targets, from their logits (targets, vocab)."""
        logits, wanted = logits.float(), torch.tensor(targets, device=self._device)
        logprob = logits.log_softmax(-1).gather(1, wanted[:, None]).cpu().double().sum().item()
        return logprob, bool((logits[:, : self.codec.vocab_size].argmax(-1) == wanted).all())  # ids from there on are padding

    # -- whole texts --

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-probability of each text from EOT on; windows meet without overlap, and the last is as long as it can be."""
        keys = [request.args for request in requests]
        return self._texts("loglikelihood_rolling", keys, lambda nll, *_: (-nll.sum(),), lambda sums: sums[0], disable_tqdm)

    def recall(self, requests, disable_tqdm=False):
        """Of each text (NLL of recalled tokens, their number, NLL of the others, their number); the task `recall` asks for it.

        A token is recalled where it has followed the same token before, earlier in its window.
        """

        def split(nll, sequence, n):
            seen, again = set(), []
            for pair in itertools.pairwise(sequence):
                again.append(pair in seen)
                seen.add(pair)
            again = torch.tensor(again[-n:], dtype=torch.bool)
            return (nll[again].sum(), again.sum(), nll[~again].sum(), (~again).sum())

        return self._texts("recall", [request.args for request in requests], split, tuple, disable_tqdm)

    def _texts(self, method, keys, measure, finish, disable_tqdm):
        """Per text `finish` of the sums of `measure(nll (n,), tokens of the window, n scored ones)` over its windows."""
        windows = [self._windows([self.eot_token_id], self.tok_encode(text)) for text, *_ in keys]
        items = [(owner, *pair) for owner, of_one in enumerate(windows) for pair in of_one]
        left, sums = [len(of_one) for of_one in windows], [[] for _ in keys]
        with torch.inference_mode(), self._bar(method, len(items), disable_tqdm) as bar:
            for (owner, context, targets), nll in self._run(items, lambda item: len(item[1]) + len(item[2]), self._nll, bar):
                sums[owner].append([float(x) for x in measure(nll, context + targets, len(targets))])
                left[owner] -= 1
                if not left[owner]:
                    self.cache_hook.add_partial(method, keys[owner], finish([sum(x) for x in zip(*sums[owner], strict=True)]))
        empty = [float(x) for x in measure(torch.zeros(0), [], 0)] if not all(sums) else []
        return [finish([sum(x) for x in zip(*of_one, strict=True)] if of_one else empty) for of_one in sums]

    def _nll(self, items):
        """NLL (targets,) in fp64 of each item, through the training loss: no logits are kept."""
        tokens, segment_ids = self._padded([(context + targets)[:-1] for _, context, targets in items], self.eot_token_id)
        labels, _ = self._padded([[-1] * (len(context) - 1) + targets for _, context, targets in items], -1)
        with self._autocast():
            nll = self.model(tokens, labels, segment_ids=segment_ids).nll.cpu().double()
        ends = [len(context) - 1 + len(targets) for _, context, targets in items]
        return [row[end - len(targets) : end] for row, end, (_, _, targets) in zip(nll, ends, items, strict=True)]

    # -- generation --

    def generate_until(self, requests, disable_tqdm=False):
        """Continue each context until a stop string, EOT or max_gen_toks tokens; greedy unless the task samples.

        A context is cut on the left to leave room for max_gen_toks, but to no less than half of max_length. A generation may go
        on beyond max_length, as sampling does (not with learned positions). What is sampled depends on torch's seed and on the
        place of the request, and on nothing else.
        """
        calls = [request.args for request in requests]  # (context, gen_kwargs)
        kinds = {}
        for i, (_, gen_kwargs) in enumerate(calls):
            kinds.setdefault(json.dumps(gen_kwargs, sort_keys=True, default=str), []).append(i)
        texts = [""] * len(calls)
        with torch.inference_mode(), self._bar("generate_until", len(calls), disable_tqdm) as bar:
            for members in kinds.values():
                options = self._options(calls[members[0]][1])
                items = [(i, self._prompt(calls[i][0], options["max_new_tokens"])) for i in members]
                write = functools.partial(self._write, options=options)
                for (i, _), text in self._run(items, lambda item: len(item[1]), write, bar):
                    texts[i] = text
                    self.cache_hook.add_partial("generate_until", calls[i], text)
        return texts

    def _options(self, gen_kwargs):
        """lm-eval's generation settings as those of the sampler, and the stop strings."""
        kwargs = normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks)
        known = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
        ignored = ", ".join(sorted(kwargs.keys() - {"until", "max_gen_toks", "do_sample"} - known))
        if ignored:
            warning_once(logger, f"generation settings that have no effect here: {ignored}")
        options = {name: kwargs[name] for name in known & kwargs.keys()}
        if not kwargs["do_sample"]:
            options = {"temperature": 0.0} | {n: x for n, x in options.items() if n == "repetition_penalty"}
        stops = [stop for stop in handle_stop_sequences(kwargs["until"], None) if stop]
        steps = kwargs["max_gen_toks"]
        if self.model.position_embedding is not None:
            steps = min(steps, max(1, self.max_length // 2))
        return {"max_new_tokens": steps, "stops": stops, **options}

    def _prompt(self, context, steps):
        room = self.max_length - min(steps, self.max_length // 2)
        return self._after_separator(self.tok_encode(context))[-room:]

    def _write(self, batch, options):
        if self._engine is None:
            if self.dtype == "float16":
                warning_once(logger, "dtype=float16: texts are scored in it, but generated in float32")
            vocab = drawable(self.codec, self.meta)
            self._engine = Engine(self.model, vocab=vocab, eot=self.eot_token_id, dtype=self.dtype)
        options = dict(options)
        stops, base = options.pop("stops"), torch.initial_seed()
        seeds = [int.from_bytes(hashlib.blake2b(f"{base} {i}".encode(), digest_size=7).digest()) for i, _ in batch]
        prompts = [prompt for _, prompt in batch]
        generator = Generator(self._engine, prompts, seed=seeds, stop_tokens={self.eot_token_id}, **options)
        return complete(generator, self.codec, stops)


def _size(name, given):
    if given in (None, "", "auto") or str(given).startswith("auto:"):  # lm-eval's auto:N searches again N times; here it adapts
        return "auto" if given and name == "batch_size" else None
    if not str(given).isdecimal() or int(given) < 1:
        raise ConfigError(f"{name}={given}: must be a whole number, at least 1{', or auto' if name == 'batch_size' else ''}")
    return int(given)


# ----------------------------------------------------------------------------------------------------------------------
# Requests that are parts of each other


class Row:
    """Ids to read, and the pairs scored along them: (index of the pair, where its first target is predicted, targets)."""

    def __init__(self, inputs):
        self.inputs, self.pairs = inputs, []

    @property
    def context(self):
        """The part of the row before any target."""
        return self.inputs[: 1 + min(at for _, at, _ in self.pairs)]


class Group:
    def __init__(self, context, rows):
        self.context, self.rows = context, rows


def _rows(pairs):
    """The fewest rows from which all `(context, targets)` can be scored: what begins another one is read off it."""
    inputs = [(context + targets)[:-1] for context, targets in pairs]
    rows = []
    for i in sorted(range(len(pairs)), key=inputs.__getitem__, reverse=True):  # what begins another comes after it
        if not rows or rows[-1].inputs[: len(inputs[i])] != inputs[i]:
            rows.append(Row(inputs[i]))
        context, targets = pairs[i]
        rows[-1].pairs.append((i, len(context) - 1, targets))
    return rows


def _group(rows):
    """(rows to read whole, groups of rows to read on forks of their common context's state)."""
    by_context = {}
    for row in rows:
        by_context.setdefault(tuple(row.context), []).append(row)
    alone, shared = [], []
    for context, members in by_context.items():
        if len(members) > 1 and len(context) >= SHARED:
            shared.append(Group(list(context), members))
        else:
            alone += members
    return alone, shared


def _filled(rows, n):
    """The rows, and the last one again to make them n: a batch of groups is a rectangle."""
    return rows + rows[-1:] * (n - len(rows))


# ----------------------------------------------------------------------------------------------------------------------
# lm-eval's command line


def main():
    """lm-eval's command line with our model; our tasks and the best device there is, unless other ones are given."""
    from lm_eval.__main__ import cli_evaluate

    given = {argument.partition("=")[0] for argument in sys.argv}
    if given & {"--tasks", "-t"} and "--include_path" not in given:
        sys.argv += ["--include_path", str(TASKS)]
    if given & {"--model", "-M"} and not given & {"--device", "--config", "-C"}:  # theirs is cuda:0 on any machine
        sys.argv += ["--device", str(resolve_device(SimpleNamespace(device=None, dtype=None))[0])]
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and given & {"--use_cache", "-c"}:
        sys.exit("error: --use_cache holds the answers of one process: run without torchrun")
    if int(os.environ.get("RANK", 0)):  # it has the results of the first process, which prints and writes them
        evaluate = lm_eval.simple_evaluate
        lm_eval.simple_evaluate = lambda *args, **options: evaluate(*args, **options) and None
    cli_evaluate()


if __name__ == "__main__":
    main()
