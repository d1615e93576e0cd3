"""README.md and docs/: every link, file, command and flag in them exists.

Commands are taken from code blocks and from `inline code`. Each is parsed by the parser of the file
that it calls, and goes no further. A word in capitals (FILE, RUN) stands for something of the
reader's.
"""

import argparse
import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import asdict
from functools import partial
from pathlib import Path

import processes
import pytest
import torch.distributed.run
import yaml
from packaging.requirements import Requirement
from PIL import Image

from course import form
from course.training_commands import COMMANDS as TRAINING_COMMANDS
from finetune.labelled_data import Reader
from finetune.nemo_config import PromptConfig
from models.pictures import open_pictures
from planning import commands as planning_commands
from planning.inputs import TRAIN
from planning.memory import memory
from planning.plan import layout_of, predict, software_of
from run import flags, rules
from run.pretraining import Config
from run.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = [README, ROOT / "CONTRIBUTING.md", ROOT / "course" / "exercises" / "README.md"]
DOCS += sorted((ROOT / "docs").glob("*.md"))
MAKEFILE = (ROOT / "Makefile").read_text()
# files whose command line is parsed by a function that takes it; others read sys.argv
# those with a parser of their own
COMMANDS = (
    "generate.py",
    "inference/prompt_tuning.py",
    "inference/adapters.py",
    "course/verify.py",
)
COMMANDS += ("finetune/prompt_tuning.py", "finetune/adapters.py", "finetune/classify.py")
COMMANDS += ("inference/huggingface.py", "inference/evaluate.py", "inference/export.py")
COMMANDS += ("inference/megatron.py",)
COMMANDS += ("models/generate_t5.py", "models/seq2seq.py", "models/use_bert.py", "models/draw.py")
COMMANDS += ("models/ask_picture.py", "run/curate.py")
COMMANDS += ("course/exercises/bugs.py", "course/page/explorer.py", "inference/serve.py")


def tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return set(done.stdout.split("\n"))


# --- what a document says -------------------------------------------------------------------------


def code_blocks(text: str) -> list[str]:
    """The lines of blocks that name no language; a line that ends with \\ goes on."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    plain = "\n".join(block for language, block in blocks if not language)
    return plain.replace("\\\n", " ").split("\n")


def without_code(text: str) -> str:
    """Without blocks of code: they may have files and flags of their own."""
    return re.sub(r"^```(?:python|diff)\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def inline_code(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def commands(path: Path) -> list[list[str]]:
    """The words of each command, without what follows | or >."""
    text = path.read_text()
    found = []
    for line in code_blocks(text) + inline_code(text):
        line = re.sub(r"^docker run .* large-model-training (?=python|torchrun)", "", line)
        line = re.sub(r"^([A-Z_]+=\w+ )+", "", line)
        if not re.match(r"(python|torchrun|make|sbatch) ", line):
            continue
        words = shlex.split(line, comments=True)
        ends = [words.index(sign) for sign in ("|", ">") if sign in words]
        found.append(words[: min(ends, default=len(words))])
    return found


def every_command() -> list[tuple[str, str]]:
    """(document, command), each command once."""
    pairs = {}
    for path in DOCS:
        for words in commands(path):
            pairs.setdefault(shlex.join(words), path.name)
    return [(document, command) for command, document in pairs.items()]


# --- whether it exists ----------------------------------------------------------------------------


class Parsed(BaseException):
    """A command line was accepted; nothing more shall run."""


@pytest.fixture
def only_parse(monkeypatch):
    """parse_args raises Parsed after it has accepted its arguments."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, args=None, namespace=None):
        parse_args(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def is_placeholder(word: str) -> bool:
    return re.fullmatch(r"[A-Z_]+", word) is not None


def check_script(path: str, argv: list[str], monkeypatch) -> None:
    """A script of this repository, and the flags that a document gives it."""
    assert path in tracked(), f"{path} does not exist"
    assert '__name__ == "__main__"' in (ROOT / path).read_text(), f"{path} is no command"
    has_flags = any(word.startswith("-") for word in argv)
    if not has_flags and not (path.startswith("benchmarks/") and argv):
        return
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [path, *argv])
    # --help prints, and ends
    with pytest.raises(SystemExit if "--help" in argv else Parsed):
        main_of(path, argv)()


def main_of(path: str, argv: list[str]):
    """What a command calls with these arguments."""
    if path == "train.py":
        return lambda: flags.make_parser(0).parse_args(argv)
    text = (ROOT / path).read_text()
    if of_run := re.search(r"^    .*train\.main\(argv, (\w*runs)\.(\w+)\)", text, re.MULTILINE):
        config_class = getattr(importlib.import_module(f"models.{of_run[1]}"), of_run[2])
        return lambda: flags.make_parser(0, config_class).parse_args(argv)
    if lesson := re.search(r'^    form\.run\("(\w+)"\)', text, re.MULTILINE):
        return partial(form.main, lesson[1], argv)
    module = path.removesuffix(".py").replace("/", ".")
    started = re.search(r"^    terminal\.command\((?:(\w+)\.)?main\)", text, re.MULTILINE)
    if started is None:
        # a script, which reads sys.argv
        return importlib.import_module(module).main
    if started[1]:
        folder = re.search(rf"^    from (\w+) import {started[1]}$", text, re.MULTILINE)[1]
        module = f"{folder}.{started[1]}"
    return partial(importlib.import_module(module).main, argv)


def check_make(words: list[str], monkeypatch) -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE))
    for word in words:
        name, equals, value = word.partition("=")
        assert name in (variables if equals else targets), f"make knows no {name}"
        if name == "ARGS" and "train" in words:
            check_script("train.py", value.split(), monkeypatch)


def split_launcher(words: list[str]) -> tuple[str, list[str], str]:
    """(script, its arguments, ranks) of the words after torchrun."""
    args = torch.distributed.run.get_args_parser().parse_args(words)
    script = args.training_script
    if args.module:
        script = script.replace(".", "/") + ".py"
    return script, args.training_script_args, args.nproc_per_node


@pytest.mark.parametrize("document, command", every_command(), ids=lambda text: text[:60])
def test_command(document, command, monkeypatch, request):
    program, *words = shlex.split(command)
    if program == "torchrun":
        if not any(word.endswith(".py") or word == "-m" for word in words):
            # a flag of the launcher is mentioned; test_flags knows them
            return
        script, words, _ = split_launcher(words)
        words.insert(0, script)
    # after the launcher's own flags were parsed
    request.getfixturevalue("only_parse")
    if program == "make":
        check_make(words, monkeypatch)
    elif program == "sbatch":
        assert words[0] in tracked()
    elif words[0] == "-m":
        if words[1:]:
            check_script(words[1].replace(".", "/") + ".py", words[2:], monkeypatch)
    elif not is_placeholder(words[0]):
        check_script(words[0], words[1:], monkeypatch)


def training_commands() -> list[tuple[int, str]]:
    """(ranks, flags) of the commands that begin a run of their own."""
    found = {}
    for _, command in every_command():
        program, *words = shlex.split(command)
        ranks = "1"
        if program == "torchrun" and "train.py" in words:
            script, words, ranks = split_launcher(words)
            words.insert(0, script)
        elsewhere = {"--resume", "--load", "--help", "train"} & set(words)
        if words[:1] == ["train.py"] and not elsewhere and ranks.isdigit():
            found[int(ranks), shlex.join(words[1:])] = None
    # four nodes of eight
    script = (ROOT / "train.sbatch").read_text()
    flags_of_job = re.search(r'^TRAIN="(.*?)"', script, re.MULTILINE | re.DOTALL)[1]
    found[32, " ".join(flags_of_job.split())] = None
    return list(found)


@pytest.mark.parametrize("ranks, arguments", training_commands(), ids=lambda x: str(x)[:60])
def test_training_command_can_run(ranks, arguments):
    """Its layout and batch fit its ranks and its model. Nothing starts."""
    config, question = flags.parse_all(shlex.split(arguments), 0, Config, ranks)
    rules.validate(config, question.get("of", ranks))


def test_dockerfile():
    """What can be told without docker: the compiler is there, the torch of pyproject.toml, the
    files, the extra."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    told = [line.split(maxsplit=1) for line in lines if line and line[0] != "#"]
    ((_, image),) = [words for words in told if words[0] == "FROM"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch_versions,) = [line for line in project["dependencies"] if line.startswith("torch")]
    version = re.fullmatch(r"pytorch/pytorch:([\d.]+)-cuda[\d.]+-cudnn9-devel", image)[1]
    assert Requirement(torch_versions).specifier.contains(version)
    for words in told:
        if words[0] == "COPY":
            *names, _ = words[1].split()
            assert all(name == "." or name in tracked() for name in names), names
    assert project["readme"] in str(told) and str(project["license-files"][0]) in str(told)
    (install,) = [text for instruction, text in told if instruction == "RUN"]
    assert re.search(r"\.\[(\w+)\]", install)[1] in project["optional-dependencies"]
    (command,) = [json.loads(text) for instruction, text in told if instruction == "CMD"]
    assert command[0] == "python" and command[1] in tracked()


def test_commands_for_gpus_fit_into_80_gb():
    """Those of train.sbatch and of the tables of tasks, with 4 to spare, by the planner's
    formulas."""
    files = README, ROOT / "docs" / "training.md", ROOT / "train.sbatch"
    text = " ".join(" ".join(path.read_text() for path in files).split())
    fitting = 0
    for ranks, arguments in training_commands():
        if ranks >= 8 and arguments in text:
            config, _ = flags.parse_all(shlex.split(arguments), 0, Config)
            layout = layout_of(config, ranks)
            assert sum(memory(config.model_config(), layout, TRAIN).values()) < 76e9, arguments
            # attention is fused without dropout alone
            assert config.model_config().dropout == 0, arguments
            fitting += 1
    assert fitting >= 4


def test_what_is_said_of_gpus():
    """Each row of docs/gpu.md names tests that are there. A file of which a part has not run says
    so."""
    text = (ROOT / "docs" / "gpu.md").read_text().split("what holds it here | not yet run |")[1]
    rows = [line.split("|") for line in text.split("\n\n")[0].splitlines()[2:]]
    assert len(rows) > 10
    left = {}
    for _, what, where, holds, missing, _ in rows:
        for name in re.findall(r"tests/\w+\.py", holds):
            assert (ROOT / name).exists(), what
        for name in re.findall(r"\b(?:base|inference)/\w+\.py|kernels\.py", where):
            left[name] = left.get(name, "") + missing.strip()
    for name, missing in left.items():
        introduction = ast.get_docstring(ast.parse((ROOT / name).read_text()))
        assert ("not yet run" in " ".join(introduction.split())) == bool(missing), name


def test_predictions_of_the_first_hour():
    """The seconds and bytes marked *p* in docs/gpu.md are those of its commands."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    found = []
    for words in commands(ROOT / "docs" / "gpu.md"):
        if words[0] == "torchrun" and "--plan" in words:
            _, arguments, each = split_launcher(words[1:])
            ranks = int(each) * (2 if "--nnodes" in words else 1)
            config, _ = flags.parse_all(arguments, 0, Config)
            seconds = sum(predict(config, ranks).values())
            parts = memory(config.model_config(), layout_of(config, ranks), software_of(config))
            found.append((f"{seconds:.3g} s *p*", f"{sum(parts.values()) / 1e9:.0f} GB"))
    (first, gb), (large, gb_of_large), (two_nodes, _) = found
    for words in first, large, two_nodes, f"{gb} of a GPU *p*", f"{gb_of_large} *p*":
        assert words in " ".join(text.split()), words


def test_prompt_configuration():
    """The JSON in docs/prompts.md is a configuration, and the line below it is data for it."""
    text = (ROOT / "docs" / "prompts.md").read_text()
    configuration, line = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    config = PromptConfig.of(json.loads(configuration))
    record = json.loads(line)
    config.templates[record["taskname"]].check_record(record, answer=True)


def test_data_of_bert_and_t5(tmp_path, monkeypatch):
    """In docs/models.md: lines to classify are read, and the program writes the pairs that it says,
    of which the one below it is one."""
    text = (ROOT / "docs" / "models.md").read_text()
    blocks = re.findall(r"^```(json|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown = "".join(block for language, block in blocks if language == "json")
    lines = [json.loads(line) for line in shown.splitlines()]
    reader = Reader(ByteTokenizer(), 257, 256, 128)
    read = [reader.row(line).record for line in lines if {"label", "answer"} & line.keys()]
    assert len(read) == 3
    (program,) = [block for language, block in blocks if language == "python"]
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    written = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("pairs", "new")]
    assert [len(part) for part in written] == [5500, 500]
    (pair,) = [line for line in lines if "source" in line]
    assert pair in [json.loads(line) for part in written for line in part]


def test_data_of_pictures(tmp_path):
    """In docs/pictures.md: lines of metadata.jsonl are read as they stand."""
    text = (ROOT / "docs" / "pictures.md").read_text()
    shown = "".join(re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = [json.loads(line) for line in shown.splitlines()]
    assert len(lines) == 3
    for name in ("a.png", "after.png", "before.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "metadata.jsonl").write_text(shown)
    files = open_pictures([str(tmp_path)], 4).files
    for line in lines:
        assert any(line.items() <= asdict(file).items() for file in files), line


def option_strings(main, argv, monkeypatch) -> set[str]:
    """The flags of the parser that main(argv), or main() with sys.argv, makes."""
    parsers = []

    def keep(self, args=None, namespace=None):
        parsers.append(self)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", keep)
    monkeypatch.setattr("sys.argv", ["command", *argv])
    with pytest.raises(Parsed):
        main()
    return {flag for action in parsers[0]._actions for flag in action.option_strings}


# of explicit attention, or of what it costs
WITH_DROPOUT = ("--recompute selective", "runs/fused", "runs/apart", "--as-rank", "--positions")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_for_gpus_have_no_dropout(path):
    """By default GPT-2 and GPT-3 have it, and then attention writes s x s probabilities."""
    commands = path.read_text().replace("\\\n", " ").replace("\n  ", " ")
    for command in re.findall(r"train\.py [^`\n]*--model (?:gpt|megatron)[^`\n]*", commands):
        if not any(word in command for word in WITH_DROPOUT):
            assert re.search(r"--dropout 0(\.0)? ", command + " "), command


def test_flags(monkeypatch):
    """Every --flag that is mentioned anywhere belongs to some command here, or to torchrun."""
    launcher = torch.distributed.run.get_args_parser()
    known = {flag for action in launcher._actions for flag in action.option_strings}
    mains = [
        (partial(flags.parse, [], 0, config_class), [])
        for config_class in TRAINING_COMMANDS.values()
    ]
    mains += [(main_of(name, ["word"]), []) for name in COMMANDS]
    for name in planning_commands.COMMANDS.keys() - {"try"}:
        mains.append((partial(planning_commands.main, [name]), []))
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        if "\ndef main(" in path.read_text():
            mains.append((importlib.import_module(f"benchmarks.{path.stem}").main, []))
    mains.append((main_of("course/tensor_parallel.py", []), []))
    mains.append((main_of("course/exercises/check.py", []), []))
    for main, argv in mains:
        known |= option_strings(main, argv, monkeypatch)
    # of torchrun from torch 2.13 on
    known.add("--shutdown-timeout")
    # of docker
    known.add("--ipc")
    # of lm-eval
    known |= {"--model_args", "--num_fewshot", "--apply_chat_template", "--output_path"}
    known |= {"--include_path", "--tasks"}
    # of the server whose command planner.py serve prints
    known |= {"--max-sequences", "--block-size", "--blocks"}
    for path in DOCS:
        text = without_code(path.read_text())
        mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
        assert mentioned <= known, (path.name, mentioned - known)


# --- links, images, size --------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links(path):
    """Each local link leads to a committed file, and to a heading that is there."""
    committed = tracked()
    targets = re.findall(r"\]\(([^)]+)\)", path.read_text())
    assert targets
    for target in targets:
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert str(file.relative_to(ROOT)) in committed, f"{target} is not committed"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading"


def test_every_figure_and_every_comparison_is_shown():
    shown = README, ROOT / "docs" / "results.md", ROOT / "docs" / "course.md"
    text = "".join(path.read_text() for path in shown)
    names = [f"docs/figures/{path.name}" for path in (ROOT / "docs" / "figures").glob("*.svg")]
    for path in (ROOT / "benchmarks").glob("*.py"):
        if "\ndef main(" in path.read_text():
            names.append(f"python -m benchmarks.{path.stem}")
    missing = [name for name in names if name not in text]
    assert not missing, "show each in docs/results.md, docs/course.md or README.md"


def test_every_folder_is_described():
    """In docs/design.md, and in its own `__init__.py`: what it holds, and where to begin."""
    text = (ROOT / "docs" / "design.md").read_text()
    folders = {name.split("/")[0] for name in tracked() if name.endswith(".py") and "/" in name}
    for folder in folders - {"benchmarks", "tests"}:
        init = ROOT / folder / "__init__.py"
        assert f"]({Path('..') / folder / '__init__.py'})" in text, folder
        docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert "mports" in docstring and "Begin with" in docstring, init
        assert docstring.count("\n") < 5, init


def test_readme_is_one_short_page():
    content = README.read_bytes()
    assert content.count(b"\n") <= 150, "README.md is longer than 150 lines: shorten it"
    assert len(content) <= 8 * 1024, "README.md has more than 8,192 bytes: shorten it"


def test_paths_in_prose_exist():
    """`run/config` and `weight_layouts.py` in prose: a module with or without its ending."""
    folders = "base run finetune inference planning course benchmarks tests".split()
    # but files with other endings
    pattern = rf"(?<![\w/-])(?:{'|'.join(folders)})/\w+\b(?!\.(?:json|txt|js|html))(?:\.py)?"
    for path in DOCS:
        for name in re.findall(pattern, without_code(path.read_text())):
            file = ROOT / (name if name.endswith(".py") else f"{name}.py")
            assert file.exists() or (ROOT / name).is_dir(), f"{path.name}: {name}"


def test_workflow():
    """A public forge runs the checks of the Makefile, on Sundays the repetitions too, and no action
    but those that it needs."""
    (job,) = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"].values()
    actions = [step["uses"].split("@")[0] for step in job["steps"] if "uses" in step]
    assert actions == ["actions/checkout", "actions/setup-python"]
    assert job["steps"][1]["with"]["python-version"] == "3.11" and "ubuntu" in job["runs-on"]
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == ["make lint", "make test", "make test-all"]
    assert {"lint", "test", "test-all"} <= targets


def test_hello(tmp_path):
    """The README's first program: two ranks, one loss."""
    (program,) = re.findall(
        r"^```python\n(import torch\n.*?)^```$", README.read_text(), re.M | re.S
    )
    (tmp_path / "hello.py").write_text(program)
    done = processes.run([tmp_path / "hello.py"], world=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(64, 32) of (128, 32)") == 2
    losses = re.findall(r"loss ([\d.]+), on one device ([\d.]+)", done.stdout)
    assert len(losses) == 2 and all(float(a) == pytest.approx(float(b)) for a, b in losses)


def test_lines_in_the_readme():
    """What it says of the tree's size is so, within one in twenty."""
    text = " ".join(README.read_text().split())
    said = re.search(r"`import train` loads ([\d,]+) lines; .*? has ([\d,]+) more", text).groups()
    code = "import sys, train; print(*(getattr(m, '__file__', '') for m in sys.modules.values()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    ours = {Path(name) for name in done.stdout.split() if Path(name).is_relative_to(ROOT)}
    sources = {
        ROOT / name
        for name in tracked()
        if re.search(r"\.(py|cu|cuh|js|css|html)$", name)
        and not name.startswith(("tests/", "docs/"))
    }

    def lines(files) -> int:
        return sum(len(path.read_text().splitlines()) for path in files)

    counted = lines(ours & sources), lines(sources - ours)
    for number, count in zip(said, counted):
        assert int(number.replace(",", "")) == pytest.approx(count, rel=0.05), counted
