"""Prompt tuning: templates and labels worked out by hand, encoders against PEFT's, gradients under
every layout against one device, and the commands from a checkpoint to a prompt file and back."""

import json
import shutil

import parity
import processes
import pytest
import torch
from safetensors.torch import load_file
from small_run import template, write_lines
from test_generate import loud, save
from test_gpt import LLAMA_SHAPES, build
from test_tokenizer import words as word_tokenizer

import prompt_tuning
import sequence_parallel
import tensor_parallel
from base.errors import InputError
from base.model_config import GPTConfig
from finetune import prompt_data
from finetune import prompt_tuning as prompt_command
from finetune.nemo_config import PromptConfig
from finetune.packing import Padded
from finetune.prompt_template import Template
from gpt import GPT
from inference import loading
from inference import prompt_tuning as prompt_answers
from prompt_tuning import (
    PARAMETER_PREFIX,
    PromptError,
    PromptTasks,
    PTuning,
    VirtualPrompts,
    apply,
    apply_tables,
    initial_values,
)
from run import checkpoint
from run.tokenizer import ByteTokenizer
from sharding import num_parameters

# of the byte tokenizer
V = 257


def config(new=("a", "b"), existing=(), style="prompt-tuning", **fields):
    """The content of --prompt-config."""
    templates = [template(name) for name in (*new, *existing)]
    tasks = dict(task_templates=templates, new_tasks=list(new), existing_tasks=list(existing))
    settings = dict(new_prompt_init_methods=["random"] * len(new))
    return tasks | dict(virtual_prompt_style=style, prompt_tuning=settings) | fields


# --- templates and data ---------------------------------------------------------------------------


def show(token):
    """One byte token for people: <0> for the first virtual token, $ for the end of text."""
    if token >= V:
        return f"<{token - V}>"
    return "$" if token == 256 else chr(token)


def filled(fields, record, first=V, limit=64, **options):
    """The template of these fields, filled with a record, as text; None where it is too long."""
    example = Template(**fields).fill(record, ByteTokenizer(), first, limit, **options)
    return example and "".join(map(show, example.ids))


def test_a_template_by_hand():
    t = template()
    record = {"text": "good", "label": "ok"}
    example = Template(**t).fill(record, ByteTokenizer(), V, 64)
    assert "".join(map(show, example.ids)) == "<0><1><2>good is<3><4>ok$"
    assert example.counted.index(True) == 12
    assert not example.truncated
    question = filled(t, {"text": "good"}, first=V + 10, answer=False)
    assert question == "<10><11><12>good is<13><14>"
    # cut from its end
    assert filled(t, record, limit=13) == "<0><1><2>go is<3><4>ok$"
    assert filled(t, record, limit=11) == "<0><1><2> is<3><4>ok$"
    assert filled(t, record, limit=10) is None
    assert filled(template(truncate_field=None), record, limit=14) is None
    everywhere = template(text="{text}<|VIRTUAL_PROMPT_1|>, <|VIRTUAL_PROMPT_0|>{label}")
    assert filled(everywhere, record) == "good<3><4>, <0><1><2>ok$"
    assert filled(t, {"text": 3, "label": 0.5}) == "<0><1><2>3 is<3><4>0.5$"
    # a field's value is text, whatever stands in it
    tricky = {"text": "{label}<|VIRTUAL_PROMPT_0|>", "label": "x"}
    assert filled(t, tricky) == "<0><1><2>{label}<|VIRTUAL_PROMPT_0|> is<3><4>x$"


def test_labels_by_hand():
    """The loss is taken on the answer and the end of text; without answer_only_loss on all text;
    never on a virtual token."""
    answer = Template(**template())
    whole = Template(**template(answer_only_loss=False))
    for t, expected in ((answer, "ok$"), (whole, "good isok$")):
        example = t.fill({"text": "good", "label": "ok"}, ByteTokenizer(), V, 64)
        data = Padded([example], None, multiple_of=4)
        batch = data.batch([0])
        assert data.s == 16
        assert batch.tokens.shape == batch.targets.shape == (1, 16)
        targets = batch.targets[batch.loss_mask].tolist()
        assert "".join(map(show, targets)) == expected
        assert data.counted_tokens([0]) == len(expected) == int(batch.loss_mask.sum())
        assert batch.targets.max() < V
        assert batch.targets[~batch.loss_mask].sum() == 0
        # a target is the next token
        mask = batch.loss_mask[:, :-1]
        shifted = batch.tokens[:, 1:][mask].tolist()
        assert shifted == batch.targets[:, :-1][mask].tolist()


MARKERS = "<|VIRTUAL_PROMPT_0|><|VIRTUAL_PROMPT_1|>"


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(splits=(3,)), r"markers .* have the numbers \[0, 1\]"),
        (dict(total_virtual_tokens=9), r"add up to total_virtual_tokens 9, not to 5"),
        (dict(splits=(5, 0)), r"`int` >= 1 - at `\$.task_templates\[0\].virtual_token_splits"),
        (dict(splits=(3, True)), r"Expected `int`, got `bool`"),
        (dict(truncate_field="nope"), r"truncate_field 'nope' is not a field"),
        (dict(answer_field="text", truncate_field=None), r"must end the template"),
        (dict(answer_field=None), r"needs an answer_field"),
        (dict(truncate_field="label"), r"also the truncate_field"),
        (dict(text=MARKERS + "{text}{text}{label}"), r"stands twice"),
        (dict(text=MARKERS + "{prediction}{label}", truncate_field=None), r"may not be called"),
        (dict(name="a.b"), r"letters, digits"),
        (dict(name="__metadata__"), r"does not begin"),
    ],
)
def test_bad_templates(fields, words):
    with pytest.raises(InputError, match=words):
        PromptConfig.of(dict(task_templates=[template(**fields)], new_tasks=["t"]))


def p_tuning(**encoder):
    return config(style="p-tuning", p_tuning=encoder)


@pytest.mark.parametrize(
    "content, words",
    [
        (config(task_templates=[template("a")]), r"new_tasks: 'b' has no template; there are \['a"),
        (config(existing=("c",)), r"restore_path must name"),
        (config(style="tuning"), r"virtual_prompt_style 'tuning'"),
        (config(colour=1), r"unknown field `colour`"),
        (config(data=dict(train=[])), r"unknown field `train` - at `\$.data`"),
        (config(new=("a", "a")), r"two have the same taskname"),
        (config(new=()), r"new_tasks is empty"),
        (config(existing=("a",), new=("a",), task_templates=[template("a")]), r"there twice"),
        (config(prompt_tuning=dict(new_prompt_init_methods=["text"] * 2)), r"and none stands"),
        (config(prompt_tuning={}), r"one of text and random for each"),
        (config(task_templates=[{}]), r"missing required field `taskname`"),
        (config(new_tasks="a"), r"Expected `array`, got `str` - at `\$.new_tasks`"),
        (config(data=dict(max_seq_length=-3)), r"Expected `int` >= 1"),
        (config(style="fine-tuning"), r"has 5 virtual tokens"),
        (p_tuning(encoder_type="gru"), r"encoder_type 'gru': must be one of mlp, lstm, tpmlp"),
        (p_tuning(encoder_type="tpmlp", num_layers=3), r"num_layers 3: tpmlp has 2"),
        (p_tuning(num_layers=1), r"num_layers 1: mlp has 2 to 64"),
        (p_tuning(num_layers=10**9), r"Expected `int` <= 64"),
        (p_tuning(dropout=0.1), r"dropout 0.1: must be 0"),
        (p_tuning(encoder_hidden=10**30), r"Expected `int` <= 65536"),
    ],
)
def test_bad_configurations(content, words):
    with pytest.raises(InputError, match=words):
        PromptConfig.of(content)


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"taskname": "a", "text": "x"}', r"has the fields .*; the line lacks \['label'\]"),
        ("{oh", r"not JSON"),
        ('{"taskname": []}', r"taskname \[\] is none"),
        ('{"taskname": "z"}', r"taskname 'z' is none of the tasks here, \['a', 'b'\]"),
        ('{"taskname": "a", "text": "x", "label": "y", "more": 1}', r"also has \['more'\]"),
        ('{"taskname": "a", "text": ["x"], "label": "y"}', r"field 'text' is neither"),
    ],
)
def test_bad_lines(line, words, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"taskname": "a", "text": "x", "label": "y"}\n\n' + line + "\n")
    with pytest.raises(InputError, match=f"d.jsonl, line 3: .*{words}"):
        read_examples(path, PromptConfig.of(config()), 64)


def read_examples(path, c, limit):
    templates, first_ids = c.templates, c.prompt_tasks.first_ids(V)
    return prompt_data.read_examples([str(path)], templates, first_ids, ByteTokenizer(), limit)


def test_what_is_too_long_is_counted(tmp_path):
    """Every `no` of task b is too long: that class will not be learned."""
    c = PromptConfig.of(config(task_templates=[template("a"), template("b", truncate_field=None)]))
    path = tmp_path / "d.jsonl"
    lengths = [("a", 5, "y"), ("a", 50, "y"), ("b", 5, "yes"), ("b", 50, "no"), ("b", 60, "no")]
    write_lines(path, [dict(taskname=t, text="x" * n, label=label) for t, n, label in lengths])
    examples, records, summary = read_examples(path, c, 32)
    counts, warning = summary.split("; ")
    assert counts == "3 examples, 1 truncated and 2 skipped (longer than 32 tokens)"
    assert warning == "every example of b, label 'no' is skipped (2)"
    assert len(records) == len(examples) == 5
    assert max(len(example.ids) for example in examples if example) == 32
    with pytest.raises(PromptError, match="no examples; 5 are longer than 5 tokens"):
        read_examples(path, c, 5)


# --- tables and encoders --------------------------------------------------------------------------


def test_parameters_by_the_paper():
    """h 768, two tasks of 100 virtual tokens: 153,600 (FACTS), and nothing else learns."""
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=2, hidden_size=768, num_heads=12))
    model.requires_grad_(False)
    templates = [template(name, splits=(60, 40)) for name in "ab"]
    apply(model, PromptConfig.of(config(task_templates=templates)).prompt_tasks)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 153_600
    # the embedding counts once
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model)


def test_an_encoder_beyond_memory_is_refused(monkeypatch):
    """65,536 wide it has 4 10^9 numbers: not one of them is allocated."""
    monkeypatch.setattr("run.world.memory", lambda device, ranks: 2**35)
    expected = r"p_tuning.encoder_hidden 65536: takes 68,.* bytes, and cpu has 34,359,738,368"
    with pytest.raises(checkpoint.CheckpointError, match=expected):
        prompt_command.check_room(PromptTasks({}, [], PTuning("mlp", 2**16, 3)), 8)


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_encoders_equal_peft(kind):
    """PEFT's PromptEncoder with the same weights: the same structure, so the same numbers. (Its MLP
    always has three layers; ours keeps a sequence [T, h], theirs a batch of it.)"""
    peft = pytest.importorskip("peft")
    h, e, T = 24, 10, 7
    settings = peft.PromptEncoderConfig(
        peft_type="P_TUNING",
        task_type="CAUSAL_LM",
        num_virtual_tokens=T,
        token_dim=h,
        num_transformer_submodules=1,
        num_attention_heads=2,
        num_layers=2,
        encoder_reparameterization_type=kind.upper(),
        encoder_hidden_size=e,
        encoder_num_layers=2,
        encoder_dropout=0.0,
    )
    theirs = peft.PromptEncoder(settings).double()
    ours = prompt_tuning.ENCODERS[kind](h, PTuning(kind, e, 3 if kind == "mlp" else 2)).double()

    def their_name(name):
        part, rest = name.split(".", 1)
        return f"{dict(layers='mlp_head', lstm='lstm_head')[part]}.{rest}"

    weights = theirs.state_dict()
    ours.load_state_dict({name: weights[their_name(name)] for name in ours.state_dict()})
    # and their embedding, our inputs
    assert len(ours.state_dict()) + 1 == len(weights)
    inputs = theirs.embedding.weight.detach().clone().requires_grad_()
    a = ours(inputs)
    b = theirs(torch.arange(T).unsqueeze(0))[0]
    a.square().sum().backward()
    b.square().sum().backward()
    exact = dict(rtol=1e-12, atol=1e-14)
    assert torch.allclose(a, b, **exact)
    assert torch.allclose(inputs.grad, theirs.embedding.weight.grad, **exact)
    for name, p in ours.named_parameters():
        assert torch.allclose(p.grad, theirs.get_parameter(their_name(name)).grad, **exact)


def test_a_table_is_what_the_model_would_read():
    """Virtual tokens whose vectors are those of words are those words; and each task reads its own
    rows."""
    model = loud(build(torch.float64, **LLAMA_SHAPES[1] | dict(vocab_size=V)))
    words = {"a": [5, 6, 7, 8, 9], "b": [50, 60, 70, 80, 90]}
    embedding = model.embedding.tokens.weight.detach()
    with torch.no_grad():
        plain = {task: model(torch.tensor([[1, *ids, 2]])) for task, ids in words.items()}
        first = apply_tables(model, {task: embedding[ids] for task, ids in words.items()})
        assert first == {"a": V, "b": V + 5}
        for task, i in first.items():
            assert torch.equal(model(torch.tensor([[1, *range(i, i + 5), 2]])), plain[task])
        with pytest.raises(IndexError):
            model(torch.tensor([[V + 10]]))


def test_values_at_the_start():
    embedding = torch.arange(V * 8.0).view(V, 8)

    def values_from(text):
        settings = dict(
            new_prompt_init_methods=["text", "random"], new_prompt_init_text=[text, None]
        )
        c = PromptConfig.of(config(prompt_tuning=settings))
        return initial_values(c.prompt_tasks, 8, 0, c.init_texts, ByteTokenizer(), embedding)

    values = values_from("ab")
    assert torch.equal(values["tables.task-a"], embedding[[97, 98, 97, 98, 97]])
    assert 0.01 < values["tables.task-b"].std() < 0.03
    assert torch.equal(values_from("abcdefgh")["tables.task-a"], embedding[97:102])
    for kind in prompt_tuning.ENCODERS:
        encoder = dict(encoder_type=kind, encoder_hidden=6, init_std=0.5)
        c = PromptConfig.of(p_tuning(**encoder)).prompt_tasks
        values = initial_values(c, 8, 0)
        assert values.keys() == dict(VirtualPrompts(c, 8).named_parameters()).keys()
        assert all(value.abs().max() > 0 for value in values.values())
        assert not torch.equal(values["inputs.task-a"], values["inputs.task-b"])
        again = initial_values(c, 8, 0)
        assert torch.equal(again["inputs.task-a"], values["inputs.task-a"])


# --- under every layout: gradients of one device --------------------------------------------------


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """{table, or an encoder: its configuration file}"""
    folder = tmp_path_factory.mktemp("prompts")
    contents = {"table": config()}
    for kind in prompt_tuning.ENCODERS:
        contents[kind] = p_tuning(encoder_type=kind, encoder_hidden=6)
    paths = {}
    for kind, content in contents.items():
        path = folder / f"{kind}.json"
        path.write_text(json.dumps(content))
        paths[kind] = str(path)
    return paths


def flags_of(path, base=parity.SMALL):
    """A run of tests/parity.py that learns prompts: several micro-batches, two tasks in each."""
    settings = dict(command="prompt_tuning.py", prompt_config=path)
    return base | settings | dict(dropout=0.0, micro_batch_size=2)


TP, SEQUENCE, PP = dict(tp=2), dict(tp=2, sequence_parallel=True), dict(pp=2)
ZERO_1, ZERO_2, ZERO_3 = (dict(zero_stage=stage) for stage in (1, 2, 3))
ZERO_BUBBLE = PP | dict(schedule="zb-h1")


@pytest.mark.parametrize(
    "world, kind, model, layouts",
    [
        (2, "table", parity.SMALL, [SEQUENCE, PP, ZERO_1, ZERO_3, dict(cp=2)]),
        (2, "mlp", parity.SMALL, [SEQUENCE, ZERO_BUBBLE, ZERO_2]),
        (2, "mlp", parity.LLAMA, [SEQUENCE, PP]),
        (2, "mlp", parity.LLAMA | dict(num_experts=4), [SEQUENCE, dict(ep=2)]),
        (2, "lstm", parity.SMALL, [SEQUENCE, PP | dict(recompute="full"), ZERO_3]),
        (2, "tpmlp", parity.SMALL, [TP, SEQUENCE, ZERO_3]),
        (4, "tpmlp", parity.SMALL, [TP | ZERO_BUBBLE]),
        parity.again(2, "table", parity.SMALL, [TP, {}]),
        parity.again(
            4, "tpmlp", parity.SMALL, [SEQUENCE | ZERO_3, PP | ZERO_1, SEQUENCE | dict(cp=2)]
        ),
    ],
    ids=str,
)
def test_gradients_of_one_device(settings, world, kind, model, layouts):
    """Float64, 1e-10: loss, norm, every gradient of a prompt parameter, their values after three
    steps. The GPT is tied and pads its vocabulary."""
    base = flags_of(settings[kind], model)
    one = parity.train(base=base)
    assert one.gradients
    assert all(name.startswith(PARAMETER_PREFIX) for name in one.gradients)
    for result in parity.train_each(world, layouts, base=base):
        parity.same(result, one)


def no_sum_of_shards():
    without = dict(vars(tensor_parallel), copy_to_ranks=staticmethod(lambda x, group: x))
    prompt_tuning.tensor_parallel = type("", (), without)


def no_sum_of_encoder_parts():
    sequence_parallel.STARTS[tensor_parallel.CopyToRanks] = sequence_parallel.NOTHING


def a_table_for_all_tasks():
    prompt_tuning.PromptTasks.first_ids = lambda self, vocab_size: dict.fromkeys(
        self.tokens, vocab_size
    )


@pytest.mark.parametrize(
    "mutate, kind, flags",
    [
        (no_sum_of_shards, "mlp", SEQUENCE),
        (no_sum_of_encoder_parts, "tpmlp", TP),
        (a_table_for_all_tasks, "table", {}),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_gate_sees(settings, mutate, kind, flags):
    base = flags_of(settings[kind])
    parity.differs(parity.train(2, mutate=mutate, base=base, **flags), parity.train(base=base))


def test_only_prompts_have_gradients_and_state(settings):
    """Nothing is kept for what is frozen: 2 tables [5, 32], a gradient and two moments each, in
    float64."""
    flags = dict(command="prompt_tuning.py", prompt_config=settings["table"], dropout=0.0)
    trainer = parity.trainer_of(**flags)
    trainer.forward_backward(1, parity.Prompted(16, 61, trainer.task.learned.prompts))
    parameters = dict(trainer.stages[0].named_parameters())
    learned = {name for name, p in parameters.items() if p.requires_grad}
    tables = ("tables.task-a", "tables.task-b")
    assert learned == {PARAMETER_PREFIX + name for name in tables}
    for name, p in parameters.items():
        assert p.grad is None
        assert (getattr(p, "main_grad", None) is not None) == (name in learned)
    state = trainer.optimizer.tensors()
    assert {name.split(".", 1)[1] for name in state} == learned
    moments = [tensor for name, tensor in state.items() if name.startswith("exp")]
    assert sum(tensor.nbytes for tensor in moments) == 2 * 8 * 10 * 32


# --- from a checkpoint to a prompt file and back --------------------------------------------------


def records_of(task, n):
    """Texts of the letters x, y and z; the label alternates, the other way round in task b."""
    labels = ("yes", "no") if task == "b" else ("no", "yes")
    texts = ["xyz"[i % 3] * (i + 1) for i in range(n)]
    return [dict(taskname=task, text=x, label=labels[i % 2]) for i, x in enumerate(texts)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The checkpoint of a model that has norms of its own, and lines for two tasks."""
    folder = tmp_path_factory.mktemp("base")
    model = loud(build(**LLAMA_SHAPES[1] | dict(vocab_size=V, seq_length=48)))
    with torch.no_grad():
        model.head.norm.weight.add_(torch.linspace(0, 0.1, 64))
    save(folder, model)
    for name, n in (("train", 12), ("test", 6)):
        of_a, of_b = records_of("a", n), records_of("b", n)
        in_turn = [record for pair in zip(of_a, of_b) for record in pair]
        for task, records in (("-a", of_a), ("-b", of_b), ("", in_turn)):
            write_lines(folder / f"{name}{task}.jsonl", records)
    return folder


TRAIN_FLAGS = "--steps 4 --lr 0.05 --warmup-steps 1 --global-batch-size 4 --device cpu".split()
INFER_FLAGS = "--device cpu --max-tokens 6".split()


def learn(out, content, *flags):
    """A run. Its configuration is written to OUT.json. Returns the exit status."""
    path = out.with_suffix(".json")
    path.write_text(json.dumps(content))
    argv = ["--config", str(path), "--out", str(out), *TRAIN_FLAGS, *flags]
    return prompt_command.main(argv)


def infer(command, prompts, base, data, capsys):
    """`generate` or `evaluate`. Returns (exit status, standard output, standard error)."""
    paths = ["--prompts", str(prompts), "--checkpoint", str(base), "--data", str(data)]
    status = prompt_answers.main([command, *paths, *INFER_FLAGS])
    return status, *capsys.readouterr()


def for_base(base, new="ab", **fields):
    """The configuration that learns the tasks in `new` for the model of the fixture `base`."""
    task = "" if len(new) == 2 else f"-{new}"
    names = dict(train_ds="train", validation_ds="test")
    lines = {field: [str(base / f"{name}{task}.jsonl")] for field, name in names.items()}
    return config(tuple(new), **fields) | dict(language_model_path=str(base), data=lines)


def files_in(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.name: path.read_bytes() for path in files}


def test_tasks_one_after_the_other(base, tmp_path, capsys):
    """Task a by p-tuning, then b by prompt tuning from a text. a's table and answers stay as they
    are, bit for bit, when b is learned, and so does the model."""
    before = files_in(base / "checkpoints")
    of_a = for_base(base, "a", style="p-tuning", p_tuning=dict(encoder_hidden=8))
    assert learn(tmp_path / "a", of_a) == 0
    out = capsys.readouterr().out
    inputs_and_encoder = 5 * 64 + 64 * 8 + 8 + 8 * 64 + 64
    assert f"all frozen, and {inputs_and_encoder:,} prompt parameters" in out
    prompts_a, prompts_b = (tmp_path / task / "prompts.safetensors" for task in "ab")
    text = dict(new_prompt_init_methods=["text"], new_prompt_init_text=["yes or no"])
    existing = dict(existing=("a",), restore_path=str(prompts_a))
    assert learn(tmp_path / "b", for_base(base, "b", prompt_tuning=text, **existing)) == 0
    capsys.readouterr()
    first, second = load_file(prompts_a), load_file(prompts_b)
    assert list(first["a"].shape) == [5, 64] and list(first) == ["a"] and list(second) == ["a", "b"]
    assert torch.equal(first["a"], second["a"])
    assert prompts_a.stat().st_size < 3000
    answers = {}
    for prompts, lines in ((prompts_a, "test-a.jsonl"), (prompts_b, "test.jsonl")):
        status, out, _ = infer("generate", prompts, base, base / lines, capsys)
        assert status == 0
        answers[prompts] = [json.loads(line) for line in out.splitlines()]
    assert len(answers[prompts_b]) == 12
    assert [answer for answer in answers[prompts_b] if answer["taskname"] == "a"] == answers[
        prompts_a
    ]
    status, out, _ = infer("evaluate", prompts_b, base, base / "test.jsonl", capsys)
    assert {task: result["examples"] for task, result in json.loads(out).items()} == dict(a=6, b=6)
    # prompt parameters and their optimizer state, and nothing else
    saved = checkpoint.read_index(checkpoint.find(tmp_path / "a"))["tensors"]
    assert all(name.split(".", 1)[1].startswith(PARAMETER_PREFIX) for name in saved)
    assert files_in(base / "checkpoints") == before


def test_the_prompt_file_of_split_masters_is_in_fp32(base, tmp_path, capsys):
    """With bf16 state a table is the upper half of its master; the file has both halves."""
    flags = "--precision bf16 --optimizer-state bf16 --steps 1".split()
    assert learn(tmp_path / "a", for_base(base, "a"), *flags) == 0
    table = load_file(tmp_path / "a" / "prompts.safetensors")["a"]
    saved = {f"model.{PARAMETER_PREFIX}tables.task-a": torch.zeros_like(table)}
    checkpoint.load(checkpoint.find(tmp_path / "a"), saved)
    (master,) = saved.values()
    assert torch.equal(table, master) and not torch.equal(table, table.bfloat16().float())


def test_resume_goes_on_bit_for_bit(base, tmp_path, capsys):
    encoder = dict(encoder_type="lstm", encoder_hidden=4)
    content = for_base(base, style="p-tuning", p_tuning=encoder)
    assert learn(tmp_path / "whole", content, "--steps", "6") == 0
    assert learn(tmp_path / "parts", content, "--steps", "6", "--save-every", "3") == 0
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000006")
    (tmp_path / "parts" / "prompts.safetensors").unlink()
    assert learn(tmp_path / "parts", content, "--steps", "6", "--resume") == 0
    assert "resuming after step 3" in capsys.readouterr().out
    whole, parts = (tmp_path / name / "prompts.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_a_base_that_has_changed_since_is_refused(base, tmp_path, capsys):
    """The prompts were learned for another model: their values would mean nothing."""
    model = tmp_path / "model"
    shutil.copytree(base, model)
    content = for_base(base) | dict(language_model_path=str(model))
    assert learn(tmp_path / "run", content) == 0
    trained = loading.load_model(model)[0]
    trained.head.norm.weight.data.add_(0.01)
    save(model, trained, step=2)
    capsys.readouterr()
    resume = ["--steps", "6", "--resume"]
    assert learn(tmp_path / "run", content, *resume) == 2
    error = capsys.readouterr().err
    assert f"--load {model}: is not the model that the run in" in error
    first_step = str(model / "checkpoints/step-000001")
    assert learn(tmp_path / "run", content, *resume, "--load", first_step) == 0


def test_fine_tuning_and_adapters_by_the_same_templates(base, tmp_path, capsys):
    """Without virtual tokens the whole model learns, or adapters: templates only name the data.
    Prompts beside adapters are refused."""
    templates = [template(name, (), "{text} is {label}") for name in "ab"]
    content = for_base(base, style="fine-tuning") | dict(task_templates=templates)
    tuned, lora = tmp_path / "tuned", tmp_path / "lora"
    assert learn(tuned, content) == 0
    capsys.readouterr()
    status, out, _ = infer(
        "evaluate", tuned.with_suffix(".json"), tuned, base / "test.jsonl", capsys
    )
    assert status == 0 and json.loads(out)["a"]["examples"] == 6
    saved, weights = (checkpoint.read_index(checkpoint.find(of))["tensors"] for of in (tuned, base))
    # a weight and its two moments
    assert len(saved) == 3 * len(weights)
    assert learn(lora, content, "--peft", "lora", "--lora-rank", "2") == 0
    assert "train_ds: " in capsys.readouterr().out
    saved = checkpoint.read_index(checkpoint.find(lora))["tensors"]
    assert saved and all(".lora." in name for name in saved)
    assert learn(tmp_path / "both", for_base(base), "--peft", "lora") == 2
    assert "--peft lora: --config learns prompts" in capsys.readouterr().err


def test_the_tokenizer_of_the_model(tmp_path, capsys):
    """A tokenizer of its own, beside the model: prompts are learned, and answer, with it; so does
    what is fine-tuned."""
    (tmp_path / "checkpoints").mkdir()
    word_tokenizer(tmp_path / "tokenizer.json", ("?", "x", "is", "yes", "no", "</s>"))
    save(tmp_path, loud(build(**LLAMA_SHAPES[1])), tokenizer="moved.json")
    lines = tmp_path / "d.jsonl"
    texts = {"x x": "yes", "x": "no"}
    write_lines(lines, [dict(taskname="a", text=x, label=label) for x, label in texts.items()])
    for style, splits, text in (
        ("p-tuning", (2,), "<|VIRTUAL_PROMPT_0|>{text} is {label}"),
        ("fine-tuning", (), "{text} is {label}"),
    ):
        content = config(
            ("a",),
            style=style,
            task_templates=[template("a", splits, text)],
            language_model_path=str(tmp_path),
            data=dict(train_ds=[str(lines)], validation_ds=[str(lines)]),
        )
        out = tmp_path / style
        assert learn(out, content, "--global-batch-size", "2", "--steps", "60") == 0
        assert (out / "tokenizer.json").exists()
        capsys.readouterr()
        prompts, model = out / "prompts.safetensors", tmp_path
        if style == "fine-tuning":
            prompts, model = out.with_suffix(".json"), out
        status, results, err = infer("evaluate", prompts, model, lines, capsys)
        assert status == 0, err
        assert json.loads(results)["a"]["examples"] == 2, err


def test_an_example_token_by_token(capsys):
    prompt_data.main()
    assert "['p', 'o', 's', 'i', 't', 'i', 'v', 'e', '<end>']" in capsys.readouterr().out


def test_another_model(base, tmp_path, capsys):
    """And another template, a file that is none, a damaged one, lines of an unknown task."""
    assert learn(tmp_path / "a", for_base(base)) == 0
    prompts, test, other = tmp_path / "a/prompts.safetensors", base / "test.jsonl", tmp_path / "c"
    model, _ = loading.load_model(base)
    model.head.norm.weight.add_(1e-3)
    save(other, model)
    content = for_base(base, "b", existing=("a",), restore_path=str(prompts))
    assert learn(tmp_path / "b", content | dict(language_model_path=str(other))) == 2
    assert "belongs to another model" in capsys.readouterr().err
    changed = "<|VIRTUAL_PROMPT_0|>{text} was<|VIRTUAL_PROMPT_1|>{label}"
    content["task_templates"][1] = template("a", text=changed)
    assert learn(tmp_path / "b", content) == 2
    assert "another template" in capsys.readouterr().err
    damaged = bytearray(prompts.read_bytes())
    damaged[-9] ^= 1
    flipped, lines = tmp_path / "flipped.safetensors", tmp_path / "z.jsonl"
    flipped.write_bytes(damaged)
    write_lines(lines, [dict(taskname="z", text="x")])
    for file, of_model, data, words in (
        (prompts, other, test, "belongs to another model"),
        (test, base, test, "is not a prompt file"),
        (flipped, base, test, "not what was written"),
        (prompts, base, lines, "z.jsonl, line 1: taskname 'z' is none of the tasks here, ['a', "),
    ):
        status, out, err = infer("generate", file, of_model, data, capsys)
        assert (status, out) == (2, "") and words in err, err


def test_names_and_lengths(base, tmp_path, capsys):
    """A task named like an attribute of modules; a shorter context for training; lines that are
    too long, answers in the order of the lines."""
    lines = tmp_path / "lines.jsonl"
    write_lines(lines, [dict(taskname="train", text="x" * n, label="y") for n in (3, 40, 5)])
    content = for_base(base, "a", task_templates=[template("train", truncate_field=None)])
    content["new_tasks"] = ["train"]
    content["data"] = dict(train_ds=[str(lines)], validation_ds=[str(lines)])
    assert learn(tmp_path / "t", content, "--seq-length", "32") == 0
    assert "train_ds: 2 examples, 1 skipped (longer than 33 tokens)" in capsys.readouterr().out
    prompts = tmp_path / "t" / "prompts.safetensors"
    _, out, _ = infer("generate", prompts, base, lines, capsys)
    answers = [json.loads(line) for line in out.splitlines()]
    assert [len(answer["text"]) for answer in answers] == [3, 40, 5]
    assert [answer["prediction"] is None for answer in answers] == [False, True, False]
    assert answers[1]["finish"] == "too long"
    _, out, _ = infer("evaluate", prompts, base, lines, capsys)
    results = json.loads(out)["train"]
    assert (results["examples"], results["too_long"]) == (3, 1)


# As NeMo's users have them on disk: no virtual_prompt_style, the section that is there decides.
SENTIMENT = """
model:
  seed: 1234
  language_model_path: gpt.nemo
  existing_tasks: []
  new_tasks: [sentiment]
  task_templates:
  - taskname: sentiment
    prompt_template: "<|VIRTUAL_PROMPT_0|> {sentence} sentiment: {label}"
    total_virtual_tokens: 100
    virtual_token_splits: [100]
    truncate_field: null
    answer_only_loss: False
    answer_field: label
  prompt_tuning:
    new_prompt_init_methods: [text]
    new_prompt_init_text: ["some text"]
  data: {train_ds: [train.jsonl], validation_ds: [test.jsonl], add_eos: True, num_workers: 8}
  optim: {name: fused_adam, lr: 1e-4}
trainer: {devices: 1}
"""
INTENT_AND_SLOT = """
language_model_path: gpt.nemo
new_tasks: [intent_and_slot]
task_templates:
- taskname: intent_and_slot
  prompt_template:
    "<|VIRTUAL_PROMPT_0|> Predict intent and slot <|VIRTUAL_PROMPT_1|> :\\n{utterance}{label}"
  total_virtual_tokens: 100
  virtual_token_splits: [80, 20]
  truncate_field:
  answer_only_loss: True
  answer_field: label
p_tuning: {dropout: 0.0, num_layers: 2}
"""


@pytest.mark.parametrize(
    "text, style, notices, record, ends",
    [
        (
            SENTIMENT,
            "prompt-tuning",
            ["not read: trainer, optim, seed, data.num_workers", "the section prompt_tuning"],
            dict(sentence="good fun", label="positive"),
            "<99> good fun sentiment: positive$",
        ),
        (
            INTENT_AND_SLOT,
            "p-tuning",
            ["virtual_prompt_style p-tuning, the section p_tuning is there"],
            dict(utterance="wake me", label="alarm"),
            "<99> :\nwake mealarm$",
        ),
        (
            INTENT_AND_SLOT
            + "existing_tasks: ['boolq', 'squad']\nrestore_path: null\n"
            + "virtual_prompt_style: p-tuning",
            "p-tuning",
            ["not read: existing_tasks ['boolq', 'squad'], for restore_path is null"],
            dict(utterance="w", label="a"),
            "<99> :\nwa$",
        ),
    ],
    ids=["sentiment", "intent and slot", "tasks that are nowhere yet"],
)
def test_nemo_files_as_they_are(text, style, notices, record, ends, tmp_path):
    path = tmp_path / "nemo.yaml"
    path.write_text(text)
    found = []
    config = PromptConfig.read(path, found.append)
    assert config.virtual_prompt_style == style and config.language_model_path == "gpt.nemo"
    assert len(found) == len(notices)
    for notice, words in zip(found, notices):
        assert words in notice, notice
    (template,) = config.task_templates
    example = template.fill(record, ByteTokenizer(), V, 1000)
    assert "".join(map(show, example.ids)).endswith(ends)


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_layers_of_the_encoder(layers):
    """NeMo's encoder with num_layers 2 has two linear layers."""
    encoder = prompt_tuning.make_encoder(PTuning(num_layers=layers, encoder_hidden=16), 24)
    shapes = [tuple(p.shape) for p in encoder.parameters() if p.dim() == 2]
    assert shapes == [(16, 24), *[(16, 16)] * (layers - 2), (24, 16)]


def test_a_nemo_file_learns(base, tmp_path, capsys):
    content = for_base(base, "a", style="p-tuning", p_tuning=dict(num_layers=2))
    del content["virtual_prompt_style"]
    del content["prompt_tuning"]
    path = tmp_path / "nemo.yaml"
    # JSON is YAML
    path.write_text(json.dumps({"model": content, "trainer": {"devices": 1}}))
    argv = ["--config", str(path), "--out", str(tmp_path / "out"), *TRAIN_FLAGS]
    assert prompt_command.main(argv) == 0
    assert "virtual_prompt_style p-tuning, the section p_tuning is there" in capsys.readouterr().out
    content["language_model_path"] = "gpt.nemo"
    path.write_text(json.dumps(content))
    assert prompt_command.main([*argv[:3], str(tmp_path / "other")]) == 2
    assert "gpt.nemo: no such folder; unpack this tar" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: [", "not YAML (while parsing"),
        ("- a", "Expected `object`, got `array`"),
        ("data: {add_eos: False}\ntask_templates: []", "data.add_eos: only true is supported here"),
    ],
)
def test_yaml_that_cannot_be_used(text, words, tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(PromptError) as e:
        PromptConfig.read(path)
    assert words in str(e.value) and "\n" not in str(e.value), str(e.value)


@pytest.mark.parametrize("argv", [[], ["--config=nowhere"]])
def test_train_needs_a_configuration(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert prompt_command.main(argv) == 2
    words = "--config nowhere" if argv else "--config: prompts for what?"
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


NOWHERE = dict(train_ds=["nowhere"], validation_ds=["nowhere"])


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(new_tasks=["z"]), "--config"),
        (dict(data=NOWHERE), "nowhere: cannot be read"),
        (dict(data=NOWHERE | dict(validation_ds=[])), "validation_ds is empty"),
        (dict(language_model_path="nowhere"), "nowhere: no such folder"),
        (dict(language_model_path=None), "for which model? --load"),
        (dict(virtual_prompt_style="inference"), "learns nothing"),
    ],
)
def test_runs_that_cannot_be(base, tmp_path, capsys, change, words):
    assert learn(tmp_path / "x", for_base(base) | change) == 2
    assert words in capsys.readouterr().err


def test_layouts_learn_alike(base, tmp_path):
    """The command on two ranks, two stages: the same table to rounding."""
    content = for_base(base, style="p-tuning", p_tuning=dict(encoder_hidden=8))
    assert learn(tmp_path / "one", content) == 0
    settings = tmp_path / "one.json"
    out = tmp_path / "two"
    words = ["--config", settings, "--out", out, *TRAIN_FLAGS, "--pp", "2"]
    run = processes.run(["finetune.prompt_tuning", *words], world=2)
    assert run.returncode == 0, run.stderr
    prompts = tmp_path / "one" / "prompts.safetensors"
    one, two = load_file(prompts), load_file(out / "prompts.safetensors")
    for task, table in one.items():
        assert (table - two[task]).abs().max() < 1e-4 * table.abs().max()
