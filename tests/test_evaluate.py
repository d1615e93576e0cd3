"""evaluate.py under every layout, and by hand. (test_server.py has lm-eval.)"""

import json
import math
import re
from pathlib import Path

import processes
import published_tokenizers
import pytest
import torch
from test_families import FAMILIES
from their_models import their_model

import sharding
from base.groups import Groups
from base.model_config import MoEConfig
from course import demo, ranks
from inference import evaluate
from inference.evaluate import Evaluator
from inference.loading import build_stages, find_tokenizer, load_model, materialise
from run.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent.parent
TASKS = ("sums", "prose", "capitals")
CONTEXT = 64
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# --- a small model, and the tasks of docs/evaluation.md -------------------------------------------


def make_tokenizer(begins: bool):
    """Byte-level BPE, as transformers loads it. begins: a begin token before every text."""
    transformers = pytest.importorskip("transformers")
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    names = {"eos_token": "</s>", "additional_special_tokens": specials[2:]}
    if begins:
        names["bos_token"] = "<s>"
    bpe = published_tokenizers.byte_level(specials, words=True, begin=names.get("bos_token"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(folder: Path, begins: bool = True, family: str = "llama") -> None:
    """A model with random weights, so large that its tokens depend on those before."""
    tokenizer = make_tokenizer(begins)
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    model_type, fields = FAMILIES[family]
    limit = {"bloom": "seq_length", "gpt2": "n_positions"}.get(
        model_type, "max_position_embeddings"
    )
    fields = fields | ids | {limit: CONTEXT, "initializer_range": 0.3}
    model = their_model(model_type, 1, **fields | dict(vocab_size=len(tokenizer)))
    # the model ends a turn now and then
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.get_output_embeddings().weight.data[turn_end] *= 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_tasks(folder: Path) -> None:
    """The YAML of docs/evaluation.md, and the data below each."""
    text = (ROOT / "docs" / "evaluation.md").read_text()
    blocks = re.findall(r"^```(yaml|json)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["yaml", "json"] * len(TASKS)
    folder.mkdir()
    for (_, task), (_, data) in zip(blocks[::2], blocks[1::2]):
        name = re.match(r"task: (\w+)\n", task)[1]
        (folder / f"{name}.yaml").write_text(task)
        (folder / f"{name}.jsonl").write_text(data)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, in which the tests of this file run."""
    folder = tmp_path_factory.mktemp("evaluation")
    save_model(folder / "begins", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


LONG = "The capital of Peru is Lima. " * 9


@pytest.mark.parametrize("layout", ["--tp", pytest.param("--pp", marks=pytest.mark.repetition)])
def test_command_on_two_ranks(layout, place):
    Path("two.txt").write_text(LONG)
    argv = ["--checkpoint", "begins", "--perplexity", "two.txt", "--out"]
    assert evaluate.main([*argv, f"one{layout}.json"]) == 0
    done = processes.run(["inference.evaluate", layout, 2, *argv, f"two{layout}.json"], world=2)
    assert done.returncode == 0, done.stderr
    # rank 0 alone prints
    assert done.stdout.count("two.txt") == 1
    one, two = (json.loads(Path(f"{n}{layout}.json").read_text()) for n in ("one", "two"))
    for row, other in zip(one["documents"], two["documents"], strict=True):
        assert row["log_prob"] == pytest.approx(other["log_prob"], rel=1e-5)


# --- every layout ---------------------------------------------------------------------------------

SMALL = dict(num_layers=2, seq_length=16, vocab_size=257)
MODELS = {
    "gpt": {},
    "llama": dict(llama=True, num_kv_heads=2, ffn_hidden_size=56),
    "experts": dict(num_experts=4, expert_every=1, router="topk", router_topk=2),
}
LAYOUTS = {"tp 2": dict(tp=2), "pp 2": dict(pp=2), "dp 2": {}}


def make_evaluator(groups: Groups, fields: dict, batch_size: int = 3) -> Evaluator:
    stages = build_stages(demo.tiny_config(MoEConfig, **SMALL, **fields), groups)
    model = materialise(stages, groups, "cpu", torch.float64)
    for stage in stages:
        sharding.init(stage, 0, "cpu", torch.float64)
        for name, p in stage.named_parameters():
            # matrices so large that each token depends on those before
            if name.endswith("weight") and "norm" not in name:
                p.mul_(6)
        stage.requires_grad_(False)
    lockstep = groups.replicas if groups.ep else None
    return Evaluator(model, ByteTokenizer(), groups, batch_size, lockstep)


def ask(evaluator: Evaluator) -> dict:
    """Requests of all lengths, also beyond the context of 16. In 10, with 3 on each of two ranks,
    the last batch has none for one of them."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(256, (n,), generator=generator).tolist() for n in range(3, 33, 3)]
    return {
        "pairs": evaluator.log_likelihoods([(text[:-2], text[-2:]) for text in texts]),
        "rolling": evaluator.rolling([*texts, []], 256),
    }


def ask_on_rank(rank: int) -> dict:
    found = {}
    for model, fields in MODELS.items():
        layouts = LAYOUTS | ({"ep 2": dict(ep=2)} if model == "experts" else {})
        for layout, sizes in layouts.items():
            groups = Groups.make("cpu", 2, **sizes)
            evaluator = make_evaluator(groups, fields)
            found[model, layout] = ask(evaluator)
    not_finite(rank)
    return found


def not_finite(rank: int) -> None:
    """Where one rank's weights are not, all raise the error."""
    evaluator = make_evaluator(Groups.make("cpu", 2), MODELS["gpt"])
    if rank == 1:
        evaluator.model.head.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        evaluator.log_likelihoods([([1], [2])] * 8)


def test_every_layout_is_one_device():
    of_ranks = ranks.run(ask_on_rank, 2)
    for (model, layout), found in of_ranks[0].items():
        expected = ask(make_evaluator(Groups(), MODELS[model], batch_size=6))
        # every rank has all results
        assert of_ranks[1][model, layout] == found
        log_p, reference = (
            torch.tensor(answers["rolling"] + [x for x, _ in answers["pairs"]]).double()
            for answers in (found, expected)
        )
        worst = (log_p - reference).abs().max() / reference.abs().max()
        assert worst < 1e-10, (model, layout, worst)
        assert [greedy for _, greedy in found["pairs"]] == [g for _, g in expected["pairs"]]


# --- by hand --------------------------------------------------------------------------------------


def test_the_head_computes_in_pieces(monkeypatch):
    evaluator = make_evaluator(Groups(), MODELS["gpt"])
    requests = [([1, 2], [3] * n) for n in (1, 7, 12)]
    expected = [log_p for log_p, _ in evaluator.log_likelihoods(requests)]
    pieces = []
    evaluator.model.head.register_forward_hook(lambda module, x, y: pieces.append(y.shape[1]))
    monkeypatch.setattr(evaluate, "HEAD_POSITIONS", 8)
    found = [log_p for log_p, _ in evaluator.log_likelihoods(requests)]
    assert found == pytest.approx(expected, rel=1e-12)
    # 20 positions, and none of those that are read only
    assert pieces == [8, 8, 4]


def test_windows():
    """Those of the docstring; and for every length, those of lm-eval."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    expected = [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([6, 7, 8], [9, 10])]
    assert evaluate.windows(ids, 0, 4) == expected
    utils = pytest.importorskip("lm_eval.utils")
    for n in range(14):
        ids = list(range(1, n + 1))
        for longest in (1, 2, 5, 20):
            theirs = utils.get_rolling_token_windows(ids, 0, longest, context_len=1)
            theirs = [utils.make_disjoint_window(pair) for pair in theirs]
            assert evaluate.windows(ids, 0, longest) == theirs


def test_perplexity_of_documents(place, capsys):
    """Of a text in one window, it is the exponential of the training loss."""
    Path("a.txt").write_text("The capital of Peru is Lima.")
    Path("b.jsonl").write_text(json.dumps({"text": "é"}) + "\n" + json.dumps({"text": LONG}))
    argv = ["--checkpoint", "begins", "--perplexity", "a.txt", "b.jsonl", "--precision", "fp64"]
    assert evaluate.main([*argv, "--out", "documents.json"]) == 0
    rows = json.loads(Path("documents.json").read_text())["documents"]
    assert [row["name"] for row in rows] == ["a.txt", "b.jsonl:1", "b.jsonl:2", "all"]
    model, index = load_model("begins", dtype=torch.float64)
    tokenizer = find_tokenizer("begins", index)
    ids = tokenizer.encode(Path("a.txt").read_text())
    loss = model(torch.tensor([[tokenizer.bos, *ids[:-1]]]), torch.tensor([ids])).mean().item()
    assert rows[0]["tokens"] == len(ids) and rows[0]["bytes"] == 28 and rows[1]["bytes"] == 2
    assert rows[0]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)
    assert rows[0]["bits_per_byte"] == pytest.approx(loss * len(ids) / 28 / math.log(2), rel=1e-12)
    for key in ("tokens", "bytes", "log_prob"):
        assert rows[3][key] == sum(row[key] for row in rows[:3])
    total = rows[3]
    assert total["perplexity"] == math.exp(-total["log_prob"] / total["tokens"])
    assert f"{rows[0]['perplexity']:,.4f}" in capsys.readouterr().out


# --- bad input ------------------------------------------------------------------------------------

ASKED = ["--perplexity", "a.txt"]
BAD = {
    "nothing": ([], "--perplexity FILE: name a text"),
    "batch": ([*ASKED, "--batch-size", "0"], "--batch-size 0: must be at least 1"),
    "out": ([*ASKED, "--out", "begins"], "--out begins: must be a new file"),
    "cp": ([*ASKED, "--cp", "2"], "--cp 2: ranks do not share a text"),
    "tp": ([*ASKED, "--tp", "2"], "--tp 2 --pp 1: their product must divide the 1"),
    "text": (["--perplexity", "no.txt"], "--perplexity no.txt: no such file"),
    "adapter": ([*ASKED, "--adapter", "no"], "no: no such folder"),
    "proc": ([*ASKED, "--out", "/proc/a"], "--out /proc/a: cannot be written"),
    "adapters": ([*ASKED, "--adapter", "a", "--adapter", "b"], "with one adapter"),
}


@pytest.mark.parametrize("argv, words", BAD.values(), ids=BAD)
def test_bad_input(argv, words, place, capsys):
    Path("a.txt").write_text("The capital of Peru is Lima.")
    status = evaluate.main(["--checkpoint", "begins", *argv])
    message = capsys.readouterr().err.splitlines()[-1]
    assert status == 2, message
    assert message.startswith("evaluate.py: ") and words in message


def test_perplexity_beyond_the_largest_number():
    row = evaluate.measures("a", 1, 1, -800.0)
    assert row["perplexity"] == math.inf and "inf" in evaluate.table_of([row])


def test_documents_without_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text('{"text": ""}\n')
    Path("some.jsonl").write_text('{"text": ""}\n{"text": "a"}\n')
    assert evaluate.read_files(["empty.jsonl", "some.jsonl"]) == [("some.jsonl:2", "a")]
    with pytest.raises(ValueError, match="no document has any text"):
        evaluate.read_files(["empty.jsonl"])


def test_no_half_of_a_report(tmp_path, monkeypatch):
    def open_full(path, mode):
        Path(path).touch()
        return open("/dev/full", "w")

    monkeypatch.setattr(evaluate, "open", open_full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        evaluate.write(f"{tmp_path}/a.json", {"rows": [1]})
    assert not (tmp_path / "a.json").exists()
