"""Every flag changes something in every kind of run, or is refused there.

A pair of a flag and a kind of run is drawn at random. The run is made twice, with the flag and
without, and what it leaves is compared: weights, metrics, samples, files.
"""

import contextlib
import dataclasses
import io
import random

import pytest
import small_run
from small_run import numbers_of, run, write_lines

import train
from course import training_commands
from run import checkpoint
from run.config import flag_name
from run.pretraining import Config
from run.rules import NEEDS, NEEDS_RANKS, validate

# flag -> what to give; two words where the first is another flag's
VALUES = dict(
    model="tiny-moe", num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=4,
    ffn_hidden_size=16, seq_length=16, vocab_size=300, norm="layernorm", activation="gelu",
    positions="alibi", sliding_window=4, dropout=0.2, num_experts=2, expert_every=2,
    router="sinkhorn", router_topk=2, router_temperature=0.5, capacity_factor=0.5, aux_loss=0.1,
    z_loss=0.1, first_dense_layers=1, expert_ffn_size=8, shared_ffn_size=8, router_scale=2.0,
    bias_rate=0.1, expert_groups=2, topk_groups=2, reduce_dtype="bf16", zero_stage=2,
    cp_kind="all-to-all", schedule="gpipe",
    layer_split=1, head_chunk=4, steps=3, lr=0.1, min_lr=1e-5, warmup_steps=1,
    weight_decay=0.5, grad_clip=1e-6, precision="bf16", fp8="current", fp8_skip=0,
    fp8_scales="any", fp8_block=64, optimizer_state="bf16", optimizer="muon", val_data="OTHERS",
    document_mask=True,
    pack=True, tokenizer="TOKENIZER", chat_template="TEMPLATE", loss_on="all", method="OTHER",
    reward="REWARD", beta=0.7, answer_tokens=3, group_size=4, epochs=3, clip_range=0.01,
    gae_lambda=0.1, critic_lr=0.3, save_every=1, peft="lora", lora_rank=2, lora_alpha=3.0,
    lora_dropout=0.5, adapter_size=4, peft_targets="down", eval_every=1, sample_prompt="xyz",
    seed=5, log_every=2, profile=True, plan="h100", global_batch_size=4, data="OTHERS",
    attention_bias="qkv", mlp_bias=True, tied=True, norm_eps=0.1, rotary_base=10.0,
    rotary_share=0.5, init_std=0.1, adam_beta1=0.5, adam_beta2=0.5, decay_steps=1, fp8_history=1,
    window_pattern="10", rotary_factor=4.0, rotary_scaling="yarn", rotary_original_length=64,
    lr_schedule="wsd", wsd_steps=2, ep_comm_overlap=True,
    kv_rank=8, query_rank=8, rope_head_dim=2, value_head_dim=2,
    cache="elsewhere", date="2026-11-26", encoder_layers=2, target_length=24,
    rampup_batch_size=[1, 1, 1],
    rollout_lag=1, importance_cap=1.0, mtp_layers=2, mtp_loss_weight=0.1,
)  # fmt: skip
# a kind of run -> what OTHER stands for
OTHER = {"reward": "dpo", "dpo": "reward", "grpo": "ppo", "ppo": "grpo"}
# What a run leaves does not show these: they are about memory, speed, devices, or what breaks.
UNSEEN = {
    *("attention", "recompute", "recompute_layers", "micro_batch_size", "kernels", "compile"),
    "make_vocab_size_divisible_by",
    *("device", "timeout", "max_bad_steps", "tensorboard", "fp8_keep_bytes", "out", "resume"),
    # layouts need more ranks; each technique's tests have them
    *("tp", "sequence_parallel", "pp", "cp", "virtual_stages", "ep", "rollout_tp", "rollout_pp"),
    *("data_parallel_replicate_degree", "tp_comm_overlap"),
    # files that the other flags do not have here
    *("load", "skip_bad_examples"),
    # of more checkpoints than two steps write
    "keep",
}
WORDS = ("step", "--pl")
KINDS = {
    "text": "train.py --data TEXT",
    "experts": "train.py --data TEXT --num-experts 2 --router topk --num-layers 2",
    "bert": "bert.py --data TEXT",
    "t5": "t5.py --data TEXT --num-layers 3 --target-length 16",
    "goes on": "train.py --load BASE --data TEXT",
    "sft": "sft.py --load BASE --data SFT",
    "lora": "sft.py --load BASE --data SFT --peft lora",
    "ia3": "adapters.py --load BASE --data TEXT --peft ia3",
    "adapter": "adapters.py --load BASE --data TEXT --peft adapter",
    "reward": "preference.py --method reward --load BASE --data PAIRS",
    "dpo": "preference.py --method dpo --load BASE --data PAIRS",
    "grpo": "reinforcement.py --method grpo --load BASE --data PROMPTS --reward REWARD"
    " --answer-tokens 4 --group-size 2",
    "ppo": "reinforcement.py --method ppo --load BASE --data PROMPTS --reward REWARD"
    " --answer-tokens 4",
}
# flags that a refusal may name in its place
BESIDE = {"model": ("--expert-every",), "method": ("--beta", "--group-size")}


PAIRS = [
    (kind, field.name)
    for kind, words in KINDS.items()
    for field in dataclasses.fields(training_commands.split(KINDS[kind].split())[0])
    # where it is given already
    if field.name in VALUES and f"{flag_name(field.name)} {VALUES[field.name]}" not in words
]
random.Random(1).shuffle(PAIRS)
DEFAULT = 40
SHAPE = "num_layers hidden_size num_heads ffn_hidden_size seq_length".split()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """What stands for the words in capitals."""
    folder = tmp_path_factory.mktemp("effects")
    answers = {"completion": "cc", "chosen": "c", "rejected": "dd"}
    lines = {
        "SFT": [{"prompt": f"{n % 9}", "completion": "ab"[n % 2] * 5} for n in range(40)],
        "PAIRS": [{"prompt": f"{n % 9}", "chosen": "aa", "rejected": "b"} for n in range(40)],
        "PROMPTS": [{"prompt": f"{n}"} for n in range(40)],
        "OTHERS": [{"prompt": f"{n}?", **answers} for n in range(40)],
        "TEXT": [{"text": f"a text, and more of it {n}. "} for n in range(400)],
    }
    found = {}
    for name, records in lines.items():
        found[name] = str(write_lines(folder / f"{name}.jsonl", records))
    texts = {
        "VAL": "another text. " * 400,
        "TEMPLATE": "{% for m in messages %}[{{ m.content }}{{ eos_token }}{% endfor %}",
        "REWARD": "def f(prompt, answer, record):\n    return len(set(answer)) + answer.count('a')",
    }
    endings = {"REWARD": ".py", "TEMPLATE": ".jinja"}
    for name, text in texts.items():
        path = folder / f"{name}{endings.get(name, '.txt')}"
        path.write_text(text)
        found[name] = str(path)
    found["REWARD"] += ":f"
    found["TOKENIZER"] = tokenizer(folder)
    found["BASE"] = str(folder / "base")
    argv = [*small_run.flags(steps=2, data=found["TEXT"], out=found["BASE"]), "--lr", "0.01"]
    assert run(*argv, "--cache", folder / "cache") == 0
    return found


def tokenizer(folder) -> str:
    from tokenizers import Tokenizer, models

    path = folder / "other.json"
    vocabulary = {chr(n): n - 32 for n in range(32, 127)} | {"</s>": 95}
    Tokenizer(models.BPE(vocabulary, [], unk_token=" ")).save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def result(files, tmp_path_factory):
    """What a run leaves, by kind and flag; or its refusal, a text."""
    found = {}

    def of(kind: str, *words: str):
        if (kind, *words) not in found:
            found[kind, *words] = leaves(kind, words, files, tmp_path_factory.mktemp("run"))
        return found[kind, *words]

    return of


def leaves(kind: str, words: tuple[str, ...], files: dict, folder):
    argv = "--steps 2 --global-batch-size 2 --eval-every 2 --device cpu --lr 0.01".split()
    argv += ["--warmup-steps", "0", "--out", str(folder / "out")]
    if "TEXT" in KINDS[kind]:
        argv += ["--cache", str(folder / "cache")]
        files = files | {"OTHERS": files["VAL"]}
    if "--load" not in KINDS[kind]:
        shape = {
            name: small_run.SMALL[name] for name in SHAPE if flag_name(name) not in KINDS[kind]
        }
        argv += small_run.as_flags(**shape)
    meant = files | {"OTHER": OTHER.get(kind), "elsewhere": str(folder / "elsewhere")}
    given = [meant.get(word, word) for word in KINDS[kind].split()]
    argv += [meant.get(word, word) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(*given, *argv)
    if status:
        # above it may stand what was tokenized
        last = err.getvalue().splitlines()[-1]
        command = KINDS[kind].split()[0]
        assert status == 2 and last.startswith(f"{command}: "), err.getvalue()
        return last
    left = [path for path in sorted((folder / "out").rglob("*")) if path.is_file()]
    contents = {str(path.relative_to(folder)): None for path in left}
    for path in left:
        if path.suffix in (".safetensors", ".txt"):
            content = path.read_bytes()
            if path.suffix == ".safetensors":
                # without the header, in which the order of names varies
                content = content[8 + int.from_bytes(content[:8], "little") :]
            contents[str(path.relative_to(folder))] = content
    state = checkpoint.read_index(checkpoint.find(folder / "out"))["model"]
    # the screen shows lines of steps, and a prediction
    printed = [line.split()[:2] for line in out.getvalue().splitlines() if line[:4] in WORDS]
    tokenized = sorted(path.name for path in folder.iterdir())
    return numbers_of(folder / "out"), contents, state, printed, tokenized


def flags_of(field: str) -> list[str]:
    value = VALUES[field]
    words = value if isinstance(value, list) else [value]
    return [flag_name(field), *([] if value is True else map(str, words))]


@pytest.mark.parametrize(
    "kind, field",
    [
        pytest.param(*pair, marks=[] if n < DEFAULT else pytest.mark.repetition)
        for n, pair in enumerate(PAIRS)
    ],
)
def test_a_flag_changes_something_or_is_refused(kind, field, result):
    given = result(kind, *flags_of(field))
    if isinstance(given, str):
        others = BESIDE.get(field, ())
        assert any(name in given for name in (flag_name(field), field, *others)), given
    else:
        assert given != result(kind), f"{flag_name(field)} has no effect, and is not refused"


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_flag_nothing_changes(kind, result):
    assert result(kind) == result(kind, "--seed", "0")


def test_every_flag_is_tried():
    configurations = {training_commands.split(KINDS[kind].split())[0] for kind in KINDS}
    fields = {field.name for each in configurations for field in dataclasses.fields(each)}
    assert fields == VALUES.keys() | UNSEEN and not VALUES.keys() & UNSEEN


def test_a_run_goes_on_with_fewer_ranks():
    """What only several ranks have is no fault of a run that began with them."""
    validate(Config(reduce_dtype="bf16", zero_stage=2, resume=True), 1)


@pytest.mark.parametrize("field", ["plan", "profile"])
def test_flags_beside_as_rank(field, capsys):
    argv = ["--as-rank", "0", "--of", "2", *flags_of(field)]
    assert train.main(argv) == 2
    assert f"leave {flag_name(field)} out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", training_commands.COMMANDS.values())
def test_the_tables_name_flags(kind):
    names = {name for need in (*NEEDS, *NEEDS_RANKS, *kind.needs) for name in need.fields}
    # a constant of the class is a flag that the command does not have
    assert [name for name in names if not hasattr(kind(), name)] == []
