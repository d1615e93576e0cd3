"""Damages files at random, and checks that the commands which read them refuse them in one line.

    python tests/bad_files.py [--count 200] [--first 0] [--kind index config prompts tokenizer
    metrics tokens adapter peft conversations]

Case n of a kind is drawn from seed n. A valid folder is copied and one of its files is changed:
bytes are flipped, the file is cut off, a JSON value becomes another type, huge, negative, NaN,
nested or half a character, a key is removed or added. Then one of the commands that read this file
runs in this process. In half of the cases the checksum beside index.json is made to fit, so that
its content is read.

The command must end within 20 seconds, with status 2 and one line on stderr or with status 0, and
no exception may escape."""

import argparse
import contextlib
import faulthandler
import functools
import hashlib
import importlib
import inspect
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import small_run  # noqa: E402 (needs the path)

from base import terminal  # noqa: E402
from base.errors import InputError  # noqa: E402

SECONDS = 20
DEEP = "nested-without-end"
VALUES = [None, True, False, -1, 0, 1, 3, 2.0, 0.5, -0.5, 1e-320, 1e300, 10**30, 60000]
VALUES += [2**31 - 1, 2**31, 2**53, 2**63, float("nan"), float("inf"), "", "x", "2", "\ud800"]
VALUES += ["a" * 300, "../..", "\0", [], {}, [["x"]], {"x": 1}, DEEP]
TEXT = "def f(x):\n    return x + 1\n" * 40
SHAPE = dict(num_layers=2, hidden_size=16, num_heads=2, ffn_hidden_size=24, seq_length=16)
SIZES = " ".join(small_run.as_flags(**SHAPE))
# words of commands: what a run reads, how little it does, the model of its own
TEXTS = "--data text.txt"
BRIEF = "--device cpu --global-batch-size 2 --warmup-steps 0 --eval-every 0"
TRAIN = f"train {TEXTS} {BRIEF} {SIZES}"
LEARN_LORA = f"finetune.adapters --load run {TEXTS} {BRIEF} --steps 2 --peft lora"
ANSWER = "--max-tokens 2 --device cpu"
CHAT = """\
{% for message in messages %}
{{ message.role }}: {% if message.role == "assistant" %}
{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
{% else %}
{{ message["content"] }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ "assistant: " }}{% endif %}
"""


# --- changes --------------------------------------------------------------------------------------


def changed_bytes(data: bytes, g: random.Random) -> bytes:
    at = g.randrange(len(data))
    n = g.choice([1, 1, 4, 40])
    before = data[:at]
    some = data[at : at + n]
    after = data[at + n :]
    cut_off = before
    removed = before + after
    repeated = before + some + some + after
    zeroed = before + bytes(n) + after
    flipped = before + bytes(b ^ g.randrange(1, 256) for b in some) + after
    return g.choice([flipped] * 4 + [cut_off, removed, repeated, zeroed, b""])


def random_location(content, g: random.Random) -> tuple:
    """(object or list, key) of a value in JSON: every key of an object is as likely, however much
    it holds."""
    while True:
        key = g.choice(list(content) if isinstance(content, dict) else range(len(content)))
        if not isinstance(content[key], dict | list) or not content[key] or g.random() < 0.2:
            return content, key
        content = content[key]


def changed_json(data: bytes, g: random.Random) -> bytes:
    content = json.loads(data)
    for _ in range(g.choice([1, 1, 1, 2])):
        if content:
            outer, key = random_location(content, g)
            way = g.random()
            if way < 0.7 or isinstance(outer, list):
                outer[key] = g.choice(VALUES)
            elif way < 0.85:
                del outer[key]
            else:
                outer[g.choice(["x", "", "\ud800", "type", "dtype"])] = g.choice(VALUES)
    depth = g.choice([900, 100_000])
    return json.dumps(content).replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode()


def changed_line(data: bytes, g: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    n = g.randrange(len(lines))
    lines[n] = changed_json(lines[n], g) + b"\n"
    return b"".join(lines)


def changed_header(data: bytes, g: random.Random) -> bytes:
    """Change the length of a safetensors file's header, or the JSON in it."""
    size = int.from_bytes(data[:8], "little")
    if g.random() < 0.2:
        return g.choice([0, 1, size - 1, size + 1, 2**40, 2**63]).to_bytes(8, "little") + data[8:]
    header = changed_json(data[8 : 8 + size], g)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


# --- valid folders --------------------------------------------------------------------------------


def succeed(command: str) -> None:
    """Run a command that prepares a folder, without showing its output."""
    status, _, err = run(command)
    assert status == 0, (command, err)


def make_run() -> None:
    succeed(f"{TRAIN} --steps 2 --out run")


def make_folder() -> None:
    """Hugging Face folders: gpt2, llama, mixtral."""
    from test_generate import save
    from test_gpt import build

    from inference import huggingface

    experts = dict(llama=True, num_experts=2, router="topk", router_topk=2, z_loss=0.0)
    for name, fields in {"gpt2": {}, "llama": dict(llama=True), "mixtral": experts}.items():
        made = Path(f"{name}-ckpt")
        save(made, build(**SHAPE, vocab_size=257, **fields))
        huggingface.export_folder(made, Path(name))
        shutil.rmtree(made)


def make_prompts() -> None:
    make_run()
    lines = [dict(taskname="t", text="ab"[n % 2], label="xy"[n % 2]) for n in range(4)]
    small_run.write_lines(Path("lines.jsonl"), lines)
    encoder = dict(encoder_type="mlp", encoder_hidden=8, num_layers=2, dropout=0.0, init_std=1.0)
    data = dict(train_ds=["lines.jsonl"], validation_ds=["lines.jsonl"], max_seq_length=16)
    config = {
        "task_templates": [small_run.template("t", (2,), "<|VIRTUAL_PROMPT_0|>{text}={label}")],
        "virtual_prompt_style": "p-tuning",
        "language_model_path": "run",
        "existing_tasks": [],
        "new_tasks": ["t"],
        "p_tuning": encoder,
        "data": data | {"shuffle": True},
    }
    Path("prompts.json").write_text(json.dumps(config))
    succeed(f"{LEARN} --out prompts --steps 2")


def make_tokenizer() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    make_run()
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["<unk>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save("tokenizer.json")


def make_adapter() -> None:
    make_run()
    succeed(f"{LEARN_LORA} --out lora")


def make_peft() -> None:
    """Adapters of a GPT-2: folders lora and ia3."""
    make_run()
    for peft in ("lora", "ia3"):
        succeed(f"{LEARN_LORA} --peft {peft} --out our-{peft}")
        succeed(f"inference.adapters export our-{peft} {peft} --base run")


def make_conversations() -> None:
    # which takes longer than a case may
    importlib.import_module("train")
    said = {"role": "assistant", "content": "yes"}
    talks = [{"messages": [{"role": "user", "content": f"{n}?"}, said]} for n in range(4)]
    talks.append({"prompt": "a", "completion": "b"})
    small_run.write_lines(Path("chats.jsonl"), talks)
    Path("chat.jinja").write_text(CHAT)


# --- commands -------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """A file of a kind, as a pattern; how it may be changed; the commands that read it: a module
    and its words. {} stands for the name of a Hugging Face folder."""

    file: str
    changes: list[Callable]
    commands: list[str]


RESUME = f"{TRAIN} --steps 3 --out run --resume"
GENERATE = f"generate --checkpoint run --prompt de {ANSWER}"
LEARN = "finetune.prompt_tuning --config prompts.json --global-batch-size 2 --device cpu"
INFER = "--prompts prompts/prompts.safetensors --checkpoint run --data lines.jsonl"
ANSWERS = [f"finetune.prompt_tuning {word} {INFER} {ANSWER}" for word in ("generate", "evaluate")]
CHATS = f"finetune.sft {BRIEF} {SIZES} --seq-length 64 --data chats.jsonl"
CHATS += " --chat-template chat.jinja"
JSON = [changed_json, changed_json, changed_bytes]
OF_INDEX = [
    GENERATE,
    "inference.huggingface export run hf",
    "checkpoint verify run",
    "checkpoint show run",
    f"train --load run {TEXTS} --device cpu --global-batch-size 2 --steps 1 --out new",
    RESUME,
]
OF_FOLDER = [
    "inference.huggingface import {} ckpt",
    f"generate --checkpoint {{}} --prompt de {ANSWER}",
]
OF_TOKENIZER = ["run.tokenizer def tokenizer.json", f"{GENERATE} --tokenizer tokenizer.json"]
OF_ADAPTER = [
    "inference.adapters merge run lora new",
    "inference.adapters export lora new --base run",
    "inference.huggingface export run new --adapter lora",
    f"{GENERATE} --adapter lora",
    f"{LEARN_LORA} --out lora --resume --steps 3",
]
IMPORT = "inference.adapters import {} new --base run"
# kind -> (what makes a valid folder, the files in it)
KINDS = {
    "index": (make_run, [Reading("run/checkpoints/*/index.json", JSON, OF_INDEX)]),
    "config": (
        make_folder,
        [
            Reading("{}/config.json", JSON, OF_FOLDER),
            Reading("{}/config.json", JSON, OF_FOLDER),
            Reading("{}/model.safetensors", [changed_header], OF_FOLDER),
        ],
    ),
    "prompts": (
        make_prompts,
        [
            Reading("prompts.json", JSON, [f"{LEARN} --out new --steps 1"]),
            Reading("prompts/prompts.safetensors", [changed_header, changed_bytes], ANSWERS),
            Reading(
                "lines.jsonl",
                [changed_line, changed_bytes],
                [f"{LEARN} --out new --steps 1", *ANSWERS],
            ),
        ],
    ),
    "tokenizer": (make_tokenizer, [Reading("tokenizer.json", JSON, OF_TOKENIZER)]),
    "metrics": (
        make_run,
        [Reading("run/metrics.jsonl", [changed_line, changed_bytes], ["run.metrics run", RESUME])],
    ),
    "adapter": (make_adapter, [Reading("lora/checkpoints/*/index.json", JSON, OF_ADAPTER)]),
    "peft": (
        make_peft,
        [
            Reading(f"{folder}/{file}", changes, [IMPORT.format(folder)])
            for folder in ("lora", "ia3")
            for file, changes in (
                ("adapter_config.json", JSON),
                ("adapter_model.safetensors", [changed_header]),
            )
        ],
    ),
    "conversations": (
        make_conversations,
        [
            Reading("chats.jsonl", [changed_line, changed_bytes], [f"{CHATS} --steps 1 --out new"]),
            Reading("chat.jinja", [changed_bytes], [f"{CHATS} --steps 1 --out new"]),
        ],
    ),
    "tokens": (
        make_run,
        [
            Reading("cache/*/index.json", JSON, [f"{TRAIN} --steps 1 --out new"]),
            Reading("cache/*/tokens.npy", [changed_bytes], [f"{TRAIN} --steps 1 --out new"]),
        ],
    ),
}


# --- one case -------------------------------------------------------------------------------------


@contextlib.contextmanager
def inside(folder: Path):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@functools.cache
def valid(kind: str) -> tempfile.TemporaryDirectory:
    """The folder that the cases of a kind are copies of; goes with the process."""
    folder = tempfile.TemporaryDirectory()
    with inside(folder.name):
        Path("text.txt").write_text(TEXT)
        KINDS[kind][0]()
    return folder


def raise_timeout(number, frame):
    raise TimeoutError(f"not finished after {SECONDS} s")


def call(command: str) -> int:
    """Run a module's main, which takes its words or reads them from sys.argv."""
    module, *words = command.split()
    main = importlib.import_module(module).main
    before = sys.argv
    sys.argv = [f"{module}.py", *words]
    try:
        return main(words) if inspect.signature(main).parameters else main()
    finally:
        sys.argv = before


def run(command: str) -> tuple[int | str, str, str]:
    """(exit status, or the exception that escaped; stdout; stderr) of a command in this process.
    What libraries print from C code is included."""
    with (
        tempfile.TemporaryFile("w+", errors="surrogateescape") as out,
        tempfile.TemporaryFile("w+", errors="surrogateescape") as err,
    ):
        kept = [os.dup(1), os.dup(2)]
        before = signal.signal(signal.SIGALRM, raise_timeout)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        signal.alarm(SECONDS)
        # for C code that never returns to Python, where signals are handled
        faulthandler.dump_traceback_later(6 * SECONDS, exit=True, file=kept[1])
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = call(command) or 0
        except SystemExit as e:
            status = e.code or 0
            if isinstance(status, str):
                print(status, file=err)
                status = 1
        except InputError as e:
            print(terminal.one_line(e), file=err)
            status = 2
        except BaseException as e:
            status = f"{type(e).__name__}: {e}"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()
            for number, fd in enumerate(kept, 1):
                os.dup2(fd, number)
                os.close(fd)
        for file in (out, err):
            file.flush()
            file.seek(0)
        return status, out.read(), err.read()


def check(kind: str, seed: int) -> tuple[bool, str | None]:
    """One case: (whether the command refused the file, what the command did wrong or None)."""
    g = random.Random(f"{kind} {seed}")
    family = g.choice(["gpt2", "llama", "mixtral"])
    reading = g.choice(KINDS[kind][1])
    command = g.choice(reading.commands).format(family)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(valid(kind).name, folder, dirs_exist_ok=True)
        with inside(folder):
            file = g.choice(sorted(Path().glob(reading.file.format(family))))
            change = g.choice(reading.changes)
            file.write_bytes(change(file.read_bytes(), g))
            if kind == "index" and seed % 2:
                checksum = hashlib.sha256(file.read_bytes()).hexdigest()
                file.with_name("index.json.sha256").write_text(f"{checksum}  index.json\n")
            begin = time.perf_counter()
            status, _, err = run(command)
    lines = err.splitlines()
    seconds = time.perf_counter() - begin
    if status == 0 and "Traceback" not in err:
        return False, None
    if status == 2 and len(lines) == 1 and seconds < SECONDS:
        return True, None
    problem = (
        f"{kind} {seed}: {change.__name__} of {file}; {command}: status {status}, {seconds:.0f} s,"
        f" {len(lines)} lines on stderr: {err[-1500:]}"
    )
    return status == 2, problem


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="of each kind")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    # a file that makes a command allocate too much is an error here, not the end of this machine
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, resource.RLIM_INFINITY))
    failed = 0
    for kind in args.kind:
        begin = time.time()
        wrong = []
        refused = 0
        for seed in range(args.first, args.first + args.count):
            was_refused, problem = check(kind, seed)
            refused += was_refused
            if problem:
                wrong.append(seed)
                print(problem, flush=True)
        failed += len(wrong)
        print(
            f"{kind}: {args.count - len(wrong)} of {args.count} held, {refused} refused;"
            f" {time.time() - begin:.0f} s; wrong: {wrong}",
            flush=True,
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
