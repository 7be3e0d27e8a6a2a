"""The task behind recall.yaml: how well a model predicts what it could look up in its own context.

A token is recalled if it followed the same token before, earlier in its window. Most of the gap between recurrent models and
attention in language modelling lies on these tokens (Zoology, 2312.04927), which are the smaller part.
"""

import math

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from configurator import ConfigError


class Recall(ConfigurableTask):
    """Asks a model for `recall`, which gives (NLL, tokens) of recalled tokens and of the others for each text."""

    def __init__(self, config):
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def construct_requests(self, doc, ctx, **kwargs):
        for name in ("apply_chat_template", "chat_template"):
            kwargs.pop(name, None)
        return Instance(request_type="recall", doc=doc, arguments=(self.doc_to_target(doc),), idx=0, **kwargs)


def process_results(doc, results):
    """(log-likelihood, tokens) of each kind; the metrics add up both."""
    (found,) = results
    if not isinstance(found, list | tuple) or len(found) != 4:
        raise ConfigError(f"task recall got {found!r}: only the model type `hybrid` tells recalled tokens from others")
    recalled, n_recalled, other, n_other = found
    return {
        "recalled_perplexity": (-recalled, n_recalled),
        "other_perplexity": (-other, n_other),
        "recalled_share": (n_recalled, n_recalled + n_other),
    }


def perplexity(items):
    """exp(NLL / tokens), nan where there are none."""
    tokens = sum(n for _, n in items)
    return math.exp(-sum(loglikelihood for loglikelihood, _ in items) / tokens) if tokens else math.nan


def share(items):
    """Recalled tokens / all tokens."""
    return sum(n for n, _ in items) / max(1, sum(total for _, total in items))
