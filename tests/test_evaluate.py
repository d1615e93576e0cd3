"""evaluate.py beside lm-eval's own backend for `transformers`, under every layout, and by hand."""

import contextlib
import copy
import dataclasses
import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import processes
import published_tokenizers
import pytest
import torch
from parity import again
from test_families import FAMILIES
from their_models import their_model

import sharding
from base.model_config import MoEConfig
from base.world import Groups, World
from course import demo, ranks
from inference import evaluate, evaluation_commands
from inference.evaluate import Evaluator
from inference.loading import build_stages, find_chat, find_tokenizer, load_model, materialise
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
    """A folder with models and tasks, in which the tests of this file run."""
    pytest.importorskip(
        "lm_eval", reason="tests/requirements.txt names lm-eval, and it is not here"
    )
    folder = tmp_path_factory.mktemp("evaluation")
    save_model(folder / "begins", True)
    save_model(folder / "plain", False)
    write_tasks(folder / "my_tasks")
    # a metric from the package of this project's file's name
    (folder / "my_tasks" / "counts.py").write_text(
        "def results(doc, answers):\n"
        "    import evaluate\n"
        "    return {'other': float(hasattr(evaluate, 'load'))}\n"
    )
    (folder / "my_tasks" / "metric.yaml").write_text(
        "task: metric\ndataset_path: json\n"
        "dataset_kwargs: {data_files: {test: my_tasks/capitals.jsonl}}\n"
        "output_type: generate_until\ntest_split: test\n"
        "doc_to_text: '{{country}}'\ndoc_to_target: '{{capital}}'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 2}\n"
        "process_results: !function counts.results\n"
        "metric_list: [{metric: other, aggregation: mean, higher_is_better: true}]\n"
    )
    import datasets

    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


def run_command(out: str, *more: str) -> dict:
    """What `python -m inference.evaluate --tasks ..` writes to --out."""
    argv = ["--checkpoint", "begins", "--include-path", "my_tasks", "--out", out, "--tasks"]
    assert evaluation_commands.main([*argv, *TASKS, *more]) == 0
    return json.loads(Path(out).read_text())


@pytest.fixture(scope="module")
def ours(place) -> dict:
    return run_command("ours.json", "metric", "--batch-size", "3")


@pytest.fixture(scope="module")
def backend(place):
    """backend(name): lm-eval's own model of that folder. One text at a time: it goes on with a text
    that has ended while others of its batch have not."""
    from lm_eval.models.huggingface import HFLM

    # BLOOM's configuration does not say
    options = dict(device="cpu", dtype="float32", batch_size=1, max_length=CONTEXT)
    return lambda name: HFLM(pretrained=name, **options)


@pytest.fixture
def harness(place, monkeypatch):
    """inference.harness with the tasks of a folder; those of lm-eval take seconds to list."""
    module = importlib.import_module("inference.harness")
    everything = module.TaskManager

    def manager(include_path, **options):
        return everything(None, include_path, include_defaults=False)

    monkeypatch.setattr(module, "TaskManager", manager)
    return module


def assert_same_answers(found: list, expected: list) -> None:
    """Texts, and whether tokens are the most likely ones, exactly; log-probabilities to 1e-5."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected):
        if isinstance(theirs, str):
            assert ours == theirs
        elif isinstance(theirs, float):
            assert ours == pytest.approx(theirs, rel=1e-5)
        else:
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and ours[1] == theirs[1]


# --- beside lm-eval's own backend -----------------------------------------------------------------


def test_three_tasks_item_by_item(place, ours, backend):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path="my_tasks", include_defaults=False)
    theirs = simple_evaluate(backend("begins"), tasks=list(TASKS), task_manager=manager)
    for name in TASKS:
        expected = theirs["samples"][name]
        found = ours["samples"][name]
        assert len(expected) == len((place / "my_tasks" / f"{name}.jsonl").read_text().splitlines())
        for item, other in zip(found, expected, strict=True):
            assert item["prompt_hash"] == other["prompt_hash"]
            assert_same_answers(item["filtered_resps"], other["filtered_resps"])
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4), metric


LONG = "The capital of Peru is Lima. " * 9
PAIRS = [
    ("The capital of Peru is", " Lima"),
    # spaces belong to the answer
    ("The capital of Peru is  ", "Lima"),
    ("9 + 9 =\n", "18"),
    (LONG, "Lima. The capital"),
    ("a", LONG[:50]),
    ("", "18"),
    ("", "</s>18"),
    ("", "<s>18"),
    ("<s>9 + 9 =", " 18"),
    ("9</s>9", "<|im_end|>"),
]
TEXTS = ["a", "", LONG, "<s>" + LONG * 2, "two\nlines </s>"]
GENERATIONS = [
    ("The capital of Peru is", {"until": ["\n"], "max_gen_toks": 9}),
    ("The capital of", {"until": ["\n"], "max_gen_toks": 9}),
    # cut on the left, beside 40 more
    (LONG, {"until": ";", "max_gen_toks": 40, "do_sample": False, "temperature": 0.7}),
    ("<s>9 + 9 =", {"until": [], "max_new_tokens": 30}),
    # special tokens have no text
    *[(text, {"until": ["<|im_end|>"], "max_gen_toks": 30}) for text in ("9", "8 +", LONG, "a b")],
]


@pytest.mark.parametrize("name", ["begins", "plain"])
def test_texts_become_the_same_tokens(name, harness, backend):
    """Each method of an LM, with the texts that are encoded in more than one way."""
    texts = compare(make_lm(harness, name), backend(name), PAIRS, TEXTS, GENERATIONS)
    assert len({len(text) for text in texts}) > 3


NOW = ["mistral", "bloom, 6 heads"]
LATER = [name for name in FAMILIES if name not in (*NOW, "mixtral")]


@pytest.mark.parametrize("family", [*NOW, *map(again, LATER)])
def test_families(family, harness, backend):
    """A sliding window, ALiBi, and all others: where texts are longer than a window too."""
    save_model(Path(family), family=family)
    compare(make_lm(harness, family), backend(family), PAIRS[:4], TEXTS[:3], GENERATIONS[:3])


def compare(lm, other, pairs: list, texts: list, generations: list) -> list[str]:
    """Two LMs of lm-eval, by each method. Returns what they write."""
    from lm_eval.api.instance import Instance

    def requests(kind: str, arguments: list) -> list[Instance]:
        return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]

    pairs = requests("loglikelihood", pairs)
    assert_same_answers(lm.loglikelihood(pairs), other.loglikelihood(pairs))
    texts = requests("loglikelihood_rolling", [(text,) for text in texts])
    expected = [float(log_p) for log_p in other.loglikelihood_rolling(texts)]
    assert_same_answers(lm.loglikelihood_rolling(texts), expected)
    generations = requests("generate_until", generations)
    # lm-eval changes the lists
    expected = other.generate_until(copies(generations))
    assert_same_answers(lm.generate_until(generations), expected)
    return expected


def copies(requests: list) -> list:
    return [dataclasses.replace(r, arguments=copy.deepcopy(r.arguments)) for r in requests]


def test_nothing_to_score(harness):
    """Not 0, with which it would be the most likely answer."""
    with pytest.raises(ValueError, match="'a' comes '': the continuation has no token of its own"):
        make_lm(harness, "begins").pair("a", "")


def make_lm(harness, name: str, chat: bool = False):
    """HarnessLM over the model in that folder, on one device."""
    model, index = load_model(name)
    tokenizer = find_tokenizer(name, index)
    evaluator = Evaluator(model, tokenizer, Groups(), 3)
    template = harness.find_template(find_chat(name, tokenizer)) if chat else None

    def call(method, *arguments):
        return getattr(evaluator, method)(*arguments)

    return harness.HarnessLM(evaluator, call, template)


def test_chat_template(harness, backend):
    lm = make_lm(harness, "begins", chat=True)
    other = backend("begins")
    history = [
        {"role": "user", "content": "2 + 3"},
        {"role": "assistant", "content": " 5 "},
        {"role": "user", "content": "4 + 4"},
    ]
    for messages, asks in ((history, True), (history[:2], False)):
        # both may change the list
        text = lm.apply_chat_template(list(messages), add_generation_prompt=asks)
        assert text == other.apply_chat_template(messages, add_generation_prompt=asks)
        # one begin token, and the special tokens of turns
        assert lm.encode(text) == other.tok_encode(text)
    assert lm.chat_template(True) == other.chat_template(True) == TEMPLATE


# --- the command under torchrun -------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["--tp", pytest.param("--pp", marks=pytest.mark.repetition)])
def test_command_on_two_ranks(layout, ours):
    argv = ["--checkpoint", "begins", "--include-path", "my_tasks", "--out", f"two{layout}.json"]
    done = processes.run(
        ["inference/evaluate.py", layout, 2, *argv, "--tasks", *TASKS, "metric"], world=2
    )
    assert done.returncode == 0, done.stderr
    # rank 0 alone prints
    assert done.stdout.count("|capitals") == 1
    found = json.loads(Path(f"two{layout}.json").read_text())
    for name in TASKS:
        for item, other in zip(found["samples"][name], ours["samples"][name], strict=True):
            assert_same_answers(item["filtered_resps"], other["filtered_resps"])
    # a task that imports `evaluate` finds Hugging Face's package
    assert found["results"]["metric"]["other,none"] == 1


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
    prompts = [text[:n] for n, text in enumerate(texts[1:8], 1)]
    written = evaluator.generate(prompts, 6, ["\x10"], {"temperature": 0.0})
    # equal prompts draw each its own text, in one batch and in two
    prompts += [[7]] * 3
    drawn = evaluator.generate(prompts, 6, [], {"temperature": 1.0, "top_k": 99})
    assert len(set(drawn[-3:])) == 3
    return {
        "pairs": evaluator.log_likelihoods([(text[:-2], text[-2:]) for text in texts]),
        "rolling": evaluator.rolling([*texts, []], 256),
        "texts": (written, drawn),
    }


def ask_on_rank(rank: int) -> dict:
    found = {}
    for model, fields in MODELS.items():
        layouts = LAYOUTS | ({"ep 2": dict(ep=2)} if model == "experts" else {})
        for layout, sizes in layouts.items():
            groups = Groups.make("cpu", 2, **sizes)
            evaluator = make_evaluator(groups, fields)
            found[model, layout] = ask(evaluator)
    follow(rank)
    not_finite(rank)
    # neither the file nor the command imports it before a task is asked for
    assert "lm_eval" not in sys.modules
    return found


def follow(rank: int) -> None:
    """An error of lm-eval on rank 0 does not leave the others waiting."""
    world = World(rank, 2, rank, 2, 0, torch.device("cpu"), Groups.make("cpu", 2))
    evaluator = make_evaluator(world.groups, MODELS["gpt"])

    def work(call):
        call("rolling", [[1, 2, 3]], 0)
        raise KeyError("a task's own")

    with pytest.raises(KeyError) if rank == 0 else contextlib.nullcontext():
        assert evaluation_commands.lead(world, evaluator, work) is None


def not_finite(rank: int) -> None:
    """Where one rank's weights are not, all raise the error."""
    evaluator = make_evaluator(Groups.make("cpu", 2), MODELS["gpt"])
    if rank == 1:
        evaluator.model.head.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        evaluator.log_likelihoods([([1], [2])] * 8)
    with pytest.raises(FloatingPointError, match="not finite"):
        evaluator.generate([[1]] * 8, 2, [], {"temperature": 0.0})


def test_every_layout_is_one_device():
    of_ranks = ranks.run(ask_on_rank, 2)
    for (model, layout), found in of_ranks[0].items():
        expected = ask(make_evaluator(Groups(), MODELS[model], batch_size=6))
        # every rank has all results
        assert of_ranks[1][model, layout] == found
        assert found["texts"] == expected["texts"], (model, layout)
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


def test_perplexity_of_documents(place, capsys, monkeypatch):
    """Without lm-eval. Of a text in one window, it is the exponential of the training loss."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    Path("a.txt").write_text("The capital of Peru is Lima.")
    Path("b.jsonl").write_text(json.dumps({"text": "é"}) + "\n" + json.dumps({"text": LONG}))
    argv = ["--checkpoint", "begins", "--perplexity", "a.txt", "b.jsonl", "--precision", "fp64"]
    assert evaluation_commands.main([*argv, "--out", "documents.json"]) == 0
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

BAD = {
    "nothing": ([], "--tasks NAME or --perplexity FILE"),
    "unknown": (["--tasks", "sums", "sumz"], "--tasks sumz: lm-eval has no task of this name"),
    "folder": (["--tasks", "sums", "--include-path", "no"], "--include-path no: no such folder"),
    "shots": (["--tasks", "sums", "--num-fewshot", "-1"], "--num-fewshot -1: must be at least 0"),
    "limit": (["--tasks", "sums", "--limit", "0"], "--limit 0: must be at least 1"),
    "batch": (["--tasks", "sums", "--batch-size", "0"], "--batch-size 0: must be at least 1"),
    "out": (["--tasks", "sums", "--out", "my_tasks"], "--out my_tasks: must be a new file"),
    "cp": (["--tasks", "sums", "--cp", "2"], "--cp 2: ranks do not share a text"),
    "tp": (["--tasks", "sums", "--tp", "2"], "--tp 2 --pp 1: their product must divide the 1"),
    "text": (["--perplexity", "no.txt"], "--perplexity no.txt: no such file"),
    "adapter": (["--tasks", "sums", "--adapter", "no"], "no: no such folder"),
    "room": (["--tasks", "long"], "--tasks: 64 new tokens (max_gen_toks) leave no room"),
    "beams": (["--tasks", "beams"], "generation_kwargs has num_beams"),
    "answer": (["--tasks", "answer"], "the continuation has 101 tokens, and the model's context"),
    "of tasks": (["--perplexity", "a", "--limit", "2"], "--limit: is of --tasks"),
    "proc": (["--tasks", "sums", "--out", "/proc/a"], "--out /proc/a: cannot be written"),
    "adapters": (["--tasks", "sums", "--adapter", "a", "--adapter", "b"], "with one adapter"),
    "examples": (["--tasks", "sums", "--num-fewshot", "9"], "fewer examples than --num-fewshot"),
    "field": (["--tasks", "field"], "--tasks field: lm-eval cannot ask this (UndefinedError: "),
    "split": (["--tasks", "split"], "--tasks split: lm-eval cannot ask this (KeyError: 'absent')"),
    "words": (["--tasks", "words"], "a perplexity is too large for a number"),
    "package": (["--tasks", "package"], "(No module named 'none_such'): pip install it"),
    "length": (["--tasks", "length"], "max_tokens -1: must be at least 0"),
    "data": (["--tasks", "lost"], "--tasks lost: lm-eval cannot have their data"),
}


@pytest.mark.parametrize("argv, words", BAD.values(), ids=BAD)
def test_bad_input(argv, words, harness, place, capsys):
    capitals = (place / "my_tasks" / "capitals.yaml").read_text()
    sums = (place / "my_tasks" / "sums.yaml").read_text()
    prose = (place / "my_tasks" / "prose.yaml").read_text()
    for name, text in {
        "long": capitals.replace("max_gen_toks: 12", "max_gen_toks: 64"),
        "beams": capitals.replace("max_gen_toks: 12", "num_beams: 4"),
        "answer": sums.replace("choices", f"['{'x' * 100}', 'a', 'b']"),
        "lost": sums.replace("sums.jsonl", "lost.jsonl"),
        "field": sums.replace("{{question}}", "{{ask}}"),
        "split": sums.replace("test_split: test", "test_split: absent"),
        "words": prose.replace("{{text}}", "{{'1+' * 2000}}"),
        "package": sums.replace("doc_to_target: answer", "doc_to_target: !function lacks.target"),
        "length": capitals.replace("max_gen_toks: 12", "max_gen_toks: -1"),
    }.items():
        (place / "my_tasks" / f"{name}.yaml").write_text(re.sub("task: .*", f"task: {name}", text))
    (place / "my_tasks" / "lacks.py").write_text("import none_such\n")
    mine = ["--include-path", "my_tasks"] if "--tasks" in argv else []
    status = evaluation_commands.main(["--checkpoint", "begins", *mine, *argv])
    message = capsys.readouterr().err.splitlines()[-1]
    assert status == 2, message
    assert message.startswith("evaluate.py: ") and words in message


def test_patterns_of_task_names(harness):
    assert harness.find_tasks(["*ums", "prose"], ["my_tasks"])[1] == ["prose", "sums"]


def test_an_error_of_the_evaluator_is_no_fault_of_a_task(harness):
    """It keeps its class, and so its traceback."""
    evaluator = SimpleNamespace(tokenizer=ByteTokenizer(), config=SimpleNamespace(seq_length=99))
    manager = harness.TaskManager(include_path="my_tasks")

    def call(name, *arguments):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        harness.run_tasks(harness.HarnessLM(evaluator, call), manager, ["prose"], None, None)


def test_perplexity_beyond_the_largest_number():
    row = evaluation_commands.measures("a", 1, 1, -800.0)
    assert row["perplexity"] == math.inf and "inf" in evaluation_commands.table_of([row])


def test_documents_without_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text('{"text": ""}\n')
    Path("some.jsonl").write_text('{"text": ""}\n{"text": "a"}\n')
    assert evaluation_commands.read_files(["empty.jsonl", "some.jsonl"]) == [("some.jsonl:2", "a")]
    with pytest.raises(ValueError, match="no document has any text"):
        evaluation_commands.read_files(["empty.jsonl"])


def test_no_half_of_a_report(tmp_path, monkeypatch):
    class Report:
        def __str__(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluation_commands.write(f"{tmp_path}/a.json", {"rows": [1, Report()]})
    assert not list(tmp_path.iterdir())


def test_without_lm_eval(place, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    argv = ["--checkpoint", "begins", "--tasks", "sums"]
    assert evaluation_commands.main(argv) == 2
    assert "pip install lm-eval" in capsys.readouterr().err


def test_model_without_a_chat_template(harness):
    tokenizer = ByteTokenizer()
    with pytest.raises(ValueError, match="has no chat template"):
        harness.find_template(find_chat("begins", tokenizer))
