"""What T5 is used for: it writes the tokens of transformers, and under every layout those of one
device. (That a T5 computes what one of transformers computes: test_models_hf.py.)"""

import json
import re
from dataclasses import asdict

import processes
import pytest
import small_run
import tokenizers
import torch
import torch.distributed as dist

from base.groups import Groups
from course import ranks
from finetune import prompt_file
from finetune.pair_data import Pair
from inference.answers import text_of
from inference.loading import load_model
from inference.sampling import choose, keys_of, uniform
from inference.token_bytes import token_bytes
from models import generate_t5, prompt_t5, seq2seq
from models.batch import Context
from models.generate_t5 import stream
from models.special_tokens import T5Text, fill, spell, t5_tokens
from models.t5 import T5Config
from prompt_tuning import apply_tables
from run import checkpoint
from run.tokenizer import ByteTokenizer, FileTokenizer, TokenizerError

SHAPE = dict(num_layers=5, encoder_layers=2, hidden_size=48, num_heads=4, head_dim=16)
SHAPE |= dict(ffn_hidden_size=100, vocab_size=61, seq_length=64, buckets=8, max_distance=16)
TIED, GATED = dict(activation="relu", tied=True), dict(activation="geglu", tied=False)
EOS = 1
SAMPLED = dict(temperature=0.8, top_k=20, top_p=0.95, seed=3)


@torch.no_grad()
def t5(seed=0, std=0.5, dtype=torch.float64, **fields):
    """A T5 with weights so large that each token depends on what was read."""
    model = T5Config(**SHAPE | fields).build().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * std)
    return model


def sources_of(lengths, vocab_size=61, seed=1):
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(2, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return [[*text, EOS] for text in texts]


def written(model, sources, n, **options):
    """The tokens of each target."""
    targets = [[] for _ in sources]
    for outputs in stream(model, sources, n, begin=0, eot=EOS, **options):
        for output in outputs:
            if output.token is not None:
                targets[output.number].append(output.token)
    return targets


# --- one device -----------------------------------------------------------------------------------


def theirs(folder, seed=0, **fields):
    """(a T5 of transformers with weights as of `t5`, the model that its folder becomes here)"""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    sizes = dict(vocab_size=61, d_model=48, d_kv=16, d_ff=100, num_layers=2, num_decoder_layers=3)
    sizes |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=16)
    ids = dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=EOS)
    config = transformers.T5Config(**sizes, **ids, num_heads=4, **fields)
    torch.manual_seed(seed)
    model = transformers.T5ForConditionalGeneration(config).eval()
    if not fields["tie_word_embeddings"]:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(61, 48))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    model.save_pretrained(folder)
    return model.double(), load_model(folder, dtype=torch.float64, shape_class=T5Config)[0]


@pytest.mark.parametrize(
    "fields",
    [
        dict(feed_forward_proj="relu", tie_word_embeddings=True),
        dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ],
)
def test_the_tokens_of_transformers(fields, tmp_path):
    """Greedy, of sources of unequal length together; targets beyond every bucket of distances."""
    other, model = theirs(tmp_path, **fields)
    sources, n = sources_of((5, 33, 1, 17)), 24
    longest = max(map(len, sources))
    ids = torch.tensor([source + [0] * (longest - len(source)) for source in sources])
    mask = torch.arange(longest) < torch.tensor([len(source) for source in sources]).unsqueeze(1)
    # their cache takes both halves to have equally many layers
    options = dict(attention_mask=mask, max_new_tokens=n, do_sample=False, use_cache=False)
    expected = [tokens[1:] for tokens in other.generate(input_ids=ids, **options).tolist()]
    for tokens, target in zip(expected, written(model, sources, n, temperature=0.0), strict=True):
        end = tokens.index(EOS) if EOS in tokens else n
        assert target == tokens[:end]
    assert max(map(len, expected)) == n


@torch.no_grad()
def naive(model, sources, n, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    """The definition: for each token a forward pass of the whole model, source by source."""
    targets = []
    for source, key in zip(sources, keys_of(sources, seed)):
        ids = [0]
        while len(ids) <= n and ids[-1] != EOS:
            tokens = torch.tensor([source + ids])
            logits = model(tokens, None, Context(len(source)))[:, -1]  # [1, V]
            u = uniform(torch.tensor([key], dtype=torch.int32), torch.tensor([len(ids)]))
            ids.append(int(choose(logits, u, temperature, top_k, top_p)))
        targets.append([token for token in ids[1:] if token != EOS])
    return targets


@pytest.mark.parametrize("options", [dict(temperature=0.0), SAMPLED])
def test_without_what_is_kept(options):
    model, sources = t5(**GATED), sources_of((3, 9, 1))
    before = dict(model.named_modules())
    assert written(model, sources, 30, **options) == naive(model, sources, 30, **options)
    assert dict(model.named_modules()) == before
    assert written(model, sources, 0) == [[], [], []]


def test_cross_attention_is_projected_once():
    """Keys and values of the encoder's output: once in each layer, however long the target."""
    model, calls = t5(**TIED), []
    for block in model.blocks.values():
        block.attention.key.register_forward_hook(lambda *_: calls.append("self"))
        if hasattr(block, "cross_attention"):
            block.cross_attention.key.register_forward_hook(lambda *_: calls.append("cross"))
    (target,) = written(model, sources_of((4,)), 9, temperature=0.0, keys=[0])
    steps = min(len(target) + 1, 9)
    assert (calls.count("cross"), calls.count("self")) == (3, 2 + 3 * steps)


# --- layouts --------------------------------------------------------------------------------------


def save(folder, model):
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    state = {"config": {"tokenizer": "bytes"}, "model": asdict(model.config)}
    return checkpoint.save(folder / "checkpoints", 1, tensors, state)


def on_layouts(rank, path, layouts, sources, options):
    """The targets on this rank, under each layout of 4 ranks."""
    found = []
    for layout in layouts:
        layout = dict(layout)
        layer_split = layout.pop("layer_split", None)
        groups = Groups.make("cpu", dist.get_world_size(), **layout)
        where = "cpu", torch.float64, groups, layer_split, T5Config
        model, _ = load_model(path, *where)
        found.append(written(model, sources, 8, **options))
    return found


def test_layouts(tmp_path):
    """tp and pp, stages of one half of the model and of both: one device's tokens on every rank."""
    model, sources = t5(**TIED), sources_of((3, 9, 1, 6, 2))
    save(tmp_path, model)
    layouts = [dict(tp=2, pp=2, layer_split=[3, 2]), dict(pp=4, layer_split=[1, 2, 1, 1])]
    on_ranks = ranks.run(on_layouts, 4, str(tmp_path), layouts, sources, SAMPLED)
    expected = naive(model, sources, 8, **SAMPLED)
    assert on_ranks == [[expected] * len(layouts)] * 4


# --- texts, and the command -----------------------------------------------------------------------


def test_texts():
    text = T5Text(ByteTokenizer(), 358, "ask: ")
    sentinel = text.tokens.sentinels[1]
    assert text.encode("a <extra_id_1>b") == [*b"ask: a ", sentinel, *b"b", text.tokens.eos]
    source = "The capital of <extra_id_0> is <extra_id_1>."
    assert fill(source, "<extra_id_0> France<extra_id_1> Paris <extra_id_2>") == (
        "The capital of France is Paris."
    )
    assert fill(source, "nothing") == source
    # a sentinel that no model knows, one that this model does not know, and one whose row it has
    # not learned; a model that knows no <pad>
    for encode, name in (
        (text.encode, "<extra_id_100>"),
        (T5Text(ByteTokenizer(), 258).encode, "<extra_id_0>"),
        (T5Text(ByteTokenizer(), 358, imported=True).encode, "<extra_id_0>"),
    ):
        with pytest.raises(TokenizerError, match=f"{name} is no token that the model has learned"):
            encode(f"a{name}")
    with pytest.raises(TokenizerError, match="no <pad> among the 257 ids"):
        T5Text(ByteTokenizer(), 257)


WORDS = ["<pad>", "</s>", "<unk>", "▁The", "▁capital", "▁is", "▁France"]
SENTINELS = [f"<extra_id_{n}>" for n in range(99, -1, -1)]


def published(folder, words=WORDS, prefix=""):
    """A tokenizer of a published T5. prefix: as that of a BERT, a token before each text."""
    library = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=2)
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    library.add_special_tokens(words[:3] if len(words) > len(WORDS) else [*words[:3], *SENTINELS])
    if prefix:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{prefix} $A </s>", special_tokens=[(prefix, 0), ("</s>", 1)]
        )
    library.save(str(folder / "tokenizer.json"))
    return FileTokenizer(str(folder / "tokenizer.json"))


def test_texts_of_a_published_tokenizer(tmp_path):
    """It has the sentinels as special tokens, the last of its ids first."""
    tokenizer = published(tmp_path)
    text = T5Text(tokenizer, 107, "The ")
    source = "capital <extra_id_0> is <extra_id_1>"
    assert [i for i in text.encode(source) if i != 2] == [3, 4, 106, 5, 105, 1]
    token_bytes(tokenizer).show(dict(zip(text.sentinels.values(), text.sentinels)))
    written = text_of(tokenizer, text.encode(source), [106, 6, 105, 3, 1])
    assert written == "<extra_id_0> France<extra_id_1> The"
    assert fill(source, written) == "capital France is The"


def test_texts_of_mt5(tmp_path):
    """Its sentinels are words, with the space before them; the library finds them too."""
    tokenizer = published(tmp_path, [*WORDS, *(f"▁{name}" for name in SENTINELS)])
    text = T5Text(tokenizer, 112, "The ", imported=True)
    source = "capital <extra_id_0> is <extra_id_1>"
    assert text.encode(source) == [3, 4, 106, 5, 105, 1] == [3, *tokenizer.encode(source), 1]
    assert t5_tokens(tokenizer).sentinels == list(range(106, 6, -1))
    token_bytes(tokenizer).show(dict(zip(text.sentinels.values(), text.sentinels)))
    written = text_of(tokenizer, text.encode(source), [106, 6, 105, 3, 1])
    assert fill(source, written) == "capital France is The"


def test_texts_with_a_begin(tmp_path):
    text = T5Text(published(tmp_path, prefix="<pad>"), 107)
    assert text.encode("The") == [0, 3, 1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save(folder, t5(std=0.3, dtype=torch.float32, **GATED | dict(vocab_size=360)))
    return folder


def command(saved, capsys, *argv):
    status = generate_t5.main(["--checkpoint", str(saved), "--device", "cpu", *argv])
    return status, *capsys.readouterr()


def test_command(saved, capsys, tmp_path):
    """A text, a file, and the file on two stages: the same targets, whatever shares a batch."""
    path = tmp_path / "sources.jsonl"
    records = [{"source": "ab <extra_id_0> c"}, {"source": "longer", "target": "x", "id": 7}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ["--data", str(path), "--max-tokens", "12", "--prefix", "do: "]
    status, out, err = command(saved, capsys, *flags)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and "0 of 1 targets" in err
    assert [line | record for line, record in zip(lines, records, strict=True)] == lines
    for line in lines:
        text = command(saved, capsys, "--text", line["source"], *flags[2:])[1]
        assert text == line["text"] + "\n"
    text = T5Text(ByteTokenizer(), 360, "do: ")
    ids = text.encode("longer")
    options = dict(begin=text.tokens.pad, eot=text.tokens.eos, temperature=0.0)
    outputs = stream(load_model(saved, shape_class=T5Config)[0], [ids], 12, **options)
    tokens = [each.token for (each,) in outputs if each.token is not None]
    assert (lines[1]["tokens"], len(tokens) > 3) == (len(tokens), True)
    on = ["--checkpoint", saved, "--device", "cpu", "--pp", "2", "--layer-split", "3", "2"]
    two = processes.run(["-m", "models.generate_t5", *on, *flags], world=2)
    assert (two.returncode, two.stdout) == (0, out), two.stderr


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "--text TEXT or --data FILE"),
        (["--text", "a" * 64], "65 tokens, and the model's context holds 64"),
        (["--text", "a", "--pp", "6"], "--pp 6"),
        (["--text", "a", "--batch-size", "2"], "--batch-size 2: is for --data"),
        (["--data", "a", "--prompts", "b", "--prefix", "c"], "--prefix c: a template"),
    ],
)
def test_bad_flags(argv, words, saved, capsys):
    status, _, err = command(saved, capsys, *argv)
    assert status == 2 and words in err and err.count("\n") == 1


# --- pairs ----------------------------------------------------------------------------------------

PAIRS = [Pair([5, 6, 7, EOS], [8, EOS]), Pair([9, EOS], [10, 11, 12, EOS])]


def test_a_batch_of_pairs():
    """By hand: sources and targets beside each other, padded to even lengths."""
    batch = seq2seq.PaddedPairs(PAIRS, None, pad=0, multiple_of=2).batch([0, 1])
    assert batch.tokens.tolist() == [[5, 6, 7, 1, 0, 8, 1, 0], [9, 1, 0, 0, 0, 10, 11, 12]]
    assert batch.targets.tolist() == [[8, 1, 0, 0], [10, 11, 12, 1]]
    assert batch.loss_mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.context().source == 4


@pytest.mark.parametrize("multiple_of", [1, 7])
def test_padding_changes_no_loss(multiple_of):
    """The loss of each pair is that of the pair alone, and of transformers' shift of the target."""
    model = t5(**GATED, std=0.3)
    together = seq2seq.PaddedPairs(PAIRS, None, pad=0, multiple_of=multiple_of).batch([0, 1])
    losses = model(together.tokens, together.targets, together.context())
    assert losses.isfinite().all()
    for pair, loss, counts in zip(PAIRS, losses, together.loss_mask, strict=True):
        tokens = torch.tensor([[*pair.ids, 0, *pair.target[:-1]]])
        alone = model(tokens, torch.tensor([pair.target]), Context(source=len(pair.ids)))
        torch.testing.assert_close(loss[counts], alone[0], rtol=1e-12, atol=0)


def pairs_file(path, n=40):
    records = [{"source": f"{k} x", "target": f"y {k % 7}"} for k in range(n)]
    return small_run.write_lines(path, records)


def test_a_run_of_pairs(tmp_path, capsys, saved):
    """LoRA on one device, and with tp x pp and sequence parallelism: the same losses, the same
    text, and generate_t5 has it too."""
    path = pairs_file(tmp_path / "pairs.jsonl")
    flags = dict(data=path, prefix="do: ", steps=3, lr=1e-2, warmup_steps=0, global_batch_size=4)
    flags |= dict(device="cpu", precision="fp64", eval_every=0, seed=3, load=saved, peft="lora")
    one, four = tmp_path / "one", tmp_path / "four"
    more = small_run.as_flags(**flags, target_length=12)
    assert seq2seq.main([*more, "--out", str(one)]) == 0
    layout = ["--tp", "2", "--pp", "2", "--sequence-parallel", "--layer-split", "3", "2"]
    done = processes.run(["-m", "models.seq2seq", *more, *layout, "--out", four], world=4)
    assert done.returncode == 0, done.stderr
    for a, b in zip(small_run.lines_of(one), small_run.lines_of(four), strict=True):
        for name in {"loss", "grad_norm", "eval_loss", "eval_accuracy"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-10), name
    assert small_run.lines_of(one)[-1]["loss"] < small_run.lines_of(one)[0]["loss"]
    sample = (one / "sample.txt").read_text()
    assert sample == (four / "sample.txt").read_text().replace(str(four), str(one))
    capsys.readouterr()
    source, written = (re.search(rf"\[{name}\] (.*)", sample)[1] for name in ("source", "written"))
    text = source.removeprefix("do: ").removesuffix("</s>")
    argv = ["--text", text, "--prefix", "do: ", "--precision", "fp64", "--max-tokens", "8"]
    assert command(saved, capsys, *argv, "--adapter", str(one))[1].strip() == written.strip()
    assert command(saved, capsys, *argv)[1].strip() != written.strip()
    status, _, err = command(saved, capsys, *argv, "--checkpoint", str(one))
    assert status == 2 and "python -m models.generate_t5 --checkpoint BASE --adapter" in err


@pytest.mark.parametrize(
    "line, words",
    [
        ({"source": "a"}, 'a line has "source" and "target"'),
        ({"source": "a" * 40, "target": "b"}, "41 tokens, and --seq-length is 40"),
        ({"source": "a", "target": "b" * 30}, "31 tokens, and --target-length is 20"),
    ],
)
def test_bad_pairs(line, words, tmp_path, capsys):
    path = pairs_file(tmp_path / "pairs.jsonl", 3)
    with path.open("a") as f:
        f.write(json.dumps(line) + "\n")
    flags = ["--data", str(path), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert seq2seq.main([*flags, "--seq-length", "40", "--target-length", "20"]) == 2
    error = capsys.readouterr().err
    assert f"{path}, line 4: " in error and words in error


# --- learned prompts ------------------------------------------------------------------------------


def test_learned_prompts(tmp_path, capsys, saved):
    """One device, and tp x pp with sequence parallelism: the same losses and the same prompts, for
    a model that stays as it is. generate_t5 writes with them what it writes without a task."""
    lines = [dict(taskname="t", text=f"{k}", label="yes" if k % 2 else "no") for k in range(16)]
    path = str(small_run.write_lines(tmp_path / "tasks.jsonl", lines))
    config = dict(virtual_prompt_style="p-tuning", new_tasks=["t"], p_tuning=dict(num_layers=2))
    config["task_templates"] = [small_run.template()]
    config["data"] = dict(train_ds=[path], validation_ds=[path])
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(config))
    flags = dict(config=file, load=saved, steps=3, warmup_steps=0, global_batch_size=4)
    flags |= dict(device="cpu", precision="fp64", eval_every=0)
    one, four = tmp_path / "one", tmp_path / "four"
    before = small_run.tensors_of(saved)
    assert prompt_t5.main([*small_run.as_flags(**flags), "--out", str(one)]) == 0
    layout = ["--tp", "2", "--pp", "2", "--sequence-parallel", "--layer-split", "3", "2"]
    argv = ["-m", "models.prompt_t5", *small_run.as_flags(**flags), *layout, "--out", four]
    done = processes.run(argv, world=4)
    assert done.returncode == 0, done.stderr
    for a, b in zip(small_run.lines_of(one), small_run.lines_of(four), strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-10), name
    assert small_run.lines_of(one)[-1]["loss"] < small_run.lines_of(one)[0]["loss"]
    (a, b) = (prompt_file.load(out / "prompts.safetensors")[1]["t"] for out in (one, four))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert small_run.equal(small_run.tensors_of(saved), before)
    capsys.readouterr()
    prompts = ["--prompts", str(one / "prompts.safetensors"), "--data", path]
    status, out, err = command(saved, capsys, *prompts, "--max-tokens", "4")
    assert status == 0 and "of 16 targets" in err
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer | line for answer, line in zip(answers, lines, strict=True)] == answers
    # the source of the first line, by hand
    tokens, first = t5_tokens(ByteTokenizer()), 360
    ids = [first, first + 1, first + 2, *b"0 is", first + 3, first + 4, tokens.eos]
    model, _ = load_model(saved, shape_class=T5Config)
    apply_tables(model, {"t": a})
    options = dict(begin=tokens.pad, eot=tokens.eos, temperature=0.0)
    outputs = [output for (output,) in stream(model, [ids], 4, **options)]
    written = [output.token for output in outputs if output.token is not None]
    assert (len(written), outputs[-1].finish) == (answers[0]["tokens"], answers[0]["finish"])
    text = spell(written, tokens.names, ByteTokenizer()).strip()
    assert text == answers[0]["prediction"]
    status, _, err = command(saved, capsys, *prompts, "--checkpoint", str(one))
    assert status == 2 and "give the prompt file to python -m models.generate_t5 --prompts" in err


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(virtual_prompt_style="fine-tuning"), "python -m models.seq2seq"),
        (dict(task_templates=[small_run.template(answer_only_loss=False)]), "t: answer_only_loss"),
    ],
)
def test_prompts_that_are_not_of_a_t5(changes, words, tmp_path, capsys, saved):
    if "task_templates" not in changes:
        template = small_run.template(text="{text}{label}", splits=())
        changes = changes | dict(task_templates=[template])
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(dict(new_tasks=["t"]) | changes))
    argv = ["--config", str(file), "--load", str(saved), "--out", str(tmp_path / "out")]
    assert prompt_t5.main(argv) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
