"""Losses by hand, a value head under every layout, pairs from files, runs of train.py."""

import math
import shutil
from functools import partial

import numpy as np
import processes
import pytest
import small_run
import torch
from parity import LLAMA, SMALL, again, same, train, train_each
from small_run import lines_of, numbers_of, refusal, run, tensors_of, write_lines
from test_sft import chat_of

import generate
from course import training_commands, verify
from finetune import preference, preference_data
from finetune.chat import message
from finetune.chat_template import ChatError
from inference import cli, huggingface
from run import checkpoint
from run.rules import validate
from run.tokenizer import ByteTokenizer

NO_DROPOUT = SMALL | dict(dropout=0.0)


# --- losses (test_against_trl.py compares them with trl's) ----------------------------------------


def test_a_reward_loss_does_not_overflow():
    far = torch.tensor([1e4, -1e4])
    assert preference.reward_loss(far, -far).tolist() == [0.0, 2e4]


# --- the gate -------------------------------------------------------------------------------------


def of(method: str) -> dict:
    return dict(command="preference.py", method=method, data=["-"])


SEQUENCE = dict(tp=2, sequence_parallel=True)
LAYOUTS = [
    dict(tp=2),
    SEQUENCE,
    dict(pp=2),
    dict(pp=2, schedule="zb-h1"),
    dict(zero_stage=1),
    dict(zero_stage=2, micro_batch_size=2),
    dict(zero_stage=3, micro_batch_size=2),
]
REWARD, DPO = of("reward"), of("dpo")
VIRTUAL = dict(pp=2, virtual_stages=2, tp=2, recompute="full")
LLAMA_3D = SEQUENCE | dict(pp=2, schedule="zb-h1", head_chunk=7)
EXPERTS = dict(num_experts=4, router="topk", router_topk=2, micro_batch_size=4)
HALVES = dict(micro_batch_size=2)


@pytest.mark.parametrize(
    "world, base, layouts",
    [
        (2, NO_DROPOUT | REWARD, [*LAYOUTS[1::2], LAYOUTS[6]]),
        (2, NO_DROPOUT | DPO, LAYOUTS[1:5:3]),
        again(2, NO_DROPOUT | REWARD, LAYOUTS[:5:2]),
        (2, SMALL | REWARD, [SEQUENCE]),
        # the head is no copy of the embedding here, and weight gradients wait
        (4, LLAMA | REWARD | dict(dropout=0.0), [LLAMA_3D]),
        again(4, NO_DROPOUT | DPO | dict(num_layers=4), [VIRTUAL]),
        again(4, NO_DROPOUT | DPO | dict(num_layers=4), [dict(pp=2, zero_stage=2)]),
        # routers take raw logits: an answer does not depend on what is beside it in a micro-batch
        (
            *(2, NO_DROPOUT | REWARD | EXPERTS),
            [SEQUENCE | HALVES, dict(ep=2) | HALVES, dict(ep=2, zero_stage=3) | HALVES],
        ),
        (2, NO_DROPOUT | DPO | dict(peft="lora", lora_rank=2), [*LAYOUTS[:3], dict(zero_stage=3)]),
    ],
    ids=[
        "reward",
        "dpo",
        "more of reward",
        "dropout",
        "llama",
        "four ranks",
        "pipeline",
        "experts",
        "lora",
    ],
)
def test_layouts(world, base, layouts):
    one = train(base=base)
    for result in train_each(world, layouts, base=base):
        same(result, one)


def test_dpo_begins_at_log_2():
    """The reference comes from matrices of the same sizes: the first loss has rounding alone."""
    for layout in (dict(), dict(micro_batch_size=2)):
        one = train(base=NO_DROPOUT, **of("dpo"), **layout)
        assert abs(one.losses[0] - math.log(2)) < 1e-14
        assert one.losses[2] != pytest.approx(math.log(2), abs=1e-6)


# --- pairs ----------------------------------------------------------------------------------------


user, says = partial(message, "user"), partial(message, "assistant")


def read(tmp_path, *records, skip=False, limit=64):
    path = write_lines(tmp_path / "pairs.jsonl", records)
    chat = chat_of(ByteTokenizer(), "plain")
    return preference_data.read_pairs([str(path)], "--data", chat, limit, skip)


def test_forms_of_a_line(tmp_path):
    """Text, messages, and whole conversations, as data sets on Hugging Face have them."""
    q, a, b = user("q"), says("a"), says("bb")
    forms = [
        {"prompt": "q", "chosen": "a", "rejected": "bb"},
        {"prompt": [q], "chosen": [a], "rejected": [b]},
        {"prompt": [q], "chosen": "a", "rejected": [b]},
        {"chosen": [q, a], "rejected": [q, b]},
        {"prompt": "q", "chosen": [q, a], "rejected": [q, b], "score": 1},
    ]
    pairs, summary = read(tmp_path, *forms)
    assert pairs == [pairs[0]] * 5 and summary.startswith("5 pairs")
    text = ByteTokenizer().decode(pairs[0].rejected.ids[:-1])
    assert text == "user:\nq\nassistant:\nbb"
    # two letters and the token that ends the answer; nothing after it
    assert pairs[0].rejected.counted == [False] * (len(text) - 2) + [True] * 3
    # of several answers the last one alone
    before = [q, says("first"), user("r")]
    ((chosen, _),), _ = read(tmp_path, {"chosen": [*before, a], "rejected": [*before, b]})
    assert sum(chosen.counted) == 2 and chosen.counted[-2:] == [True] * 2


def test_nothing_follows_the_end_of_an_answer(tmp_path):
    """A reward is read there, whether or not the template goes on."""
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{ messages[0].content }}{% if not add_generation_prompt %}{% generation %}"
        "{{ messages[1].content + eos_token }}{% endgeneration %}{{ '--' }}{% endif %}"
    )
    chat = chat_of(ByteTokenizer(), template)
    example = preference_data.answer_example(chat, [user("q"), says("ab")])
    assert example.ids == [*b"qab", ByteTokenizer().eot]
    assert example.counted == [False, True, True, True]


@pytest.mark.parametrize(
    "record, words",
    [
        ({"prompt": "q", "chosen": "a"}, "is no pair"),
        ({"chosen": "a", "rejected": "b"}, 'needs a "prompt"'),
        ({"chosen": [user("q")], "rejected": [user("r")]}, "not the assistant's answer"),
        ({"prompt": "q", "chosen": [{"role": "x"}], "rejected": "b"}, "must be text"),
        ({"prompt": "q", "chosen": [], "rejected": []}, "is no conversation"),
    ],
)
def test_lines_that_are_no_pairs(record, words, tmp_path):
    """Also where bad examples are skipped."""
    with pytest.raises(ChatError) as e:
        read(tmp_path, record, skip=True)
    assert words in str(e.value) and "line 1" in str(e.value)


BAD = {
    "equal": {"prompt": "q", "chosen": "a", "rejected": "a"},
    "two questions": {"chosen": [user("q"), says("a")], "rejected": [user("r"), says("b")]},
    "tokens, and": {"prompt": "q" * 60, "chosen": "a", "rejected": "b"},
}


def test_pairs_that_cannot_be_used(tmp_path):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for words, record in BAD.items():
        with pytest.raises(ChatError, match=f"line 2.*{words}"):
            read(tmp_path, good, record)
    pairs, summary = read(tmp_path, *BAD.values(), good, skip=True)
    assert len(pairs) == 1
    assert summary.endswith("3 skipped (1 equal answers, 1 too long, 1 two questions)")


def test_rows(tmp_path):
    records = [
        {"prompt": "q" * n, "chosen": "a" * n, "rejected": "b" * (7 - n)} for n in range(1, 6)
    ]
    pairs, _ = read(tmp_path, *records)
    assert pairs == read(tmp_path, *records[::-1])[0]
    answers = preference_data.Pairs(pairs, 0, 8, last_token=False)
    assert answers.s % 8 == 0 and answers.num_sequences == 10
    ends = preference_data.Pairs(pairs, 0, 8, last_token=True)
    for sample in range(20):
        batch = answers.batch([sample])
        letter = ("a", "b")[sample % 2]
        said = batch.targets[batch.loss_mask].tolist()
        # the letters of the answer, and its end
        assert set(said[:-1]) == {ord(letter)} and said[-1] == ByteTokenizer().eot
        last = ends.batch([sample])
        assert last.tokens[last.loss_mask].tolist() == [ByteTokenizer().eot]
    # an epoch has every pair once, in an order of its own
    epochs = [[answers.row(n) for n in range(start, start + 10)] for start in (0, 10)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert all(b == a + 1 and a % 2 == 0 for a, b in zip(epochs[0][0::2], epochs[0][1::2]))


# --- runs -----------------------------------------------------------------------------------------

BATCH = dict(global_batch_size=8, warmup_steps=0)
SHAPE = small_run.flags(seq_length=48, **BATCH)
TOY = small_run.as_flags(device="cpu", eval_every=0, **BATCH)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(folder, flags): a base, and pairs in which the answer that says yes was chosen."""
    folder = tmp_path_factory.mktemp("preference")
    (folder / "text.txt").write_text("yes and no, no and yes. " * 200)
    base = ["--data", folder / "text.txt", "--cache", folder / "cache", "--out", folder / "base"]
    assert run(*SHAPE, *base, "--steps", 2) == 0
    records = [
        {"prompt": f"{n}?", "chosen": "yes" * (n % 2 + 1), "rejected": "no" * (n % 3 + 1)}
        for n in range(40)
    ]
    pairs = write_lines(folder / "pairs.jsonl", records)
    flags = ["finetune.preference", "--load", folder / "base", "--data", pairs, *TOY, "--lr", 3e-3]
    return folder, flags


@pytest.fixture(scope="module")
def reward_run(toy):
    folder, flags = toy
    words = [*flags, "--method", "reward", "--out", folder / "reward", "--steps", 12]
    assert run(*words, "--save-every", 8, "--keep", 0) == 0
    return folder / "reward", words


def test_a_reward_model_learns(reward_run):
    out, _ = reward_run
    lines = lines_of(out)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=0.1)
    assert lines[-1]["accuracy"] == 1.0 and lines[-1]["loss"] < 0.4
    last = lines[-1]
    assert last["margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"])
    assert last["eval_loss"] < 0.6 and last["eval_accuracy"] == 1.0
    assert last["tokens"] == 12 * 8
    assert (out / "loss.png").exists() and not (out / "sample.txt").exists()


def test_a_reward_model_goes_on(reward_run, tmp_path, capsys):
    out, words = reward_run
    parts = tmp_path / "parts"
    shutil.copytree(out, parts)
    shutil.rmtree(parts / "checkpoints" / "step-000012")
    (parts / "loss.png").unlink()
    assert run(*words, "--out", parts, "--resume") == 0
    assert "resuming after step 8" in capsys.readouterr().out
    assert numbers_of(parts) == numbers_of(out)
    # and a new run begins where it ended
    more = [*words, "--load", out, "--out", tmp_path / "more", "--steps", 1, "--lr", 0]
    assert run(*more) == 0
    assert "with its value head" in capsys.readouterr().out
    name = "model.head.value.weight"
    assert torch.equal(tensors_of(tmp_path / "more")[name], tensors_of(out)[name])


def test_a_reward_model_writes_no_text(reward_run, toy, tmp_path, capsys):
    out, _ = reward_run
    folder, flags = toy
    newest = checkpoint.find(out)
    assert checkpoint.read_index(newest)["head"] == "value"
    refused = [
        lambda: generate.main(["--checkpoint", str(out), "--prompt", "a"]),
        lambda: run(*SHAPE, "--load", out, "--data", folder / "text.txt", "--out", tmp_path / "a"),
        lambda: run(*flags, "--load", out, "--method", "dpo", "--out", tmp_path / "b"),
    ]
    for command in refused:
        assert command() == 2
        error = capsys.readouterr().err
        assert "holds a reward model" in error and error.count("\n") == 1
    with pytest.raises(checkpoint.CheckpointError, match="holds a reward model"):
        huggingface.export_folder(newest, tmp_path / "c")


@pytest.fixture(scope="module")
def dpo_run(toy):
    folder, flags = toy
    words = [*flags, "--method", "dpo", "--out", folder / "dpo", "--steps", 12]
    assert run(*words, "--save-every", 8, "--keep", 0) == 0
    return folder / "dpo", words


def test_dpo_learns(dpo_run):
    out, _ = dpo_run
    lines = lines_of(out)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["loss"] < 0.5 and lines[-1]["accuracy"] == 1.0
    assert len((out / "sample.txt").read_text()) > 4
    # the last batch was filled up with rows that do not count
    with np.load(out / "reference.npz") as file:
        assert [len(file[name]) for name in ("train", "held_out")] == [76, 4]
        assert all((file[name] < -1).all() for name in ("train", "held_out"))
    model, _ = cli.load_model(str(out))
    assert len(generate.generate(model, [[1, 2]], 5)[0]) == 5


def test_two_ranks_have_the_numbers_of_one(toy, tmp_path):
    """All of a run: the reference, rows of another padded length, statistics, evaluation."""
    _, flags = toy
    words = [*flags, "--method", "dpo", "--steps", 3, "--precision", "fp64", "--eval-every", 2]
    assert run(*words, "--out", tmp_path / "one") == 0
    layout = ["--tp", 2, "--sequence-parallel", "--out", tmp_path / "two"]
    done = processes.run([*words, *layout], world=2)
    assert done.returncode == 0, done.stderr
    for two, one in zip(numbers_of(tmp_path / "two"), numbers_of(tmp_path / "one"), strict=True):
        # in the first step both models are one, and rounding says which answer is better
        if abs(one["margin"]) < 1e-13:
            del one["accuracy"], two["accuracy"]
        assert two == pytest.approx(one, rel=1e-10, abs=1e-13)


def test_dpo_goes_on_with_the_first_reference(dpo_run, tmp_path, capsys):
    out, words = dpo_run
    parts = tmp_path / "parts"
    shutil.copytree(out, parts)
    shutil.rmtree(parts / "checkpoints" / "step-000012")
    (parts / "sample.txt").unlink()
    reference = parts / "reference.npz"
    kept = reference.read_bytes()
    for content, words_of_error in (
        (b"PK", "cannot be read"),
        (other_key(reference), "another base, or of other pairs"),
    ):
        reference.write_bytes(content)
        assert words_of_error in refusal(capsys, *words, "--out", parts, "--resume")
        reference.write_bytes(kept)
    assert run(*words, "--out", parts, "--resume") == 0
    assert numbers_of(parts) == numbers_of(out)


def other_key(path) -> bytes:
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path.with_name("other.npz"), **arrays | {"key": "of another"})
    return path.with_name("other.npz").read_bytes()


def test_a_micro_batch_of_a_pipeline_is_a_pair():
    config = training_commands.config_of(DPO | dict(pp=2, device="cpu"))
    assert config.micro_batch(1) == 2
    validate(config, 2, base_needed=False)


@pytest.mark.parametrize("kind", [again("reward"), "dpo"])
def test_verify(kind, tmp_path, capsys):
    """Rows that are a pair stay together in its band."""
    flags = f"finetune.preference --method {kind} --data p.jsonl --model gpt2 --tp 2"
    assert verify.main(["--steps", "2", "--ranks", "2", "--", *flags.split()]) == 0
    printed = capsys.readouterr().out
    assert "equal: " in printed and "inside the band" in printed
