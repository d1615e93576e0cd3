import argparse
import dataclasses
import enum
import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from parity import again
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.nn import functional as F

import moe
from course import ranks
from inference import megatron
from inference.architectures import HuggingFaceError
from run import checkpoint

# --- the model that Megatron-Core computes, from its own names ------------------------------------

GPT = dict(num_layers=2, hidden_size=24, num_attention_heads=4, ffn_hidden_size=40)
GPT |= dict(max_position_embeddings=16, norm_epsilon=1e-5, hidden_dropout=0.0)
GPT |= dict(attention_dropout=0.0, group_query_attention=False, num_query_groups=1, kv_channels=6)
LLAMA = GPT | dict(swiglu=True, normalization="RMSNorm", add_bias_linear=False, kv_channels=8)
LLAMA |= dict(position_embedding_type="rope", rotary_base=500000, num_query_groups=2)
LLAMA |= dict(group_query_attention=True, untie_embeddings_and_output_weights=True)
MIXTRAL = LLAMA | dict(num_experts=4, moe_router_topk=2, moe_router_load_balancing_type="aux_loss")
MIXTRAL |= dict(moe_ffn_hidden_size=20)
ARGUMENTS = {
    "gpt": GPT,
    "llama": LLAMA | dict(use_rope_scaling=True, qk_layernorm=True),
    "mixtral": MIXTRAL,
    "qwen": LLAMA | dict(add_qkv_bias=True),
    "nemotron": LLAMA
    | dict(swiglu=False, squared_relu=True, normalization="LayerNorm")
    | dict(apply_layernorm_1p=True, rotary_percent=0.5),
    "exact": GPT | dict(bias_gelu_fusion=False),
}
VOCABULARY, PADDED = 61, 64
TOKENS = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))


def shapes_of(args: dict) -> dict[str, tuple[list[int], int | None, int]]:
    """Name, with {n} for the layer -> (shape, the axis that tensor parallelism cuts, blocks along
    it that are cut one by one)."""
    h, hn = args["hidden_size"], args["kv_channels"]
    ffn = args.get("moe_ffn_hidden_size", args["ffn_hidden_size"])
    heads = args["num_attention_heads"]
    groups = args["num_query_groups"] if args["group_query_attention"] else heads
    gates = 2 if args.get("swiglu") else 1
    shapes = {"embedding.word_embeddings.weight": ([PADDED, h], 0, 1)}
    if "position_embedding_type" not in args:
        shapes["embedding.position_embeddings.weight"] = (
            [args["max_position_embeddings"], h],
            None,
            1,
        )
    attention, mlp = "decoder.layers.{n}self_attention.", "decoder.layers.{n}mlp."
    norms = ["decoder.final_layernorm.", attention + "linear_qkv.layer_norm_"]
    norms += [mlp + "linear_fc1.layer_norm_"]
    for norm in norms:
        for leaf in ("weight", "bias")[: 1 + (args.get("normalization") != "RMSNorm")]:
            shapes[norm + leaf] = [h], None, 1
    if args.get("qk_layernorm"):
        shapes |= {f"{attention}{x}_layernorm.weight": ([hn], None, 1) for x in "qk"}
    shapes[attention + "linear_qkv.weight"] = [(heads + 2 * groups) * hn, h], 0, 1
    shapes[attention + "linear_proj.weight"] = [h, heads * hn], 1, 1
    experts = [args["num_experts"]] if args.get("num_experts") else []
    if experts:
        shapes[mlp + "router.weight"] = [*experts, h], None, 1
        mlp += "experts.experts."
    first = len(experts)
    shapes[mlp + "linear_fc1.weight"] = [*experts, gates * ffn, h], first, gates
    shapes[mlp + "linear_fc2.weight"] = [*experts, h, ffn], first + 1, 1
    if args.get("add_bias_linear", True):
        shapes[attention + "linear_proj.bias"] = shapes[mlp + "linear_fc2.bias"] = [h], None, 1
        shapes[mlp + "linear_fc1.bias"] = [gates * ffn], 0, gates
    if args.get("add_bias_linear", True) or args.get("add_qkv_bias"):
        shapes[attention + "linear_qkv.bias"] = [(heads + 2 * groups) * hn], 0, 1
    if args.get("untie_embeddings_and_output_weights"):
        shapes["output_layer.weight"] = [PADDED, h], 0, 1
    return shapes


def value(name: str, shape: list[int]) -> Tensor:
    """Weights as different as their names."""
    generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(name)))
    drawn = 0.3 * torch.randn(shape, generator=generator)
    return drawn + 1 if name.endswith(("norm.weight", "norm_weight")) else drawn


def values_of(args: dict) -> dict[str, Tensor]:
    """Every layer's own tensors, under decoder.layers.N."""
    numbers = range(args["num_layers"])
    names = {
        name.format(n=f"{n}."): shape
        for name, (shape, *_) in shapes_of(args).items()
        for n in (numbers if "{n}" in name else [0])
    }
    return {name: value(name, shape) for name, shape in names.items()}


def frequencies(args: dict, size: int) -> Tensor:
    """Of rotary positions; scaled as Llama 3.1's, in Megatron-Core's fixed numbers."""
    f = args["rotary_base"] ** -(torch.arange(0, size, 2).double() / size)
    if not args.get("use_rope_scaling"):
        return f
    smooth = ((8192 * f / (2 * torch.pi) - 1) / (4 - 1)).clamp(0, 1)
    return (1 - smooth) * f / 8 + smooth * f


class Theirs:
    """Megatron-Core's forward in float64, written from its modules. The mixed projection is viewed
    as [s, b, ng, (np/ng + 2) hn], and split into queries, key and value of a group."""

    def __init__(self, args: dict):
        self.args = args
        self.weights = {name: tensor.double() for name, tensor in values_of(args).items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name + "weight"] + bool(self.args.get("apply_layernorm_1p"))
        if self.args.get("normalization") == "RMSNorm":
            return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        return F.layer_norm(x, x.shape[-1:], weight, self.weights[name + "bias"], 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[name + "weight"].T
        return y + self.weights[name + "bias"] if name + "bias" in self.weights else y

    def activation(self, x: Tensor) -> Tensor:
        if self.args.get("swiglu"):
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up
        if self.args.get("squared_relu"):
            return x.relu().square()
        return F.gelu(x, approximate="tanh" if self.args.get("bias_gelu_fusion", True) else "none")

    def rotate(self, x: Tensor) -> Tensor:
        """x: [b, s, heads, hn]"""
        size = int(x.shape[-1] * self.args.get("rotary_percent", 1))
        angles = torch.outer(torch.arange(x.shape[1]).double(), frequencies(self.args, size))
        cos, sin = (torch.cat([w, w], -1)[:, None] for w in (angles.cos(), angles.sin()))
        turned, rest = x[..., :size], x[..., size:]
        a, b = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, rest], -1)

    def attention(self, x: Tensor, name: str) -> Tensor:
        heads, hn = self.args["num_attention_heads"], self.args["kv_channels"]
        groups = self.args["num_query_groups"] if self.args["group_query_attention"] else heads
        y = self.norm(x, name + "linear_qkv.layer_norm_")
        mixed = self.linear(y, name + "linear_qkv.").unflatten(-1, (groups, -1))
        q, k, v = mixed.split([heads // groups * hn, hn, hn], -1)
        q = q.reshape(*q.shape[:2], heads, hn)
        if self.args.get("qk_layernorm"):
            q, k = self.norm(q, name + "q_layernorm."), self.norm(k, name + "k_layernorm.")
        if "rotary_base" in self.args:
            q, k = self.rotate(q), self.rotate(k)
        k, v = (z.repeat_interleave(heads // groups, 2) for z in (k, v))
        scores = torch.einsum("bqad,bkad->baqk", q, k) / hn**0.5
        scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
        y = torch.einsum("baqk,bkad->bqad", scores.softmax(-1), v).flatten(2)
        return self.linear(y, name + "linear_proj.")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        y = self.norm(x, name + "linear_fc1.layer_norm_")
        if not self.args.get("num_experts"):
            return self.linear(
                self.activation(self.linear(y, name + "linear_fc1.")), name + "linear_fc2."
            )
        chosen = self.linear(y, name + "router.").topk(self.args["moe_router_topk"], -1)
        fc1, fc2 = (self.weights[f"{name}experts.experts.linear_fc{n}.weight"] for n in (1, 2))
        each = torch.stack([self.activation(y @ a.T) @ b.T for a, b in zip(fc1, fc2)], -2)
        index = chosen.indices[..., None].expand(*chosen.indices.shape, x.shape[-1])
        return (chosen.values.softmax(-1)[..., None] * each.gather(-2, index)).sum(-2)

    def logits(self) -> Tensor:
        embedding = self.weights["embedding.word_embeddings.weight"]
        x = embedding[TOKENS] + self.weights.get("embedding.position_embeddings.weight", 0)
        for n in range(self.args["num_layers"]):
            x = x + self.attention(x, f"decoder.layers.{n}.self_attention.")
            x = x + self.mlp(x, f"decoder.layers.{n}.mlp.")
        x = self.norm(x, "decoder.final_layernorm.")
        return x @ self.weights.get("output_layer.weight", embedding)[:VOCABULARY].T


# --- the folder that Megatron-LM writes -----------------------------------------------------------


def shards(rank: int, tensor: Tensor, axis: int | None, blocks: int, offset: list[int]) -> list:
    """What one of two tensor-parallel ranks holds of a tensor that lies at an offset of a global
    one. A gate and its up are cut one by one."""
    lead = [1] * (len(offset) - tensor.dim())
    if axis is None:
        pieces = [(tensor, 0)] if rank == 0 else []
    else:
        size = tensor.shape[axis] // blocks
        starts = [block * size + rank * size // 2 for block in range(blocks)]
        pieces = [(tensor.narrow(axis, start, size // 2), start) for start in starts]
    found = []
    for piece, start in pieces:
        at = [*offset]
        at[len(lead) + (axis or 0)] += start
        piece = piece.reshape([*lead, *piece.shape]).contiguous()
        found.append(Shard.from_tensor_and_offsets(piece, at, rank))
    return found


SEPARATE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def write(rank: int, folder: str, kind: str, nemo: bool) -> None:
    """Save as Megatron-LM does, with layers stacked and norms fused; or as NeMo does, with a
    prefix, here also with layers of their own and norms beside the matrices."""
    args = ARGUMENTS[kind]
    values, state = values_of(args), {}
    for name, (shape, axis, blocks) in shapes_of(args).items():
        layers = args["num_layers"] if "{n}" in name else 1
        stack = [layers] * ("{n}" in name and not nemo)
        local = {}
        for n in range(layers):
            theirs = name.format(n="" if stack else f"{n}.")
            offset = [n] * len(stack) + [0] * len(shape)
            parts = shards(rank, values[name.format(n=f"{n}.")], axis, blocks, offset)
            local.setdefault(theirs, []).extend(parts)
        for theirs, parts in local.items():
            if nemo:
                for fused, separate in SEPARATE.items():
                    theirs = theirs.replace(fused, separate)
                theirs = f"model.{theirs}"
            state[theirs] = ShardedTensor._init_from_local_shards(parts, stack + shape)
    moments = shards(rank, torch.ones(4, 2), 0, 1, [0, 0])
    name = "optimizer.state.exp_avg.output_layer.weight"
    state[name] = ShardedTensor._init_from_local_shards(moments, [4, 2])
    dcp.save(state | {f"rng_state/shard_{rank}": {"seed": rank}}, checkpoint_id=folder)


class Backend(enum.Enum):
    """A class that the reader does not know, as AttnBackend in Megatron-LM's arguments."""

    auto = 1


def save_arguments(folder, args: dict) -> None:
    args = argparse.Namespace(**args, attention_backend=Backend.auto, params_dtype=torch.bfloat16)
    torch.save({"args": args, "iteration": 100}, folder / "iter_0000100" / "common.pt")


TO_NEMO = dict(add_bias_linear="bias", add_qkv_bias="qkv_bias", num_experts="num_moe_experts")
TO_NEMO |= dict(norm_epsilon="layernorm_epsilon", rotary_percent="rotary_percentage")
TO_NEMO |= dict(use_rope_scaling="scale_positional_embedding")


def as_yaml(args: dict) -> dict:
    """The same model in the words of NeMo's model_config.yaml."""
    args = dict(args)
    flags = ("swiglu", "group_query_attention", "untie_embeddings_and_output_weights")
    gated, grouped, untied = (args.pop(name, False) for name in flags)
    args["activation"] = "fast-swiglu" if gated else "gelu"
    args["num_query_groups"] = args["num_query_groups"] if grouped else None
    args["share_embeddings_and_output_weights"] = not untied
    args["normalization"] = args.get("normalization", "LayerNorm").lower()
    return {TO_NEMO.get(name, name): x for name, x in args.items()} | {"precision": "bf16"}


def save(folder, kind: str, nemo: bool):
    """The folder that a user names."""
    weights = folder / ("model_weights" if nemo else "iter_0000100")
    ranks.run(write, 2, str(weights), kind, nemo)
    (weights / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    if nemo:
        (folder / "model_config.yaml").write_text(yaml.safe_dump(as_yaml(ARGUMENTS[kind])))
    else:
        (folder / "latest_checkpointed_iteration.txt").write_text("100")
        save_arguments(folder, ARGUMENTS[kind])
    return folder


# --- read -----------------------------------------------------------------------------------------


def read(folder) -> tuple[moe.gpt.GPT, dict]:
    config, index = checkpoint.read_model(folder)
    model = moe.build(config)
    checkpoint.read(folder, {f"model.{n}": p.detach() for n, p in model.named_parameters()})
    return model, index


@pytest.mark.parametrize(
    "kind, nemo",
    [("gpt", False), ("llama", True), ("mixtral", False)]
    + [again("gpt", True), again("llama", False), again("mixtral", True)]
    + [again(kind, False) for kind in ("qwen", "nemotron", "exact")],
)
def test_logits(tmp_path, kind, nemo, capsys):
    """What Megatron-Core computes from these names and what this project does from the imported
    checkpoint are equal in float64."""
    folder = save(tmp_path / "theirs", kind, nemo)
    words = [str(folder), str(tmp_path / "ours"), "--vocab-size", str(VOCABULARY)]
    assert megatron.main(words) == 0
    assert "left out: 1 tensors of the optimizer" in capsys.readouterr().out
    model, _ = read(tmp_path / "ours")
    with torch.no_grad():
        ours = model.double().eval()(TOKENS)
    theirs = Theirs(ARGUMENTS[kind]).logits()
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"), "llama", False)


@pytest.fixture
def folder(saved, tmp_path):
    """A copy, to be spoiled."""
    return shutil.copytree(saved, tmp_path / "theirs")


def refusal(folder, capsys, *words: str) -> str:
    """The one line that is said, where nothing is written."""
    assert megatron.main([str(folder), str(folder.parent / "ours"), *words]) == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"multi_latent_attention": True}, "multi_latent_attention is True"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True"),
        ({"position_embedding_type": "none"}, "position_embedding_type: none is none of"),
        ({"quick_geglu": True, "swiglu": False}, "quick_geglu is True"),
        ({"moe_shared_expert_intermediate_size": 8, "num_experts": 2}, "intermediate_size is 8"),
        ({"window_size": [4, 0]}, "window_size is [4, 0]"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function is sigmoid"),
        ({"num_layers": None}, "num_layers is missing"),
        ({"num_layers": 3}, "linear_qkv.layer_norm_weight is [2, 24]"),
        ({"num_query_groups": 4}, "linear_qkv.weight"),
        ({"ffn_hidden_size": 44}, "linear_fc1.weight is [2, 80, 24], where blocks.0.mlp.gate"),
        ({"untie_embeddings_and_output_weights": False}, "output_layer.weight has no place here"),
        ({"normalization": "LayerNorm", "qk_layernorm": False}, "layer_norm_bias is missing"),
        ({"add_bias_linear": True}, "linear_qkv.bias is missing"),
        ({"hidden_size": Backend.auto}, "hidden_size is missing"),
    ],
)
def test_another_model(folder, capsys, fields, says):
    save_arguments(folder, ARGUMENTS["llama"] | fields)
    assert says in refusal(folder, capsys)


def test_unknown_tensor(folder, capsys):
    """Of Mamba, of another architecture or of a later version."""
    path = folder / "iter_0000100" / ".metadata"
    content = pickle.loads(path.read_bytes())
    tensors = content.state_dict_metadata
    tensors["decoder.layers.mixer.A_log"] = dataclasses.replace(tensors["output_layer.weight"])
    for index, info in list(content.storage_data.items()):
        if index.fqn == "output_layer.weight":
            name = dataclasses.replace(index, fqn="decoder.layers.mixer.A_log")
            content.storage_data[name] = info
    path.write_bytes(pickle.dumps(content))
    assert "decoder.layers.mixer.A_log has no place here" in refusal(folder, capsys)


def test_another_format(folder, capsys):
    form = folder / "iter_0000100" / "metadata.json"
    form.write_text('{"sharded_backend": "zarr"}')
    assert "only sharded_backend torch_dist is read" in refusal(folder, capsys)
    latest = folder / "latest_checkpointed_iteration.txt"
    step = latest.read_text()
    latest.write_bytes(b"\xff")
    assert "iteration.txt cannot be read" in refusal(folder, capsys)
    latest.write_text(step)
    form.unlink()
    assert "metadata.json is not there" in refusal(folder, capsys)
    assert megatron.main([str(form), str(folder / "ours")]) == 2
    assert "no such folder (a .nemo file is a tar" in capsys.readouterr().err


def test_missing_part(folder, capsys):
    """A tensor is refused that its parts do not fill."""
    path, name = folder / "iter_0000100" / ".metadata", "decoder.layers.mlp.linear_fc2.weight"
    content = pickle.loads(path.read_bytes())
    content.state_dict_metadata[name].chunks.pop()
    path.write_bytes(pickle.dumps(content))
    assert "a part of blocks.1.mlp.down.weight is missing" in refusal(folder, capsys)


def test_their_defaults():
    """A key that is absent has Megatron-LM's default; GELU is by erf without their fused kernel."""
    args = {name: x for name, x in GPT.items() if not name.endswith("dropout")}
    assert megatron.model_config(args, VOCABULARY).dropout == 0.1
    assert megatron.model_config(ARGUMENTS["exact"], VOCABULARY).activation == "exact-gelu"
    with pytest.raises(HuggingFaceError):
        megatron.model_config(GPT | {"activation": ["swiglu"]}, VOCABULARY)


@pytest.mark.parametrize("size", ["65", "-1", "0"])
def test_vocabulary(folder, capsys, size):
    says = "word_embeddings.weight is [64, 24]" if size == "65" else "vocab_size"
    assert says in refusal(folder, capsys, "--vocab-size", size)


class Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_executed(folder, capsys):
    """Neither by .metadata nor by common.pt; the rest of them is read."""
    step, made = folder / "iter_0000100", folder / "made"
    content = pickle.loads((step / ".metadata").read_bytes())
    content.planner_data = Runs(made)
    (step / ".metadata").write_bytes(pickle.dumps(content))
    args = argparse.Namespace(**ARGUMENTS["llama"], exit_signal=Runs(made))
    torch.save({"args": args, "more": Runs(made)}, step / "common.pt")
    assert megatron.main([str(folder), str(folder.parent / "ours")]) == 0
    assert not made.exists()
    pickle.loads((step / ".metadata").read_bytes())
    assert made.exists()


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "__0_0.distcp", "metadata.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_damaged_files(folder, capsys, name, damage):
    path = folder / "iter_0000100" / name
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"\x00[}" * 400)
    said = refusal(folder, capsys)
    assert name in said and "HuggingFaceError" not in said and not said.endswith(": ")


def test_weights_of_eight_bits(tmp_path):
    """Refused: their scales are elsewhere."""
    torch.save(torch.zeros(2, 2, dtype=torch.float8_e4m3fn), tmp_path / "part")
    chunk = dcp.metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 2]))
    info = dcp.filesystem._StorageInfo("part", 0, (tmp_path / "part").stat().st_size)
    with pytest.raises(HuggingFaceError, match="float8_e4m3fn"):
        megatron.read_tensor(tmp_path, torch.Size([2, 2]), [(chunk, info)], None)


def test_one_layer_is_read(saved, monkeypatch):
    """Without the other layers of its stack."""
    loaded = []
    load = torch.load

    def load_and_count(*args, **options):
        loaded.append(load(*args, **options))
        return loaded[-1]

    folder = saved / "iter_0000100"
    stored = megatron.stored_tensors(folder)["decoder.layers.mlp.linear_fc1.weight"]
    monkeypatch.setattr(torch, "load", load_and_count)
    layer = megatron.read_tensor(folder, *stored, 1)
    assert layer.equal(values_of(ARGUMENTS["llama"])["decoder.layers.1.mlp.linear_fc1.weight"])
    assert sum(item.numel() for item in loaded) == layer.numel()
    # Two ranks, and a gate and its up on each.
    assert len(loaded) == 4


@pytest.mark.parametrize("swapped", ["query", "up", *map(again, ("key", "value", "gate"))])
def test_a_swap_is_seen(saved, tmp_path, monkeypatch, swapped):
    """Logits differ where one part is taken in another order."""
    right = megatron.part

    def wrong(ours, theirs, config):
        found = right(ours, theirs, config)
        return found.flip(0) if ours.split(".")[-2] == swapped else found

    monkeypatch.setattr(megatron, "part", wrong)
    megatron.import_folder(saved, tmp_path / "ours", VOCABULARY)
    model, _ = read(tmp_path / "ours")
    with torch.no_grad():
        ours = model.double().eval()(TOKENS)
    theirs = Theirs(ARGUMENTS["llama"]).logits()
    assert (ours - theirs).abs().max() > 1e-3 * theirs.abs().max()
