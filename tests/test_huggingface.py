import argparse
import dataclasses
import json
import os
import pickle
import resource
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from parity import again
from safetensors.torch import load_file, save_file
from small_run import equal, tensors_of
from test_gpt import build
from their_models import shaken, their_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import generate
import train
from base.model_config import MoEConfig
from inference import cli, huggingface
from inference.architectures import GPT2, LLAMA, MIXTRAL, HuggingFaceError, their_tensors
from inference.hf_config import architecture_of, to_hf_config, to_model_config
from inference.huggingface import export_folder, import_folder
from run import checkpoint
from run.checkpoint import CheckpointError
from run.presets import PRESETS

transformers = pytest.importorskip("transformers")

SIZES = dict(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=61)
LIKE_LLAMA = SIZES | dict(num_kv_heads=2, llama=True, norm_eps=1e-6, rotary_base=500.0)
EXPERTS = dict(num_experts=4, router="topk", router_topk=2, aux_loss=0.03, z_loss=0.0)
SHAPES = {
    "gpt2": SIZES | dict(ffn_hidden_size=72),
    "llama": LIKE_LLAMA | dict(ffn_hidden_size=56),
    "mixtral": LIKE_LLAMA | EXPERTS | dict(ffn_hidden_size=36),
}
FAMILIES = list(SHAPES)
TOKENS = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(0))
STATE = {"config": {"tokenizer": "bytes"}, "tokens": 0, "corpus": None, "optimizer": None}


OF_LLAMA = dict(
    num_key_value_heads=2,
    # as transformers 4 and 5 take it
    rms_norm_eps=1e-6,
    rope_theta=500.0,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)
OF_MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.03)
THEIRS = {
    "gpt2": dict(n_inner=72, bos_token_id=60, eos_token_id=60),
    "llama": OF_LLAMA | dict(intermediate_size=56),
    "mixtral": OF_LLAMA | OF_MIXTRAL | dict(intermediate_size=36),
}


def theirs(family):
    return shaken(their_model(family, max_position_embeddings=16, **THEIRS[family]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders that save_pretrained wrote, and the logits of their models."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp("saved") / family
        model = theirs(family)
        model.save_pretrained(folder, **({} if family == "gpt2" else {"max_shard_size": "20KB"}))
        with torch.no_grad():
            found[family] = folder, model(TOKENS).logits
    for family in ("llama", "mixtral"):
        assert len(list(found[family][0].glob("*.safetensors"))) > 2
    return found


@pytest.fixture
def copy(saved, tmp_path):
    def copy_of(family):
        return Path(shutil.copytree(saved[family][0], tmp_path / "hf"))

    return copy_of


def our_checkpoint(path, dtype=torch.float32, **shape):
    """A checkpoint of this project, and its model."""
    model = shaken(build(dtype, **shape))
    checkpoint.write(
        path,
        7,
        {f"model.{n}": p.detach() for n, p in model.named_parameters()},
        STATE | {"model": dataclasses.asdict(model.config)},
    )
    return path, model


def tensors_in(folder):
    return {
        n: t
        for file in sorted(Path(folder).glob("*.safetensors"))
        for n, t in load_file(file).items()
    }


def close(a, b):
    return (a - b).abs().max() <= 1e-5 * b.abs().max()


@torch.no_grad()
def our_logits(path):
    return cli.load_model(path)[0](TOKENS)


@torch.no_grad()
def their_logits(folder):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()(TOKENS).logits


# --- the same logits on both sides ----------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_files_of_a_size(tmp_path, family):
    path, model = our_checkpoint(tmp_path / "ckpt", **SHAPES[family])
    folder = tmp_path / "hf"
    export_folder(path, folder, max_shard_bytes=20_000)
    with torch.no_grad():
        assert close(their_logits(folder), model(TOKENS))
    shards = sorted(folder.glob("model-*.safetensors"))
    count = len(shards)
    names = [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    assert [f.name for f in shards] == names and count > 2
    assert all(f.stat().st_size < 20_000 + 2_000 for f in shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_in(folder).values())
    assert all(n in load_file(folder / file) for n, file in index["weight_map"].items())


PRESET_OF = {"gpt2": "gpt2", "llama": "llama2-7b", "mixtral": "mixtral-8x7b"}


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(saved, tmp_path, family):
    """Bit for bit, and in 16 bits what was stored in 16 bits. (The logits: test_families.py.)"""
    folder = saved[family][0]
    config = import_folder(folder, tmp_path / "d")
    assert config == MoEConfig(**SHAPES[family], dropout=0.1 if family == "gpt2" else 0.0)
    index = checkpoint.read_index(tmp_path / "d")
    assert index["config"]["model"] == PRESET_OF[family] and index["step"] == 0
    assert index["config"]["tokenizer"].endswith("d/tokenizer.json")
    for name, (dtype, _) in index["tensors"].items():
        assert name.startswith("model.") and dtype == "float32"
    export_folder(tmp_path / "d", tmp_path / "e")
    assert equal(tensors_in(folder), tensors_in(tmp_path / "e"))
    assert {f.name for f in (tmp_path / "e").iterdir()} == {"config.json", "model.safetensors"}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        there, back = tmp_path / name, tmp_path / f"from {name}"
        export_folder(tmp_path / "d", there, dtype=name)
        stored = {n: t.to(dtype) for n, t in tensors_in(folder).items()}
        assert equal(tensors_in(there), stored)
        said = json.loads((there / "config.json").read_text())["dtype"]
        assert f"torch.{said}" == str(dtype)
        import_folder(there, back)
        ours = {n: t.to(dtype).float() for n, t in tensors_of(tmp_path / "d").items()}
        assert equal(tensors_of(back), ours)


SWAPS = {
    "query and key": ("gpt2", "attention.query", "attention.key"),
    "gate and up": ("llama", "mlp.gate", "mlp.up"),
    "the norms": ("gpt2", "attention_norm", "mlp_norm"),
    "the norms of Llama": ("llama", "attention_norm", "mlp_norm"),
    "gate and up of experts": ("mixtral", "mlp.gate", "mlp.up"),
}


@pytest.mark.parametrize("mistake", [*SWAPS, "not transposed"])
def test_a_wrong_table_shows(saved, tmp_path, monkeypatch, mistake):
    """In logits: a round trip, which reads the same wrong table twice, sees nothing."""
    family, first, second = SWAPS.get(mistake, ("gpt2", "attention.output", None))
    table = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL}[family].modules
    first = f"blocks.*.{first}"
    second = f"blocks.*.{second}"
    if mistake == "not transposed":
        monkeypatch.setitem(table, first, table[first]._replace(transposed=False))
    else:
        locations = table[first], table[second]
        monkeypatch.setitem(table, first, locations[1])
        monkeypatch.setitem(table, second, locations[0])
    import_folder(saved[family][0], tmp_path / "ckpt")
    difference = (our_logits(tmp_path / "ckpt") - saved[family][1]).abs().max()
    assert difference > 1e-3 * saved[family][1].abs().max()
    export_folder(tmp_path / "ckpt", tmp_path / "back")
    assert equal(tensors_in(saved[family][0]), tensors_in(tmp_path / "back"))


# --- streaming ------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """`peak`: the most bytes, of storages of tensors that operations returned, alive at once."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and not x.is_meta]
        alive = [x for x in (r() for r in self.seen) if x is not None] + made
        self.seen = [weakref.ref(x) for x in alive]
        storages = [x.untyped_storage() for x in alive]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, sum(sizes.values()))
        return result


@pytest.mark.parametrize("family", ["gpt2", again("llama"), "mixtral"])
def test_no_more_than_a_file_is_in_memory(tmp_path, monkeypatch, family):
    """Both ways: the tensors of one file, and one tensor on its way there. With files of any size
    the same meter sees the whole model."""
    # times 4 experts
    ffn = 128 if family == "mixtral" else 256
    shape = dict(num_layers=12, hidden_size=64, num_heads=8, ffn_hidden_size=ffn)
    path, model = our_checkpoint(tmp_path / "ckpt", **SHAPES[family] | shape)
    whole = sum(p.nbytes for p in model.parameters())
    theirs = their_tensors(model.config, architecture_of(model.config))
    largest = max(torch.Size(shape).numel() * 4 for shape, _ in theirs.values())
    for limit, bound in ((200_000, 210_000 + largest), (10**9, None)):
        monkeypatch.setattr(checkpoint, "FILE_BYTES", limit)
        with Alive() as out:
            export_folder(path, tmp_path / f"there {limit}", max_shard_bytes=limit)
        with Alive() as back:
            import_folder(tmp_path / f"there {limit}", tmp_path / f"back {limit}")
        if bound:
            assert max(out.peak, back.peak) <= bound < whole / 8, (out.peak, back.peak, whole)
        else:
            assert min(out.peak, back.peak) >= whole, (out.peak, back.peak, whole)


# --- config.json ----------------------------------------------------------------------------------

LLAMA_4 = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=56)
LLAMA_4 |= dict(vocab_size=61, max_position_embeddings=16, hidden_act="silu")
GPT2_4 = dict(n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=61, n_inner=None)
MIXTRAL_4 = dict(num_hidden_layers=32, num_attention_heads=32, hidden_size=4096, hidden_act="silu")
MIXTRAL_4 |= dict(num_key_value_heads=8, num_local_experts=8, intermediate_size=14336)
MIXTRAL_4 |= dict(vocab_size=32000, max_position_embeddings=32768)
OPTIONAL = dict(num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None)
THETA = {"rope_theta": 700.0, "rope_type": "default"}
# class -> (what transformers 4 wrote of it, what we read)
VERSION_4 = {
    "LlamaForCausalLM": (LLAMA_4, SIZES | dict(ffn_hidden_size=56, llama=True, norm_eps=1e-6)),
    "GPT2LMHeadModel": (GPT2_4, SIZES | dict(dropout=0.1)),
    "MixtralForCausalLM": (MIXTRAL_4, PRESETS["mixtral-8x7b"][0]),
}
# class, changes of config.json, changes of what we read
OLDER = [
    ("LlamaForCausalLM", {}, {}),
    ("LlamaForCausalLM", dict(rope_theta=500000, rope_scaling=None), dict(rotary_base=5e5)),
    ("LlamaForCausalLM", dict(num_key_value_heads=2), dict(num_kv_heads=2)),
    ("LlamaForCausalLM", dict(rope_parameters=THETA), dict(rotary_base=700.0)),
    ("LlamaForCausalLM", dict(head_dim=8, rms_norm_eps=1e-5), dict(norm_eps=1e-5)),
    ("LlamaForCausalLM", dict(rope_scaling={"type": "default"}), {}),
    ("LlamaForCausalLM", dict(attention_dropout=0.25), dict(dropout=0.25)),
    ("MixtralForCausalLM", OPTIONAL | dict(router_aux_loss_coef=0.02), {}),
    ("MixtralForCausalLM", {}, dict(aux_loss=0.001)),
    ("GPT2LMHeadModel", {}, {}),
    ("GPT2LMHeadModel", dict(n_inner=70), dict(ffn_hidden_size=70)),
    ("GPT2LMHeadModel", dict(attn_pdrop=0.2, embd_pdrop=0), dict(dropout=0.2)),
    ("GPT2LMHeadModel", dict(layer_norm_epsilon=1e-6), dict(norm_eps=1e-6)),
    ("GPT2LMHeadModel", dict(activation_function="gelu_pytorch_tanh"), {}),
]


@pytest.mark.parametrize("name, there, here", OLDER)
def test_configurations_of_older_versions(name, there, here):
    theirs, ours = VERSION_4[name]
    config = MoEConfig(**ours | here)
    assert to_model_config(theirs | there | {"architectures": [name]}) == config
    assert to_model_config(json.loads(json.dumps(to_hf_config(config)))) == config


def write_tensors(tensors, file):
    save_file(tensors, file, {"format": "pt"})


def test_what_is_not_a_parameter_is_accepted(copy, saved, tmp_path):
    """Masks, a second copy of the tied embedding, and names without prefix, as the first GPT-2 was
    published; the rotary frequencies of older Llamas."""
    file = copy("gpt2") / "model.safetensors"
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril().bool()
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    embedding = tensors["wte.weight"]
    write_tensors(tensors | {"lm_head.weight": embedding.clone()}, file)
    import_folder(file.parent, tmp_path / "ckpt")
    assert close(our_logits(tmp_path / "ckpt"), saved["gpt2"][1])
    write_tensors(tensors | {"lm_head.weight": embedding + 1}, file)
    with pytest.raises(HuggingFaceError, match=r"lm_head.weight differs"):
        import_folder(file.parent, tmp_path / "other")
    folder = Path(shutil.copytree(saved["llama"][0], tmp_path / "llama"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_tensors(tensors_in(folder) | {name: torch.ones(4)}, folder / "model.safetensors")
    import_folder(folder, tmp_path / "of llama")
    assert close(our_logits(tmp_path / "of llama"), saved["llama"][1])


# --- refusals -------------------------------------------------------------------------------------


def change(folder, changes):
    """Fields of config.json; `...` removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def refused(folder, target, *words):
    with pytest.raises(HuggingFaceError) as e:
        import_folder(folder, target)
    message = str(e.value)
    assert str(folder) in message and "\n" not in message
    assert all(w in message for w in words), message
    assert not [f.name for f in target.parent.iterdir() if "ckpt" in f.name]


# family, changes of its config.json, and words of the refusal, with ".." between them
REFUSED = [
    ("gpt2", {"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM .. GPT2LMHeadModel, OpenAI"),
    ("gpt2", {"architectures": ...}, "architectures is null"),
    ("gpt2", {"n_layer": ...}, "n_layer is missing"),
    ("gpt2", {"n_embd": "32"}, 'n_embd is "32" .. an integer'),
    ("gpt2", {"n_head": True}, "n_head is true"),
    ("gpt2", {"layer_norm_epsilon": float("nan")}, "not JSON .. NaN"),
    ("gpt2", {"n_head": 5}, "n_head 5 .. divide n_embd"),
    ("gpt2", {"n_layer": 0}, "n_layer 0"),
    ("gpt2", {"n_layer": -1}, "n_layer is -1"),
    ("gpt2", {"activation_function": "relu"}, 'activation_function is "relu" .. gelu_new'),
    ("gpt2", {"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"vocab_size": 2**31 - 1}, "vocab_size 2147483647 .. parameters or more, and its"),
    ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu" .. silu'),
    ("llama", {"tie_word_embeddings": True}, "lm_head.weight differs .. tie_word_embeddings"),
    ("llama", {"attention_bias": True}, "self_attn.q_proj.bias is missing .. and 5 more"),
    ("llama", {"mlp_bias": True}, "mlp.gate_proj.bias is missing .. and 3 more"),
    ("llama", {"head_dim": 16}, "q_proj.weight is F32 [32, 32] there .. [64, 32] here"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "original_max_position_embeddings is",
    ),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .. linear"),
    ("llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
    ("llama", {"rope_theta": "x"}, 'rope_theta is "x" .. in rope_parameters'),
    ("llama", {"rope_theta": 0, "rope_parameters": ...}, "rotary_base 0.0: must be from 1 to"),
    ("llama", {"rope_theta": "x", "rope_parameters": ...}, 'rope_theta is "x"'),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config .. awq"),
    ("llama", {"attention_dropout": 1.0}, "dropout 1.0"),
    ("llama", {"num_hidden_layers": 3}, "num_layers 3: there are tensors of 2 layers"),
    ("llama", {"num_hidden_layers": 60000}, "num_layers 60000"),
    ("llama", {"rms_norm_eps": 0}, "norm_eps 0.0: must be from 1e-30 to 1"),
    ("llama", {"vocab_size": 62}, "embed_tokens.weight is F32 [61, 32] there .. [62, 32] here"),
    ("mixtral", {"num_experts_per_tok": 1}, "router_topk 1 .. num_experts_per_tok 1"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 .. num_local_experts 4"),
    ("mixtral", {"sliding_window": 8}, "sliding_window is 8"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    ("mixtral", {"router_aux_loss_coef": "x"}, "router_aux_loss_coef .. a number"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
    ("mixtral", {"num_local_experts": 5}, "experts.4.w1.weight is missing .. ; and 5 more"),
    ("mixtral", {"num_local_experts": 3}, "experts.3.w2.weight has no place here .. ; and 5 more"),
    ("mixtral", {"num_local_experts": 65535}, "num_experts 65535"),
    ("mixtral", {"intermediate_size": 40}, "w1.weight is F32 [36, 32] there .. [40, 32] here"),
]


@pytest.mark.parametrize("family, changes, words", REFUSED)
def test_a_model_that_gpt_py_does_not_have(copy, tmp_path, family, changes, words):
    folder = copy(family)
    change(folder, changes)
    refused(folder, tmp_path / "ckpt", *words.split(" .. "))


def test_fused_experts(tmp_path):
    theirs("mixtral").save_pretrained(tmp_path / "hf", save_original_format=False)
    words = "experts are fused", "save_original_format=True"
    refused(tmp_path / "hf", tmp_path / "ckpt", *words)


class Malice:
    def __reduce__(self):
        return os.system, ("touch executed",)


def in_64_bits(weights):
    save_file({name: t.double() for name, t in load_file(weights).items()}, weights)


ELSEWHERE = '{"weight_map": {"lm_head.weight": "../../secret.safetensors"}}'
MALICE = pickle.dumps(Malice())
# family, its file, what happens to that, words of the refusal
DAMAGED = [
    ("gpt2", "config.json", Path.unlink, "is not a folder with a config.json"),
    ("gpt2", "config.json", b"{", "config.json: not JSON .. line 1, column 2"),
    ("gpt2", "config.json", b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    ("gpt2", "config.json", b"[]", "config.json: Expected `object`, got `array`"),
    ("gpt2", "model.safetensors", Path.unlink, "neither model.safetensors nor"),
    (
        "gpt2",
        "model.safetensors",
        lambda file: file.rename(file.with_name("pytorch_model.bin")).write_bytes(MALICE),
        "pickle .. never opened .. save_pretrained",
    ),
    ("gpt2", "model.safetensors", MALICE, "cannot be loaded: damaged, or not safetensors"),
    ("gpt2", "model.safetensors", lambda file: os.truncate(file, 20_000), "loaded: damaged"),
    ("gpt2", "model.safetensors", in_64_bits, "is F64 [61, 32] there .. F32 or BF16 or F16"),
    ("llama", "model-00002-of-*", Path.unlink, "model-00002-of- .. is missing"),
    ("llama", "*.index.json", b"{}", "index.json: Object missing required field `weight_map`"),
    ("llama", "*.index.json", ELSEWHERE.encode(), "index.json: Expected `str` matching regex"),
]


@pytest.mark.parametrize("family, file, change, words", DAMAGED)
def test_damage_is_named(copy, tmp_path, monkeypatch, family, file, change, words):
    monkeypatch.chdir(tmp_path)
    folder = copy(family)
    (path,) = folder.glob(file)
    path.write_bytes(change) if isinstance(change, bytes) else change(path)
    refused(folder, tmp_path / "ckpt", *words.split(" .. "))
    # by a pickle
    assert not (tmp_path / "executed").exists()


def test_nothing_is_unpickled(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy("gpt2")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", ".metadata"):
        (folder / name).write_bytes(MALICE)
    import_folder(folder, tmp_path / "ckpt")
    assert not (tmp_path / "executed").exists() and not list((tmp_path / "ckpt").glob("*.bin"))


def test_folders_that_are_taken_or_not_there(saved, tmp_path):
    folder = saved["gpt2"][0]
    path, _ = our_checkpoint(tmp_path / "ckpt", **SHAPES["gpt2"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for target, words in (
        ("full", "exists, and is not an empty folder"),
        ("file", "exists, and is not"),
        ("file/below", "cannot be written"),
    ):
        for function, source in ((import_folder, folder), (export_folder, path)):
            with pytest.raises(HuggingFaceError, match=f"{target} {words}"):
                function(source, tmp_path / target)
    assert (
        sorted(f.name for f in tmp_path.iterdir()) == ["ckpt", "file", "full"]
        and (tmp_path / "full" / "mine").read_text() == "kept"
    )
    for function in (import_folder, export_folder):
        with pytest.raises(HuggingFaceError, match="nowhere is not a folder"):
            function(tmp_path / "nowhere", tmp_path / "new")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        export_folder(folder, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    export_folder(path, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_no_room(saved, tmp_path):
    """A limit for the size of files instead of a full disk. Nothing half done is left."""
    path, _ = our_checkpoint(tmp_path / "ckpt", **SHAPES["gpt2"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        for convert, source in ((import_folder, saved["gpt2"][0]), (export_folder, path)):
            with pytest.raises(HuggingFaceError, match=r"new cannot be written: .*File too large"):
                convert(source, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.name for file in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("how", ["truncated", "a bit"])
def test_a_damaged_checkpoint_leaves_nothing(tmp_path, how):
    path, _ = our_checkpoint(tmp_path / "ckpt", **SHAPES["gpt2"])
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content[:-1] if how == "truncated" else content)
    with pytest.raises((CheckpointError, HuggingFaceError), match=f"{path}/.*safetensors"):
        export_folder(path, tmp_path / "hf")
    assert [f.name for f in tmp_path.iterdir()] == ["ckpt"]


def test_beyond_fp16(tmp_path):
    path, model = our_checkpoint(tmp_path / "ckpt", **SHAPES["gpt2"])
    large = {f"model.{n}": torch.full(p.shape, 1e5) for n, p in model.named_parameters()}
    shutil.rmtree(path)
    checkpoint.write(path, 1, large, STATE | {"model": dataclasses.asdict(model.config)})
    words = r"transformer.wte.weight has values beyond 65504.*bf16"
    with pytest.raises(HuggingFaceError, match=words):
        export_folder(path, tmp_path / "hf", dtype="fp16")
    assert [f.name for f in tmp_path.iterdir()] == ["ckpt"]


# --- the command ----------------------------------------------------------------------------------


def make_tokenizer(path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 5}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_does_not_come_out_shorter(copy, tmp_path, family, capsys):
    """--seq-length is about rows. Where positions are computed, the model keeps its own limit, also
    when a run goes on; the padding id is kept too."""
    folder = copy(family)
    make_tokenizer(folder / "tokenizer.json")
    limit = {"llama": "max_position_embeddings", "gpt2": "n_positions"}[family]
    changes = {"pad_token_id": 1, "eos_token_id": 5}
    change(folder, changes | ({limit: 64} if family == "llama" else {}))
    base, out = tmp_path / "base", tmp_path / "run"
    assert huggingface.main(["import", str(folder), str(base)]) == 0
    (tmp_path / "a.txt").write_text("a b " * 500)
    rows = 16 if family == "llama" else json.loads((folder / "config.json").read_text())[limit]
    words = f"--load {base} --data {tmp_path}/a.txt --cache {tmp_path}/cache --out {out} --lr 1e-3"
    words += " --steps 1 --global-batch-size 2 --eval-every 0 --device cpu"
    if family == "gpt2":
        assert train.main([*words.split(), "--seq-length", str(rows // 2)]) == 2
        refusal = f"--seq-length {rows // 2}: --load has {rows} learned positions, which stay"
        assert refusal in capsys.readouterr().err
    words += f" --seq-length {rows}"
    assert train.main(words.split()) == 0
    assert train.main(f"--resume --out {out} --steps 2".split()) == 0
    assert huggingface.main(["export", str(out), str(tmp_path / "back")]) == 0
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert back["pad_token_id"] == 1
    assert back[limit] == (64 if family == "llama" else rows)


def test_ids_without_a_tokenizer_are_said_to_be_lost(copy, tmp_path, capsys):
    folder = copy("llama")
    change(folder, {"pad_token_id": 1, "eos_token_id": 5})
    assert huggingface.main(["import", str(folder), str(tmp_path / "base")]) == 0
    error = capsys.readouterr().err
    assert "has no tokenizer, so an export will not have its" in error
    assert "eos_token_id 5" in error and "pad_token_id 1" in error


def test_command(copy, tmp_path, capsys, monkeypatch):
    """With its tokenizer, there, here, as a run's checkpoint, and there again."""
    folder = copy("gpt2")
    monkeypatch.chdir(tmp_path)
    make_tokenizer(folder / "tokenizer.json")
    assert huggingface.main(["import", "hf", "ckpt"]) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    config = checkpoint.read_index(Path("ckpt"))["config"]
    assert Path(config["tokenizer"]).resolve() == Path("ckpt/tokenizer.json").resolve()
    argv = ["--checkpoint", "ckpt", "--prompt", "a b", "--max-tokens", "3", "--device", "cpu"]
    assert generate.main(argv) == 0
    assert capsys.readouterr().out.startswith("a b")
    step = Path(shutil.copytree("ckpt", "run/checkpoints/step-000000"))
    (step / "tokenizer.json").rename("run/tokenizer.json")
    assert huggingface.main("export run back --max-shard-size 20KB --dtype bf16".split()) == 0
    tokenizers = [Path(name, "tokenizer.json").read_text() for name in ("hf", "back")]
    assert tokenizers[0] == tokenizers[1]
    assert json.loads(Path("back/config.json").read_text())["eos_token_id"] == 5
    assert len(list(Path("back").glob("*.safetensors"))) > 2
    assert {t.dtype for t in tensors_in("back").values()} == {torch.bfloat16}
    for words, message in {
        "import hf x --dtype bf16": "--dtype: is for export",
        "import hf x --max-shard-size 20KB": "--max-shard-size: is for export",
        "import nowhere x": "nowhere",
        "export hf x": "hf",
    }.items():
        capsys.readouterr()
        assert huggingface.main(words.split()) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("huggingface.py: ") and message in error


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("20kb", 20_000), ("123", 123)])
def test_sizes(text, size):
    assert huggingface.size(text) == size


@pytest.mark.parametrize("text", ["0", "x", "-1GB", "1.5GB"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        huggingface.size(text)


def test_shards_by_hand():
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 2}
    assert huggingface.group_by_size(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
