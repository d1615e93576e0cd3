"""Adapters on the disk and in generation: merged, peft's folders, several in a file of prompts."""

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_generate import EXPERTS, build, loud, save
from test_gpt import GPT_SHAPES, LLAMA_SHAPES

import generate
import gpt
from base.groups import Groups
from course import ranks
from finetune import adapter_layers, adapters, frozen_base
from finetune.adapter_files import open_adapter
from finetune.adapter_layers import AdapterConfig
from inference import (
    adapted,
    huggingface,
    peft_folder,
    quantization,
    weight_layouts,
)
from inference import adapters as adapter_commands
from inference.loading import build_stages, find_chat, load_model, open_model
from pipeline_parallel import stages_of
from run import checkpoint
from run.tokenizer import CHAT_TEMPLATE, ByteTokenizer
from sharding import named_parameters, set_sharding, shard_of, sharding_of

VOCABULARY = dict(vocab_size=257, seq_length=24)
SHAPES = {
    "gpt": GPT_SHAPES[0] | VOCABULARY,
    "llama": LLAMA_SHAPES[1] | VOCABULARY,
    "experts": EXPERTS | VOCABULARY,
    # query, key and value head by head in one matrix there; heads that are not hidden size / heads
    "bloom": GPT_SHAPES[0] | VOCABULARY | dict(positions="alibi", embedding_norm=True),
    "qwen3": LLAMA_SHAPES[1] | VOCABULARY | dict(head_dim=20, qk_norm=True),
    # the same, with several queries for a key
    "falcon": GPT_SHAPES[0]
    | VOCABULARY
    | dict(num_kv_heads=2, positions="rotary", parallel_block=True, activation="exact-gelu")
    | dict(attention_bias="none", mlp_bias=False),
}
LORA = AdapterConfig("lora", lora_rank=3, lora_alpha=5.0)
IA3 = AdapterConfig("ia3")
BOTTLENECK = AdapterConfig("adapter", adapter_size=8)
TOKENS = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(2))


def whole_value(name, shape, seed=1):
    """Far from what changes nothing, and the same under every layout."""
    value = torch.randn(shape, generator=gpt.generator(seed, name)) * 0.3
    return value + 1 if name.endswith(("scale", "norm.weight")) else value


def save_adapter(rank, out, base, config, tp=1, seed=1):
    """An adapter with random values, as a run with `tp` ranks leaves it."""
    groups = Groups.make("cpu", tp, tp) if tp > 1 else Groups()
    model, *_ = open_model(base)
    (stage,) = build_stages(model, groups)
    adapter_layers.apply(stage, config, groups.tp)
    tensors = {}
    for name, p in named_parameters(stage):
        if adapter_layers.is_adapter(name):
            record = sharding_of(p)
            part = shard_of(whole_value(name, record.shape, seed), record).clone()
            tensors[f"model.{name}"] = set_sharding(part, record)
    state = {
        "config": {"tokenizer": "bytes", "load": str(base)},
        "model": asdict(model),
        "base": frozen_base.fingerprint(base, model),
        "adapter": asdict(config),
    }
    checkpoint.save(Path(out) / "checkpoints", 3, tensors, state)


def save_loras(rank, folder, shapes, tp):
    for shape in shapes:
        save_adapter(rank, f"{folder}/{shape}-lora", f"{folder}/{shape}", LORA, tp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base of each shape, and an adapter of each method. 4 ranks save a LoRA, or 2."""
    folder = tmp_path_factory.mktemp("adapters")
    for shape, sizes in SHAPES.items():
        base = folder / shape
        model = loud(build(**sizes))
        with torch.no_grad():
            for p in model.parameters():
                # biases and norms that do something
                if p.dim() == 1:
                    p.add_(whole_value("", p.shape) * 0.3)
                if shape == "llama":
                    p.copy_(p.bfloat16())
            # one that no rounding gives again
            model.blocks["0"].attention.query.weight[0, 7] = -0.0
        save(base, model)
        for config in (IA3, BOTTLENECK):
            save_adapter(0, folder / f"{shape}-{config.peft}", base, config)
    ranks.run(save_loras, 4, str(folder), ["gpt"], 4)
    # two heads of keys and values
    ranks.run(save_loras, 2, str(folder), ["llama", "experts", "bloom", "qwen3", "falcon"], 2)
    return folder


def unmerged(base, path, dtype=torch.float32):
    """The base with the adapter beside its weights."""
    model, _ = load_model(base, dtype=dtype)
    adapter = open_adapter(path)
    adapter_layers.apply(model, adapter.config)
    values = adapter.values()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if adapter_layers.is_adapter(name):
                p.copy_(values[name])
    return model.eval()


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def same_values(one, other):
    """Two adapters of one base, bit for bit."""
    one, other = open_adapter(one), open_adapter(other)
    assert one.base == other.base
    a, b = one.values(), other.values()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def command(capsys, *argv):
    status = adapter_commands.main([str(word) for word in argv])
    return status, *capsys.readouterr()


def refused(capsys, *argv):
    """The one line of a command that is refused."""
    status, out, err = command(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err


# --- merged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("peft", ["lora", "ia3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_merged_equals_unmerged(shape, peft, folder, tmp_path, capsys):
    """In the files of `merge`, in float32; in memory, in float64."""
    base, path = folder / shape, folder / f"{shape}-{peft}"
    expected = unmerged(base, path, torch.float64)(TOKENS)
    status, out, _ = command(capsys, "merge", base, path, tmp_path / "merged")
    assert status == 0 and f"{peft} in " in out
    assert difference(load_model(tmp_path / "merged")[0](TOKENS), expected) < 1e-5
    model, _ = load_model(base, dtype=torch.float64)
    assert difference(model(TOKENS), expected) > 1e-2
    adapted.Adapters([str(path)], str(base), model.config).put(model, Groups())
    assert difference(model(TOKENS), expected) < 1e-10


def write_again(path, out, change: dict) -> None:
    """An adapter whose index.json says something else."""
    index = json.loads((checkpoint.find(path) / "index.json").read_text())
    state = {k: v for k, v in index.items() if k not in ("tensors", "files", "format", "step")}
    tensors = {f"model.{n}": v for n, v in open_adapter(path).values().items()}
    checkpoint.write(out, 1, tensors, state | change)


def test_what_is_no_adapter_or_has_another_base(folder, tmp_path, capsys):
    base, path, out = folder / "gpt", folder / "gpt-lora", tmp_path / "out"
    assert "holds a whole model" in refused(capsys, "merge", base, base, out)
    assert "holds an adapter alone" in refused(capsys, "merge", path, path, out)
    assert "adapters.py: / exists" in refused(capsys, "merge", base, path, "/")
    assert "cannot be merged" in refused(capsys, "merge", base, folder / "gpt-adapter", out)
    assert "hidden_size is 64 there" in refused(capsys, "merge", base, folder / "llama-lora", out)
    changed = loud(build(**SHAPES["gpt"]))
    save(tmp_path / "changed", changed)
    line = refused(capsys, "merge", tmp_path / "changed", path, out)
    model, *_ = open_model(base)
    for word in (frozen_base.fingerprint(base, model), f"had --load {base}"):
        assert word in line
    assert frozen_base.fingerprint(checkpoint.find(tmp_path / "changed"), model) in line
    # a rank that its tensors do not have
    index = json.loads((checkpoint.find(path) / "index.json").read_text())
    for field, value, words in (
        ("adapter", index["adapter"] | {"lora_rank": 2}, "another adapter"),
        ("adapter", index["adapter"] | {"peft": "dora"}, "must be one of"),
        ("adapter", index["adapter"] | {"use_dora": True}, "use_dora: no such field"),
        ("base", None, "base"),
    ):
        wrong = tmp_path / words
        write_again(path, wrong, {field: value})
        assert words in refused(capsys, "merge", base, wrong, out)
    assert not out.exists()


def test_every_field_of_an_adapter_counts(folder, tmp_path):
    """Another value in its file is refused, or changes what it computes when it learns, or later.
    adapter_size is another method's."""
    base, path = folder / "gpt", folder / "gpt-lora"
    expected = unmerged(base, path)(TOKENS)
    values = dict(peft="ia3", lora_rank=2, lora_alpha=7.0, lora_dropout=0.5, peft_targets=["key"])
    assert {*values, "adapter_size"} == {field.name for field in fields(AdapterConfig)}
    for name, value in values.items():
        write_again(path, tmp_path / name, {"adapter": asdict(LORA) | {name: value}})
        if name in ("lora_alpha", "lora_dropout"):
            assert getattr(open_adapter(tmp_path / name).config, name) == value
            is_other = difference(unmerged(base, tmp_path / name)(TOKENS), expected) > 1e-3
            assert is_other == (name == "lora_alpha")
        else:
            with pytest.raises(checkpoint.CheckpointError, match="another adapter"):
                open_adapter(tmp_path / name)


def test_a_trained_adapter_is_merged(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a b c d e f g " * 40)
    base, run, out = folder / "llama", tmp_path / "run", tmp_path / "out"
    flags = "--peft lora --lora-rank 2 --steps 2 --device cpu --lr 0.1 --global-batch-size 2"
    flags += f" --eval-every 0 --load {base} --data {tmp_path} --out {run}"
    assert adapters.main(flags.split()) == 0
    assert command(capsys, "merge", base, run, out)[0] == 0
    expected = unmerged(base, run)(TOKENS)
    assert difference(load_model(out)[0](TOKENS), expected) < 1e-5
    assert difference(load_model(base)[0](TOKENS), expected) > 1e-4


def test_the_chat_template_of_an_adapter(folder, tmp_path, capsys):
    """It was trained with it, its base was not: it asks in it, and the merged model too."""
    base, path = folder / "gpt", tmp_path / "run"
    save_adapter(0, path, base, LORA)
    template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    (path / CHAT_TEMPLATE).write_text(template)
    assert command(capsys, "merge", base, path, tmp_path / "merged")[0] == 0
    tokenizer = ByteTokenizer()
    assert find_chat(base, tokenizer, [str(path)]).template.text == template
    assert find_chat(tmp_path / "merged", tokenizer).template.text == template
    assert find_chat(base, tokenizer).template.text != template
    # to a folder of peft, and back
    assert command(capsys, "export", path, tmp_path / "peft", "--base", base)[0] == 0
    assert command(capsys, "import", tmp_path / "peft", tmp_path / "in", "--base", base)[0] == 0
    assert find_chat(base, tokenizer, [str(tmp_path / "in")]).template.text == template


# --- folders of peft ------------------------------------------------------------------------------


def their_model(base, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    if not (tmp_path / "hf").exists():
        huggingface.export_folder(base, tmp_path / "hf")
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()


@pytest.mark.parametrize("peft_type", ["lora", "ia3"])
@pytest.mark.parametrize("shape", ["gpt", "llama", "bloom", "qwen3", "falcon"])
def test_peft_reads_what_is_exported(shape, peft_type, folder, tmp_path, capsys):
    """LoRAs were saved on four ranks, or two. The library's logits, and the same bits back."""
    peft = pytest.importorskip("peft")
    base, path = folder / shape, folder / f"{shape}-{peft_type}"
    assert command(capsys, "export", path, tmp_path / "peft", "--base", base)[0] == 0
    model = peft.PeftModel.from_pretrained(their_model(base, tmp_path), tmp_path / "peft")
    with torch.no_grad():
        logits = model(TOKENS).logits
    assert difference(logits, unmerged(base, path)(TOKENS)) < 1e-5
    again = tmp_path / "again"
    hf_base = tmp_path / "hf"
    assert command(capsys, "import", tmp_path / "peft", "--base", hf_base, again)[0] == 0
    same_values(again, path)
    assert command(capsys, "merge", base, again, tmp_path / "merged")[0] == 0


def test_query_and_value_alone(folder, tmp_path, capsys):
    """Two of the three blocks of c_attn."""
    config = AdapterConfig("lora", 2, 3.0, peft_targets=("query", "value"))
    base, path = folder / "gpt", tmp_path / "run"
    save_adapter(0, path, base, config)
    assert command(capsys, "export", path, tmp_path / "peft", "--base", base)[0] == 0
    saved = load_file(tmp_path / "peft" / peft_folder.WEIGHTS)
    assert saved[f"{peft_folder.PREFIX}transformer.h.0.attn.c_attn.lora_A.weight"].shape[0] == 4
    assert command(capsys, "import", tmp_path / "peft", "--base", base, tmp_path / "out")[0] == 0
    same_values(tmp_path / "out", path)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(something_new=3), "something_new"),
        (dict(r="8"), "$.r`"),
        (dict(r=4), "its A and B are [3, 100] and [64, 3]; r and rank_pattern say 4"),
        (dict(target_modules=".*[qv]_proj"), "down_proj is none of the target_modules"),
        (dict(target_modules=3), "$.target_modules`"),
    ],
)
def test_folders_of_peft_that_are_refused(change, words, folder, tmp_path, capsys):
    """(test_peft_fields.py has every field.)"""
    base, hf = folder / "llama", tmp_path / "peft"
    assert command(capsys, "export", folder / "llama-lora", hf, "--base", base)[0] == 0
    config = json.loads((hf / "adapter_config.json").read_text())
    (hf / "adapter_config.json").write_text(json.dumps(config | change))
    assert words in refused(capsys, "import", hf, "--base", base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_of_peft_that_are_refused(folder, tmp_path, capsys):
    base, hf, out = folder / "gpt", tmp_path / "peft", tmp_path / "out"
    assert command(capsys, "export", folder / "gpt-lora", hf, "--base", base)[0] == 0
    file = hf / peft_folder.WEIGHTS
    whole = load_file(file)
    q = f"{peft_folder.PREFIX}transformer.h.0.attn.c_attn"
    for tensors, words in (
        (whole | {f"{q}.lora_A.weight": torch.ones(())}, "its A and B are [] and [144, 9]"),
        ({n: t for n, t in whole.items() if ".h.0.attn.c_proj" not in n}, "has no tensors"),
        ({n: t for n, t in whole.items() if n != f"{q}.lora_B.weight"}, "lacks 'lora_B.weight'"),
        (whole | {f"{peft_folder.PREFIX}lm_head.lora_A.weight": torch.ones(3, 64)}, "lm_head"),
        (whole | {"x": torch.ones(1)}, "x is nothing"),
        ({}, "is empty"),
    ):
        save_file(tensors, file)
        assert words in refused(capsys, "import", hf, "--base", base, out)
    file.rename(hf / "adapter_model.bin")
    assert "a pickle, which is never opened" in refused(capsys, "import", hf, "--base", base, out)
    assert "python -m inference.adapters import" in refused(capsys, "merge", base, hf, out)
    for path, words in ((folder / "gpt-adapter", "no bottleneck"), (folder / "llama-ia3", "llama")):
        assert words in refused(capsys, "export", path, out, "--base", base)
    experts = folder / "experts"
    line = refused(capsys, "export", folder / "experts-lora", out, "--base", experts)
    assert "belongs to experts" in line
    assert not out.exists()


def test_export_of_the_merged_model(folder, tmp_path):
    """inference/huggingface.py export --adapter writes what it exports of `merge`, and the chat
    template."""
    for shape in ("gpt", "llama"):
        base, path = folder / shape, tmp_path / f"{shape}-lora"
        shutil.copytree(folder / path.name, path)
        (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
        argv = ["export", str(base), str(tmp_path / shape), "--adapter", str(path)]
        assert huggingface.main(argv) == 0
        merged = tmp_path / f"{shape}-merged"
        adapter_commands.merge_adapter(str(base), str(path), str(merged))
        huggingface.export_folder(merged, tmp_path / f"{shape}-2")
        one, two = (load_file(tmp_path / f"{shape}{n}" / "model.safetensors") for n in ("", "-2"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert "messages" in (tmp_path / shape / "chat_template.jinja").read_text()


# --- generation -----------------------------------------------------------------------------------


def answers(capsys, *argv):
    status = generate.main([str(word) for word in (*argv, "--device", "cpu", "--temperature", "0")])
    out, err = capsys.readouterr()
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_adapters_by_request(folder, tmp_path, capsys):
    """Each line as if its adapter were the only one, in the order of the lines. The two have
    another rank, scale and targets; the base is itself between them."""
    base = folder / "gpt"
    small = AdapterConfig("lora", 2, 1.0, peft_targets=("query", "down"))
    save_adapter(0, tmp_path / "small", base, small, seed=5)
    adapter_of = {"a": folder / "gpt-lora", "b": tmp_path / "small"}
    names = ["b", None, "a", "a", None, "b", "a"]
    records = [{"prompt": f"text {n}", "adapter": name} for n, name in enumerate(names)]
    records[1].pop("adapter")
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    flags = ["--checkpoint", base, "--prompt-file", file, "--max-tokens", 8, "--batch-size", 2]
    several = [
        word for name, path in adapter_of.items() for word in ("--adapter", f"{name}={path}")
    ]
    together = answers(capsys, *flags, *several)
    assert [answer["prompt"] for answer in together] == [r["prompt"] for r in records]
    file.write_text("\n".join(json.dumps({"prompt": r["prompt"]}) for r in records))
    alone = {name: answers(capsys, *flags, "--adapter", p) for name, p in adapter_of.items()}
    alone[None] = answers(capsys, *flags)
    for n, name in enumerate(names):
        assert together[n]["text"] == alone[name][n]["text"]
    assert len({texts[0]["text"] for texts in alone.values()}) == 3


LAYOUTS = {"llama": [dict(tp=2, pp=2)], "experts": [dict(tp=2, ep=2)]}


def on_layouts(rank, folder, shape, layouts, world):
    """Greedy tokens of [merged LoRA, merged IA3, bottleneck, LoRA, base] under each layout."""
    results = []
    for layout in layouts:
        groups = Groups.make("cpu", world, **layout) if layout else Groups()
        base = f"{folder}/{shape}"
        for words in (["lora"], ["ia3"], ["adapter"], ["x=", "lora"]):
            words = ["".join(words[:-1]) + f"{base}-{words[-1]}"]
            model, _ = load_model(base, dtype=torch.float64, groups=groups)
            given = adapted.Adapters(words, base, stages_of(model)[0].config)
            given.check()
            given.put(model, groups)
            for stage in stages_of(model):
                weight_layouts.replace_linears(stage)
            for name in [*given.names, None] if given.names else [""]:
                if given.names:
                    given.use(name)
                lockstep = groups.dp if groups.ep else None
                prompts = TOKENS.tolist()
                tokens = generate.generate(model, prompts, 6, temperature=0, lockstep=lockstep)
                results.append(tokens)
    return results


@pytest.mark.parametrize("shape", LAYOUTS)
def test_layouts_generate_alike(shape, folder):
    """Merged, beside the base, and switched: one device's tokens."""
    expected = on_layouts(0, str(folder), shape, [{}], 1)
    lora, ia3, bottleneck, switched, base = expected
    assert switched == lora
    assert len({str(tokens) for tokens in (lora, ia3, bottleneck, base)}) == 4
    for of_rank in ranks.run(on_layouts, 4, str(folder), shape, LAYOUTS[shape], 4):
        assert of_rank == expected * len(LAYOUTS[shape])


@pytest.mark.parametrize("peft", ["lora", "ia3", "adapter"])
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_packing_drops_no_adapter(shape, peft, folder, monkeypatch):
    """And where it does not look for one, a deferred bias comes too early."""

    def packed_logits():
        model = unmerged(folder / shape, folder / f"{shape}-{peft}", torch.float64)
        weight_layouts.apply(model)
        return model(TOKENS)

    expected = unmerged(folder / shape, folder / f"{shape}-{peft}", torch.float64)(TOKENS)
    assert difference(packed_logits(), expected) < 1e-12
    if (shape, peft) == ("gpt", "adapter"):
        monkeypatch.setattr(weight_layouts, "has_adapter", lambda part: False)
        assert difference(packed_logits(), expected) > 1e-3


def test_weights_in_8_bits(folder, tmp_path, capsys):
    """A merged LoRA is in what is quantised; what stays beside the weights is refused."""
    base, lora = folder / "gpt", folder / "gpt-lora"
    merged = tmp_path / "merged"
    assert command(capsys, "merge", base, lora, merged)[0] == 0
    expected, _ = load_model(merged)
    model, _ = load_model(base)
    given = adapted.Adapters([str(lora)], str(base), model.config)
    assert given.merged
    given.put(model, Groups())
    for each in (expected, model):
        quantization.apply(each)
    assert torch.equal(model(TOKENS), expected(TOKENS))
    words = ["--checkpoint", base, "--device", "cpu", "--weights", "int8", "--adapter"]
    assert generate.main(list(map(str, [*words, folder / "gpt-adapter"]))) == 2
    assert "--weights int8: not with adapters beside the weights" in capsys.readouterr().err


def test_the_base_is_restored_bit_for_bit(folder):
    base = str(folder / "gpt")
    model, _ = load_model(base)
    logits = model(TOKENS)
    for peft in ("lora", "ia3", "adapter"):
        model, _ = load_model(base)
        given = adapted.Adapters([f"x={base}-{peft}"], base, model.config)
        given.put(model, Groups())
        assert torch.equal(model(TOKENS), logits)
        given.use("x")
        assert difference(model(TOKENS), logits) > 1e-2
        given.use(None)
        assert torch.equal(model(TOKENS), logits)


def test_bad_flags(folder, tmp_path, capsys):
    gpt_base, lora, ia3 = (str(folder / name) for name in ("gpt", "gpt-lora", "gpt-ia3"))
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "a", "adapter": "it"}\n')
    for argv, words in (
        (["--checkpoint", lora], f"--checkpoint BASE --adapter {lora}"),
        (["--adapter", gpt_base], "holds a whole model"),
        (["--adapter", lora, "--adapter", lora], "several need names"),
        (["--adapter", f"a={lora}", "--adapter", f"a={lora}"], "the second one with this name"),
        (["--adapter", f"a={lora}", "--adapter", f"b={ia3}"], "of one method"),
        (["--adapter", f"a={lora}", "--prompt", "x"], "for lines of --prompt-file"),
        (["--adapter", f"={lora}"], "lacks its name"),
        (["--adapter", str(folder / "llama-lora")], "hidden_size is 64 there"),
        (["--adapter", f"a={lora}", "--prompt-file", str(file)], 'line 2: adapter "it": --adapter'),
        (["--prompt-file", str(file)], "line 2"),
    ):
        argv = argv if "--checkpoint" in argv else ["--checkpoint", gpt_base, *argv]
        status = generate.main([*argv, "--device", "cpu", "--max-tokens", "2"])
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert words in err and err.count("\n") == 1, err
