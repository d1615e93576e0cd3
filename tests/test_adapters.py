"""Adapters: worked by hand, beside the library peft, under every layout beside one device, and in
runs of train.py: what learns, what is saved, what is refused."""

import math
import shutil
from functools import cache
from pathlib import Path

import processes
import pytest
import small_run
import torch
from parity import LLAMA, SMALL, Result, Synthetic, again, same, train_each, trainer_of
from small_run import lines_of
from test_huggingface import SHAPES, TOKENS, our_checkpoint
from torch import nn

import gpt
from course import ranks
from course.parity import Run
from course.training_commands import config_of
from finetune import adapter_layers
from finetune.adapter_files import num_parameters
from finetune.adapter_layers import METHODS, TARGETS, AdapterConfig
from inference.huggingface import export_folder
from run import checkpoint

# --- by hand --------------------------------------------------------------------------------------


def test_bottleneck_by_hand():
    """norm([1, 3]) = [-1, 1]; D = [0, 1] of it is 1, and U = [2, 0]: [1 + 2 silu(1), 3]."""
    bottleneck = adapter_layers.Bottleneck(2, AdapterConfig("adapter", adapter_size=1), None)
    bottleneck.down.weight = nn.Parameter(torch.tensor([[0.0, 1.0]]))
    bottleneck.up.weight = nn.Parameter(torch.tensor([[2.0], [0.0]]))
    y = bottleneck(torch.tensor([[[1.0, 3.0]]]))
    assert torch.allclose(y, torch.tensor([1 + 2 / (1 + math.exp(-1)), 3.0]))


# --- the library peft -----------------------------------------------------------------------------

# a linear layer -> its name in transformers' Llama
THEIRS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def shaken_adapters(model: gpt.GPT, config: AdapterConfig) -> dict[str, nn.Parameter]:
    """The adapters of a frozen model by name, all far from their initial values."""
    model.requires_grad_(False)
    adapter_layers.apply(model, config)
    found = {name: p for name, p in model.named_parameters() if adapter_layers.is_adapter(name)}
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in found.values():
            p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return found


def of_peft(parameters: dict, name: str) -> nn.Parameter:
    """Its parameter for one of ours, named blocks.0.attention.query.lora.a."""
    _, block, _, linear, method, part = name.split(".")
    end = f"lora_{part.upper()}.default.weight" if method == "lora" else "ia3_l.default"
    return parameters[f"base_model.model.model.layers.{block}.{THEIRS[linear]}.{end}"]


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_equals_the_library_peft(method, tmp_path):
    """Loss and gradients, in float32 on the same weights."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    path, model = our_checkpoint(tmp_path / "ours", **SHAPES["llama"])
    export_folder(path, tmp_path / "theirs")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    ours = shaken_adapters(model, AdapterConfig(method, lora_rank=3, lora_alpha=5.0))
    targets = [THEIRS[name].split(".")[1] for name in TARGETS[method]]
    if method == "lora":
        settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets)
    else:
        settings = peft.IA3Config(target_modules=targets, feedforward_modules=["down_proj"])
    theirs = peft.get_peft_model(theirs, settings)
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, p in ours.items():
            of_peft(named, name).copy_(p.view_as(of_peft(named, name)))
    assert sum(p.requires_grad for p in named.values()) == len(ours)
    loss = model(TOKENS[:, :-1], TOKENS[:, 1:]).mean()
    expected = theirs(TOKENS, labels=TOKENS).loss
    assert abs(loss - expected) <= 1e-5 * expected
    loss.backward()
    expected.backward()
    for name, p in ours.items():
        gradient = of_peft(named, name).grad.view_as(p)
        assert (p.grad - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


# --- layouts beside one device --------------------------------------------------------------------

# experts have no dropout
EXPERTS = SMALL | dict(num_experts=4, router="topk", router_topk=2, micro_batch_size=2)
BASES = {
    "gpt": SMALL | dict(lora_dropout=0.2),
    "llama": LLAMA | dict(lora_dropout=0.2),
    "deep": SMALL | dict(num_layers=4, micro_batch_size=1),
    "experts": EXPERTS,
}
STEPS = 3


@cache
def one_device(base: str) -> dict[str, Result]:
    """By method."""
    results = train_each(1, [dict(peft=method) for method in METHODS], STEPS, base=BASES[base])
    return dict(zip(METHODS, results))


# nothing learns in the first stage
EMPTY_STAGE = dict(pp=2, schedule="zb-h1", layer_split=[0, 2])
LORA = ("lora",)


@pytest.mark.parametrize(
    "base, world, methods, layouts",
    [
        ("gpt", 2, METHODS, [dict(tp=2)]),
        ("gpt", 2, LORA, [EMPTY_STAGE, dict(zero_stage=1), dict(zero_stage=3, recompute="full")]),
        ("llama", 2, METHODS, [dict(tp=2, sequence_parallel=True, recompute="selective")]),
        # in the second of these rank 0 has an empty stage too
        (
            *("deep", 2, LORA),
            [dict(pp=2, virtual_stages=2), dict(pp=2, virtual_stages=2, layer_split=[2, 2, 0, 0])],
        ),
        again("deep", 2, LORA, [dict(pp=2, virtual_stages=2, schedule="zb-v")]),
        ("experts", 2, LORA, [dict(ep=2)]),
        again("experts", 4, LORA, [dict(ep=2, tp=2)]),
    ],
    ids=str,
)
def test_equals_one_device(base, world, methods, layouts):
    """In float64. (More layouts are drawn at random in test_compositions.py.)"""
    variants = [layout | dict(peft=method) for layout in layouts for method in methods]
    results = train_each(world, variants, STEPS, base=BASES[base])
    for variant, result in zip(variants, results, strict=True):
        one = one_device(base)[variant["peft"]]
        assert all(adapter_layers.is_adapter(name) for name in one.gradients) and one.gradients
        same(result, one)


# --- what learns, and its bytes -------------------------------------------------------------------


# the sizes of SMALL and LLAMA: L 2, h 32, r 8, k 32; ffn 128 and 56, key and value 32 and 16
LEARNED = {
    ("gpt", "lora"): 2 * 8 * (4 * (32 + 32) + 2 * (32 + 128)),
    ("gpt", "adapter"): 2 * 2 * (2 * 32 * 32 + 2 * 32),
    ("gpt", "ia3"): 2 * (32 + 32 + 128),
    ("llama", "lora"): 2 * 8 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 56)),
    ("llama", "ia3"): 2 * (16 + 16 + 56),
    # 4 experts in each layer
    ("experts", "lora"): 2 * 8 * (4 * (32 + 32) + 4 * 2 * (32 + 128)),
    ("experts", "ia3"): 2 * (32 + 32 + 4 * 128),
}


@pytest.mark.parametrize("base, method", list(LEARNED))
def test_number_of_parameters(base, method):
    trainer = trainer_of(BASES[base] | dict(lora_dropout=0.0), peft=method)
    learned = LEARNED[base, method]
    assert sum(p.numel() for p in trainer.optimizer.parameters.values()) == learned
    assert num_parameters(AdapterConfig(method), trainer.model_config) == learned
    assert f"{learned:,} adapter parameters" in trainer.task.learned.describe()


@pytest.mark.parametrize("method", METHODS)
def test_bytes_by_formula(method):
    """2 N + (2 + 4 + 12) n with a base of N weights in bf16: nothing but the weights of the base,
    and for each of the n that learn a weight, a gradient, a master and two moments."""
    trainer = trainer_of(peft=method, precision="bf16", lr=0.05)
    parameters = dict(trainer.stages[0].named_parameters())
    before = {name: p.clone() for name, p in parameters.items()}
    trainer.forward_backward(1, Synthetic(16, 61))
    gradients = [getattr(p, "main_grad", None) for p in parameters.values()]
    size = sum(p.nbytes for p in parameters.values())
    size += sum(gradient.nbytes for gradient in gradients if gradient is not None)
    trainer.update(1)
    size += sum(tensor.nbytes for tensor in trainer.optimizer.tensors().values())
    n = num_parameters(AdapterConfig(method), trainer.model_config)
    base = trainer.num_parameters
    assert sum(p.numel() for p in parameters.values()) == base + n
    assert size == 2 * base + (2 + 4 + 12) * n
    for name, p in parameters.items():
        learns = adapter_layers.is_adapter(name)
        assert p.dtype == torch.bfloat16 and p.grad is None
        assert (name in trainer.optimizer.parameters) == learns == p.requires_grad
        assert (getattr(p, "main_grad", None) is not None) == learns
        assert learns or torch.equal(p, before[name])
    assert any(not torch.equal(p, before[name]) for name, p in parameters.items())


def test_the_model_begins_as_its_base():
    """Bit for bit, with each method."""
    samples = Synthetic(16, 61).batch(range(4))
    with torch.no_grad():
        expected = trainer_of(dropout=0.0).model(samples.tokens, samples.targets)
        for method in METHODS:
            model = trainer_of(dropout=0.0, peft=method).model
            assert torch.equal(model(samples.tokens, samples.targets), expected)


def test_a_second_call_is_refused():
    model = trainer_of(peft="ia3").stages[0]
    with pytest.raises(ValueError, match="has adapters already"):
        adapter_layers.apply(model, AdapterConfig("lora"))


# --- on and off -----------------------------------------------------------------------------------


def outputs(run: Run) -> list[tuple]:
    """What the layers on this rank give for 8 samples: (name, .., tensor)."""
    run.outputs.clear()
    run.trainer.task.evaluate(run.dataset, 8)
    return list(run.outputs)


def equal(a: list[tuple], b: list[tuple]) -> bool:
    """Bit for bit."""
    assert [one[:3] for one in a] == [one[:3] for one in b]
    return all(torch.equal(x[-1], y[-1]) for x, y in zip(a, b))


def disabled_on_rank(rank: int, world: int, variants: list[dict]) -> list[tuple[bool, ...]]:
    """After a step: disabled, the frozen base's outputs? Enabled, the adapter's own, as before?
    After an error too? -> of each variant"""
    results = []
    for flags in variants:
        frozen = outputs(Run(world, config_of(flags | dict(peft=None)), trace=True))
        run = Run(world, config_of(flags), trace=True)
        # a step that changes each of them
        run.train(1)
        stages = run.trainer.stages
        enabled = outputs(run)
        with adapter_layers.disabled(*stages):
            disabled = outputs(run)
            with adapter_layers.disabled(*stages):
                pass
            # still, after an inner one has ended
            again = outputs(run)
        after = outputs(run)
        with pytest.raises(ZeroDivisionError), adapter_layers.disabled(*stages):
            raise ZeroDivisionError
        after_error = outputs(run)
        same_as_base = equal(disabled, frozen) and equal(again, frozen)
        restored = equal(after, enabled) and equal(after_error, enabled)
        results.append((same_as_base, not equal(enabled, frozen), restored))
    return results


@pytest.mark.parametrize(
    "base, world, methods, layouts",
    [
        ("gpt", 1, METHODS, [{}]),
        ("llama", 2, METHODS, [dict(tp=2, sequence_parallel=True)]),
        ("gpt", 2, LORA, [dict(tp=2), dict(pp=2), dict(zero_stage=3, recompute="full")]),
        ("experts", 4, LORA, [dict(ep=2, tp=2)]),
        again("experts", 4, METHODS[1:], [dict(ep=2, tp=2)]),
    ],
    ids=str,
)
def test_disabled_is_the_frozen_base(base, world, methods, layouts):
    """Bit for bit on every rank, and back again."""
    flags = BASES[base] | dict(lr=0.05)
    variants = [flags | layout | dict(peft=method) for layout in layouts for method in methods]
    for of_rank in ranks.run(disabled_on_rank, world, world, variants):
        assert of_rank == [(True, True, True)] * len(variants)


# --- runs -----------------------------------------------------------------------------------------

FLAGS = dict(steps=2, lr=1e-2, min_lr=1e-2, warmup_steps=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a run, and beside it the text that it has read."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("".join(f"x{n * n % 97} = {n};\n" for n in range(800)))
    assert run(flags_of(folder, out=folder / "run")) == 0
    return folder


def flags_of(folder: Path, **flags) -> list[str]:
    return small_run.flags(data=folder / "text.txt", **FLAGS | flags)


def run(argv: list[str]) -> int:
    return small_run.run(*(["finetune.adapters"] if "--peft" in argv else []), *argv)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run)]


def test_a_checkpoint_is_the_adapter_and_loads_under_another_layout(base, tmp_path, capsys):
    """Saved at tp 4, continued at tp 1. Four ranks generate at the end of theirs."""
    peft = dict(load=base / "run", peft="lora", precision="fp64")
    one = tmp_path / "one"
    assert run(flags_of(base, out=one, **peft | dict(steps=4))) == 0
    two = tmp_path / "two"
    flags = flags_of(base, out=two, tp=4, **peft)
    done = processes.run(["finetune.adapters", *flags], world=4)
    assert done.returncode == 0, done.stderr
    assert (two / "sample.txt").read_text()
    index = checkpoint.read_index(checkpoint.find(two))
    assert index["adapter"]["peft"] == "lora" and index["adapter"]["lora_rank"] == 8
    names = {name.split(".", 1)[1] for name in index["tensors"]}
    assert names and all(adapter_layers.is_adapter(name) for name in names)
    # a weight and its two moments
    assert len(index["tensors"]) == 3 * len(names)
    resume = [*flags_of(base, out=two, tp=1, **peft | dict(steps=4)), "--resume"]
    assert run(resume) == 0
    assert "resuming after step 2" in capsys.readouterr().out
    assert losses(two) == pytest.approx(losses(one), rel=1e-10)


def test_a_base_that_has_changed_since_is_refused(base, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(base / "run", model)
    flags = dict(out=tmp_path / "ia3", load=model, peft="ia3")
    assert run(flags_of(base, **flags)) == 0
    assert run([*flags_of(base, out=model, steps=3), "--resume"]) == 0
    capsys.readouterr()
    assert run([*flags_of(base, **flags | dict(steps=3)), "--resume"]) == 2
    error = capsys.readouterr().err
    assert f"--load {model}: is not the model that the run in" in error
    shutil.rmtree(model)
    assert run([*flags_of(base, **flags | dict(steps=3)), "--resume"]) == 2
    assert capsys.readouterr().err == f"adapters.py: --load {model}: no such folder\n"


def test_a_run_goes_on_with_the_adapter_that_it_began(base, tmp_path, capsys):
    """Though other shapes would fit. Learning rate and dropout may change."""
    flags = flags_of(base, out=tmp_path / "lora", load=base / "run", peft="lora", steps=1)
    flags += ["--peft-targets", "query", "key"]
    assert run(flags) == 0
    capsys.readouterr()
    for changed, words in (
        (["--lora-alpha", "3"], "--lora-alpha 3.0: the adapter in "),
        (["--peft-targets", "query"], "--peft-targets query: the adapter in "),
    ):
        assert run([*flags, *changed, "--resume", "--steps", "2"]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    same = ["--peft-targets", "key", "query", "--lora-dropout", "0.1"]
    assert run([*flags, *same, "--resume", "--steps", "2"]) == 0


# --- refusals -------------------------------------------------------------------------------------
