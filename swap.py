"""Start from a checkpoint whose layers were others: what each layer takes over, what begins anew, what is dropped; distillation.

A part of two mixers means the same if it makes their queries, keys, values or (with the same activation) gate, or takes the heads'
outputs back to the residual stream, in heads of the same number and width; fewer key/value heads are repeated, as grouped-query
attention reads them. Mamba-2's C, B and x are its queries, keys and values. Softmax attention becomes a linear layer this way in
Kasai et al. 2103.13076 and Wang et al. 2408.15237.
"""

import json

import torch

import checkpoint
from configurator import ModelConfig, format_layers
from model import Attention, DeltaRule, LatentAttention, LinearAttention, Mamba2, Model, SparseAttention


@torch.no_grad()
def load_weights(model, folder):
    """Copy what the checkpoint has for `model`, whose layers may be others; returns a line for each kind of change."""
    before = ModelConfig(**json.loads((folder / "meta.json").read_text())["model"])
    with torch.device("meta"):
        old = Model(before)
    if old.specs == model.specs:
        checkpoint.load_weights(model, folder)
        return []
    saved, changes = checkpoint.read_weights(old, folder), {}
    for name, p in model.named_parameters():
        if not name.startswith("blocks."):
            p.copy_(saved[name])
    for i, (was, block) in enumerate(zip(old.blocks, model.blocks, strict=True)):
        prefix = f"blocks.{i}."
        weights = {name.removeprefix(prefix): x for name, x in saved.items() if name.startswith(prefix)}
        taken, new, dropped = carry(was, block, weights)
        if old.specs[i] != model.specs[i]:
            names = [format_layers([specs[i]]) for specs in (old.specs, model.specs)]
            what = [f"{label} {', '.join(parts)}" for label, parts in (("new:", new), ("dropped:", dropped)) if parts]
            line = "; ".join([f"{' -> '.join(names)}: takes over {', '.join(taken) or 'nothing'}", *what])
            changes.setdefault(line, []).append(str(i))
    return [f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}: {line}" for line, layers in changes.items()]


def carry(was, block, weights):
    """Copy into `block` what its predecessor's `weights` have for it. Returns the names of (what is taken, what is new, dropped).

    Norms and feed-forward network are taken by name and shape, and named only where they are not.
    """
    own, a, b = dict(block.named_parameters()), parts(was.mixer), parts(block.mixer)
    alike, whole = related(was.mixer, block.mixer), a == b
    cut = {f"mixer.{module}.{kind}" for module, *_ in [*a.values(), *b.values()] for kind in ("weight", "bias")}
    by_name = [n for n, p in own.items() if n in weights and weights[n].shape == p.shape]
    by_name = [n for n in by_name if not n.startswith("mixer.") or (alike and (whole or n not in cut))]
    for name in by_name:
        own[name].copy_(weights[name])
    roles = [r for r in b if r in a and fits(r, a, b)]
    for role in roles if not (alike and whole) else ():
        for kind in ("weight", "bias"):
            source, target = weights.get(f"mixer.{a[role][0]}.{kind}"), own.get(f"mixer.{b[role][0]}.{kind}")
            if source is not None and target is not None:
                copy(role, source, a[role], target, b[role])
    taken = roles + [n.removeprefix("mixer.") for n in by_name if n.startswith("mixer.") and n not in cut]
    new = [r for r in b if r not in roles] + rest(block.mixer, b, alike and whole)
    new += [n.removeprefix("mixer.") for n in own if n not in by_name and n not in cut]
    dropped = [r for r in a if r not in roles] + rest(was.mixer, a, alike and whole)
    dropped += [n.removeprefix("mixer.") for n, _ in was.named_parameters() if n not in by_name and n not in cut]
    return taken, new, dropped


def parts(mixer):
    """What the rows of the input projection, and the columns of the output's, are: {role: (module, first, heads, width)}."""
    if isinstance(mixer, LatentAttention):
        return {}
    if isinstance(mixer, Attention):
        module, value = "qkv_proj", (mixer.H, mixer.D)
        rows = {"q": value, "k": (mixer.Hk, mixer.D), "v": (mixer.Hk, mixer.D), "sigmoid gate": value}
    elif isinstance(mixer, LinearAttention):
        module, value, key = "in_proj", (mixer.H, mixer.V), (mixer.H, mixer.K)
        rows = {"q": key, "k": key, "v": value, f"{mixer.gate} gate": value}
    elif isinstance(mixer, DeltaRule) and mixer.steps == 1:
        module, value, key = "in_proj", (mixer.H, mixer.V), (mixer.Hk, mixer.K)
        rows = {"q": key, "k": key, "v": value, f"{mixer.gate} gate": value}
    elif isinstance(mixer, Mamba2):
        module, value, key = "in_proj", (mixer.H, mixer.P), (mixer.G, mixer.N)
        rows = {"silu gate": value, "v": value, "k": key, "q": key}
    else:
        return {}
    found, first, end = {}, 0, getattr(mixer, module).out_features
    for role, (heads, width) in rows.items():
        if first < end:  # a gate, which comes last, need not be there
            found[role] = module, first, heads, width
        first += heads * width
    return {**found, "out": ("out_proj", 0, *value)}


def rest(mixer, roles, known):
    """The name of the input projection's rows that none of the roles has, in a list, unless they are taken by name."""
    module = next((module for module, *_ in roles.values() if module != "out_proj"), None)
    used = sum(heads * width for name, _, heads, width in roles.values() if name == module)
    more = module is not None and not known and used < getattr(mixer, module).out_features
    return [f"the rest of {module}"] if more else []


def related(a, b):
    """Whether parameters of the same name mean the same in both."""
    return type(a).__name__ == type(b).__name__ or {type(a), type(b)} == {Attention, SparseAttention}  # a file of mixers ran twice


def fits(role, a, b):
    """Whether the part can be taken over as it is, keys and values with their heads repeated."""
    (_, _, heads, width), (_, _, wanted, as_wide) = a[role], b[role]
    return width == as_wide and (heads == wanted or (role in ("k", "v") and wanted % heads == 0))


def copy(role, source, a, target, b):
    """Copy the part of a weight or bias; the output's bias is no head's, and copied whole."""
    (_, first, heads, width), (_, to, wanted, _) = a, b
    if role == "out":
        target.copy_(source)
        return
    block = source[first : first + heads * width].unflatten(0, (heads, width)).repeat_interleave(wanted // heads, 0)
    target[to : to + wanted * width] = block.flatten(0, 1)


class Teacher:
    """A trained model whose mixers the new ones in `student` are to imitate, each by itself.

    Mixers of other layers than the teacher's are trained, on the inputs that the teacher's have, to give its outputs; everything
    else in the student is frozen. The second stage of MOHAWK, Bick et al. 2408.10189.
    """

    def __init__(self, teacher, student):
        self.model, self.seen = teacher.requires_grad_(False), {}
        self.layers = swapped(teacher.specs, student.specs)
        student.requires_grad_(False)
        for i in self.layers:
            student.blocks[i].mixer.requires_grad_(True)
            self.model.blocks[i].mixer.register_forward_hook(self.keep(i), with_kwargs=True)

    def keep(self, i):
        def hook(_, args, context, output):
            self.seen[i] = args[0], context["positions"], output

        return hook

    def loss(self, student, batch):
        """Squared error of the mixers' outputs: mean over channels and layers, sum over tokens."""
        with torch.no_grad():
            self.model(batch.tokens, segment_ids=batch.segment_ids, last_only=True)
        error = 0.0
        for i in self.layers:
            x, positions, wanted = self.seen.pop(i)
            given = student.blocks[i].mixer(x, segment_ids=batch.segment_ids, positions=positions, aux={})
            error = error + (given.float() - wanted.float()).square().mean(-1).sum()
        return error / len(self.layers)


def swapped(before, after):
    """The layers that have another mixer, or other options, than before; those without one do not count."""
    pairs = enumerate(zip(before, after, strict=True))
    return [i for i, (a, b) in pairs if a != b and "mlp" not in (a.name, b.name)]
