"""Score a checkpoint with the LM Evaluation Harness: `python eval.py RUN [--tasks=NAME,NAME] [--limit=N]`.

    python eval.py out/demo                              # heldout_bpb: bits per byte of the held-out split, needs no network
    python eval.py out/demo --tasks=arc_easy,piqa        # any task of lm-eval; it downloads its data

The figures are lm-eval's own. Importing this module registers the model type "hybrid", so that from Python also works:
`lm_eval.simple_evaluate(model="hybrid", model_args="pretrained=out/demo", tasks=["arc_easy"])`.
"""

import contextlib
import difflib
import json
import logging
import os
import random
import time
from pathlib import Path
from typing import ClassVar, Literal

import lm_eval
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table, warning_once
from pydantic import Field
from tqdm import tqdm

import checkpoint
import configurator
from configurator import ConfigError, Settings
from data.tokenizer import StreamDecoder
from train import resolve_device

TASKS = Path(__file__).resolve().parent / "tasks"
logger = logging.getLogger(__name__)


class EvalConfig(Settings):
    """evaluation"""

    tasks: str = Field("heldout_bpb", min_length=1, description="names of tasks, groups or patterns, separated by commas")
    limit: int | None = Field(None, ge=1, description="only the first documents of each task, for a quick look; none: all")
    num_fewshot: int | None = Field(None, ge=0, description="examples in each prompt; none: what the task says")
    batch_size: int = Field(16, ge=1, description="sequences scored at once")
    seed: int = Field(1234, ge=0, le=2**32 - 1, description="seed of few-shot choice and sampled generation")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="compute type; none: bfloat16 on CUDA, else float32")

    _positional: ClassVar[str | None] = "RUN"

    def conflicts(self):
        if self.num_fewshot and self.tasks == "heldout_bpb":
            problem = f"num_fewshot={self.num_fewshot} has no effect on heldout_bpb, which scores plain text: drop it"
            yield {"num_fewshot", "tasks"}, problem


# ----------------------------------------------------------------------------------------------------------------------
# The model, as lm-eval sees it


@register_model("hybrid")
class HybridLM(TemplateLM):
    """A checkpoint as an lm-eval model: log-likelihoods in right-padded batches, generation on a carried state.

    pretrained: a run (its best checkpoint, else the last) or checkpoint folder. No window is longer than `max_length`, the
    block_size of training: a context is cut on the left, text beyond it is scored in several windows. Where training put the
    separator before each document, every context begins with it, as every document did. `policy` records both.
    """

    max_gen_toks = 256  # where a task does not say

    def __init__(self, pretrained, batch_size=16, max_batch_size=None, device=None, dtype=None):
        super().__init__()
        if max_batch_size is not None or not str(batch_size).isdecimal() or int(batch_size) < 1:
            given = f"batch_size={batch_size}, max_batch_size={max_batch_size}"
            raise ConfigError(f"{given}: no size is found by trial, give batch_size alone and as a number, such as 16")
        self._device, self.dtype = resolve_device(EvalConfig(device=device, dtype=dtype))
        self.batch_size = int(batch_size)
        self.model, self.codec, self.meta = checkpoint.load_model(pretrained, self._device)
        self.max_length = self.model.config.block_size
        self.policy = {"bos": self.meta["separator"] == "before", "truncation": "left", "max_length": self.max_length}

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
            "parameters": self.model.n_params(),
            "tokenizer_hash": self.meta["tokenizer_hash"], "dataset": self.meta["dataset"], "val_sha256": self.meta["val_sha256"],
            "policy": self.policy, "device": str(self._device), "dtype": self.dtype,
        }  # fmt: skip

    def _autocast(self):
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self.dtype == "bfloat16")

    def _padded(self, rows, fill):
        """Rows of ids as one right-padded (B, T) int64 tensor, and segment ids (1, padding 0); None if nothing is padded."""
        width = max(map(len, rows))
        ids = torch.tensor([row + [fill] * (width - len(row)) for row in rows], device=self._device)
        if min(map(len, rows)) == width:
            return ids, None
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        return ids, (torch.arange(width, device=self._device) < lengths[:, None]).to(torch.int32)

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
        return self._score("loglikelihood", [key for key, _, _ in requests], windows, disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-probability of each text from EOT on; windows meet without overlap, and the last is as long as it can be."""
        keys = [request.args for request in requests]
        windows = [self._windows([self.eot_token_id], self.tok_encode(text)) for (text,) in keys]
        return self._score("loglikelihood_rolling", keys, windows, disable_tqdm)

    def _windows(self, context, targets):
        """[(context, targets)]: every target once, at most max_length inputs a window, as much left context as fits."""
        if len(targets) <= self.max_length:
            return [(context[-(self.max_length + 1 - len(targets)) :], targets)] if targets else []
        return [make_disjoint_window(w) for w in get_rolling_token_windows(targets, context[-1], self.max_length, 1)]

    def _score(self, method, keys, windows, disable_tqdm):
        """Sum each request's windows; what is complete goes to lm-eval's response cache at once."""
        rolling = method == "loglikelihood_rolling"
        score = self._rolling_batch if rolling else self._greedy_batch
        left, totals, greedy = [len(w) for w in windows], [0.0] * len(keys), [True] * len(keys)
        items = [(owner, context, targets) for owner, pairs in enumerate(windows) for context, targets in pairs]
        longest_first = Collator(items, sort_fn=lambda item: (-len(item[1]) - len(item[2]), item[1] + item[2]))
        with torch.inference_mode(), tqdm(total=len(items), desc=f"{method} windows", disable=disable_tqdm or None) as bar:
            for batch in longest_first.get_batched(self.batch_size):
                for (owner, _, _), (logprob, likely) in zip(batch, score([item[1:] for item in batch]), strict=True):
                    totals[owner] += logprob
                    greedy[owner] &= likely
                    left[owner] -= 1
                    if not left[owner]:
                        result = totals[owner] if rolling else (totals[owner], greedy[owner])
                        self.cache_hook.add_partial(method, keys[owner], result)
                bar.update(len(batch))
        return totals if rolling else list(zip(totals, greedy, strict=True))

    def _rolling_batch(self, pairs):
        """Scores through the training loss: no logits are kept, and whether a token is the most likely one is not asked."""
        tokens, segment_ids = self._padded([(context + targets)[:-1] for context, targets in pairs], self.eot_token_id)
        labels, _ = self._padded([[-1] * (len(context) - 1) + targets for context, targets in pairs], -1)
        with self._autocast():
            nll = self.model(tokens, labels, segment_ids=segment_ids).nll
        return [(-total, True) for total in nll.cpu().double().sum(1).tolist()]

    def _greedy_batch(self, pairs):
        tokens, segment_ids = self._padded([(context + targets)[:-1] for context, targets in pairs], self.eot_token_id)
        with self._autocast():
            logits = self.model(tokens, segment_ids=segment_ids).logits
        results = []
        for row, (context, targets) in zip(logits, pairs, strict=True):
            row = row[len(context) - 1 : len(context) - 1 + len(targets)].float()  # (targets, vocab)
            wanted = torch.tensor(targets, device=self._device)
            logprob = row.log_softmax(-1).gather(1, wanted[:, None]).cpu().double().sum()
            results.append((logprob.item(), bool((row[:, : self.codec.vocab_size].argmax(-1) == wanted).all())))
        return results

    # -- generation --

    def generate_until(self, requests, disable_tqdm=False):
        """Continue each context until a stop string, EOT or max_gen_toks tokens; greedy unless the task samples.

        A context is cut on the left to leave room for max_gen_toks, but to no less than half of max_length. A generation may
        go on beyond max_length, as sampling does.
        """
        calls = [request.args for request in requests]  # (context, gen_kwargs)
        collator = Collator(calls, sort_fn=lambda call: -len(call[0]), group_fn=lambda call: call[1], group_by="gen_kwargs")
        results = []
        with torch.inference_mode(), tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm or None) as bar:
            for batch in collator.get_batched(self.batch_size):
                texts = self._generate([context for context, _ in batch], batch[0][1])
                for (context, gen_kwargs), text in zip(batch, texts, strict=True):
                    self.cache_hook.add_partial("generate_until", (context, gen_kwargs), text)
                results += texts
                bar.update(len(batch))
        return collator.get_original(results)

    def _generate(self, contexts, gen_kwargs):
        kwargs = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
        stops = [stop for stop in handle_stop_sequences(kwargs["until"], None) if stop]
        steps, temperature = kwargs["max_gen_toks"], kwargs.get("temperature", 0.0) if kwargs["do_sample"] else 0.0
        ignored = ", ".join(sorted(kwargs.keys() - {"until", "max_gen_toks", "temperature", "do_sample"}))
        if ignored:
            warning_once(logger, f"generation settings that have no effect here: {ignored}")
        room = self.max_length - min(steps, self.max_length // 2)
        prompts = [self._after_separator(self.tok_encode(context))[-room:] for context in contexts]
        tokens, segment_ids = self._padded(prompts, self.eot_token_id)
        state = self.model.init_state(len(prompts), tokens.shape[1] + steps, self._device, getattr(torch, self.dtype))
        decoders, texts, ended = [StreamDecoder(self.codec) for _ in prompts], [""] * len(prompts), [False] * len(prompts)
        for _ in range(steps):
            with self._autocast():  # the first call reads the prompts, each later one its last token
                logits = self.model(tokens, segment_ids=segment_ids, state=state, last_only=True).logits[:, 0].float()
            drawn = draw(logits[:, : self.codec.vocab_size], temperature)  # ids from there on are padding
            for i, token in enumerate(drawn.tolist()):
                if ended[i] or token == self.eot_token_id:
                    ended[i] = True
                    continue
                texts[i] += decoders[i].push(token)
                ended[i] = any(stop in texts[i] for stop in stops)
            if all(ended):
                break
            tokens, segment_ids = drawn[:, None], None
        texts = [text + decoder.flush() for text, decoder in zip(texts, decoders, strict=True)]
        return [postprocess_generated_text(text, stops, None) for text in texts]


def draw(logits, temperature):
    """(B, vocab) logits -> (B,) token ids; temperature 0 takes the most likely."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest is 0: no overflow at tiny temperatures
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


# ----------------------------------------------------------------------------------------------------------------------
# The command


def find_tasks(text, folder):
    """(TaskManager, names) of the tasks `text` lists; ConfigError names what is unknown, with the nearest that exist.

    The tasks in tasks/ need no network and no search; lm-eval's own index takes some ten seconds, and is read only if asked for.
    """
    wanted = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    metadata = {"pretrained": str(folder)}  # lm-eval hands it to functions that make a data set: heldout_bpb finds its own by it
    manager = own = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    if not all(own.match_tasks([name]) for name in wanted):
        manager = TaskManager(include_path=str(TASKS), metadata=metadata)
    unknown = [name for name in wanted if not manager.match_tasks([name])]
    if unknown or not wanted:
        known = f"this repository has {', '.join(own.all_tasks)}, lm-eval {len(manager.all_tasks) - len(own.all_tasks):,} more"
        raise ConfigError([f"unknown task {name!r}: {known}{nearest(name, manager.all_tasks)}" for name in unknown or [text]])
    return manager, manager.match_tasks(wanted)


def nearest(name, known):
    close = difflib.get_close_matches(name, known, n=3)
    return f"; nearest: {', '.join(close)}" if close else ""


@contextlib.contextmanager
def preserved_generators():
    """Give the random generators of Python, NumPy and torch back as they were: lm-eval reseeds all of them."""
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)


def quiet():
    """Only warnings of lm-eval, and none about how a task is written: its author has seen those."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)


def evaluate(lm, manager, names, config):
    """lm-eval's results of `names`; ConfigError where a task's data cannot be had. No generator is changed."""
    try:
        with preserved_generators():
            return lm_eval.simple_evaluate(
                model=lm, tasks=names, task_manager=manager, num_fewshot=config.num_fewshot, limit=config.limit,
                batch_size=lm.batch_size, device=str(lm.device), log_samples=False, random_seed=config.seed,
                numpy_random_seed=config.seed, torch_random_seed=config.seed, fewshot_random_seed=config.seed,
            )  # fmt: skip
    except OSError as e:  # Hugging Face's errors of network and missing data sets are all OSErrors
        reason = (str(e) or type(e).__name__).splitlines()[0]
        hint = "lm-eval downloads it at first use, only heldout_bpb needs no network"
        raise ConfigError(f"tasks {', '.join(names)}: their data could not be loaded ({reason}); {hint}") from e


def write_results(lm, names, config, results, seconds):
    """Write `eval-<tasks>-<checkpoint>.json` into the run folder, whole or not at all; returns its path."""
    folder = Path(lm.meta["folder"])
    partial = "" if config.limit is None else f"-limit{config.limit}"  # a quick look must not replace a result
    shots = "" if config.num_fewshot is None else f"-{config.num_fewshot}shot"
    path = folder.parent / f"eval-{'+'.join(names)}{shots}{partial}-{folder.name}.json"
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")
    record = {**config.model_dump(), **lm.get_model_info(), "tasks": names, "seconds": round(seconds, 2),
              **{name: results[name] for name in kept if name in results}}  # fmt: skip
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(record, indent=1, default=str) + "\n")
    os.replace(beside, path)
    return path


def main(argv):
    resolved = configurator.load(EvalConfig, argv, prog="eval.py", description=__doc__.splitlines()[0])
    config = resolved.config
    if len(resolved.positional) != 1:
        raise ConfigError(f"one run or checkpoint folder is needed, got {len(resolved.positional)}: python eval.py out/demo")
    quiet()
    folder = checkpoint.resolve(resolved.positional[0], ("best", "last"))
    manager, names = find_tasks(config.tasks, folder)
    lm = HybridLM(folder, batch_size=config.batch_size, device=config.device, dtype=config.dtype)
    bos = "each context begins with the separator" if lm.policy["bos"] else "only an empty context begins with the separator"
    print(f"{folder}: {lm.model.config.layers}, {lm.model.n_params():,} parameters, on {lm.device}, {lm.dtype}")
    print(f"windows of at most {lm.max_length} tokens, cut on the left; {bos}", flush=True)
    began = time.perf_counter()
    results = evaluate(lm, manager, names, config)
    seconds = time.perf_counter() - began
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    print(f"{seconds:.1f} s; written to {write_results(lm, names, config, results, seconds)}")


if __name__ == "__main__":
    configurator.run(main)
