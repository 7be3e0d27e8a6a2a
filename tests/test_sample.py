"""Decoding: the engine writes what full evaluation would, however prompts are batched, cut, forked, put away and taken up again."""

import io
import sys

import pytest
import torch
from safetensors import SafetensorError
from test_model import make, tokens_of

import checkpoint
import sample
from configurator import ConfigError, ModelConfig
from data.tokenizer import Tokenizer
from model import Model
from sample import Engine, Generator, Sampling, TextStream, complete, draw, stream

RECIPES = {  # every mixer, every recipe's way of stacking them
    "gdn": {},
    "deltanet(steps=2, gate=silu)": {},
    "kda mla(rope=none)": {},
    "linear retnet": {},
    "lightning(alpha=2.0) attn(rope=partial, rope_fraction=0.5, alpha=2.0)": {"residual": "normed"},
    "mamba2(head_dim=16, d_state=16) mlp mamba2(head_dim=16, d_state=16, groups=2) attn(rope=none)": {"ffn": "relu2"},
    "swa(window=24)*2 swa(window=16, keep_first=3, sinks=true) attn": {"residual": "sandwich", "norm": "rmsnorm1p"},
    "dsa(top_k=12, local=4, index_heads=2, index_dim=8) mla": {},
    "gdn(n_key_head=1, neg_eigval=true) attn(residual=post, qk_norm=full, gate=true)": {"norm": "rmsnorm1p"},
    "attn(rope=none, qk_norm=false)": {"norm": "layernorm", "ffn": "gelu", "bias": True, "learned_positions": True,
                                       "block_size": 300},
}  # fmt: skip
PROMPTS = [0, 1, 2, 3, 63, 64, 65]
EOT = 60


def full(model, ids):
    """Logits after `ids` by evaluating all of them."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def greedy(model, ids, n):
    """The tokens that full evaluation would write, and the logits they come from."""
    ids, logits = list(ids), []
    for _ in range(n):
        logits.append(full(model, ids))
        ids.append(int(logits[-1].argmax()))
    return ids[len(ids) - n :], torch.stack(logits)


def model_of(pattern, **settings):
    return make(pattern, torch.float32, tie_embeddings=False, **RECIPES.get(pattern, {}) | settings)


def columns(generator):
    """What each row wrote."""
    return torch.stack(list(generator), 1).tolist()


class Watched(Engine):
    """An engine that keeps the logits of every step."""

    def forward(self, tokens, state, segment_ids=None):
        self.logits = super().forward(tokens, state, segment_ids)
        return self.logits


@pytest.mark.parametrize("pattern", RECIPES)
def test_every_mixer_writes_what_full_evaluation_writes(pattern):
    model, n = model_of(pattern), 12
    engine = Watched(model, eot=EOT, chunk=64)
    prompts = [tokens_of(1, length)[0].tolist() if length else [] for length in PROMPTS]
    want = [greedy(model, ids or [EOT], n) for ids in prompts]
    rows = columns(Generator(engine, prompts, n=2, max_new_tokens=n, temperature=0))  # ragged, forked, read in two chunks
    for row, ids in enumerate(rows):
        assert ids == want[row // 2][0], f"prompt of {PROMPTS[row // 2]}"
    alone = Generator(engine, prompts[4], max_new_tokens=n, temperature=0)
    for step, _ in enumerate(alone):
        logits = engine.logits[0] if step else alone.first.logits[0]
        assert (logits - want[4][1][step]).abs().max() <= 1e-4 * want[4][1][step].abs().max().clamp(min=1)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", RECIPES)
def test_two_hundred_tokens(pattern):
    model = model_of(pattern)
    for length in (1, 64):
        prompt = tokens_of(1, length)[0].tolist()
        assert columns(Generator(model, prompt, max_new_tokens=200, temperature=0)) == [greedy(model, prompt, 200)[0]]


def test_a_penalty_knows_the_text_before(tmp_path):
    """What a loaded state and earlier turns hold counts as in one reading of the whole."""
    engine, ids, options = Engine(model_of("gdn attn")), tokens_of(1, 40)[0].tolist(), {"temperature": 0, "repetition_penalty": 4.0}
    [want] = columns(Generator(engine, ids, max_new_tokens=24, **options))
    assert want != columns(Generator(engine, ids, max_new_tokens=24, temperature=0))[0]
    first = Generator(engine, ids[:25], max_new_tokens=0)
    first.start()
    sample.save_state(tmp_path / "a.state", first.first, {})
    after, written, rest = sample.load_state(tmp_path / "a.state", engine, {}), [], ids[25:]
    assert after.occurred == set(ids[:25])
    for _ in range(3):
        turn = Generator(engine, rest, max_new_tokens=8, after=after, **options)
        written, after, rest = written + columns(turn)[0], turn.read(), []
    assert written == want and after.occurred == {*ids, *want}


def test_a_generator_writes_once():
    generator = Generator(model_of(next(iter(RECIPES))), [1, 2, 3], max_new_tokens=4)
    next(iter(generator))
    with pytest.raises(ConfigError, match="has been iterated"):
        next(iter(generator))


@pytest.mark.parametrize("pattern", list(RECIPES)[::3])
def test_a_state_goes_on_where_it_was_left(pattern, tmp_path):
    """Saved and loaded, and kept from one request to the next, with more room for what comes."""
    model, ids = model_of(pattern), tokens_of(1, 40)[0].tolist()
    engine, want = Engine(model), greedy(model, ids, 30)[0]
    first = Generator(engine, ids[:25], max_new_tokens=0)
    assert list(first) == []
    sample.save_state(tmp_path / "a.state", first.read(), {"weights": "w"})
    after = sample.load_state(tmp_path / "a.state", engine, {"weights": "w"})
    turn = Generator(engine, ids[25:], max_new_tokens=10, temperature=0, after=after)
    written = columns(turn)[0]
    for _ in range(2):  # the last token of each turn has not been fed
        turn = Generator(engine, [], max_new_tokens=10, temperature=0, after=turn.read())
        written += columns(turn)[0]
    assert written == want
    forked = Generator(engine, ids[25:], n=3, max_new_tokens=30, temperature=0, after=after)
    assert columns(forked) == [want] * 3
    with pytest.raises(ConfigError, match="saved with another model: its weights w, this model has x"):
        sample.load_state(tmp_path / "a.state", engine, {"weights": "x"})
    (tmp_path / "b.state").write_text("no state")
    with pytest.raises(ConfigError, match="cannot be read as a saved state"):
        sample.load_state(tmp_path / "b.state", engine, {})
    with pytest.raises(ConfigError, match="a single one"):
        forked.read()


def test_draws():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]]))
    points = (torch.arange(1000) + 0.5)[:, None] / 1000

    def shares(**options):
        ids = draw(logits.expand(1000, -1), Sampling(**options), points)
        return [round(x, 2) for x in (torch.bincount(ids, minlength=5) / 1000).tolist()]

    assert shares() == [0.1, 0.4, 0.05, 0.25, 0.2]
    assert shares(top_k=9) == shares() and shares(top_p=1.0) == shares() and shares(min_p=0.0) == shares()
    assert shares(top_k=2) == [0, 0.62, 0, 0.38, 0] or shares(top_k=2) == [0, 0.61, 0, 0.39, 0]
    assert shares(top_p=0.6) == shares(top_k=2) and shares(min_p=0.6) == shares(top_k=2)  # 0.4 + 0.25; 0.25 / 0.4 = 0.625
    assert shares(top_p=1e-9) == shares(top_k=1) == shares(temperature=1e-9) == shares(temperature=0) == [0, 1, 0, 0, 0]
    flat = shares(temperature=1e9)
    assert flat == [0.2] * 5
    seen = torch.tensor([[False, True, False, False, False]])
    assert draw(logits + 2, Sampling(temperature=0, repetition_penalty=3.0), None, seen).item() == 3  # positive: divided
    assert draw(logits, Sampling(temperature=0, repetition_penalty=3.0), None, seen).item() == 3  # negative: multiplied
    almost_one = torch.full((1, 1), 1 - 2**-24)
    for k in range(1, 6):
        assert draw(logits, Sampling(top_k=k, top_p=0.9), almost_one).item() != 2  # beyond what is kept


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5},
                                 {"min_p": -0.1}, {"repetition_penalty": 0.0}])  # fmt: skip
def test_settings_that_mean_nothing(bad):
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}=.*must be"):
        Generator(model_of("gdn"), [1], **bad)


def test_a_row_does_not_depend_on_those_beside_it():
    model = model_of("gdn gdn gdn attn")
    prompts = [tokens_of(1, n)[0].tolist() for n in (5, 9)]
    options = {"max_new_tokens": 20, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3}
    rows = columns(Generator(model, prompts, n=2, seed=7, **options))
    for i, row in enumerate(rows):
        assert columns(Generator(model, prompts[i // 2], seed=[7 + i], **options)) == [row]
    assert rows[0] != rows[1]
    assert columns(Generator(model, prompts, n=2, seed=7, **options)) == rows
    few = columns(Generator(model, [[1]] * 3, max_new_tokens=50, temperature=9.0, vocab=5))
    assert max(map(max, few)) < 5


def test_a_state_is_used_again_for_the_next_request(monkeypatch):
    """As on a GPU, where a captured step keeps its state: nothing of the last request is left in it."""
    engine = Engine(model_of("gdn attn"))
    kept = engine.steps(2, 64, Sampling(temperature=0), False)
    monkeypatch.setattr(engine, "steps", lambda *a, **k: kept)
    prompts = [tokens_of(1, n)[0].tolist() for n in (30, 17)]
    first = columns(Generator(engine, prompts, max_new_tokens=30, temperature=0))
    for _ in range(3):
        assert columns(Generator(engine, prompts, max_new_tokens=30, temperature=0)) == first


def test_random_numbers_are_refilled(monkeypatch):
    model = model_of("gdn")
    want = columns(Generator(model, [1], max_new_tokens=20, temperature=3.0))
    assert len(set(want[0])) > 8
    monkeypatch.setattr(sample.Sampler, "AHEAD", 10)
    got = columns(Generator(model, [1], max_new_tokens=20, temperature=3.0))
    assert got[0][:10] == want[0][:10] and got[0][10:20] != got[0][:10]


def test_log_probabilities_are_the_models_own():
    model, ids = model_of("gdn attn"), [3, 1, 4]
    generator = Generator(model, ids, max_new_tokens=6, logprobs=True, temperature=2.0, top_k=20, repetition_penalty=1.5, seed=3)
    for tokens in generator:
        want = full(model, ids).log_softmax(-1)[tokens.item()]
        assert abs(generator.logprobs.item() - want) < 1e-4
        ids.append(tokens.item())


def test_rows_end_at_stop_tokens():
    model = model_of("gdn attn")
    prompts = [tokens_of(1, n)[0].tolist() for n in (4, 7)]
    whole = columns(Generator(model, prompts, max_new_tokens=30, temperature=0))
    stop = next(t for t in whole[0] if whole[1].count(t) == 0 or whole[0].index(t) < whole[1].index(t))
    short = columns(Generator(model, prompts, max_new_tokens=30, temperature=0, stop_tokens=[stop]))
    end = whole[0].index(stop) + 1
    assert short[0][:end] == whole[0][:end] and set(short[0][end:]) <= {-1}
    tokens = model.generate(torch.tensor([prompts[0]]), 30, temperature=0, stop_tokens=[stop])
    assert tokens.tolist() == [[*prompts[0], *whole[0][:end]]]
    assert model.generate([prompts[0], prompts[0]], 2, n=2, temperature=0).tolist() == 4 * [[*prompts[0], *whole[0][:2]]]


def test_bad_prompts():
    model = model_of("gdn")
    for ids, says in (([], "the prompt is empty"), ([3, 61], "token id 61: allowed are 0 to 60"), ([-1], "token id -1"),
                      ([[1], []], "the prompt is empty")):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            Generator(model, ids)
    with pytest.raises(ConfigError, match="token id 50: allowed are 0 to 49"):  # an id of the padded vocabulary
        Generator(model, [50], vocab=50)
    with pytest.raises(ConfigError, match="one each"):
        Generator(model, [1], n=2, seed=[1])
    with pytest.raises(ConfigError, match="use at most 3"):
        Generator(model_of("attn", learned_positions=True, block_size=8), [1] * 6, max_new_tokens=4)
    assert len(columns(Generator(model_of("attn", learned_positions=True, block_size=8), [1] * 6, max_new_tokens=3))[0]) == 3


class Bytes:
    """Tokenizer: an id is a byte, 0 the separator."""

    eot = 0

    @staticmethod
    def id_bytes(token):
        return bytes([token])


@pytest.mark.parametrize("stop, want", [((), "añb. c\ufffd"), (("b.",), "añ"), (("zz", ". c"), "añb"), (("ñ",), "a"),
                                        (("c!",), "añb. c\ufffd"), (("",), "añb. c\ufffd")])  # fmt: skip
def test_text_streams(stop, want):
    one, pieces = TextStream(Bytes, stop), []
    for token in "añb. c".encode() + b"\xc3":
        pieces.append(one.push(token))
        assert all(s not in "".join(pieces) for s in stop if s)
    assert "".join(pieces) + one.flush() == want
    assert one.push(65) == "" and one.flush() == ""


def test_streaming_gives_whole_characters_and_stops(monkeypatch):
    class Written:
        """In place of a generator: two rows of given bytes."""

        def __init__(self, *rows):
            self.data, self.rows, self.ended = rows, len(rows), torch.zeros(len(rows), dtype=torch.bool)

        def __iter__(self):
            for column in zip(*self.data, strict=True):
                yield torch.where(self.ended, -1, torch.tensor(column))
                if self.ended.all():
                    return

    rows = "né en 1".encode(), b"no\0 lost"
    steps = list(stream(Written(*rows), Bytes, ["en"]))
    assert ["".join(p) for p in zip(*steps, strict=True)] == complete(Written(*rows), Bytes, ["en"]) == ["né ", "no"]
    assert ["n", "n"] == steps[0] and steps[1] == ["", "o"] and len(steps) < len(rows[0]) + 1


# -- the command --


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A checkpoint folder with an untrained model on bytes."""
    out, tokenizer = tmp_path_factory.mktemp("run"), Tokenizer.from_bytes()
    torch.manual_seed(0)
    config = ModelConfig(layers="gdn attn", n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=260)
    meta = {"model": config.model_dump(), "separator": "before", "step": 1}
    checkpoint.save(out, 1, model=Model(config), meta=meta, tokenizer=tokenizer, keep_last=1)
    return out


def printed(capsys, *argv):
    sample.main([*map(str, argv), "--device=cpu"])
    return capsys.readouterr().out.rsplit("-" * 80, 1)[0].rstrip("\n")


def test_a_state_by_the_command(run, capsys, tmp_path):
    whole = printed(capsys, run, "--start=a b c d", "--max_new_tokens=9", "--temperature=0")
    state = f"={tmp_path / 's' / 'a.state'}"
    printed(capsys, run, "--start=a b", "--max_new_tokens=0", f"--save_state{state}")
    assert "a b" + printed(capsys, run, "--start= c d", "--max_new_tokens=9", "--temperature=0", f"--load_state{state}") == whole
    other = tmp_path / "other"
    model, tokenizer, meta = checkpoint.load_model(run)
    model.embedding.weight.data.add_(1.0)
    checkpoint.save(other, 1, model=model, meta=meta, tokenizer=tokenizer, keep_last=1)
    with pytest.raises(ConfigError, match="saved with another model: its weights"):
        sample.main([str(other), f"--load_state{state}", "--device=cpu"])
    with pytest.raises(ConfigError, match="cannot be read"):
        sample.main([str(run), "--load_state=nowhere", "--device=cpu"])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_state_that_cannot_be_written_leaves_nothing(run, tmp_path, monkeypatch, error):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr("model.save_file", full)
    with pytest.raises(ConfigError, match="cannot be written.*No space left"):
        sample.main([str(run), "--start=a", f"--save_state={tmp_path / 'a.state'}", "--device=cpu"])
    assert not list(tmp_path.iterdir())


def test_full_attention_is_counted_in_the_heads_of_the_models_own():
    sizes = {"n_layer": 4, "n_head": 3, "n_embd": 48, "vocab_size": 10}
    for layers, width in (("gdn attn(n_head=4, n_kv_head=1, head_dim=8)", 8), ("gdn", 48), ("gdn mlp", 24)):
        model = Model(ModelConfig(layers=layers, **sizes))
        assert sample.attention_cache_bytes(model, 7, torch.float32) == 2 * 4 * 7 * width * 4


def test_prompts_from_stdin_and_markers_as_text(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hé <|endoftext|>"))
    out = printed(capsys, run, "--start=-", "--max_new_tokens=3", "--top_k=9999")
    assert out.startswith("hé <|endoftext|>")
    with pytest.raises(ConfigError, match="cannot be read"):
        sample.main([str(run), "--start=FILE:nowhere", "--device=cpu"])


def test_turns_keep_the_state(run, capsys, monkeypatch):
    """Three lines of input, the last one empty, continue one text: what the turns print joins to what one prompt would give."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\n"))
    sample.main([str(run), "--interactive=true", "--max_new_tokens=4", "--temperature=0", "--device=cpu"])
    captured = capsys.readouterr()
    assert captured.err.count("ms/token") == 3
    assert captured.err.count("the model was trained on") == 0
    monkeypatch.undo()
    model, tokenizer, _ = checkpoint.load_model(run)
    ids = [tokenizer.eot]
    for line in ("one", "two", ""):
        ids += tokenizer.encode(line)
        ids += greedy(model, ids, 4)[0]
    text = "".join(captured.out.splitlines())
    assert tokenizer.decode(i for i in ids if i != tokenizer.eot).replace("\n", "") == text or "\ufffd" in text


def test_the_last_line_and_the_note(run, capsys):
    sample.main([str(run), "--start=abc", "--num_samples=2", "--max_new_tokens=40", "--logprobs=true", "--device=cpu"])
    captured = capsys.readouterr()
    last = captured.out.splitlines()[-1]
    for word in ("2 x 40 tokens on cpu in float32", "first token after", "ms/token", "tok/s", "GB/s", "full attention would keep"):
        assert word in last
    model, _, _ = checkpoint.load_model(run)
    assert f"state {sample.format_bytes(model.init_state(2, 44, dtype=torch.float32).nbytes)} " in last
    assert "log-probabilities: " in captured.out and captured.err.count("the model was trained on") == 1
    assert captured.err.count("\n") == 1  # no progress off a terminal


@pytest.mark.parametrize("flags, says", [(["--interactive=true", "--save_state=x"], "save_state has no effect"),
                                         (["--interactive=true", "--num_samples=2"], "writes one"),
                                         (["--top_p=0"], "greater than 0"), (["--min_p=2"], "at most 1"),
                                         (["--temperature=-1"], "at least 0"), (["--top_k=0"], "at least 1")])  # fmt: skip
def test_flags_that_mean_nothing(run, flags, says):
    with pytest.raises(ConfigError, match=says):
        sample.main([str(run), *flags])
