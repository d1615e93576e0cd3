"""docs/extend.md: the code of each section, in a copy of the tree, is carried out and compared with
one device.

A rank of these tests forgets the modules of this tree and imports those of the copy.
"""

import contextlib
import io
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import processes
import pytest
import small_run
import torch
import torch.distributed as dist
from parity import same
from safetensors.torch import load_file, save_file

from course import ranks
from run import checkpoint

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extend.md").read_text()
# heading -> text
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])


# --- a copy of the tree with what a section adds --------------------------------------------------


def blocks(section: str) -> list[tuple[str, str]]:
    """(language, text) of each block of code."""
    return re.findall(r"^```(diff|python)\n(.*?)^```$", SECTIONS[section], re.M | re.S)


def edit(folder: Path, diff: str) -> list[Path]:
    """Carry out a diff block. Each place is found once. Returns the files."""
    files = []
    for part in re.split(r"^\+\+\+ ", diff, flags=re.M)[1:]:
        name, _, hunks = part.partition("\n")
        file = folder / name
        text = file.read_text()
        for hunk in re.split(r"^@@\n", hunks, flags=re.M):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            after = "".join(line[1:] for line in lines if line[0] in " +")
            if not before.strip() or text.count(before) != 1:
                raise AssertionError(f"{name}: is not there once:\n{before}")
            text = text.replace(before, after)
        file.write_text(text)
        files.append(file)
    return files


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The tree's Python files, with what all sections add."""
    folder = tmp_path_factory.mktemp("extended")
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout")
    for name in names.stdout.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    changed = [file for section in SECTIONS for file in carry_out(folder, section)]
    shutil.copy(ROOT / "pyproject.toml", folder)
    for check in ["check"], ["format", "--check"]:
        ruff = [sys.executable, "-m", "ruff", *check, *changed]
        done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    return folder


def carry_out(folder: Path, section: str) -> list[Path]:
    """Write what a section adds. Returns the files."""
    files = []
    for language, text in blocks(section):
        if language == "diff":
            files += edit(folder, text)
        else:
            name, _, text = text.removeprefix("# ").partition("\n")
            (folder / name).write_text(text)
            files.append(folder / name)
    return files


def of_copy(rank: int, folder: Path, function, *args):
    """Call function(rank, *args), which imports from the copy."""
    if cuda_kernels := sys.modules.get("base.cuda_kernels"):
        # names of operations are torch's
        cuda_kernels.LIBRARY._destroy()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(ROOT)) and "site-packages" not in file:
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    return function(rank, *args)


def run(folder: Path, world: int, function, *args):
    return ranks.run(of_copy, world, folder, function, *args)[0]


def steps(rank: int, world: int, flags: dict):
    """Three steps in the copy, of the gate's model."""
    parity = import_module("course.parity")
    (result,) = parity.on_rank(rank, world, [parity.SMALL | flags], 3, None)
    return result


def equals_one_device(folder: Path, layout: dict, **flags) -> None:
    same(run(folder, 2, steps, 2, flags | layout), run(folder, 1, steps, 1, flags))


# --- what each section promises -------------------------------------------------------------------


def about_schedule(rank: int, name: str) -> dict:
    schedules = import_module("schedules")
    slow = schedules.Cost(transfer=0.5)
    found = {}
    for of in name, "1f1b":
        # make validates
        lists = schedules.make(of, 4, 12)
        found[of] = {
            "bubble": schedules.bubble(schedules.simulate(lists, schedules.Cost())),
            "formula": schedules.bubble_formula(of, 4, 12),
            "with transfers": schedules.bubble(schedules.simulate(lists, slow)),
            "in flight": schedules.in_flight(lists),
        }
    return found


def test_schedule(copy):
    """It has 1F1B's bubble, a smaller one where transfers take time, and pays in activations."""
    found = run(copy, 1, about_schedule, "eager-1f1b")
    eager, plain = found["eager-1f1b"], found["1f1b"]
    assert eager["bubble"] == eager["formula"] == plain["bubble"]
    transfers = [of["with transfers"] for of in (eager, plain)]
    assert transfers == pytest.approx([1 / 3, 5 / 9])
    assert (eager["in flight"], plain["in flight"]) == ([7, 5, 3, 1], [4, 3, 2, 1])
    equals_one_device(copy, dict(pp=2, schedule="eager-1f1b"))


def factors(rank: int, k: int) -> list:
    routers = import_module("moe")
    fields = dict(num_experts=3, router="sigmoid", router_topk=k)
    router = routers.ROUTERS["sigmoid"](routers.MoEConfig(1, 8, 2, **fields))
    logits = torch.tensor([[0.0, math.log(3), -math.log(3)]])
    return router.probabilities(logits, torch.tensor([[1, 0][:k]])).tolist()[0]


def test_router(copy):
    """By hand: sigmoids 3/4 and 1/2. Then half of the experts on each rank."""
    assert run(copy, 1, factors, 1) == pytest.approx([0.75])
    assert run(copy, 1, factors, 2) == pytest.approx([0.6, 0.4])
    experts = dict(num_experts=4, router="sigmoid", router_topk=2, aux_loss=0.01)
    equals_one_device(copy, dict(ep=2), micro_batch_size=2, **experts)


def biases(rank: int) -> list:
    families, config = import_module("families"), import_module("base.model_config").GPTConfig
    torch = import_module("torch")
    local = families.LocalBias(config(1, 16, 2, seq_length=4, positions="kerple"))
    return local(torch.zeros(1, 2, 4, 1, dtype=torch.float64))[0, :, 3].tolist()


def refusal(rank: int, flags: list[str]) -> str:
    """What is said of the flags for two ranks."""
    config = import_module("run.pretraining").Config
    try:
        parsed, _ = import_module("run.flags").parse_all(flags, 0, config)
        import_module("run.rules").validate(parsed, 2)
    except import_module("run.config").ConfigError as e:
        return str(e)
    return ""


def test_position_scheme(copy):
    """By hand: slopes 1/16 and 1/256 of two heads, times log(1 + distance)."""
    logs = [math.log(1 + distance) for distance in (3, 2, 1, 0)]
    by_hand = [[-slope * log for log in logs] for slope in (2**-4, 2**-8)]
    assert run(copy, 1, biases) == [pytest.approx(head, rel=1e-12) for head in by_hand]
    for layout in (dict(tp=2), dict(cp=2)):
        equals_one_device(copy, layout, positions="kerple")
    flags = ["--positions", "kerple", "--dropout", "0", "--model", "gpt2"]
    assert run(copy, 1, refusal, flags) == ""


# --- families and kinds of training ---------------------------------------------------------------

STARCODER2 = dict(
    architectures=["Starcoder2ForCausalLM"],
    model_type="starcoder2",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    norm_epsilon=1e-5,
    sliding_window=None,
    hidden_act="gelu_pytorch_tanh",
    use_bias=True,
    tie_word_embeddings=True,
    rope_theta=5000.0,
)


def write_folder(folder: Path) -> dict:
    """A small model with random weights, as Hugging Face has it. Returns the tensors."""
    h, ffn, kv, v = 32, 48, 16, 61
    linears = {
        "self_attn.q_proj": (h, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, h),
        "mlp.c_fc": (ffn, h),
        "mlp.c_proj": (h, ffn),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    shapes = {"model.embed_tokens.weight": (v, h)}
    shapes |= {"model.norm.weight": (h,), "model.norm.bias": (h,)}
    for layer in range(2):
        for name, shape in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    g = torch.Generator().manual_seed(7)
    tensors = {name: torch.randn(shape, generator=g) * 0.3 for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(STARCODER2))
    return tensors


def there_and_back(rank: int, folder: Path) -> tuple:
    """Import a folder, and export it beside itself. Returns (logits, the tensors of the export)."""
    huggingface = import_module("inference.huggingface")
    huggingface.import_folder(folder / "theirs", folder / "ours")
    huggingface.export_folder(folder / "ours", folder / "back")
    with torch.no_grad():
        logits = import_module("inference.cli").load_model(folder / "ours")[0](TOKENS)
    return logits, load_file(folder / "back" / "model.safetensors")


TOKENS = torch.arange(24).view(2, 12) * 5 % 61


def test_family(copy, tmp_path):
    """There and back, bit for bit; and the logits of `transformers` on both sides."""
    tensors = write_folder(tmp_path / "theirs")
    logits, back = run(copy, 1, there_and_back, tmp_path)
    assert small_run.equal(back, tensors)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    differing = [name for name, x in STARCODER2.items() if config.get(name, x) != x]
    assert not differing and config["rope_parameters"]["rope_theta"] == 5000
    transformers = pytest.importorskip("transformers")
    for folder in "theirs", "back":
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        with torch.no_grad():
            expected = model.eval()(TOKENS).logits
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def train_goldfish(rank: int, flags: list[str]) -> int:
    return import_module("finetune.goldfish").main(flags)


def test_kind_of_training(copy, tmp_path):
    """Three steps as a command, whose loss falls; and the loss of one device on two replicas."""
    text = tmp_path / "text.txt"
    text.write_text("what is learned by heart, and what is not\n" * 100)
    out = tmp_path / "run"
    of_run = dict(data=text, out=out, cache=tmp_path / "cache", steps=3, warmup_steps=0, lr=1e-2)
    flags = small_run.flags(**of_run, forget=3)
    assert run(copy, 1, train_goldfish, flags) == 0
    lines = small_run.lines_of(out)
    losses = [line["loss"] for line in lines]
    # a mean of what is summed: else two thirds of it
    assert losses[0] == pytest.approx(math.log(257), rel=0.02)
    assert (
        len(losses) == 3 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.3
    )
    equals_one_device(copy, dict(micro_batch_size=1), command="goldfish.py", forget=3)


# --- a model from elsewhere -----------------------------------------------------------------------


def any_model(rank: int, folder: Path, world: int, port: int) -> list[str]:
    """Run the script as a rank of torchrun. Returns the words that it prints."""
    dist.destroy_process_group()
    os.environ |= processes.of_rank(rank, world, port)
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("any_model.py", run_name="__main__")
    return printed.getvalue().split()


def losses_and_checkpoint(copy: Path, world: int) -> tuple[list, Path]:
    printed = run(copy, world, any_model, copy, world, processes.free_port())
    path = (copy / "any_model").rename(copy / f"any_model_{world}")
    return printed, path / "step-000003"


def test_any_model(copy):
    """Two ranks print the losses of one rank, and save its values."""
    pytest.importorskip("transformers")
    losses, path = losses_and_checkpoint(copy, 1)
    losses_of_two, path_of_two = losses_and_checkpoint(copy, 2)
    assert losses == losses_of_two and len(losses) == 6
    (file,) = path.glob("*.safetensors")
    saved = load_file(file)
    found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    checkpoint.read(path_of_two, found)
    assert "model.scale" in found
    for name, tensor in saved.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
