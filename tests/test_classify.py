"""A decoder labels texts: transformers' head, layouts, the command. And the scores of answers."""

import json
import random
import re
from dataclasses import dataclass

import pytest
import small_run
import torch
from parity import LLAMA, SMALL, again, differs, same
from small_run import lines_of, write_lines

import train
from course import parity, ranks
from finetune import classify, preference
from finetune.labelled_data import Row
from finetune.scores import macro_f1, of_answer
from gpt import GPT
from inference.huggingface import open_folder
from models import use_bert
from run import checkpoint

# --- transformers ---------------------------------------------------------------------------------


def row(ids, label: str) -> Row:
    return Row(list(ids), len(ids), {"label": label}, [], None)


def test_head_equals_that_of_transformers(tmp_path):
    """Logits and loss of texts of several lengths; every gradient of the body's last norm too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=61, num_labels=3)
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0)
    theirs = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, **off))
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.2)
    body = transformers.GPT2LMHeadModel(theirs.config)
    body.transformer = theirs.transformer
    body.tie_weights()
    body.save_pretrained(tmp_path / "gpt2")
    config, read, _ = open_folder(tmp_path / "gpt2")
    ours = GPT(config)
    for name, p in ours.named_parameters():
        p.data.copy_(read(name))
    preference.apply(ours, None, False, n=3)
    ours.head.value.weight.data.copy_(theirs.score.weight)
    rows = [row([5, 9, 4], "b"), row(range(1, 17), "c"), row([60], "a")]
    batch = classify.Labelled(rows, None, ["a", "b", "c"]).batch([0, 1, 2])
    y = ours(batch.tokens, batch.targets, batch.context())
    task = classify.ClassifyConfig().task()
    task.trainer = Trained(classify.ClassifyConfig())
    loss = task.total_loss(y, batch) / 3
    loss.backward()
    output = theirs(batch.tokens, labels=batch.targets[:, 0], attention_mask=batch.real.long())
    output.loss.backward()
    for a, b in (
        (task.scores(batch, y)[:, :, 0], output.logits),
        (loss, output.loss),
        (ours.head.value.weight.grad, theirs.score.weight.grad),
        (ours.head.norm.weight.grad, theirs.transformer.ln_f.weight.grad),
        (ours.embedding.positions.weight.grad, theirs.transformer.wpe.weight.grad),
    ):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()
    task.trainer.config.pool = "mean"
    scores = task.scores(batch, y)
    assert torch.allclose(scores[0, :, 0], y[0, :3].mean(0))


@dataclass
class Trained:
    config: classify.ClassifyConfig


# --- the gate -------------------------------------------------------------------------------------


@dataclass
class OfRows(classify.ClassifyConfig):
    """Without files."""

    document_mask: bool = False

    def task(self) -> classify.LabelTask:
        task = super().task()
        task.labels = ["0", "1", "2"]
        return task


def on_rank(rank: int, world: int, variants: list[dict], mutate=None) -> list[parity.Result]:
    if mutate:
        mutate()
    results = []
    for flags in variants:
        run = parity.Run(world, OfRows(**flags))
        rows = []
        for k in range(24):
            g = torch.Generator().manual_seed(k)
            ids = torch.randint(flags["vocab_size"], (3 + k % 11,), generator=g).tolist()
            rows.append(row(ids, str(k % 3)))
        multiple_of = run.trainer.config.length_multiple
        run.dataset = classify.Labelled(rows, None, run.trainer.task.labels, multiple_of)
        result = run.train(3)
        task = run.trainer.task
        result.losses.append(task.evaluate(run.dataset, 0))
        found = task.scores_of(run.dataset)[:, :, 0].argmax(1).tolist()
        right = sum(int(n == k % 3) for k, n in enumerate(found))
        assert task.measured["eval_accuracy"] == right / 24 < 1
        results.append(result)
    return results


def learned(world: int, base: dict, layouts: list[dict], mutate=None) -> list[parity.Result]:
    return ranks.run(on_rank, world, world, [base | each for each in layouts], mutate)[0]


SEQUENCE = dict(tp=2, sequence_parallel=True)
ZERO = dict(zero_stage=3, micro_batch_size=2)
DELAYED = dict(pp=2, schedule="zb-h1", recompute="full")
MEAN = SMALL | dict(pool="mean")
FROZEN = SMALL | dict(freeze=True)
EXPERTS = SMALL | dict(num_experts=4, router="topk", router_topk=2, micro_batch_size=4, dropout=0.0)


@pytest.mark.parametrize(
    "world, base, layouts",
    [
        (2, MEAN, [SEQUENCE, DELAYED, ZERO]),
        (2, FROZEN, [dict(pp=2)]),
        again(2, FROZEN, [SEQUENCE, ZERO]),
        again(2, SMALL, [dict(tp=2), SEQUENCE, dict(pp=2), DELAYED, dict(zero_stage=1), ZERO]),
        again(4, LLAMA | dict(dropout=0.0), [SEQUENCE | DELAYED, SEQUENCE | ZERO]),
        again(2, EXPERTS, [dict(ep=2), SEQUENCE]),
    ],
    ids=["mean", "frozen", "more frozen", "last", "four ranks", "experts"],
)
def test_layouts(world, base, layouts):
    (one,) = learned(1, base, [{}])
    for result in learned(world, base, layouts):
        same(result, one)


def no_sum_of_norms():
    preference.synchronise = lambda module, group: None


def whole_gradient_for_a_shard():
    preference.grad_of_shard = lambda grad, group: grad.chunk(group.size(), dim=1)[0].contiguous()


def padding_counts():
    original = classify.lay_out

    def without(*args, **options):
        batch = original(*args, **options)
        return batch._replace(real=torch.ones_like(batch.real))

    classify.lay_out = without


@pytest.mark.parametrize(
    "mutate", [no_sum_of_norms, again(whole_gradient_for_a_shard), again(padding_counts)]
)
def test_what_is_removed_shows(mutate):
    (one,) = learned(1, MEAN, [{}])
    (wrong,) = learned(2, MEAN, [SEQUENCE], mutate)
    differs(wrong, one)


# --- the commands ---------------------------------------------------------------------------------


def predicted(capsys, *words) -> list[dict]:
    capsys.readouterr()
    assert use_bert.main(["predict", *map(str, words)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def run(*words: str, **options) -> int:
    options = dict(device="cpu", warmup_steps=0) | options
    return classify.main([*words, *small_run.as_flags(**options)])


def body(run) -> dict[str, torch.Tensor]:
    """The weights of a run, without its head's matrix."""
    path = checkpoint.find(run)
    shapes = checkpoint.read_index(path)["tensors"]
    names = [n for n in shapes if n.startswith("model.") and not n.startswith("model.head.value")]
    tensors = {name: torch.empty(shapes[name][1]) for name in names if "head.output" not in name}
    checkpoint.read(path, tensors)
    return tensors


def test_runs_and_new_texts(tmp_path, capsys):
    """A model learns labels, whole, or its head alone; its checkpoint labels new texts."""
    texts = [{"text": f"{'ab'[n % 2]} {n}", "label": ["even", "odd"][n % 2]} for n in range(40)]
    data, new = tmp_path / "d.jsonl", tmp_path / "new.jsonl"
    write_lines(data, texts)
    write_lines(new, [{"text": "a 52"}, {"text": "b 53"}])
    flags = small_run.flags(steps=1, out=tmp_path / "base", data=__file__, cache=tmp_path)
    assert train.main(flags) == 0
    others = dict(load=tmp_path / "base", data=data, lr=0.01)
    words = ["embed", "--text", "a", "--out", "v.npy", "--checkpoint", str(tmp_path / "base")]
    assert use_bert.main(words) == 2 and "/v1/embeddings" in capsys.readouterr().err
    for name, words in (("whole", ""), ("head", "--freeze --pool mean")):
        assert run(*words.split(), out=tmp_path / name, steps=60, **others) == 0
        said = capsys.readouterr().out
        assert "labels: even, odd" in said and "2 held out: too few to measure" in said
        assert f"predict --checkpoint {tmp_path / name} --data FILE" in said
        last = lines_of(tmp_path / name)[-1]
        assert last["eval_accuracy"] == last["eval_macro_f1"] == 1.0
        lines = predicted(capsys, "--checkpoint", tmp_path / name, "--data", new)
        assert [line["predicted"] for line in lines] == ["even", "odd"]
        resumed = ["--resume", "--out", str(tmp_path / name), "--steps", "61"]
        assert classify.main(resumed) == 0
        learned = body(tmp_path / name)
        kept = [learned[each].equal(p) for each, p in body(tmp_path / "base").items()]
        # With --freeze not a bit of the body changes.
        assert all(kept) if name == "head" else not any(kept)
    write_lines(new_labels := tmp_path / "l.jsonl", [{"text": n, "label": n} for n in "abcd"])
    resumed[-1] = "62"
    for words, refusal in (
        ("--pool last", "--pool last: .* has mean"),
        ("--no-freeze", "--freeze False: .* has True"),
        (f"--data {new_labels}", "has other labels"),
    ):
        assert classify.main([*resumed, *words.split()]) == 2
        assert re.search(refusal, capsys.readouterr().err)
    others |= dict(out=tmp_path / "further", load=tmp_path / "whole", steps=1)
    assert run(**others) == 0
    assert "with its head" in capsys.readouterr().out
    answers = tmp_path / "answers.jsonl"
    write_lines(
        answers, [dict(question="?", context=f"it {n}", answer="it", start=0) for n in "ab"]
    )
    for data, words in ((answers, "has answers"), (new, "is no example")):
        others |= dict(out=tmp_path / "refused", load=tmp_path / "base", data=data)
        assert run(**others) == 2
        assert words in capsys.readouterr().err
    assert small_run.run("train.py", "--load", tmp_path / "whole", "--out", tmp_path / "no") == 2
    assert "holds a classifier" in capsys.readouterr().err


# --- scores ---------------------------------------------------------------------------------------

# found, right, exact match, F1, ROUGE-L. Written on 2026-11-27 by lm-eval 0.4.13 (SQuAD's formula,
# in tasks/qasper/metrics.py) and rouge_score 0.1.2; where no word is left F1 is that of SQuAD 2.0.
SCORES = [
    ("The Eiffel Tower!", "eiffel tower", 1.0, 1.0, 0.8),
    ("in Paris, France", "Paris France", 0.0, 0.8, 0.8),
    ("the cat sat on the mat", "on the mat the cat sat", 0.0, 1.0, 0.5),
    ("London", "Paris", 0.0, 0.0, 0.0),
    ("the", "a", 1.0, 1.0, 0.0),
    ("", "Paris", 0.0, 0.0, 0.0),
    ("12,5 % in 2024", "12.5 percent in 2024", 0.0, 0.8571428571428571, 0.888888888888889),
]


@pytest.mark.parametrize("found, right, exact, f1, rouge_l", SCORES)
def test_scores_of_answers(found, right, exact, f1, rouge_l):
    expected = {"exact_match": exact, "f1": pytest.approx(f1), "rouge_l": pytest.approx(rouge_l)}
    assert of_answer(found, right) == expected
    assert set(of_answer(None, right).values()) == {0.0}


@pytest.mark.repetition
def test_scores_of_the_packages():
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    qasper = pytest.importorskip("lm_eval.tasks.qasper.metrics")
    scorer, draw = rouge_scorer.RougeScorer(["rougeL"]), random.Random(0)
    words = "The a an cat, Cat sat. on-mat don't 12 3.5 é (x) ; the and".split()
    for _ in range(500):
        found, right = (" ".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(2))
        ours = of_answer(found, right)
        assert ours["rouge_l"] == pytest.approx(scorer.score(right, found)["rougeL"].fmeasure)
        if qasper.normalize_answer(found) or qasper.normalize_answer(right):
            assert ours["f1"] == pytest.approx(qasper.f1_abstractive([found], [right]))
        equal = qasper.normalize_answer(found) == qasper.normalize_answer(right)
        assert ours["exact_match"] == equal


def test_macro_f1_equals_that_of_scikit_learn():
    """By hand: a has 2 * 1 / 3, b 2 * 1 / 4, c, which is never right, 0."""
    found, right = list("abbc"), list("abab")
    assert macro_f1(found, right) == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)
    metrics = pytest.importorskip("sklearn.metrics")
    draw = random.Random(1)
    for _ in range(5):
        found, right = (draw.choices("abcd", k=9) for _ in range(2))
        assert macro_f1(found, right) == pytest.approx(
            metrics.f1_score(right, found, average="macro", zero_division=0)
        )
