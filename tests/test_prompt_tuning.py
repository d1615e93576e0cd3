import json
import shutil
from dataclasses import asdict
from pathlib import Path

import parity
import pytest
import torch
from test_generate import loud
from test_gpt import LLAMA_SHAPES, build

import checkpoint
import prompt_tuning
import tensor_parallel
import train
from corpus.tokenizer import ByteTokenizer
from gpt import GPT
from inference import cli
from model_config import GPTConfig
from prompt_tuning import VirtualPrompts, apply, attach_tables, initial_values
from prompts import prompt_data, prompt_file
from prompts.prompt_data import PromptConfig, PromptData, PromptError, PTuning, Template
from sharding import num_parameters

V = 257


def template(
    name="t",
    splits=(3, 2),
    text="<|VIRTUAL_PROMPT_0|>{text} is<|VIRTUAL_PROMPT_1|>{label}",
    **fields,
):
    return (
        dict(
            taskname=name,
            prompt_template=text,
            total_virtual_tokens=sum(splits),
            virtual_token_splits=list(splits),
            truncate_field="text",
            answer_only_loss=True,
            answer_field="label",
        )
        | fields
    )


def config(new=("a", "b"), existing=(), style="prompt-tuning", **fields):
    tasks = [*new, *existing]
    return (
        dict(
            task_templates=[template(name) for name in tasks],
            new_tasks=list(new),
            existing_tasks=list(existing),
            virtual_prompt_style=style,
            prompt_tuning=dict(new_prompt_init_methods=["random"] * len(new)),
        )
        | fields
    )


# --- templates and data ---------------------------------------------------------------------------


def text_of(example):
    return "".join(f"<{i - V}>" if i >= V else "$" if i == 256 else chr(i) for i in example.ids)


def test_a_template_by_hand():
    t = Template(**template())
    record = {"text": "good", "label": "ok"}
    example = t.fill(record, ByteTokenizer(), V, 64)
    assert (
        text_of(example) == "<0><1><2>good is<3><4>ok$"
        and example.loss_from == 12
        and not example.truncated
    )
    assert (
        text_of(t.fill({"text": "good"}, ByteTokenizer(), V + 10, 64, answer=False))
        == "<10><11><12>good is<13><14>"
    )
    # cut from its end
    assert text_of(t.fill(record, ByteTokenizer(), V, 13)) == "<0><1><2>go is<3><4>ok$"
    assert (
        text_of(t.fill(record, ByteTokenizer(), V, 11)) == "<0><1><2> is<3><4>ok$"
        and t.fill(record, ByteTokenizer(), V, 10) is None
    )
    assert Template(**template(truncate_field=None)).fill(record, ByteTokenizer(), V, 14) is None
    everywhere = Template(
        **template(text="{text}<|VIRTUAL_PROMPT_1|>, <|VIRTUAL_PROMPT_0|>{label}")
    )
    assert text_of(everywhere.fill(record, ByteTokenizer(), V, 64)) == "good<3><4>, <0><1><2>ok$"
    assert (
        text_of(t.fill({"text": 3, "label": 0.5}, ByteTokenizer(), V, 64))
        == "<0><1><2>3 is<3><4>0.5$"
    )
    # data is data
    assert (
        text_of(
            t.fill({"text": "{label}<|VIRTUAL_PROMPT_0|>", "label": "x"}, ByteTokenizer(), V, 64)
        )
        == "<0><1><2>{label}<|VIRTUAL_PROMPT_0|> is<3><4>x$"
    )


def test_labels_by_hand():
    """The loss is taken on the answer and the end of text; without answer_only_loss on all text;
    never on a virtual token."""
    answer = Template(**template())
    whole = Template(**template(answer_only_loss=False))
    for t, expected in ((answer, "ok$"), (whole, "good isok$")):
        data = PromptData(
            [t.fill({"text": "good", "label": "ok"}, ByteTokenizer(), V, 64)],
            V,
            None,
            multiple_of=4,
        )
        batch = data.batch([0])
        assert data.s == 16 and batch.tokens.shape == batch.targets.shape == (1, 16)
        assert (
            "".join("$" if i == 256 else chr(i) for i in batch.targets[batch.loss_mask].tolist())
            == expected
        )
        assert data.counted_tokens([0]) == len(expected) == int(batch.loss_mask.sum())
        assert batch.targets.max() < V and batch.targets[~batch.loss_mask].sum() == 0
        shifted = batch.tokens[:, 1:][batch.loss_mask[:, :-1]].tolist()
        # a label is the next token
        assert shifted == batch.targets[:, :-1][batch.loss_mask[:, :-1]].tolist()


def test_epochs_are_permutations():
    examples = [
        Template(**template()).fill({"text": str(n), "label": "x"}, ByteTokenizer(), V, 64)
        for n in range(7)
    ]
    data = PromptData(examples, V, seed=3)
    first, second = ([data.example(n).ids for n in range(start, start + 7)] for start in (0, 7))
    assert sorted(first) == sorted(second) == sorted(e.ids for e in examples) and first != second
    assert (
        PromptData(examples, V, seed=3).example(9).ids == second[2]
        and PromptData(examples, V, None).example(2) is examples[2]
    )


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(splits=(3,)), "markers .* have the numbers \\[0, 1\\]"),
        (dict(total_virtual_tokens=9), "add up to total_virtual_tokens 9, not to 5"),
        (
            dict(virtual_token_splits=[5, 0]),
            "Expected `int` >= 1 - at `\\$.task_templates\\[0\\].virtual_token_splits",
        ),
        (dict(taskname=[]), "Expected `str`, got `array`"),
        (dict(total_virtual_tokens=10**30), "Expected `int` <= 65535"),
        (dict(truncate_field="nope"), "truncate_field 'nope' is not a field"),
        (dict(answer_field="text", truncate_field=None), "must end the template"),
        (dict(answer_field=None), "needs an answer_field"),
        (dict(truncate_field="label"), "also the truncate_field"),
        (dict(text="<|VIRTUAL_PROMPT_0|>{text}{text}<|VIRTUAL_PROMPT_1|>{label}"), "stands twice"),
        (dict(text="<|VIRTUAL_PROMPT_0|><|VIRTUAL_PROMPT_0|>{text}{label}"), "numbers \\[0, 0\\]"),
        (dict(name="a.b"), "letters, digits"),
        (dict(name="__metadata__"), "does not begin"),
        (
            dict(text="<|VIRTUAL_PROMPT_0|>{prediction}<|VIRTUAL_PROMPT_1|>{text}{label}"),
            "may not be called \\['prediction'\\]",
        ),
        (dict(splits=(3, True)), "Expected `int`, got `bool`"),
        (dict(total_virtual_tokens="5"), "Expected `int`, got `str`"),
    ],
)
def test_bad_templates(fields, words):
    with pytest.raises(PromptError, match=words):
        PromptConfig.of(dict(task_templates=[template(**fields)], new_tasks=["t"]))


@pytest.mark.parametrize(
    "content, words",
    [
        (
            config(new=("a", "c")) | dict(task_templates=[template("a")]),
            "new_tasks: 'c' has no template; there are \\['a'\\]",
        ),
        (config(existing=("c",)), "restore_path must name"),
        (config(style="tuning"), "virtual_prompt_style 'tuning'"),
        (config(colour=1), "unknown field `colour`"),
        (config(new=("a", "a")), "two have the same taskname"),
        (config(new=()), "new_tasks is empty"),
        (
            config(prompt_tuning=dict(new_prompt_init_methods=["text"] * 2)),
            "begins from a text, and none",
        ),
        (config(prompt_tuning={}), "one of text and random for each"),
        (
            config(style="p-tuning", p_tuning=dict(encoder_type="gru")),
            "encoder_type 'gru': must be one of mlp, lstm, tpmlp",
        ),
        (config(style="p-tuning", p_tuning=dict(dropout=0.1)), "dropout 0.1: must be 0"),
        (config(data=dict(train=[])), "unknown field `train` - at `\\$.data`"),
        ({}, "task_templates"),
        (config(task_templates=[{}]), "missing required field `taskname`"),
        (config(new_tasks="a"), "Expected `array`, got `str` - at `\\$.new_tasks`"),
        (config(data=dict(shuffle="no")), "Expected `bool`, got `str`"),
        (config(data=None), "got `null` - at `\\$.data`"),
        (
            config(p_tuning=dict(encoder_hidden=8.5)),
            "Expected `int`, got `float` - at `\\$.p_tuning.encoder_hidden`",
        ),
        (config(p_tuning=dict(encoder_hidden=10**30)), "Expected `int` <= 65536"),
        (config(p_tuning=dict(num_layers=10**9)), "Expected `int` <= 64"),
        (config(data=dict(max_seq_length=-3)), "Expected `int` >= 1"),
        (config(style="fine-tuning"), "has 5 virtual tokens"),
    ],
)
def test_bad_configurations(content, words):
    with pytest.raises(PromptError, match=words):
        PromptConfig.of(content)


@pytest.mark.parametrize(
    "line, words",
    [
        (
            '{"taskname": "a", "text": "x"}',
            (
                "line 3: the template of 'a' has the fields \\['text', 'label'\\]; the line lacks"
                " \\['label'\\]"
            ),
        ),
        ("{oh", "line 3: not JSON"),
        ("[]", "line 3: Expected `object`, got `array`"),
        ('{"taskname": []}', "line 3: taskname \\[\\] is none"),
        ('{"taskname": "\\ud800"}', "line 3: not JSON .*half of a surrogate"),
        (
            '{"taskname": "a", "text": "x", "label": "y", "more": 1}',
            "line 3: .* also has \\['more'\\]",
        ),
        (
            '{"taskname": "z", "text": "x", "label": "y"}',
            "line 3: taskname 'z' is none of the tasks here, \\['a', 'b'\\]",
        ),
        ('{"taskname": "a", "text": ["x"], "label": "y"}', "line 3: field 'text' is neither"),
    ],
)
def test_bad_lines(line, words, tmp_path):
    c = PromptConfig.of(config())
    (tmp_path / "d.jsonl").write_text(
        '{"taskname": "a", "text": "x", "label": "y"}\n\n' + line + "\n"
    )
    with pytest.raises(PromptError, match=words):
        prompt_data.read_examples(
            [str(tmp_path / "d.jsonl")], c.templates, c.first_ids(V), ByteTokenizer(), 64
        )


def test_what_is_too_long_is_counted(tmp_path):
    c = PromptConfig.of(config(task_templates=[template("a"), template("b", truncate_field=None)]))
    path = tmp_path / "d.jsonl"
    path.write_text(
        "".join(
            json.dumps(dict(taskname=task, text="x" * n, label="y")) + "\n"
            for task in "ab"
            for n in (5, 50, 60)
        )
    )
    examples, records, told = prompt_data.read_examples(
        [str(path)], c.templates, c.first_ids(V), ByteTokenizer(), 32
    )
    assert (
        told == "4 examples, 2 truncated and 2 skipped (longer than 32 tokens)"
        and len(records) == len(examples) == 6
        and max(len(e.ids) for e in examples if e) == 32
    )
    with pytest.raises(PromptError, match="no examples; 6 are longer than 5 tokens"):
        prompt_data.read_examples([str(path)], c.templates, c.first_ids(V), ByteTokenizer(), 5)


# --- tables and encoders --------------------------------------------------------------------------


def test_parameters_by_the_paper():
    """h 768, two tasks of 100 virtual tokens: 153,600 (FACTS), and nothing else learns."""
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=2, hidden_size=768, num_heads=12))
    model.requires_grad_(False)
    apply(
        model,
        PromptConfig.of(config(task_templates=[template(name, splits=(60, 40)) for name in "ab"])),
    )
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 153_600
    # the embedding counts once
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model)


def test_an_encoder_beyond_memory_is_refused(monkeypatch):
    """65,536 wide it has 4 10^9 numbers: not one of them is allocated."""
    monkeypatch.setattr("runtime.room.memory", lambda device, ranks: 2**35)
    config_ = PromptConfig.of(config(style="p-tuning", p_tuning=dict(encoder_hidden=2**16)))
    with pytest.raises(
        checkpoint.CheckpointError,
        match="p_tuning.encoder_hidden 65536: takes 68,.* bytes, and cpu has 34,359,738,368",
    ):
        prompt_tuning.VirtualPrompts(config_, 8)


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_encoders_equal_peft(kind):
    """PEFT's PromptEncoder with the same weights: the same structure, so the same numbers. (Its MLP
    and ours have three layers, NeMo's may have more; ours keeps a sequence [T, h], theirs a batch
    of it.)"""
    peft = pytest.importorskip("peft")
    h = 24
    e = 10
    T = 7
    theirs = peft.PromptEncoder(
        peft.PromptEncoderConfig(
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
    ).double()
    ours = prompt_tuning.ENCODERS[kind](h, PTuning(kind, e)).double()
    names = {"layers": "mlp_head", "lstm": "lstm_head"}
    ours.load_state_dict(
        {
            name: theirs.state_dict()[names[name.split(".")[0]] + name[name.index(".") :]]
            for name in ours.state_dict()
        }
    )
    # and their embedding, our inputs
    assert len(ours.state_dict()) + 1 == len(theirs.state_dict())
    inputs = theirs.embedding.weight.detach().clone().requires_grad_()
    a = ours(inputs)
    b = theirs(torch.arange(T).unsqueeze(0))[0]
    a.square().sum().backward()
    b.square().sum().backward()
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-14) and torch.allclose(
        inputs.grad, theirs.embedding.weight.grad, rtol=1e-12, atol=1e-14
    )
    mine = dict(ours.named_parameters())
    other = dict(theirs.named_parameters())
    assert all(
        torch.allclose(
            p.grad, other[names[n.split(".")[0]] + n[n.index(".") :]].grad, rtol=1e-12, atol=1e-14
        )
        for n, p in mine.items()
    )


def test_a_table_is_what_the_model_would_read():
    """Virtual tokens whose vectors are those of words are those words; and each task reads its own
    rows."""
    model = loud(build(torch.float64, **LLAMA_SHAPES[1] | dict(vocab_size=V)))
    c = PromptConfig.of(config() | dict(virtual_prompt_style="inference"))
    words = {"a": [5, 6, 7, 8, 9], "b": [50, 60, 70, 80, 90]}
    embedding = model.embedding.tokens.weight.detach()
    with torch.no_grad():
        plain = {task: model(torch.tensor([[1, *ids, 2]])) for task, ids in words.items()}
        first = attach_tables(model, c, {task: embedding[ids] for task, ids in words.items()})
        assert first == {"a": V, "b": V + 5}
        for task, i in first.items():
            assert torch.equal(model(torch.tensor([[1, *range(i, i + 5), 2]])), plain[task])
        with pytest.raises(IndexError):
            model(torch.tensor([[V + 10]]))


def test_values_at_the_start():
    embedding = torch.arange(V * 8.0).view(V, 8)
    c = PromptConfig.of(
        config(
            prompt_tuning=dict(
                new_prompt_init_methods=["text", "random"], new_prompt_init_text=["ab", None]
            )
        )
    )
    values = initial_values(c, 8, 0, ByteTokenizer(), embedding)
    assert (
        torch.equal(values["tables.task-a"], embedding[[97, 98, 97, 98, 97]])
        and 0.01 < values["tables.task-b"].std() < 0.03
    )
    longer = PromptConfig.of(
        config(
            prompt_tuning=dict(
                new_prompt_init_methods=["text", "random"], new_prompt_init_text=["abcdefgh", None]
            )
        )
    )
    assert torch.equal(
        initial_values(longer, 8, 0, ByteTokenizer(), embedding)["tables.task-a"], embedding[97:102]
    )
    for kind in prompt_tuning.ENCODERS:
        c = PromptConfig.of(
            config(
                style="p-tuning", p_tuning=dict(encoder_type=kind, encoder_hidden=6, init_std=0.5)
            )
        )
        values = initial_values(c, 8, 0)
        assert values.keys() == dict(VirtualPrompts(c, 8).named_parameters()).keys() and all(
            x.abs().max() > 0 for x in values.values()
        )
        assert not torch.equal(values["inputs.task-a"], values["inputs.task-b"]) and torch.equal(
            initial_values(c, 8, 0)["inputs.task-a"], values["inputs.task-a"]
        )


# --- under every layout: gradients of one device --------------------------------------------------


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Configuration files: a table, and each encoder."""
    folder = tmp_path_factory.mktemp("prompts")
    found = {}
    for kind in ("table", *prompt_tuning.ENCODERS):
        content = (
            config()
            if kind == "table"
            else config(style="p-tuning", p_tuning=dict(encoder_type=kind, encoder_hidden=6))
        )
        found[kind] = str(folder / f"{kind}.json")
        Path(found[kind]).write_text(json.dumps(content))
    return found


@pytest.mark.parametrize(
    "world, kind, flags",
    [
        (
            2,
            "table",
            [
                dict(tp=2),
                dict(tp=2, sequence_parallel=True),
                dict(pp=2),
                dict(),
                dict(zero_stage=1),
                dict(zero_stage=3),
            ],
        ),
        (
            2,
            "mlp",
            [dict(tp=2, sequence_parallel=True), dict(pp=2, schedule="zb-h1"), dict(zero_stage=2)],
        ),
        (
            2,
            "lstm",
            [dict(tp=2, sequence_parallel=True), dict(pp=2, recompute="full"), dict(zero_stage=3)],
        ),
        (2, "tpmlp", [dict(tp=2), dict(tp=2, sequence_parallel=True), dict(zero_stage=3)]),
        (
            4,
            "tpmlp",
            [
                dict(tp=2, sequence_parallel=True, zero_stage=3),
                dict(tp=2, pp=2, schedule="zb-h1"),
                dict(pp=2, zero_stage=1),
            ],
        ),
    ],
    ids=str,
)
def test_gradients_of_one_device(settings, world, kind, flags):
    """Float64, 1e-10: loss, norm, every gradient of a prompt parameter, their values after three
    steps; several micro-batches, two tasks in each, GPT (tied, pads its vocabulary)."""
    base = parity.SMALL | dict(prompt_config=settings[kind], dropout=0.0, micro_batch_size=2)
    one = parity.train(base=base)
    assert one.gradients and all(name.startswith(prompt_tuning.WHERE) for name in one.gradients)
    for found in parity.train_each(world, flags, base=base):
        parity.same(found, one)


def test_gradients_of_llama_and_experts(settings):
    for base in (parity.LLAMA, parity.LLAMA | dict(num_experts=4)):
        base = base | dict(prompt_config=settings["mlp"], dropout=0.0, micro_batch_size=2)
        flags = [dict(tp=2, sequence_parallel=True)] + (
            [dict(ep=2)] if "num_experts" in base else [dict(pp=2)]
        )
        for found in parity.train_each(2, flags, base=base):
            parity.same(found, parity.train(base=base))


def no_sum_of_slices():
    prompt_tuning.tensor_parallel = type(
        "", (), dict(vars(tensor_parallel), copy_to_ranks=staticmethod(lambda x, group: x))
    )


def no_sum_of_encoder_parts():
    tensor_parallel.ColumnParallelLinear.on_gradient = staticmethod(tensor_parallel.start_nothing)


def a_table_for_all_tasks():
    prompt_data.PromptConfig.first_ids = lambda self, vocab_size: dict.fromkeys(
        self.tasks, vocab_size
    )


@pytest.mark.parametrize(
    "mutate, kind, flags",
    [
        (no_sum_of_slices, "mlp", dict(tp=2, sequence_parallel=True)),
        (no_sum_of_encoder_parts, "tpmlp", dict(tp=2)),
        (a_table_for_all_tasks, "table", dict()),
    ],
    ids=str,
)
def test_the_gate_sees(settings, mutate, kind, flags):
    base = parity.SMALL | dict(prompt_config=settings[kind], dropout=0.0, micro_batch_size=2)
    parity.differs(parity.train(2, mutate=mutate, base=base, **flags), parity.train(base=base))


def test_only_prompts_have_gradients_and_state(settings):
    """Nothing is kept for what is frozen: 2 tables [5, 32], a gradient and two moments each, in
    float64."""
    trainer = train.Trainer(
        train.Config(**parity.SMALL | dict(prompt_config=settings["table"], dropout=0.0)),
        torch.device("cpu"),
        train.Groups(),
    )
    trainer.forward_backward(1, parity.Prompted(16, 61, trainer.prompts))
    learned = {n for n, p in trainer.stages[0].named_parameters() if p.requires_grad}
    assert learned == {prompt_tuning.WHERE + "tables.task-a", prompt_tuning.WHERE + "tables.task-b"}
    for name, p in trainer.stages[0].named_parameters():
        assert p.grad is None and (getattr(p, "main_grad", None) is not None) == (name in learned)
    state = trainer.optimizer.tensors()
    assert {n.split(".", 1)[1] for n in state} == learned and sum(
        t.nbytes for n, t in state.items() if n.startswith("exp")
    ) == 2 * 8 * 10 * 32


# --- from a checkpoint to a prompt file and back --------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The checkpoint of a model that has norms of its own."""
    folder = tmp_path_factory.mktemp("base")
    model = loud(build(**LLAMA_SHAPES[1] | dict(vocab_size=V, seq_length=48)))
    with torch.no_grad():
        model.head.norm.weight.add_(torch.linspace(0, 0.1, 64))
    checkpoint.save(
        folder / "checkpoints",
        1,
        {f"model.{n}": p.detach() for n, p in model.named_parameters()},
        {"config": {"tokenizer": "bytes"}, "model": asdict(model.config)},
    )
    for name, n in (("train", 12), ("test", 6)):
        (folder / f"{name}.jsonl").write_text(
            "".join(
                json.dumps(
                    dict(
                        taskname=task,
                        text="xyz"[i % 3] * (i + 1),
                        label="yes" if (i + (task == "b")) % 2 else "no",
                    )
                )
                + "\n"
                for i in range(n)
                for task in "ab"
            )
        )
        for task in "ab":
            lines = (folder / f"{name}.jsonl").read_text().splitlines(True)
            (folder / f"{name}-{task}.jsonl").write_text(
                "".join(line for line in lines if json.loads(line)["taskname"] == task)
            )
    return folder


def learn(base, out, content, *flags):
    path = out.with_suffix(".json")
    path.write_text(json.dumps(content))
    return prompt_tuning.main(
        [
            "train",
            "--config",
            str(path),
            "--out",
            str(out),
            "--steps",
            "4",
            "--lr",
            "0.05",
            "--warmup-steps",
            "1",
            "--global-batch-size",
            "4",
            "--device",
            "cpu",
            *flags,
        ]
    )


def for_base(base, new="ab", **fields):
    data = "" if len(new) == 2 else f"-{new}"
    return config(tuple(new), **fields) | dict(
        language_model_path=str(base),
        data=dict(
            train_ds=[str(base / f"train{data}.jsonl")],
            validation_ds=[str(base / f"test{data}.jsonl")],
        ),
    )


def infer(command, prompts, base, data, capsys, *flags):
    status = prompt_tuning.main(
        [
            command,
            "--prompts",
            str(prompts),
            "--checkpoint",
            str(base),
            "--data",
            str(data),
            "--device",
            "cpu",
            "--max-tokens",
            "6",
            *flags,
        ]
    )
    return status, *capsys.readouterr()


def tensors(path):
    from safetensors.torch import load_file

    return load_file(path)


def test_tasks_one_after_the_other(base, tmp_path, capsys):
    """Task a by p-tuning, then b by prompt tuning from a text: a's table and answers stay as they
    are, bit for bit, and so does the model."""
    before = {
        f.name: f.read_bytes() for f in sorted((base / "checkpoints").rglob("*")) if f.is_file()
    }
    assert (
        learn(
            base,
            tmp_path / "a",
            for_base(base, "a", style="p-tuning", p_tuning=dict(encoder_hidden=8)),
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        f"{5 * 64 + 64 * 8 + 8 + 72 + 8 * 64 + 64:,} prompt parameters" in said
        and "nothing changes" in said
    )
    first = tensors(tmp_path / "a" / "prompts.safetensors")
    assert {n: list(t.shape) for n, t in first.items()} == {"a": [5, 64]} and (
        tmp_path / "a" / "prompts.safetensors"
    ).stat().st_size < 3000
    saved = checkpoint.read_index(checkpoint.find(tmp_path / "a"))["tensors"]
    assert (
        all(name.split(".", 1)[1].startswith(prompt_tuning.WHERE) for name in saved)
        and sum(f.stat().st_size for f in (tmp_path / "a" / "checkpoints").rglob("*.safetensors"))
        < 40_000
    )
    content = for_base(
        base,
        "b",
        existing=("a",),
        prompt_tuning=dict(new_prompt_init_methods=["text"], new_prompt_init_text=["yes or no"]),
    )
    assert (
        learn(
            base,
            tmp_path / "b",
            content | dict(restore_path=str(tmp_path / "a" / "prompts.safetensors")),
        )
        == 0
    )
    second = tensors(tmp_path / "b" / "prompts.safetensors")
    assert list(second) == ["a", "b"] and torch.equal(first["a"], second["a"])
    capsys.readouterr()
    one = infer(
        "generate", tmp_path / "a" / "prompts.safetensors", base, base / "test-a.jsonl", capsys
    )
    two = infer(
        "generate", tmp_path / "b" / "prompts.safetensors", base, base / "test.jsonl", capsys
    )
    assert one[0] == two[0] == 0
    answers = [json.loads(line) for line in two[1].splitlines()]
    assert [x for x in answers if x["taskname"] == "a"] == [
        json.loads(line) for line in one[1].splitlines()
    ] and len(answers) == 12
    status, out, err = infer(
        "evaluate", tmp_path / "b" / "prompts.safetensors", base, base / "test.jsonl", capsys
    )
    assert status == 0 and {k: v["examples"] for k, v in json.loads(out).items()} == {
        "a": 6,
        "b": 6,
    }
    assert before == {
        f.name: f.read_bytes() for f in sorted((base / "checkpoints").rglob("*")) if f.is_file()
    }
    # logits of task a with one table, and with two
    with_a, with_b = (cli.load_model(base)[0] for _ in range(2))
    for model, name in ((with_a, "a"), (with_b, "b")):
        attach_tables(model, *prompt_file.load(tmp_path / name / "prompts.safetensors"))
    ids = torch.tensor([[*range(V, V + 5), 1, 2]])
    assert torch.equal(with_a(ids), with_b(ids))


def test_resume_goes_on_bit_for_bit(base, tmp_path, capsys):
    content = for_base(base, style="p-tuning", p_tuning=dict(encoder_type="lstm", encoder_hidden=4))
    assert learn(base, tmp_path / "whole", content, "--steps", "6") == 0
    assert learn(base, tmp_path / "parts", content, "--steps", "6", "--save-every", "3") == 0
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000006")
    (tmp_path / "parts" / "prompts.safetensors").unlink()
    assert learn(base, tmp_path / "parts", content, "--steps", "6", "--resume") == 0
    assert "resuming after step 3" in capsys.readouterr().out
    assert (tmp_path / "whole" / "prompts.safetensors").read_bytes() == (
        tmp_path / "parts" / "prompts.safetensors"
    ).read_bytes()


def test_a_base_that_has_changed_since_is_refused(base, tmp_path, capsys):
    """The prompts were learned for another model: their values would mean nothing."""
    model = tmp_path / "model"
    shutil.copytree(base, model)
    content = for_base(base) | dict(language_model_path=str(model))
    assert learn(base, tmp_path / "run", content) == 0
    trained = cli.load_model(model)[0]
    trained.head.norm.weight.data.add_(0.01)
    parameters = {f"model.{n}": p.detach() for n, p in trained.named_parameters()}
    checkpoint.save(
        model / "checkpoints",
        2,
        parameters,
        {"config": {"tokenizer": "bytes"}, "model": asdict(trained.config)},
    )
    capsys.readouterr()
    assert learn(base, tmp_path / "run", content, "--steps", "6", "--resume") == 2
    error = capsys.readouterr().err
    assert (
        f"--load {model}: is not the model that the prompts in" in error and error.count("\n") == 1
    )
    assert (
        learn(
            base,
            tmp_path / "run",
            content,
            "--steps",
            "6",
            "--resume",
            "--load",
            str(model / "checkpoints/step-000001"),
        )
        == 0
    )


def test_fine_tuning_by_the_same_templates(base, tmp_path, capsys):
    """The ceiling of comparisons/prompt_tuning.py: no virtual tokens, and the whole model
    learns."""
    content = for_base(base, style="fine-tuning") | dict(
        task_templates=[template(name, (), "{text} is {label}") for name in "ab"]
    )
    assert learn(base, tmp_path / "tuned", content) == 0
    capsys.readouterr()
    status, out, err = infer(
        "evaluate", tmp_path / "tuned.json", tmp_path / "tuned", base / "test.jsonl", capsys
    )
    assert status == 0 and json.loads(out)["a"]["examples"] == 6
    assert len(checkpoint.read_index(checkpoint.find(tmp_path / "tuned"))["tensors"]) == 3 * len(
        checkpoint.read_index(checkpoint.find(base))["tensors"]
    )


def test_the_tokenizer_of_the_model(tmp_path, capsys):
    """A tokenizer of its own, beside the model: prompts are learned, and answer, with it; so does
    what is fine-tuned."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(["?", "x", "is", "yes", "no", "</s>"])}, unk_token="?"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "checkpoints").mkdir()
    model = loud(build(**LLAMA_SHAPES[1]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checkpoint.save(
        tmp_path / "checkpoints",
        1,
        {f"model.{n}": p.detach() for n, p in model.named_parameters()},
        {"config": {"tokenizer": "moved.json"}, "model": asdict(model.config)},
    )
    (tmp_path / "d.jsonl").write_text(
        '{"taskname": "a", "text": "x x", "label": "yes"}\n{"taskname": "a", "text": "x", "label":'
        ' "no"}\n'
    )
    for style, splits, text in (
        ("p-tuning", (2,), "<|VIRTUAL_PROMPT_0|>{text} is {label}"),
        ("fine-tuning", (), "{text} is {label}"),
    ):
        content = config(
            ("a",),
            style=style,
            task_templates=[template("a", splits, text)],
            language_model_path=str(tmp_path),
            data=dict(
                train_ds=[str(tmp_path / "d.jsonl")], validation_ds=[str(tmp_path / "d.jsonl")]
            ),
        )
        out = tmp_path / style
        assert (
            learn(tmp_path, out, content, "--global-batch-size", "2", "--steps", "60") == 0
            and (out / "tokenizer.json").exists()
        )
        capsys.readouterr()
        prompts, base = (
            (out / "prompts.safetensors", tmp_path) if splits else (out.with_suffix(".json"), out)
        )
        status, said, err = infer("evaluate", prompts, base, tmp_path / "d.jsonl", capsys)
        assert status == 0 and json.loads(said)["a"]["examples"] == 2, err


def test_lessons(capsys):
    assert prompt_tuning.lesson() == 0
    out = capsys.readouterr().out
    assert (
        out.count("bit for bit") == 2
        and "first of hgfe: h, last of hgfe: e, first of badc: b, last of badc: c, first of ccgh: c, last of ccgh: h"
        in out
    )
    prompt_data.main()
    assert "['p', 'o', 's', 'i', 't', 'i', 'v', 'e', '<end>']" in capsys.readouterr().out


def test_a_lesson_that_has_not_learned_says_so(capsys):
    assert prompt_tuning.lesson(steps=(2, 2)) == 1
    err = capsys.readouterr().err
    assert (
        "not learned: the model has a loss of" in err
        and "first of hgfe is not" in err
        and err.count("\n") == 1
    )


def test_another_model(base, tmp_path, capsys):
    assert learn(base, tmp_path / "a", for_base(base)) == 0
    other = tmp_path / "other"
    model, index = cli.load_model(base)
    model.head.norm.weight.add_(1e-3)
    checkpoint.save(
        other / "checkpoints",
        1,
        {f"model.{n}": p.detach() for n, p in model.named_parameters()},
        {"config": {"tokenizer": "bytes"}, "model": asdict(model.config)},
    )
    capsys.readouterr()
    status, out, err = infer(
        "generate", tmp_path / "a" / "prompts.safetensors", other, base / "test.jsonl", capsys
    )
    assert status == 2 and "belongs to another model" in err and not out
    status, out, err = infer("generate", base / "test.jsonl", base, base / "test.jsonl", capsys)
    assert status == 2 and "is not a prompt file" in err
    whole = bytearray((tmp_path / "a" / "prompts.safetensors").read_bytes())
    whole[-9] ^= 1
    (tmp_path / "flipped.safetensors").write_bytes(whole)
    status, out, err = infer(
        "generate", tmp_path / "flipped.safetensors", base, base / "test.jsonl", capsys
    )
    assert status == 2 and "not what was written" in err
    (tmp_path / "z.jsonl").write_text('{"taskname": "z", "text": "x"}\n')
    status, out, err = infer(
        "generate", tmp_path / "a" / "prompts.safetensors", base, tmp_path / "z.jsonl", capsys
    )
    assert (
        status == 2 and "z.jsonl, line 1: taskname 'z' is none of the tasks here, ['a', 'b']" in err
    )
    content = for_base(
        base, "b", existing=("a",), restore_path=str(tmp_path / "a" / "prompts.safetensors")
    ) | dict(language_model_path=str(other))
    assert (
        learn(other, tmp_path / "b", content) == 2
        and "belongs to another model" in capsys.readouterr().err
    )
    content = for_base(
        base, "b", existing=("a",), restore_path=str(tmp_path / "a" / "prompts.safetensors")
    )
    content["task_templates"][1] = template(
        "a", text="<|VIRTUAL_PROMPT_0|>{text} was<|VIRTUAL_PROMPT_1|>{label}"
    )
    assert (
        learn(base, tmp_path / "b", content) == 2 and "another template" in capsys.readouterr().err
    )


def test_names_and_lengths(base, tmp_path, capsys):
    """Tasks named like attributes of modules; a shorter context for training; lines that are too
    long, answers in the order of the lines."""
    content = for_base(base, "a", task_templates=[template("train", truncate_field=None)]) | dict(
        new_tasks=["train"]
    )
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(
                json.dumps(dict(taskname="train", text="x" * n, label="y")) + "\n"
                for n in (3, 40, 5)
            )
        )
    content["data"] = dict(
        train_ds=[str(tmp_path / "train.jsonl")], validation_ds=[str(tmp_path / "test.jsonl")]
    )
    assert learn(base, tmp_path / "t", content, "--seq-length", "32") == 0
    assert "train_ds: 2 examples, 1 skipped (longer than 33 tokens)" in capsys.readouterr().out
    status, out, err = infer(
        "generate", tmp_path / "t" / "prompts.safetensors", base, tmp_path / "test.jsonl", capsys
    )
    found = [json.loads(line) for line in out.splitlines()]
    assert (
        status == 0
        and [len(line["text"]) for line in found] == [3, 40, 5]
        and [line["prediction"] is None for line in found] == [False, True, False]
        and found[1]["finish"] == "too long"
    )
    status, out, err = infer(
        "evaluate", tmp_path / "t" / "prompts.safetensors", base, tmp_path / "test.jsonl", capsys
    )
    assert json.loads(out)["train"]["examples"] == 3 and json.loads(out)["train"]["too_long"] == 1


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "train needs --config"),
        (["--config=nowhere"], "--prompt-config nowhere"),
        (["--config"], "needs --config FILE"),
    ],
)
def test_train_needs_a_configuration(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        prompt_tuning.main(["train", *argv]) == 2
        and words in capsys.readouterr().err
        and not list(tmp_path.iterdir())
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(new_tasks=["z"]), "--prompt-config"),
        (
            dict(data=dict(train_ds=["nowhere"], validation_ds=["nowhere"])),
            "nowhere: cannot be read",
        ),
        (dict(data=dict(train_ds=["nowhere"])), "validation_ds is empty"),
        (dict(language_model_path="nowhere"), "nowhere: no such folder"),
        (dict(language_model_path=None), "for which model? --load"),
        (dict(virtual_prompt_style="inference"), "learns nothing"),
    ],
)
def test_runs_that_cannot_be(base, tmp_path, capsys, change, words):
    assert learn(base, tmp_path / "x", for_base(base) | change) == 2
    assert words in capsys.readouterr().err


def test_layouts_learn_and_answer_alike(base, tmp_path, capsys):
    """The command under torchrun, two stages and data parallel; the same table to rounding, the
    same answers."""
    import subprocess
    import sys

    assert (
        learn(
            base,
            tmp_path / "one",
            for_base(base, style="p-tuning", p_tuning=dict(encoder_hidden=8)),
        )
        == 0
    )
    command = [
        Path(sys.executable).parent / "torchrun",
        "--nproc-per-node",
        "2",
        "prompt_tuning.py",
    ]
    run = lambda *more: subprocess.run(
        [*command, *map(str, more)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    two = run(
        "train",
        "--config",
        tmp_path / "one.json",
        "--out",
        tmp_path / "two",
        "--steps",
        "4",
        "--lr",
        "0.05",
        "--warmup-steps",
        "1",
        "--global-batch-size",
        "4",
        "--device",
        "cpu",
        "--pp",
        "2",
    )
    assert two.returncode == 0, two.stderr
    one, two = (tensors(tmp_path / name / "prompts.safetensors") for name in ("one", "two"))
    assert all((one[task] - two[task]).abs().max() < 1e-4 * one[task].abs().max() for task in one)
    capsys.readouterr()
    expected = infer(
        "generate", tmp_path / "one" / "prompts.safetensors", base, base / "test.jsonl", capsys
    )[1]
    found = run(
        "generate",
        "--prompts",
        tmp_path / "one" / "prompts.safetensors",
        "--checkpoint",
        base,
        "--data",
        base / "test.jsonl",
        "--device",
        "cpu",
        "--max-tokens",
        "6",
        "--pp",
        "2",
    )
    assert found.returncode == 0 and found.stdout == expected and len(expected.splitlines()) == 12
