"""Labels and answers: transformers' heads, layouts, SQuAD's measures, files, the commands."""

import json
import re
from dataclasses import dataclass

import numpy as np
import pytest
import small_run
import tokenizers
import torch
from parity import SMALL, differs, same
from small_run import lines_of, tensors_of, write_lines

import train
from course import parity, ranks
from finetune.chat_template import ChatError
from finetune.labelled_data import Reader, Row, best
from inference.huggingface import export_folder
from models import classify, use_bert
from models.bert import BertConfig
from models.special_tokens import bert_tokens
from models.use_bert import MaskedReader
from run.checkpoint import CheckpointError
from run.tokenizer import ByteTokenizer, FileTokenizer, make_tokenizer

BASE = SMALL | dict(model="tiny", num_layers=2)
# A softmax over positions does not see a shift of all: these gradients are exactly zero.
SHIFTS = ("head.scores.bias", "blocks.1.mlp_norm.bias")

# --- transformers ---------------------------------------------------------------------------------

OUTSIDE = {
    "embedding.tokens": "bert.embeddings.word_embeddings",
    "embedding.positions": "bert.embeddings.position_embeddings",
    "embedding.types": "bert.embeddings.token_type_embeddings",
    "embedding.norm": "bert.embeddings.LayerNorm",
    "head.pooler": "bert.pooler.dense",
}
IN_BLOCKS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def their_name(name: str, scores: str) -> str:
    module, leaf = name.rsplit(".", 1)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    if block:
        return f"bert.encoder.layer.{block[1]}.{IN_BLOCKS[block[2]]}.{leaf}"
    return f"{(OUTSIDE | {'head.scores': scores})[module]}.{leaf}"


def models_and_names(n: int) -> tuple:
    """(ours, theirs, our name of each parameter -> theirs), float64, with equal weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
    off = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    their_config = transformers.BertConfig(
        **sizes, **off, intermediate_size=100, max_position_embeddings=20, num_labels=n or 2
    )
    of_labels = "BertForSequenceClassification" if n else "BertForQuestionAnswering"
    theirs = getattr(transformers, of_labels)(their_config).double()
    ours = BertConfig(2, 48, 4, seq_length=20, vocab_size=61, ffn_hidden_size=100).build()
    classify.apply(ours, n)
    scores = "classifier" if n else "qa_outputs"
    names = {name: their_name(name, scores) for name in parameters(ours)}
    assert set(names.values()) == parameters(theirs).keys()
    for name, p in parameters(ours.double()).items():
        torch.nn.init.normal_(p, std=0.2)
        parameters(theirs)[names[name]].data.copy_(p.data)
    return ours, theirs, names


@pytest.mark.parametrize("n", [3, 0], ids=["labels", "spans"])
def test_heads_equal_those_of_transformers(n):
    ours, theirs, names = models_and_names(n)
    spans = [None, None] if n else [[3, 4], [7, 7]]
    rows = [row([5, 9, 4, 33, 2], 3, 1, spans[0]), row(range(1, 18), 6, 2, spans[1])]
    dataset = classify.Rows(rows, None, pad=0, types=2, labels=["0", "1", "2"][:n])
    batch = dataset.batch([0, 1])
    scores = ours(batch.tokens, batch.targets, batch.context())
    loss = classify.ClassifyConfig().task().losses(scores, batch).mean()
    loss.backward()
    inputs = dict(attention_mask=batch.real.long(), token_type_ids=batch.types)
    if n:
        output = theirs(batch.tokens, labels=batch.targets[:, 0], **inputs)
        close(scores.squeeze(2), output.logits)
        close(loss, output.loss)
        output.loss.backward()
    else:
        output = theirs(batch.tokens, **inputs)
        close(scores[0, :5, 0], output.start_logits[0, :5])
        close(scores[1, :, 1], output.end_logits[1])
        # Their softmax counts padding, so each row is taken alone.
        total = 0
        for k, each in enumerate(rows):
            one = {name: x[k : k + 1, : len(each.ids)] for name, x in inputs.items()}
            start, end = (torch.tensor([at]) for at in each.span)
            tokens = batch.tokens[k : k + 1, : len(each.ids)]
            total += theirs(tokens, start_positions=start, end_positions=end, **one).loss / 2
        close(loss, total)
        total.backward()
    largest = max(p.grad.abs().max() for p in theirs.parameters())
    for name, p in parameters(ours).items():
        their_grad = parameters(theirs)[names[name]].grad
        exactly_zero = name.endswith("key.bias") or (not n and name in SHIFTS)
        scale = largest if exactly_zero else their_grad.abs().max()
        assert (p.grad - their_grad).abs().max() < 1e-10 * scale, name


def parameters(model) -> dict:
    return dict(model.named_parameters())


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def row(ids, n: int, label: int, span: list[int] | None = None) -> Row:
    """Without a span an example of a label."""
    record = {"label": str(label), "context": "", "answer": ""}
    return Row(list(ids), n, record, [(0, 0)] * (len(ids) - n - 1), span)


# --- the gate -------------------------------------------------------------------------------------


@dataclass
class Labelled(classify.ClassifyConfig):
    """Without files: n labels, or answers (0)."""

    n: int = 3
    document_mask: bool = False

    def task(self) -> classify.ClassifyTask:
        task = super().task()
        task.labels = [str(k) for k in range(self.n)]
        return task


def examples(trainer) -> classify.Rows:
    """24 rows of 3 to 13 random tokens, of which the answers are anywhere."""
    rows = []
    for k in range(24):
        g = torch.Generator().manual_seed(k)
        ids = torch.randint(trainer.model_config.vocab_size, (3 + k % 11,), generator=g).tolist()
        first = k % len(ids)
        span = None if trainer.task.labels else [first, max(first, len(ids) - 2)]
        rows.append(row(ids, 1, k % 3, span))
    labels, multiple_of = trainer.task.labels, trainer.config.length_multiple
    return classify.Rows(rows, None, 0, 2, labels, multiple_of)


def on_rank(rank: int, world: int, variants: list[dict], mutate=None) -> list[parity.Result]:
    if mutate:
        mutate()
    results = []
    for flags in variants:
        run = parity.Run(world, Labelled(**flags))
        run.dataset = examples(run.trainer)
        result = run.train(3)
        result.losses.append(run.trainer.task.evaluate(run.dataset, 0))
        if not flags["n"] and rank == 0:
            for name in SHIFTS:
                assert result.gradients.pop(name).abs().max() < 1e-12
        results.append(result)
    return results


def train_labelled(world: int, n: int, layouts: list[dict], mutate=None) -> list[parity.Result]:
    return ranks.run(on_rank, world, world, [BASE | dict(n=n) | each for each in layouts], mutate)[
        0
    ]


SEQUENCE = dict(tp=2, sequence_parallel=True)
LAYOUTS = [
    dict(tp=2),
    SEQUENCE,
    dict(pp=2),
    dict(pp=2, schedule="zb-h1", recompute="full"),
    dict(zero_stage=1),
    dict(zero_stage=3, micro_batch_size=2),
]


@pytest.mark.parametrize("n", [3, 0], ids=["labels", "spans"])
def test_layouts(n):
    """With dropout; the rows of sequence parallelism have one token of padding more."""
    (one,) = train_labelled(1, n, [{}])
    for result in train_labelled(2, n, LAYOUTS):
        same(result, one)
    (result,) = train_labelled(4, n, [SEQUENCE | dict(pp=2)])
    same(result, one)


def every_rank_reads_its_own_first_token():
    classify.gather_values = lambda values, group: values.repeat(1, group.size(), 1)


def test_cls_comes_from_the_first_rank():
    (one,) = train_labelled(1, 3, [{}])
    (wrong,) = train_labelled(2, 3, [SEQUENCE], every_rank_reads_its_own_first_token)
    differs(wrong, one)


# --- lines and measures ---------------------------------------------------------------------------


def read(record: dict, answered: bool = True, types: int = 2) -> Row:
    """Of at most 20 tokens."""
    return Reader(ByteTokenizer(), 257, 256, 20, types, answered).row(record)


def test_lines_become_rows():
    assert read({"text": "ab", "label": 1}).record["label"] == "1"
    assert read({"text": "ab", "label": "x"})[:2] == ([257, *b"ab", 256], 4)
    assert read({"text": "ab", "second": "c", "label": "x"}).ids == [257, *b"ab", 256, *b"c", 256]
    # 17 bytes of two texts fit: a short one stays whole, two long ones have a half each.
    pair = read({"text": "a" * 30, "second": "bb"}, answered=False)
    assert pair.ids == [257, *b"a" * 15, 256, *b"bb", 256]
    halves = read({"text": "a" * 30, "second": "b" * 30}, answered=False)
    assert halves.ids == [257, *b"a" * 8, 256, *b"b" * 9, 256]
    # These characters are no end of text.
    end = "<|endoftext|>"
    assert read({"text": end}, answered=False).ids == [257, *end.encode(), 256]


def test_an_answer_is_found_where_it_stands():
    """In bytes of a text whose characters have two each, and not at its first occurrence."""
    found = read({"question": "?", "context": "ab é ab", "answer": "é ab", "start": 3})
    assert found.n == 3 and found.span == [6, 10]
    scores = torch.zeros(20, 2, dtype=torch.float64)
    # The best end, 7, lies before the best start, 9.
    scores[6, 0], scores[9, 0], scores[7, 1], scores[10, 1] = 18, 20, 20, 19
    assert best(scores, found, []) == ("ab", pytest.approx(0.8808 * 0.2689, abs=1e-4))
    scores[9, 0] = 0
    assert best(scores, found, []) == ("é", pytest.approx(0.7311, abs=1e-4))
    # White space alone is no answer.
    scores[5], scores[8] = 40, 30
    assert best(scores, found, [])[0] not in ("", " ")


def test_accents_belong_to_an_answer(tmp_path):
    """A published tokenizer drops them, at the end of a text too."""
    context = "a cafe\u0301"
    words = dict(zip(["[UNK]", "a", "cafe", "?"], range(4)))
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.BertNormalizer()
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.save(str(tmp_path / "t.json"))
    reader = Reader(FileTokenizer(str(tmp_path / "t.json")), cls=5, sep=6, limit=20)
    record = {"question": "?", "context": context, "answer": context[2:], "start": 2}
    found = reader.row(record)
    assert found.ids == [5, 3, 6, 1, 2, 6] and found.span == [4, 4]
    scores = torch.eye(6)[4].mul(20).unsqueeze(1).expand(6, 2)
    assert best(scores, found, [])[0] == context[2:]


def test_types_of_a_pair():
    pair = read({"text": "ab", "second": "c"}, answered=False)
    for types, of_second in ((2, 1), (1, 0)):
        batch = classify.Rows([pair], None, pad=0, types=types).batch([0])
        assert batch.types.tolist() == [[0] * 4 + [of_second] * 2] and batch.targets is None
        assert batch.context().source == 0


def test_a_roberta_has_two_separators_in_a_pair():
    pair = read({"text": "a" * 30, "second": "b" * 30}, answered=False, types=1)
    assert pair[:2] == ([257, *b"a" * 8, 256, 256, *b"b" * 8, 256], 11)
    alone = read({"text": "a" * 30}, answered=False, types=1)
    assert alone.ids == [257, *b"a" * 18, 256]
    found = read({"question": "?", "context": "a b", "answer": "b", "start": 2}, types=1)
    assert found.ids[found.span[0]] == ord("b")


def test_the_space_before_a_mask_may_belong_to_it(tmp_path):
    """RoBERTa's mask token takes it, BERT's does not."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    for lstrip in (True, False):
        library = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        named = [AddedToken(name) for name in ("<s>", "</s>", "<pad>")]
        library.add_special_tokens([*named, AddedToken("<mask>", lstrip=lstrip)])
        library.save(str(tmp_path / "tokenizer.json"))
        tokenizer = make_tokenizer(str(tmp_path / "tokenizer.json"))
        special = bert_tokens(tokenizer)
        reader = MaskedReader(special.mask, tokenizer, special.cls, special.sep, 20, answered=False)
        row = reader.row({"text": "a [MASK] b.", "second": "[MASK]"})
        names = [library.id_to_token(i) for i in row.ids]
        space = [] if lstrip else ["Ġ"]
        first = ["a", *space, "<mask>", "Ġ", "b", "."]
        assert names == ["<s>", *first, "</s>", "<mask>", "</s>"]


@pytest.mark.parametrize(
    "record, words",
    [
        ({"text": "a"}, "is no example"),
        ({"text": "a", "label": 0.5}, "is no example"),
        ({"text": "", "label": "x"}, "empty text"),
        ({"text": "a", "label": ""}, "or label"),
        ({"question": "?", "context": "ab", "answer": "b"}, "start None"),
        ({"question": "?", "context": "ab", "answer": "b", "start": -1}, "start -1"),
        ({"question": "?", "context": "ab", "answer": "b", "start": 0}, "does not stand there"),
        ({"question": "?", "context": "a" * 30 + "b", "answer": "b", "start": 30}, "beyond"),
        ({"question": "?", "context": "ab", "answer": "", "start": 1}, "is empty"),
    ],
)
def test_lines_that_are_refused(record, words):
    with pytest.raises(ChatError, match=words):
        read(record)


# --- the commands ---------------------------------------------------------------------------------


def classify_run(tmp_path, name: str, **options) -> int:
    sizes = dict(steps=2, warmup_steps=0, out=tmp_path / name)
    if "load" not in options:
        sizes |= small_run.SMALL | dict(vocab_size=260)
    return train.main(small_run.as_flags(**sizes | options), classify.ClassifyConfig)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of labels, one of answers, and their data."""
    tmp_path = tmp_path_factory.mktemp("use")
    labels = [{"text": f"{'ab'[n % 2]} {n}", "label": "xy"[n % 2]} for n in range(24)]
    answers = [
        {"question": "who?", "context": f"it is {n}", "answer": str(n), "start": 6}
        for n in range(24)
    ]
    for name, records in (("labels", labels), ("answers", answers)):
        data = write_lines(tmp_path / f"{name}.jsonl", records)
        assert classify_run(tmp_path, name, data=data) == 0
    return tmp_path


def test_runs(trained):
    for name, measures in (
        ("labels", ["accuracy", "macro_f1"]),
        ("answers", ["exact_match", "f1"]),
    ):
        assert {f"eval_{measure}" for measure in measures} <= lines_of(trained / name)[-1].keys()
    # One more step; the pretrained head goes, another one begins; a classifier goes on.
    data = trained / "labels.jsonl"
    assert train.main(["--resume", "--out", str(trained / "labels"), "--steps", "3"], CONFIG) == 0
    assert classify_run(trained, "further", load=trained / "labels", data=data) == 0
    # The head alone: all else stays, and is in the checkpoint.
    flags = small_run.as_flags(load=trained / "labels", data=data, out=trained / "head", steps=1)
    assert classify.main([*flags, "--freeze", "--warmup-steps", "0"]) == 0
    before, after = (tensors_of(trained / name, "model.") for name in ("labels", "head"))
    changed = {name for name in after if not before[name].equal(after[name])}
    assert changed and all(name.startswith("head.") for name in changed)
    assert before.keys() == after.keys()


CONFIG = classify.ClassifyConfig


def test_refusals(trained, capsys):
    def refused(words, *argv, **options):
        assert classify_run(trained, "refused", **options) == 2
        assert words in capsys.readouterr().err

    refused("--data: classify.py needs")
    refused("--load has answers", load=trained / "answers", data=trained / "labels.jsonl")
    refused("--load has ['x', 'y']", load=trained / "labels", data=trained / "answers.jsonl")
    one = write_lines(trained / "one.jsonl", [{"text": f"{n}", "label": "x"} for n in range(4)])
    refused("has the labels ['x']", data=one)
    # An adapter beside the head is not covered, so nobody may believe to train one.
    with pytest.raises(SystemExit):
        classify_run(trained, "refused", data=trained / "labels.jsonl", peft="lora")
    # The run goes on with a third label, or with answers.
    third = write_lines(trained / "third.jsonl", [{"text": f"{n}", "label": n} for n in "xyzxyz"])
    for data in (third, trained / "answers.jsonl"):
        again = ["--resume", "--out", str(trained / "labels"), "--data", str(data), "--steps", "9"]
        assert train.main(again, CONFIG) == 2
        assert "has other labels than" in capsys.readouterr().err
    for name in ("labels", "answers"):
        with pytest.raises(CheckpointError, match="holds a classifier"):
            export_folder(trained / name, trained / "hf")


def use(*words) -> int:
    return use_bert.main([*map(str, words), "--device", "cpu"])


def test_uses(trained, capsys):
    texts = write_lines(trained / "texts.jsonl", [{"text": "a 1"}, {"text": "b"}])
    capsys.readouterr()
    assert use("predict", "--checkpoint", trained / "labels", "--data", texts) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["text"] for each in said] == ["a 1", "b"]
    assert all(each["predicted"] in "xy" and each["probability"] >= 0.5 for each in said)
    for pooling in ("mean", "first"):
        out = trained / f"{pooling}.npy"
        flags = ("--data", texts, "--pooling", pooling, "--out", out)
        assert use("embed", "--checkpoint", trained / "answers", *flags) == 0
        assert np.load(out).shape == (2, 32)
    assert use("fill", "--checkpoint", trained / "labels", "--text", "[MASK]") == 2
    assert "is of python -m models.classify; predict would fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, refusal",
    [
        ("predict --checkpoint {0}/answers --text a", 'needs "question" and "context"'),
        (
            "predict --checkpoint {0}/labels --data {0}/answers.jsonl",
            'line 1: the model of .* "text"',
        ),
        ("embed --checkpoint {0}/labels --data {0}/bare.jsonl --out {0}/v.npy", "all are text"),
        ("embed --checkpoint {0}/labels --text a --out {0}/no/v.npy", "--out .*: no such folder"),
        ("embed --checkpoint {0}/no --text a --out {0}/v.npy", "--checkpoint .*: no such folder"),
    ],
)
def test_uses_that_are_refused(trained, capsys, words, refusal):
    write_lines(trained / "bare.jsonl", [{"words": "a"}])
    assert use(*words.format(trained).split()) == 2
    assert re.search(refusal, capsys.readouterr().err)


def test_masked_words(tmp_path, capsys):
    from models.runs import BertRun

    flags = small_run.flags(steps=1, out=tmp_path / "bert", data=__file__, cache=tmp_path)
    assert train.main(flags, BertRun) == 0
    capsys.readouterr()
    fill = ("fill", "--checkpoint", tmp_path / "bert", "--top-k", 3)
    assert use(*fill, "--text", "a[MASK]c[MASK]") == 0
    words = json.loads(capsys.readouterr().out)["words"]
    assert len(words) == 2 and all(len(likeliest) == 3 for likeliest in words)
    assert words[0][0][1] >= words[0][1][1] >= words[0][2][1] > 0
    pair = write_lines(tmp_path / "pair.jsonl", [{"text": "a[MASK]", "second": "[MASK]c"}])
    assert use(*fill, "--data", pair) == 0
    assert len(json.loads(capsys.readouterr().out)["words"]) == 2
    assert use(*fill[:-1], 1000, "--text", "[MASK]") == 2
    assert "--top-k 1000: the model has" in capsys.readouterr().err
    assert use("predict", *fill[1:3], "--text", "a") == 2
    assert "is not of python -m models.classify" in capsys.readouterr().err
    assert use(*fill, "--text", "abc") == 2
    assert "has no [MASK]" in capsys.readouterr().err
    assert use(*fill, "--text", "[MASK]\udcff") == 2
    assert "--text: 'utf-8' codec" in capsys.readouterr().err
