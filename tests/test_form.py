"""The form of the tree: imports run one way, files and functions stay small."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules() -> dict[str, Path]:
    """Module name -> file, of everything but tests and benchmarks."""
    found = {}
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in ("tests", "benchmarks", "shared", "runs"):
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported_names(node: ast.AST) -> set[str]:
    """Everything that a file imports, also inside functions and as a command."""
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            names |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and child.module:
            names |= {child.module} | {f"{child.module}.{alias.name}" for alias in child.names}
    return names


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# A model of models/ -> the file with the flags of its command, which imports the model.
GUARDS = {"bert": "runs", "t5": "runs", "vit": "picture_runs"}
GUARDS |= {"clip": "clip_runs", "dit": "diffusion_runs", "unet": "diffusion_runs"}
GUARDS["autoencoder"] = "autoencoder_runs"
GUARDS["multimodal"] = "multimodal_runs"


@cache
def imports() -> dict[str, set[str]]:
    known = modules()
    graph = {}
    for name, path in known.items():
        graph[name] = imported_names(tree_of(path)) & known.keys() - {name}
    # The command `python planner.py` is planning/commands.py.
    graph["planner"].discard("planning.commands")
    # And `python -m models.bert` is models/runs.py.
    for name, runs in GUARDS.items():
        graph[f"models.{name}"] -= {f"models.{runs}", "train"}
    return graph


def test_imports_have_no_circle():
    """Also not through imports inside functions, or through what a command imports."""
    graph = imports()
    done, path = set(), []

    def visit(name: str) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for other in sorted(graph[name]):
                visit(other)
            path.pop()
            done.add(name)

    for name in graph:
        visit(name)


def test_the_check_finds_a_circle(monkeypatch):
    circle = {"a": {"b"}, "b": {"c"}, "c": {"a"}}
    monkeypatch.setitem(globals(), "imports", lambda: circle)
    with pytest.raises(AssertionError, match="a -> b -> c -> a"):
        test_imports_have_no_circle()


def test_the_model_knows_of_nothing_else():
    parts = {"base.dropout", "base.document_mask", "base.rotary"}
    parts |= {"base.cross_entropy", "base.model_config"}
    assert imports()["gpt"] - {"base"} == parts
    for name in parts:
        assert imports()[name] <= {"base", "base.document_mask", "base.model_config"}


def test_families_know_of_the_model_alone():
    """So that whatever changes a model can look at what they have put into it."""
    known = {"gpt", "base", "base.rotary", "base.rotary_scaling", "base.model_config"}
    assert imports()["families"] <= known


def test_only_trainers_built_on_train_import_it():
    """And what compares a run of it with one device, or breaks it."""
    importers = {name for name, others in imports().items() if "train" in others}
    built = {
        "finetune.prompt_tuning",
        "finetune.reference_models",
        "course.mutations.training_loop",
    }
    built |= {
        f"finetune.{name}"
        for name in ("adapters", "sft", "classify", "preference", "reinforcement")
    }
    built |= {f"models.{name}" for name in ("seq2seq", "prompt_t5", "classify", "use_bert", "draw")}
    of_one_device = {"course.verify", "course.parity", "course.bug_runs"}
    assert importers <= built | of_one_device


@pytest.mark.parametrize("file, most", [("gpt.py", 330), ("train.py", 295), ("README.md", 150)])
def test_files_that_are_read_first_are_short(file, most):
    assert len((ROOT / file).read_text().splitlines()) <= most


def test_each_technique_says_what_it_does_not_cover():
    """In its introduction. The others at the root are the loop, and the shape of a model."""
    others = {"train"}
    for path in sorted(ROOT.glob("*.py")):
        introduction = ast.get_docstring(tree_of(path))
        assert ("Not covered" in introduction) == (path.stem not in others), path.name


def test_the_root_is_small():
    """Who comes here first sees the techniques, and ten folders."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    names = done.stdout.split()
    files = {name for name in names if name.endswith(".py") and "/" not in name}
    folders = {name.split("/")[0] for name in names if "/" in name} - {".ci", ".github"}
    assert len(files) <= 18 and len(folders) <= 10, (files, folders)


def test_no_line_of_cuda_is_wide():
    sources = sorted((ROOT / "base" / "csrc").iterdir())
    wide = [
        f"{path.name}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert sources and not wide


def peers() -> set[str]:
    """Modules of the packages that only the extra `dev` of pyproject.toml has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[=<>]", line)[0] for line in project["optional-dependencies"]["dev"]}
    return {name.replace("-", "_") for name in names - {project["name"], "pytest"}}


def test_tests_are_collected_without_peers():
    """`pip install -e . pytest` is enough: a test of a peer skips, with the reason."""
    assert {"transformers", "peft", "lm_eval"} <= peers()
    for path in (ROOT / "tests").glob("*.py"):
        body = tree_of(path).body
        at_once = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        roots = {name.split(".")[0] for name in imported_names(ast.Module(at_once, []))}
        assert not roots & peers(), f'{path.name}: use pytest.importorskip("..") instead'


def test_functions_fit_a_screen():
    long = []
    for path in [*modules().values(), *ROOT.glob("tests/*.py"), *ROOT.glob("benchmarks/*.py")]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > 50:
                    long.append(f"{path.name} {node.name}: {lines} lines")
    assert not long


def test_pretraining_loads_only_what_it_uses():
    """What `import train` loads of this project: no conversations, adapters, prompts, planning; and
    of PyTorch: no compiler, which takes seconds."""
    code = (
        "import sys, train\n"
        "for name, module in list(sys.modules.items()):\n"
        "    print(name, getattr(module, '__file__', None))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    ours = {name: ROOT / loaded[name] for name in modules() if name in loaded}
    assert "torch._dynamo" not in loaded
    others = {"models", "finetune", "planning", "inference", "generate", "planner"}
    others |= {"course", "benchmarks"}
    assert not {name for name in ours if name.split(".")[0] in others}
    lines = sum(len(path.read_text().splitlines()) for path in ours.values())
    assert len(ours) <= 45 and lines <= 13_000, (len(ours), lines)
