"""Conversations: the tokens of `transformers`, targets by hand, what is refused, and training."""

import json
import re
import shutil
import types

import processes
import pytest
import small_run
import tokenizers
import torch
from small_run import lines_of, write_lines
from test_generate import save
from test_gpt import LLAMA_SHAPES, build
from test_tokenizer import words as word_tokenizer

import generate
import train
from base.groups import Groups
from finetune import sft_data
from finetune.chat import Chat
from finetune.chat_template import ChatError, ChatTokenizer, open_template
from finetune.packing import Example, Packed, Padded
from inference import huggingface
from inference.loading import find_chat, find_tokenizer
from run import launch
from run.config import ConfigError
from run.tokenizer import ByteTokenizer, FileTokenizer, GPT2Tokenizer, save_files

USER = {"role": "user", "content": "What is 2 + 3? Grüße, 世界"}
ANSWER = {"role": "assistant", "content": "It is 5,\nI think. 🙂"}
AGAIN = {"role": "user", "content": "  And   5 * 3? "}
LAST = {"role": "assistant", "content": "15"}
SYSTEM = {"role": "system", "content": "Be short."}
TWO_TURNS = [USER, ANSWER, AGAIN, LAST]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set rest = messages[1:] %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set rest = messages %}
    {% set system = '' %}
{% endif %}
{% for message in rest %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {% endif %}
    {% if message.role == 'user' %}
        {% set text = system + message.content if loop.first else message.content %}
        {{- bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
    {% else %}
        {{- ' ' + message.content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""
# the assistant's text marked, with the end of its turn
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# family -> (template, special tokens, those that the tokenizer names)
FAMILIES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
    "llama-2": (LLAMA_2, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "marked": (MARKED, ["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
}
CORPUS = ["It is 5, I think. What is 2 + 3? And 5 * 3? user assistant system [INST] [/INST]"] * 3


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Family -> (our tokenizer, that of `transformers`), both from one folder with its template."""
    transformers = pytest.importorskip("transformers")
    found = {}
    for family, (template, specials, names) in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        byte_pairs(specials).save(str(folder / "tokenizer.json"))
        config = names | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        found[family] = FileTokenizer(str(folder / "tokenizer.json")), theirs
    return found


def byte_pairs(specials) -> tokenizers.Tokenizer:
    """Byte pairs as Llama 3 has them: the offsets that it gives leave out spaces."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def chat_of(tokenizer, choice="auto") -> Chat:
    chat_tokenizer = ChatTokenizer(tokenizer)
    return Chat(open_template(str(choice), chat_tokenizer), chat_tokenizer)


def targets(chat: Chat, example: Example) -> str:
    """The text of the counted tokens, with special tokens, one / between pieces."""
    pieces = []
    before = False
    for token, counts in zip(*example):
        if counts:
            pieces += [] if before else [[]]
            pieces[-1].append(token)
        before = counts
    library = chat.tokenizer.library
    return "/".join(library.decode(piece, skip_special_tokens=False) for piece in pieces)


# --- the tokens of transformers -------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
def test_tokens_equal_transformers(families, family, system):
    ours, theirs = families[family]
    chat = chat_of(ours)
    messages = [SYSTEM] * system + TWO_TURNS
    for n in (1, 3, 4):
        part = messages[: n + system]
        ask = part[-1]["role"] == "user"
        expected = theirs.apply_chat_template(
            part, tokenize=True, add_generation_prompt=ask, return_dict=False
        )
        found = chat.prompt(part) if ask else chat.example(part).ids
        assert found == list(expected)
    with_text = [{"role": "user", "content": "is </s> or <|im_end|> a word?"}, ANSWER]
    expected = theirs.apply_chat_template(with_text, tokenize=True, return_dict=False)
    assert chat.example(with_text).ids == list(expected)


@pytest.mark.parametrize("choice", ["auto", "plain"])
def test_marked_answers_equal_transformers(families, choice):
    """Also in the plain template, which is exported with a model."""
    ours, theirs = families["marked"]
    chat = chat_of(ours, choice)
    for messages in (TWO_TURNS, [SYSTEM, *TWO_TURNS], [USER, ANSWER]):
        expected = theirs.apply_chat_template(
            messages,
            chat_template=chat.template.text,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        example = chat.example(messages)
        assert example.ids == list(expected["input_ids"])
        assert example.counted == [bool(counts) for counts in expected["assistant_masks"]]


# --- targets --------------------------------------------------------------------------------------

TARGETS = {
    "chatml": "It is 5,\nI think. 🙂<|im_end|>/15<|im_end|>",
    "llama-2": " It is 5,\nI think. 🙂 </s>/ 15 </s>",
    "marked": "It is 5,\nI think. 🙂<|im_end|>/15<|im_end|>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_the_ends_of_their_turns(families, family):
    chat = chat_of(families[family][0])
    for messages in (TWO_TURNS, [SYSTEM, *TWO_TURNS]):
        assert targets(chat, chat.example(messages)) == TARGETS[family]
    everything = chat.example(TWO_TURNS, "all")
    assert all(everything.counted) and everything.ids == chat.example(TWO_TURNS).ids
    end = chat.tokenizer.library.id_to_token(chat.end_of_turn())
    assert TARGETS[family].endswith(end)


def write(path, text):
    path.write_text(text)
    return path


def test_a_block_without_the_end_of_its_turn(families, tmp_path):
    """The special token behind a block counts, and nothing else behind it."""
    ours, _ = families["marked"]
    block = "{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    assert block in MARKED
    short = block.replace(" + '<|im_end|>' }}{% endgeneration", " }}{% endgeneration")
    outside = write(tmp_path / "outside.jinja", MARKED.replace(block, short + "<|im_end|>"))
    wide = block.replace("'<|im_end|>'", "'<|im_end|>\\n'")
    inside = write(tmp_path / "inside.jinja", MARKED.replace(block, wide))
    chat = chat_of(ours, outside)
    assert targets(chat, chat.example(TWO_TURNS)) == TARGETS["marked"]
    chat = chat_of(ours, inside)
    expected = TARGETS["marked"].replace("<|im_end|>", "<|im_end|>\n")
    assert targets(chat, chat.example(TWO_TURNS)) == expected


def test_a_token_that_is_added_after_the_last_message(families, tmp_path):
    """Phi's template ends the whole text with a token too: no turn ends with that."""
    ours, _ = families["chatml"]
    more = "{% if not add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    chat = chat_of(ours, write(tmp_path / "t.jinja", CHATML + more))
    assert targets(chat, chat.example(TWO_TURNS)) == TARGETS["chatml"]


def test_a_token_that_lies_across_the_beginning_of_an_answer(families, tmp_path):
    """It counts: " is" has the answer's first letters."""
    ours, _ = families["marked"]
    text = "{{ messages[0].content + ' ' }}{% generation %}{{ messages[1].content }}"
    text += "<|im_end|>{% endgeneration %}"
    chat = chat_of(ours, write(tmp_path / "t.jinja", text))
    example = chat.example([{"role": "user", "content": "What"}, LAST | {"content": "is"}])
    assert targets(chat, example) == " is<|im_end|>" and sum(example.counted) == 2


def test_plain_by_hand(tmp_path):
    """On bytes; a begin token where the tokenizer adds one."""
    chat = chat_of(ByteTokenizer())
    assert "plain" in chat.template.where
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "é"}
    example = chat.example([question, answer, question, answer])
    end = ByteTokenizer.eot
    turn = [*b"user:\na\nassistant:\n", *"é".encode(), end]
    assert example.ids == turn * 2
    assert example.counted == ([False] * 19 + [True] * 3) * 2
    assert chat.prompt([question]) == turn[:-3] and chat.end_of_turn() == end
    # a tokenizer with tokens of its own, which are no special tokens for the library
    word_tokenizer(tmp_path / "tokenizer.json", ("?", "<s>", "</s>", "a"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    chat = chat_of(FileTokenizer(str(tmp_path / "tokenizer.json")))
    example = chat.example([question, {"role": "assistant", "content": "a"}])
    assert example.ids[-2:] == [3, 2] and example.counted[-2:] == [True, True]
    assert 1 not in example.ids


class TwoBytes:
    """An encoding like tiktoken's, whose tokens are two bytes, or one at the end."""

    def encode_ordinary(self, text):
        content = text.encode()
        self.pieces = [content[n : n + 2] for n in range(0, len(content), 2)]
        return [int.from_bytes(b"\1" + piece) for piece in self.pieces]

    def decode_single_token_bytes(self, token):
        return token.to_bytes(3).lstrip(b"\0")[1:]


def test_tokens_that_are_parts_of_characters():
    tokenizer = object.__new__(GPT2Tokenizer)
    tokenizer.encoding = TwoBytes()
    tokenizer.eot, tokenizer.stop_ids = 0, (0,)
    tokens = ChatTokenizer(tokenizer).encode("世a界<|endoftext|>é")
    assert [*zip(tokens.starts, tokens.ends)] == [(0, 1), (0, 2), (2, 3), (2, 3), (3, 16), (16, 17)]
    assert tokens.ids[-2] == 0


# --- which template -------------------------------------------------------------------------------


def test_templates_beside_a_tokenizer(families, tmp_path):
    """A list of templates; a file of its own, which comes first; saved with the tokenizer."""
    source, _ = families["chatml"]
    save_files(source.files, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "?"}, {"name": "default", "template": "of a list"}]
    config.write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": named}))

    def text():
        tokenizer = FileTokenizer(str(tmp_path / "tokenizer.json"))
        save_files(tokenizer.files, tmp_path / "copy")
        return chat_of(tokenizer).template.text, chat_of(
            FileTokenizer(str(tmp_path / "copy" / "tokenizer.json"))
        ).template.text

    (tmp_path / "copy").mkdir()
    assert text() == ("of a list", "of a list")
    (tmp_path / "chat_template.jinja").write_text("of a file é")
    assert text() == ("of a file é", "of a file é")
    config.write_text(json.dumps({"chat_template": [1]}))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ChatError, match="chat_template: Expected"):
        text()


@pytest.mark.parametrize(
    "template, words",
    [
        ("{% for %}", "t.jinja, line 1: "),
        ("{{ raise_exception('no') }}", "t.jinja: no"),
        # jinja computes it before it renders anything
        ("{{ 10 ** 5000 }}", "Exceeds the limit"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "changes a part"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %} ", "no special token"),
        ("{% generation %}{% generation %}" + "{% endgeneration %}" * 2, "inside another"),
        ("{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x[1:] }}", "cuts the text"),
    ],
)
def test_templates_that_cannot_be(tmp_path, template, words):
    path = write(tmp_path / "t.jinja", template)
    with pytest.raises(ChatError) as e:
        chat_of(ByteTokenizer(), path).example([USER, ANSWER])
    assert words in str(e.value) and "\n" not in str(e.value)


def test_a_template_of_answers_alone_asks_nothing(tmp_path):
    text = "{% generation %}{{ messages[1].content + eos_token }}{% endgeneration %}"
    chat = chat_of(
        ByteTokenizer(), write(tmp_path / "t.jinja", "{% if messages[1] %}" + text + "{% endif %}")
    )
    assert len(chat.example([USER, LAST]).ids) == 3
    with pytest.raises(ChatError, match="makes no text of a question"):
        chat.prompt([USER])


def test_helpers_of_templates(tmp_path):
    text = "{% set n = namespace(self=1) %}{% for m in messages %}{% set n.x = m %}{% break %}"
    text += "{% endfor %}{{ n.x | tojson }}{{ strftime_now('%Y') }}"
    rendered = chat_of(ByteTokenizer(), write(tmp_path / "t.jinja", text)).template.render([USER])
    assert rendered.text.startswith(json.dumps(USER, ensure_ascii=False) + "20")


# --- files ----------------------------------------------------------------------------------------


def pair(question, answer):
    return {"prompt": question, "completion": answer}


GOOD = [pair("abc", "a"), {"messages": [SYSTEM, USER, LAST], "id": 7}]
BAD = [
    (pair("x" * 200, "a"), "has 220 tokens, and --seq-length 99 has room for 100"),
    ({"messages": [USER]}, "no message of the assistant"),
]


def read(path, skip=False):
    chat = chat_of(ByteTokenizer())
    return sft_data.read_examples([str(path)], "--data", chat, "answers", 100, skip)


def test_what_cannot_be_used_is_named_or_counted(tmp_path):
    for n, (record, words) in enumerate(BAD):
        path = write_lines(tmp_path / f"{n}.jsonl", [*GOOD, record])
        with pytest.raises(ChatError) as e:
            read(path)
        assert str(e.value).startswith(f"--data {path}, line 3: ") and words in str(e.value)
    path = write_lines(tmp_path / "all.jsonl", [*GOOD, *(record for record, _ in BAD)])
    examples, summary = read(path, skip=True)
    assert len(examples) == 2
    assert summary == (
        "2 conversations, 5 of 92 tokens in the loss; 2 skipped (1 nothing to learn, 1 too long)"
    )
    with pytest.raises(ChatError, match="nothing to learn from; 1 skipped"):
        read(write_lines(tmp_path / "none.jsonl", [BAD[0][0]]), skip=True)


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 1: not JSON"),
        ('{"messages": []}', "is no conversation"),
        ('{"conversations": [{"from": "human", "value": "a"}]}', "is no conversation"),
        ('{"messages": [{"role": "user"}]}', 'message 1: "role" and "content" must be text'),
        ('{"prompt": "a", "completion": 5}', "message 2: "),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', "has tools"),
    ],
)
def test_lines_that_are_no_conversations(line, words, tmp_path):
    """Also where bad examples are skipped."""
    path = tmp_path / "c.jsonl"
    path.write_text(line)
    with pytest.raises(ChatError) as e:
        read(path, skip=True)
    assert words in str(e.value) and str(path) in str(e.value)


# --- training -------------------------------------------------------------------------------------

SMALL = small_run.flags(num_layers=2, seq_length=96, global_batch_size=4, steps=3)
SMALL += "--warmup-steps 0 --precision fp64".split()


def run(*flags) -> int:
    return small_run.run("finetune.sft", *SMALL, *flags)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations of unequal lengths."""
    records = [pair("ab" * (n % 5 + 1), "b" * (1 + n * n % 23)) for n in range(40)]
    return write_lines(tmp_path_factory.mktemp("chats") / "chats.jsonl", records)


@pytest.fixture(scope="module")
def one_device(chats, tmp_path_factory):
    """(flags, the folder of their run). The template has no form without an answer, so there is no
    sample at the end."""
    folder = tmp_path_factory.mktemp("one_device")
    text = "{{ messages[0].content }}>{% generation %}{{ messages[1].content + eos_token }}"
    template = write(folder / "t.jinja", text + "{% endgeneration %}")
    flags = ["--data", chats, "--chat-template", template, "--sample-prompt", "def "]
    assert run(*flags, "--out", folder / "run", "--save-every", 2, "--keep", 0) == 0
    assert (folder / "run" / "sample.txt").read_text().startswith("no sample: --chat-template")
    return flags, folder / "run"


@pytest.mark.parametrize(
    "ranks, layout",
    [(2, "--tp 2 --sequence-parallel"), (4, "--pp 2 --zero-stage 1")],
)
def test_layouts_have_the_losses_of_one_device(one_device, tmp_path, ranks, layout):
    flags, one = one_device
    words = [*SMALL, *flags, "--out", tmp_path / "run", *layout.split()]
    done = processes.run(["finetune.sft", *words], world=ranks)
    assert done.returncode == 0, done.stderr
    for x, y in zip(lines_of(tmp_path / "run"), lines_of(one), strict=True):
        assert x["tokens"] == y["tokens"]
        for name in ("loss", "grad_norm"):
            assert abs(x[name] - y[name]) <= 1e-10 * abs(y[name]), name


def test_a_run_goes_on_with_its_own_copy_of_the_template(one_device, tmp_path, capsys):
    flags, one = one_device
    short = tmp_path / "short"
    shutil.copytree(one, short)
    shutil.rmtree(short / "checkpoints" / "step-000003")
    moved = [word if word != flags[-1] else tmp_path / "moved.jinja" for word in flags]
    assert run("--resume", *moved, "--out", short) == 0
    assert "generate.py --chat will not work with this template" in capsys.readouterr().out
    assert [line["loss"] for line in lines_of(short)] == [line["loss"] for line in lines_of(one)]


def test_ranks_that_read_other_conversations_are_refused():
    """A template with the time in it gives each rank its own."""
    sets = [Padded([Example([1, 2, token], [True] * 3)], seed=None) for token in (3, 4)]

    def beside(*others):
        corpora = [[data_set.index["corpus"]] * 2 for data_set in others]
        return types.SimpleNamespace(gather=lambda mine: [mine, *corpora])

    launch.check_data_agree(sets[0], sets[0], beside(sets[0]))
    with pytest.raises(ConfigError, match="rank 1 has read other data than rank 0"):
        launch.check_data_agree(sets[0], sets[0], beside(sets[1]))


@pytest.mark.parametrize(
    "experts",
    [{}, dict(num_experts=4, router="topk", router_topk=2, aux_loss=1.0, capacity_factor=1.5)],
)
def test_packed_conversations_have_the_gradients_of_padded_ones(chats, experts):
    """All conversations once, as one step: a token weighs the same in a long answer and a short
    one, in a row of its own or beside others. Padding is nothing to a router either."""
    examples, _ = read(chats)
    datasets = (Padded(examples, seed=None), Packed(examples, 96, seed=0))
    assert datasets[1].num_sequences < len(examples) / 2
    shape = dict(num_layers=1, hidden_size=32, num_heads=4, seq_length=96, vocab_size=257)
    found = []
    for dataset in datasets:
        size = dict(global_batch_size=dataset.num_sequences, precision="fp64", device="cpu")
        config = train.Config(**shape, **experts, **size)
        trainer = train.Trainer(config, torch.device("cpu"), Groups())
        loss = trainer.forward_backward(1, dataset)
        gradients = {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()}
        found.append((loss, gradients))
    (loss, gradients), (packed_loss, packed_gradients) = found
    assert abs(loss - packed_loss) < 1e-12
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, packed_gradients[name], rtol=1e-10, atol=1e-14), name


def test_a_conversation_is_answered(chats, tmp_path, capsys):
    """Trained, asked with --chat, and started from: the template stays with the model."""
    out = tmp_path / "out"
    short = "--steps 60 --lr 1e-2 --precision fp32 --eval-every 0 --num-layers 1".split()
    learned = write_lines(tmp_path / "c.jsonl", [pair("ab", "yes")] * 4)
    assert run("--data", learned, "--val-data", chats, "--out", out, *short) == 0
    said = capsys.readouterr().out
    assert "4 conversations, 16 of 96 tokens in the loss; --val-data: 40" in said
    assert "without --load a new model" in said
    argv = ["--checkpoint", str(out), "--chat", "ab", "--temperature", "0", "--device", "cpu"]
    assert generate.main(argv) == 0
    assert capsys.readouterr().out.strip() == "yes"
    assert generate.main([*argv, "--prompt", "x"]) == 2
    assert "--chat" in capsys.readouterr().err
    (out / "chat_template.jinja").write_text("{{ messages[0].content }}|")
    assert find_chat(out, ByteTokenizer()).template.text.endswith("|")


def test_a_run_keeps_the_template_of_its_base(families, chats, tmp_path):
    """And an exported model has it: transformers reads the same conversation."""
    source, theirs = families["chatml"]
    base, out = tmp_path / "base", tmp_path / "out"
    sizes = dict(vocab_size=source.vocab_size, seq_length=96)
    save(base, build(**LLAMA_SHAPES[0] | sizes), tokenizer="tokenizer.json")
    save_files(source.files, base)
    flags = "--global-batch-size 2 --steps 1 --warmup-steps 0 --device cpu".split()
    words = ["--load", base, "--data", chats, "--out", out, *flags]
    assert small_run.run("finetune.sft", *words) == 0
    assert find_chat(out, find_tokenizer(out, {})).template.text == CHATML
    huggingface.export_folder(out, tmp_path / "exported")
    transformers = pytest.importorskip("transformers")
    again = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "exported")
    assert again.chat_template == CHATML
    assert again.apply_chat_template(TWO_TURNS) == theirs.apply_chat_template(TWO_TURNS)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--loss-on", "all"], "--data: sft.py needs --data FILE"),
        (["--data", "nowhere"], "--data nowhere: cannot be read"),
        (["--data", "one"], "has one conversation, and one is held out"),
        (["--data", "one", "--chat-template", "nowhere"], "--chat-template nowhere"),
    ],
)
def test_runs_that_cannot_be(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "one", [pair("a", "b")])
    assert run(*flags, "--out", "out") == 2
    assert words in capsys.readouterr().err


# --- mutations ------------------------------------------------------------------------------------


def test_a_masked_end_of_turn_is_seen(families, monkeypatch):
    end_of_answer = Chat.end_of_answer
    monkeypatch.setattr(Chat, "end_of_answer", lambda *args: end_of_answer(*args) - 1)
    with pytest.raises(AssertionError):
        test_answers_and_the_ends_of_their_turns(families, "chatml")


def test_a_loss_on_everything_is_seen(families, monkeypatch):
    example = Chat.example
    monkeypatch.setattr(Chat, "example", lambda self, m, on="": example(self, m, "all"))
    with pytest.raises(AssertionError):
        test_marked_answers_equal_transformers(families, "auto")


# --- the numbers of a step ------------------------------------------------------------------------


def test_flops_are_those_of_the_rows(tmp_path, capsys):
    """Rows of 24 tokens cost what they cost, whatever --seq-length allows; --plan knows it too."""
    path = write_lines(tmp_path / "chats.jsonl", [pair("a" * 8, "b" * 5)] * 40)
    per_token = []
    for s in (32, 512):
        out = tmp_path / str(s)
        shape = small_run.flags(seq_length=s, data=path, steps=2, out=out, plan="h100")
        assert small_run.run("finetune.sft", *shape) == 0
        step = lines_of(out)[-1]
        flops = step["tflops_per_device"] * 1e12 / step["tokens_per_second"]
        per_token.append([flops, step["predicted_seconds"]])
    assert per_token[0] == pytest.approx(per_token[1], rel=1e-9)


def test_a_packed_run(chats, tmp_path, capsys):
    """Its sample answers a question that was held out."""
    assert run("--data", chats, "--pack", "--out", tmp_path / "run") == 0
    assert re.search(r"--pack: \d+ rows of 96 tokens, filled to \d\d", capsys.readouterr().out)
    assert "eval_loss" in lines_of(tmp_path / "run")[-1]
    sample = (tmp_path / "run/sample.txt").read_text()
    assert sample.startswith("user:\n") and "assistant:\n" in sample, sample[:100]
