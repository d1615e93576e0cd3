import argparse
import dataclasses
import json
import os
import pickle
import re
import resource
import shutil
import signal
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gpt import build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import checkpoint
import huggingface
import moe
import pipeline_parallel
import sharding
import tensor_parallel
import train
from base.world import Groups
from checkpoint import CheckpointError
from exchange import commands
from exchange.architectures import (
    GPT2,
    LLAMA,
    MIXTRAL,
    HuggingFaceError,
    Location,
    their_tensors,
)
from exchange.hf_config import architecture_of, to_gpt_config, to_hf_config
from gpt import GPT
from huggingface import export_folder, import_folder
from inference import cli
from proof import ranks
from routers import MoEConfig
from run.presets import PRESETS
from sharding import set_sharding, sharding_of

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SHAPES = {
    "gpt2": dict(
        num_layers=2, hidden_size=32, num_heads=4, ffn_hidden_size=72, seq_length=16, vocab_size=61
    ),
    "llama": dict(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=56,
        seq_length=16,
        vocab_size=61,
        llama=True,
        norm_eps=1e-6,
        rotary_base=500.0,
    ),
    "mixtral": dict(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=36,
        seq_length=16,
        vocab_size=61,
        llama=True,
        norm_eps=1e-6,
        rotary_base=500.0,
        num_experts=4,
        router="topk",
        router_topk=2,
        aux_loss=0.03,
        z_loss=0.0,
    ),
}
FAMILIES = list(SHAPES)
TOKENS = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(0))
STATE = {"config": {"tokenizer": "bytes"}, "tokens": 0, "corpus": None, "optimizer": None}


def shaken(model):
    """Norms and biases away from 1 and 0, so that a swap shows."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return model.eval()


def theirs(family):
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=61,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_inner=72,
            bos_token_id=60,
            eos_token_id=60,
        )
        return shaken(transformers.GPT2LMHeadModel(config))
    llama = dict(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        # as transformers 4 and 5 take it
        rms_norm_eps=1e-6,
        rope_theta=500.0,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    if family == "llama":
        return shaken(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=56, **llama))
        )
    return shaken(
        transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                intermediate_size=36,
                num_local_experts=4,
                num_experts_per_tok=2,
                router_aux_loss_coef=0.03,
                **llama,
            )
        )
    )


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
    assert all(
        len(list(found[family][0].glob("*.safetensors"))) > 2 for family in ("llama", "mixtral")
    )
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


def weights(path):
    """All tensors of a checkpoint."""
    found = {
        n: torch.zeros(shape, dtype=getattr(torch, dtype))
        for n, (dtype, shape) in checkpoint.read_index(path)["tensors"].items()
    }
    checkpoint.read(path, found)
    return found


def identical(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


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
def test_imports_what_transformers_wrote(saved, tmp_path, family):
    folder, expected = saved[family]
    config = import_folder(folder, tmp_path / "ckpt")
    assert config == MoEConfig(**SHAPES[family], dropout=0.1 if family == "gpt2" else 0.0)
    assert close(our_logits(tmp_path / "ckpt"), expected)
    index = checkpoint.read_index(tmp_path / "ckpt")
    assert (
        index["config"]["model"]
        == {"gpt2": "gpt2", "llama": "llama2-7b", "mixtral": "mixtral-8x7b"}[family]
    )
    assert (
        index["step"] == 0
        and index["config"]["tokenizer"].endswith("ckpt/tokenizer.json")
        and all(n.startswith("model.") and d == "float32" for n, (d, _) in index["tensors"].items())
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [5 * 10**9, 20_000], ids=["one file", "many files"])
def test_transformers_loads_what_we_export(tmp_path, family, limit):
    path, model = our_checkpoint(tmp_path / "ckpt", **SHAPES[family])
    export_folder(path, tmp_path / "hf", max_shard_bytes=limit)
    with torch.no_grad():
        assert close(their_logits(tmp_path / "hf"), model(TOKENS))
    files = sorted(f.name for f in (tmp_path / "hf").iterdir())
    if limit > 10**9:
        assert files == ["config.json", "model.safetensors"]
    else:
        shards = sorted((tmp_path / "hf").glob("model-*.safetensors"))
        assert [f.name for f in shards] == [
            f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)
        ] and len(shards) > 2
        assert all(f.stat().st_size < 20_000 + 2_000 for f in shards)
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(
            t.nbytes for t in tensors_in(tmp_path / "hf").values()
        )
        assert all(
            n in load_file(tmp_path / "hf" / file) for n, file in index["weight_map"].items()
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(saved, tmp_path, family):
    """Bit for bit, both ways, and in 16 bits what was stored in 16 bits."""
    path, _ = our_checkpoint(tmp_path / "a", **SHAPES[family])
    export_folder(path, tmp_path / "b")
    config = import_folder(tmp_path / "b", tmp_path / "c")
    assert config == MoEConfig(**SHAPES[family]) and identical(
        weights(tmp_path / "a"), weights(tmp_path / "c")
    )
    folder = saved[family][0]
    import_folder(folder, tmp_path / "d")
    export_folder(tmp_path / "d", tmp_path / "e")
    assert identical(tensors_in(folder), tensors_in(tmp_path / "e"))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        export_folder(tmp_path / "d", tmp_path / name, dtype=name)
        assert identical(
            tensors_in(tmp_path / name), {n: t.to(dtype) for n, t in tensors_in(folder).items()}
        )
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(
            dtype
        ).removeprefix("torch.")
        import_folder(tmp_path / name, tmp_path / f"from {name}")
        assert identical(
            weights(tmp_path / f"from {name}"),
            {n: t.to(dtype).float() for n, t in weights(tmp_path / "d").items()},
        )
        assert {t.dtype for t in tensors_in(tmp_path / f"from {name}").values()} == {torch.float32}


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
    assert identical(tensors_in(saved[family][0]), tensors_in(tmp_path / "back"))


def test_location_by_hand():
    theirs = torch.arange(12.0).view(2, 6)  # [in 2, out 3 x 2]
    key = Location("", transposed=True, third=1)
    assert key.view(theirs).tolist() == [[2, 8], [3, 9]]
    assert key.shape(torch.Size([2, 2])) == [2, 6]
    # a bias
    value = Location("", transposed=True, third=2)
    assert value.view(theirs[0]).tolist() == [4, 5]
    assert value.shape(torch.Size([2])) == [6]
    assert Location("", transposed=True).shape(torch.Size([5, 3])) == [3, 5]
    assert Location("").shape(torch.Size([5, 3])) == [5, 3]
    experts = huggingface.unstack_experts("e.#.w", theirs)
    assert {name: t.tolist() for name, t in experts.items()} == {
        "e.0.w": [0, 1, 2, 3, 4, 5],
        "e.1.w": [6, 7, 8, 9, 10, 11],
    }


# --- any layout -----------------------------------------------------------------------------------


def load_and_save(rank, folder, families, tp, pp, ep):
    """Build this rank's part of each family's model, load it from the import, and save it as a run
    saves it. Returns its logits, by family, where it has a head."""
    groups = Groups.make("cpu", 2, tp, pp, ep=ep)
    logits = {}
    for family in families:
        config = MoEConfig(**checkpoint.read_index(folder / family)["model"])
        with torch.device("meta"):
            model = GPT(config)
        moe.apply(model, groups.ep, groups.tp)
        stages = [model]
        if groups.pp:
            stages = pipeline_parallel.apply(model, groups.pp.rank(), pp)
        for stage in stages:
            if groups.tp:
                tensor_parallel.apply(stage, groups.tp)
            sharding.materialise(stage, "cpu", torch.float32)
        parts = {
            f"model.{n}": set_sharding(p.detach(), sharding_of(p))
            for n, p in sharding.named_parameters(*stages)
        }
        checkpoint.read(folder / family, parts)
        checkpoint.save(
            folder / f"{family} run" / "checkpoints",
            0,
            parts,
            STATE | {"model": dataclasses.asdict(config)},
        )
        y = forward_logits(stages, groups.pp)
        if y is not None:
            logits[family] = y
    return logits


@torch.no_grad()
def forward_logits(stages, pp_group):
    """None on a rank of a pipeline that does not have the model's head."""
    if not pp_group:
        return stages[0](TOKENS)
    logits = None

    def forward(chunk, k, x):
        nonlocal logits
        y = stages[chunk](TOKENS, x=x)
        if stages[chunk].head is not None:
            logits = y
        return y

    pipeline = pipeline_parallel.Pipeline(stages, pipeline_parallel.Channels(pp_group))
    pipeline.run(pipeline.forward_only(1), forward, *TOKENS.shape)
    return logits


@pytest.mark.parametrize(
    "families, layout",
    [(FAMILIES, (2, 1, 1)), (FAMILIES, (1, 2, 1)), (["mixtral"], (1, 1, 2))],
    ids=["tp 2", "pp 2", "ep 2"],
)
def test_under_a_layout(saved, tmp_path, families, layout):
    """An import loads under it with the same logits; what a run saved under it exports to the same
    folder, byte for byte."""
    for family in families:
        import_folder(saved[family][0], tmp_path / family)
    logits = ranks.run(load_and_save, 2, tmp_path, families, *layout)
    for family in families:
        # of a pipeline, the last stage has the head
        logits_of_ranks = [on_rank[family] for on_rank in logits if family in on_rank]
        assert logits_of_ranks and all(close(y, saved[family][1]) for y in logits_of_ranks)
        exported = []
        for source in (family, f"{family} run"):
            folder = tmp_path / f"from {source}"
            export_folder(tmp_path / source, folder, max_shard_bytes=20_000)
            exported.append({file.name: file.read_bytes() for file in folder.iterdir()})
        assert exported[0] == exported[1]
        assert identical(tensors_in(saved[family][0]), tensors_in(folder))


# --- streaming ------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """`peak`: the most bytes, of storages of tensors that operations returned, alive at once."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen += [
            weakref.ref(x)
            for x in tree_leaves(result)
            if isinstance(x, torch.Tensor) and not x.is_meta
        ]
        alive = [x for x in (r() for r in self.seen) if x is not None]
        self.seen = [weakref.ref(x) for x in alive]
        self.peak = max(
            self.peak,
            sum(
                {
                    x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive
                }.values()
            ),
        )
        return result


@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_than_a_file_is_in_memory(tmp_path, monkeypatch, family):
    """Both ways: the tensors of one file, and one tensor on its way there. With files of any size
    the same meter sees the whole model."""
    # times 4 experts
    ffn = 128 if family == "mixtral" else 256
    path, model = our_checkpoint(
        tmp_path / "ckpt",
        **SHAPES[family] | dict(num_layers=12, hidden_size=64, num_heads=8, ffn_hidden_size=ffn),
    )
    whole = sum(p.nbytes for p in model.parameters())
    largest = max(
        torch.Size(shape).numel() * 4
        for shape, _ in their_tensors(model.config, architecture_of(model.config)).values()
    )
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

LLAMA_4 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "vocab_size": 61,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.31.0",
}
OURS_4 = dict(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=56,
    seq_length=16,
    vocab_size=61,
    llama=True,
    norm_eps=1e-6,
)
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
GPT2_4 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 16,
    "n_ctx": 16,
    "vocab_size": 61,
    "n_inner": None,
}


@pytest.mark.parametrize(
    "there, here",
    [
        (LLAMA_4, OURS_4),
        (
            LLAMA_4
            | {
                "rope_theta": 500000,
                "rope_scaling": None,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-5,
            },
            OURS_4 | dict(rotary_base=5e5, num_kv_heads=2, norm_eps=1e-5),
        ),
        (
            LLAMA_4
            | {
                "rope_parameters": {"rope_theta": 700.0, "rope_type": "default"},
                "head_dim": 8,
            },
            OURS_4 | dict(rotary_base=700.0),
        ),
        (
            LLAMA_4
            | {
                "rope_scaling": {"type": "default"},
                "rope_theta": 300.0,
                "attention_dropout": 0.25,
            },
            OURS_4 | dict(rotary_base=300.0, dropout=0.25),
        ),
        (MIXTRAL_8X7B, PRESETS["mixtral-8x7b"][0]),
        (
            {
                k: v
                for k, v in MIXTRAL_8X7B.items()
                if k
                not in (
                    "rms_norm_eps",
                    "rope_theta",
                    "num_experts_per_tok",
                    "router_aux_loss_coef",
                    "sliding_window",
                )
            },
            PRESETS["mixtral-8x7b"][0] | dict(aux_loss=0.001),
        ),
        (
            GPT2_4,
            dict(
                num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=61, dropout=0.1
            ),
        ),
        (
            GPT2_4
            | {
                "n_inner": 70,
                "resid_pdrop": 0.1,
                "attn_pdrop": 0.2,
                "embd_pdrop": 0,
                "layer_norm_epsilon": 1e-6,
                "activation_function": "gelu_pytorch_tanh",
                "reorder_and_upcast_attn": True,
            },
            dict(
                num_layers=2,
                hidden_size=32,
                num_heads=4,
                seq_length=16,
                vocab_size=61,
                ffn_hidden_size=70,
                dropout=0.2,
                norm_eps=1e-6,
            ),
        ),
    ],
)
def test_configurations_of_older_versions(there, here):
    assert to_gpt_config(there) == MoEConfig(**here)
    assert to_gpt_config(json.loads(json.dumps(to_hf_config(MoEConfig(**here))))) == MoEConfig(
        **here
    )


def test_grouped_queries_have_no_place_in_gpt2(tmp_path):
    path, _ = our_checkpoint(tmp_path / "ckpt", **SHAPES["gpt2"] | dict(num_kv_heads=2))
    with pytest.raises(HuggingFaceError, match="GPT2LMHeadModel has no num_kv_heads 2"):
        export_folder(path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "shape, words",
    [
        (dict(router="sinkhorn", aux_loss=0.0), "router sinkhorn: a Mixtral's gates"),
        (dict(router_topk=1), "router_topk 1: .* num_experts_per_tok 1"),
        (dict(expert_every=2), "expert_every 2: .* every layer"),
        (dict(llama=False, num_kv_heads=4), "num_experts 4: GPT2LMHeadModel has none"),
    ],
)
def test_experts_that_are_not_a_mixtral(tmp_path, shape, words):
    path, _ = our_checkpoint(tmp_path / "ckpt", **SHAPES["mixtral"] | shape)
    with pytest.raises(HuggingFaceError, match=words):
        export_folder(path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_is_not_a_parameter_is_accepted(copy, saved, tmp_path):
    """Masks, a second copy of the tied embedding, and names without prefix, as the first GPT-2 was
    published."""
    folder = copy("gpt2")
    tensors = {n.removeprefix("transformer."): t for n, t in tensors_in(folder).items()}
    for i in range(2):
        tensors |= {
            f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril().bool(),
            f"h.{i}.attn.masked_bias": torch.tensor(-1e4),
        }
    save_file(
        tensors | {"lm_head.weight": tensors["wte.weight"].clone()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    import_folder(folder, tmp_path / "ckpt")
    assert close(our_logits(tmp_path / "ckpt"), saved["gpt2"][1])
    save_file(
        tensors | {"lm_head.weight": tensors["wte.weight"] + 1},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(HuggingFaceError, match=r"lm_head.weight differs"):
        import_folder(folder, tmp_path / "other")


def test_rotary_frequencies_are_accepted(copy, saved, tmp_path):
    folder = copy("llama")
    tensors = tensors_in(folder) | {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    import_folder(folder, tmp_path / "ckpt")
    assert close(our_logits(tmp_path / "ckpt"), saved["llama"][1])


def test_experts_of_a_layer_in_several_files(copy, saved, tmp_path):
    """As transformers 4 and Mixtral's authors saved them, in the order of experts; transformers 5
    keeps a layer's in one file."""
    folder = copy("mixtral")
    tensors = tensors_in(folder)
    files = {}
    for name in tensors:
        expert = re.search(r"experts.([0-9])", name)
        number = expert[1] if expert else "x"
        files.setdefault(f"model-{number}.safetensors", []).append(name)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for file, names in files.items():
        save_file({n: tensors[n] for n in names}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {n: file for file, names in files.items() for n in names}})
    )
    import_folder(folder, tmp_path / "ckpt")
    assert len(files) == 5 and close(our_logits(tmp_path / "ckpt"), saved["mixtral"][1])


# --- refusals -------------------------------------------------------------------------------------


def change(folder, changes):
    """Fields of config.json; `...` removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not ...})
    )


def refused(folder, target, words):
    with pytest.raises(HuggingFaceError) as e:
        import_folder(folder, target)
    message = str(e.value)
    assert str(folder) in message and "\n" not in message and all(w in message for w in words), (
        message
    )
    assert not [f.name for f in target.parent.iterdir() if "ckpt" in f.name]


@pytest.mark.parametrize(
    "family, changes, words",
    [
        (
            "gpt2",
            {"architectures": ["OPTForCausalLM"]},
            ["OPTForCausalLM", "GPT2LMHeadModel, LlamaForCausalLM, ", " and MixtralForCausalLM"],
        ),
        ("gpt2", {"architectures": ...}, ["architectures is null"]),
        ("gpt2", {"n_layer": ...}, ["n_layer is missing"]),
        ("gpt2", {"n_embd": "32"}, ['n_embd is "32"', "an integer"]),
        ("gpt2", {"n_head": 4.0}, ["n_head is 4.0", "an integer"]),
        ("gpt2", {"n_head": True}, ["n_head is true"]),
        ("gpt2", {"layer_norm_epsilon": float("nan")}, ["not JSON", "NaN"]),
        ("gpt2", {"n_head": 5}, ["num_heads 5", "divide"]),
        ("gpt2", {"n_layer": 0}, ["num_layers 0"]),
        ("gpt2", {"n_layer": -1}, ["n_layer is -1"]),
        ("gpt2", {"activation_function": "relu"}, ['activation_function is "relu"', "gelu_new"]),
        ("gpt2", {"activation_function": ["gelu"]}, ["activation_function"]),
        ("gpt2", {"tie_word_embeddings": False}, ["lm_head.weight is missing"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention"]),
        ("llama", {"hidden_act": "gelu"}, ['hidden_act is "gelu"', "silu"]),
        ("llama", {"tie_word_embeddings": True}, ["lm_head.weight differs", "tie_word_embeddings"]),
        ("llama", {"attention_bias": True}, ["self_attn.q_proj.bias is missing", "and 5 more"]),
        ("llama", {"mlp_bias": True}, ["mlp.gate_proj.bias is missing", "and 3 more"]),
        ("llama", {"head_dim": 16}, ["q_proj.weight is F32 [32, 32] there", "[64, 32] in gpt.py"]),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            ["low_freq_factor is missing"],
        ),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        ("llama", {"rope_scaling": "x"}, ["rope_scaling"]),
        ("llama", {"rope_parameters": {"rope_theta": "x"}}, ["rope_theta"]),
        ("llama", {"rope_theta": "x"}, ['rope_theta is "x"', "in rope_parameters"]),
        ("llama", {"num_key_value_heads": 0}, ["num_key_value_heads is 0"]),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
        ("llama", {"attention_dropout": 1.0}, ["dropout 1.0"]),
        ("mixtral", {"num_experts_per_tok": 1}, ["router_topk 1", "num_experts_per_tok 1"]),
        ("mixtral", {"num_experts_per_tok": 5}, ["router_topk 5"]),
        ("mixtral", {"sliding_window": 8}, ["sliding_window is 8"]),
        ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise is 0.1"]),
        ("mixtral", {"router_aux_loss_coef": "x"}, ["router_aux_loss_coef", "a number"]),
        ("mixtral", {"num_local_experts": 0}, ["num_local_experts is 0"]),
        (
            "mixtral",
            {"num_local_experts": 5},
            [
                "model.layers.0.block_sparse_moe.gate.weight is F32 [4, 32] there",
                "experts.4.w1.weight is missing",
                "; and 5 more",
            ],
        ),
        (
            "mixtral",
            {"num_local_experts": 3},
            [
                "gate.weight is F32 [4, 32] there",
                "experts.3.w2.weight is not in gpt.py",
                "; and 5 more",
            ],
        ),
        (
            "mixtral",
            {"intermediate_size": 40},
            ["experts.0.w1.weight is F32 [36, 32] there", "[40, 32] in gpt.py"],
        ),
        ("llama", {"num_hidden_layers": 3}, ["num_layers 3: there are tensors of 2 layers"]),
        ("llama", {"num_hidden_layers": 1}, ["num_layers 1: there are tensors of 2 layers"]),
        ("llama", {"num_hidden_layers": 60000}, ["num_layers 60000"]),
        (
            "llama",
            {"rope_theta": 0, "rope_parameters": ...},
            ["rotary_base 0.0: must be from 1 to 1e+30"],
        ),
        ("llama", {"rope_theta": "x", "rope_parameters": ...}, ['rope_theta is "x"']),
        ("llama", {"rms_norm_eps": 0}, ["norm_eps 0.0: must be from 1e-30 to 1"]),
        ("llama", {"rms_norm_eps": [1e-5]}, ["rms_norm_eps is [1e-05]"]),
        (
            "gpt2",
            {"vocab_size": 2**31 - 1},
            ["vocab_size 2147483647", "parameters or more, and its tensors have"],
        ),
        ("gpt2", {"n_positions": 2**31 - 1}, ["seq_length 2147483647"]),
        ("llama", {"hidden_size": 2**31 - 8, "head_dim": ...}, ["hidden_size 2147483640"]),
        ("mixtral", {"num_local_experts": 65535}, ["num_experts 65535"]),
        (
            "llama",
            {"vocab_size": 62},
            ["model.embed_tokens.weight is F32 [61, 32] there", "[62, 32] in gpt.py"],
        ),
    ],
)
def test_a_model_that_gpt_py_does_not_have(copy, tmp_path, family, changes, words):
    folder = copy(family)
    change(folder, changes)
    refused(folder, tmp_path / "ckpt", words)


def test_fused_experts(tmp_path):
    theirs("mixtral").save_pretrained(tmp_path / "hf", save_original_format=False)
    refused(tmp_path / "hf", tmp_path / "ckpt", ["experts are fused", "save_original_format=True"])


class Malice:
    def __reduce__(self):
        return os.system, ("touch executed",)


def damage(folder, how):
    weights = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    config = folder / "config.json"
    malice = pickle.dumps(Malice())

    def save_in_64_bits():
        save_file({name: t.double() for name, t in tensors_in(folder).items()}, weights)

    changes = {
        "no config": config.unlink,
        "not JSON": lambda: config.write_text("{"),
        "deep JSON": lambda: config.write_text('{"a": ' + "[" * 100_000),
        "not an object": lambda: config.write_text("[]"),
        "no weights": weights.unlink,
        "pickle": lambda: weights.rename(folder / "pytorch_model.bin").write_bytes(malice),
        "pickle under another name": lambda: weights.write_bytes(malice),
        "truncated": lambda: os.truncate(weights, weights.stat().st_size - 1),
        "header": lambda: weights.write_bytes(b"\xff" * 100),
        "64 bits": save_in_64_bits,
        "missing shard": lambda: sorted(folder.glob("*.safetensors"))[1].unlink(),
        "no map": lambda: index.write_text("{}"),
        "map to elsewhere": lambda: index.write_text(
            '{"weight_map": {"lm_head.weight": "../../secret.safetensors"}}'
        ),
    }
    changes[how]()


@pytest.mark.parametrize(
    "family, how, words",
    [
        ("gpt2", "no config", ["is not a folder with a config.json"]),
        ("gpt2", "not JSON", ["config.json: not JSON", "line 1, column 2"]),
        ("gpt2", "deep JSON", ["nested too deeply"]),
        ("gpt2", "not an object", ["config.json: Expected `object`, got `array`"]),
        ("gpt2", "no weights", ["neither model.safetensors nor"]),
        ("gpt2", "pickle", ["pickle", "never opened", "save_pretrained"]),
        (
            "gpt2",
            "pickle under another name",
            ["model.safetensors cannot be loaded: damaged, or not safetensors"],
        ),
        ("gpt2", "truncated", ["model.safetensors cannot be loaded: damaged"]),
        ("gpt2", "header", ["model.safetensors cannot be loaded: damaged"]),
        ("gpt2", "64 bits", ["is F64 [61, 32] there", "F32 or BF16 or F16"]),
        ("llama", "missing shard", ["model-00002-of-", "is missing"]),
        ("llama", "no map", ["index.json: Object missing required field `weight_map`"]),
        ("llama", "map to elsewhere", ["index.json: Expected `str` matching regex"]),
    ],
)
def test_damage_is_named(copy, tmp_path, monkeypatch, family, how, words):
    monkeypatch.chdir(tmp_path)
    folder = copy(family)
    damage(folder, how)
    refused(folder, tmp_path / "ckpt", words)
    # by a pickle
    assert not (tmp_path / "executed").exists()


def test_nothing_is_unpickled(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy("gpt2")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", ".metadata"):
        (folder / name).write_bytes(pickle.dumps(Malice()))
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


def without_room(rank, hf_dir, path, new):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    messages = []
    for convert, source, target in (
        (import_folder, hf_dir, new / "imported"),
        (export_folder, path, new / "exported"),
    ):
        try:
            convert(source, target)
        except HuggingFaceError as e:
            messages.append(str(e))
    return messages


def test_no_room(saved, tmp_path):
    """A file-size limit stands in for a full disk. Nothing half done is left."""
    path, _ = our_checkpoint(tmp_path / "ckpt", **SHAPES["gpt2"])
    (tmp_path / "new").mkdir()
    messages = ranks.run(without_room, 1, saved["gpt2"][0], path, tmp_path / "new")[0]
    for message, target in zip(messages, ("imported", "exported"), strict=True):
        assert f"{tmp_path}/new/{target} cannot be written" in message
        assert "File too large" in message
    assert not list((tmp_path / "new").iterdir())


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
    config = MoEConfig(**SHAPES["gpt2"])
    large = {
        f"model.{n}": torch.full(p.shape, 1e5)
        for n, p in huggingface.empty_model(config).named_parameters()
    }
    checkpoint.write(tmp_path / "ckpt", 1, large, STATE | {"model": dataclasses.asdict(config)})
    with pytest.raises(
        HuggingFaceError, match=r"transformer.wte.weight has values beyond 65504.*bf16"
    ):
        export_folder(tmp_path / "ckpt", tmp_path / "hf", dtype="fp16")
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
    assert commands.main(["import", str(folder), str(base)]) == 0
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
    assert commands.main(["export", str(out), str(tmp_path / "back")]) == 0
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert back["pad_token_id"] == 1
    assert back[limit] == (64 if family == "llama" else rows)


def test_ids_without_a_tokenizer_are_said_to_be_lost(copy, tmp_path, capsys):
    folder = copy("llama")
    change(folder, {"pad_token_id": 1, "eos_token_id": 5})
    assert commands.main(["import", str(folder), str(tmp_path / "base")]) == 0
    error = capsys.readouterr().err
    assert "has no tokenizer, so an export will not have its" in error
    assert "eos_token_id 5" in error and "pad_token_id 1" in error


def test_command(copy, tmp_path, capsys, monkeypatch):
    """With its tokenizer, there, here, as a run's checkpoint, and there again."""
    folder = copy("gpt2")
    make_tokenizer(folder / "tokenizer.json")
    ckpt = tmp_path / "ckpt"
    step = tmp_path / "run" / "checkpoints" / "step-000000"
    assert commands.main(["import", str(folder), str(ckpt)]) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    assert checkpoint.read_index(ckpt)["config"]["tokenizer"] == str(ckpt / "tokenizer.json")
    assert (
        cli.main(
            ["--checkpoint", str(ckpt), "--prompt", "a b", "--max-tokens", "3", "--device", "cpu"]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("a b")
    step.parent.mkdir(parents=True)
    shutil.copytree(ckpt, step)
    (step / "tokenizer.json").rename(tmp_path / "run" / "tokenizer.json")
    assert (
        commands.main(
            [
                "export",
                str(tmp_path / "run"),
                str(tmp_path / "back"),
                "--max-shard-size",
                "20KB",
                "--dtype",
                "bf16",
            ]
        )
        == 0
    )
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (
        folder / "tokenizer.json"
    ).read_text()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 5
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2 and all(
        t.dtype == torch.bfloat16 for t in tensors_in(tmp_path / "back").values()
    )
    capsys.readouterr()
    for flag in (["--dtype", "bf16"], ["--max-shard-size", "20KB"]):
        assert commands.main(["import", str(folder), str(tmp_path / "x"), *flag]) == 2
        assert f"{flag[0]}: is for export" in capsys.readouterr().err
    assert commands.main(["import", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2
    assert commands.main(["export", str(folder), str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(e.startswith(f"huggingface.py: {tmp_path}") for e in errors)


@pytest.mark.parametrize(
    "text, size",
    [
        ("5GB", 5 * 10**9),
        ("20kb", 20_000),
        ("3m", 3_000_000),
        ("123", 123),
        ("0", None),
        ("x", None),
        ("-1GB", None),
        ("1.5GB", None),
    ],
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            commands.size(text)
    else:
        assert commands.size(text) == size


def test_shards_by_hand():
    assert huggingface.group_by_size({"a": 4, "b": 6, "c": 1, "d": 30, "e": 2}, 10) == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e"],
    ]
