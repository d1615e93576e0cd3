"""Multi-head latent attention: the paper's formula, one device's numbers under every technique, and
in generation, whose cache has the latents alone, those of the forward without a cache."""

import pytest
import torch
import torch.distributed as dist
from parity import LLAMA, again, check, differs, needs_compiler, train, without_cpp
from test_engine import LARGE, SHAPES, SMALL, answers_alone, as_alone, make_requests, serve_all
from test_engine import make as make_engine_model
from test_generate import loud, naive, ragged, save
from test_gpt import LLAMA_SHAPES, build

import families
import generate
import gpt
import moe
import sharding
import tensor_parallel
from base.groups import Groups
from base.model_config import (
    FieldError,
    GPTConfig,
    MoEConfig,
    attention_matrices,
    least_parameters,
)
from base.rotary import rotary_frequencies, rotary_table
from course import ranks
from families import LatentAttention
from finetune.adapter_layers import AdapterConfig, targets_of
from inference.engine import Engine
from inference.export import ExportError
from inference.export import check as check_export
from inference.kv_cache import Cache, CachedLatents, caching
from inference.loading import load_model

LATENT = dict(kv_rank=12, query_rank=10, head_dim=12, rope_head_dim=4, value_head_dim=6)
# Queries read x; a value is as wide as a key.
PLAIN_QUERY = LATENT | dict(query_rank=0, value_head_dim=0)
BASE = LLAMA | LATENT | dict(num_kv_heads=None)
SHAPE = LLAMA_SHAPES[1] | LATENT | dict(num_kv_heads=0, seq_length=13)
SEQUENCE = dict(tp=2, sequence_parallel=True)

# --- the formula ----------------------------------------------------------------------------------


def by_the_paper(attention: LatentAttention, x: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    """Head by head, one sequence. x: [s, h] -> [s, h]"""
    weights = {name: p.detach() for name, p in attention.named_parameters()}
    s, d, rope = len(x), config.head_dim, config.rope_head_dim

    def matrix(name, x):
        return x @ weights[f"{name}.weight"].t()

    def norm(name, x):
        rms = (x**2).mean(-1, keepdim=True) + config.norm_eps
        return x / rms.sqrt() * weights[f"{name}.weight"]

    def turned(x):
        """Pair i of the token at position p, by p base^(-2i / rope)."""
        angles = torch.arange(s).unsqueeze(1) * config.rotary_base ** (
            -torch.arange(0, rope, 2, dtype=x.dtype) / rope
        )
        low, high = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    c_q = norm("query_norm", matrix("query_down", x)) if config.query_rank else x
    c = norm("kv_norm", matrix("kv_down", x))
    r = turned(matrix("rope_key", x))
    heads = []
    of_heads = (matrix("query", c_q), matrix("key", c), matrix("value", c))
    for q, k, v in zip(*(part.chunk(config.num_heads, -1) for part in of_heads)):
        scores = (turned(q[:, :rope]) @ r.t() + q[:, rope:] @ k.t()) / d**0.5
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return matrix("output", torch.cat(heads, -1))


def apart_from_the_paper(attention: str, fields: dict) -> float:
    model = loud(build(torch.float64, **SHAPE | fields, attention=attention))
    config, layer = model.config, model.blocks["0"].attention
    with torch.no_grad():
        layer.kv_norm.weight.mul_(1.5)
    x = torch.randn(2, 9, config.hidden_size, dtype=torch.float64)
    table = rotary_table(rotary_frequencies(config, x.device), 9, x)
    expected = torch.stack([by_the_paper(layer, one, config) for one in x])
    got = layer(x, gpt.Context(rotary=table))
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("attention", ["explicit", "fused"])
@pytest.mark.parametrize("fields", [{}, PLAIN_QUERY])
def test_the_formula(attention, fields):
    assert apart_from_the_paper(attention, fields) < 1e-12


def test_the_formula_sees_a_rotated_latent(monkeypatch):
    original = LatentAttention.latents

    def latents(self, x, context):
        q, c, r = original(self, x, context)
        cos, sin = context.rotary
        return q, families.gpt.Rotary()(c.unsqueeze(1), r, (cos, sin))[0].squeeze(1), r

    monkeypatch.setattr(LatentAttention, "latents", latents)
    assert apart_from_the_paper("fused", {}) > 1e-3


def test_counts():
    for fields in (LATENT, PLAIN_QUERY):
        config = MoEConfig(**SHAPE | fields)
        model = moe.empty_model(config)
        of_matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        assert of_matrices == least_parameters(config)
        layer = model.blocks["0"].attention
        of_layer = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
        assert of_layer == attention_matrices(config)


def test_a_real_model_has_the_values_of_seed_0():
    config = GPTConfig(**SHAPE)
    with torch.device("meta"):
        empty = families.build(config)
    sharding.init(empty, 0, "cpu", torch.float32)
    for (name, p), q in zip(families.build(config).named_parameters(), empty.parameters()):
        assert torch.equal(p, q), name


# --- the gate -------------------------------------------------------------------------------------

OF_TWO = [SEQUENCE, dict(cp=2)]
MORE_OF_TWO = [
    dict(pp=2, schedule="zb-h1", layer_split=[0, 2]),
    dict(cp=2, dropout=0.0),
    dict(cp=2, cp_kind="all-to-all"),
    dict(tp=2, recompute="full"),
    SEQUENCE | dict(recompute="selective"),
    SEQUENCE | dict(head_chunk=5, dropout=0.0),
    dict(cp=2, dropout=0.0, recompute="full", document_mask=True),
    dict(pp=2, virtual_stages=2, layer_split=[0, 1, 0, 1]),
    dict(zero_stage=1),
    dict(zero_stage=2, micro_batch_size=1),
    dict(zero_stage=3, recompute="full"),
]
FOUR = [
    SEQUENCE | dict(pp=2, schedule="zb-h1", num_layers=3, layer_split=[1, 2]),
    SEQUENCE | dict(cp=2),
    dict(tp=2, cp=2, cp_kind="all-to-all", dropout=0.0),
    SEQUENCE | dict(zero_stage=3),
    dict(tp=2, pp=2, virtual_stages=2, num_layers=4),
]
EXPERTS = dict(num_experts=4, router="topk", router_topk=2, micro_batch_size=2)
YARN = dict(rotary_scaling="yarn", rotary_factor=4.0, rotary_original_length=8)
LORA = dict(peft="lora", lora_rank=3, lora_dropout=0.1)


@pytest.mark.parametrize(
    "world, layouts, fields",
    [
        (2, OF_TWO, {}),
        again(2, [SEQUENCE, dict(tp=2)], PLAIN_QUERY),
        again(2, MORE_OF_TWO, {}),
        again(4, FOUR, {}),
        again(4, [dict(tp=4), dict(tp=4, sequence_parallel=True)], {}),
        again(2, [SEQUENCE, dict(ep=2), dict(cp=2)], EXPERTS),
        again(2, [SEQUENCE, dict(cp=2)], dict(sliding_window=5)),
        again(2, [SEQUENCE, dict(pp=2)], dict(mtp_layers=1)),
        again(2, [SEQUENCE, dict(cp=2)], YARN),
        again(2, [SEQUENCE, dict(tp=2), dict(pp=2, schedule="zb-h1")], LORA),
        again(2, [SEQUENCE, dict(tp=2)], dict(peft="adapter", adapter_size=6)),
        again(2, [SEQUENCE, dict(tp=2)], dict(peft="ia3")),
        again(2, [dict(tp=2)], dict(norm="layernorm1p")),
    ],
)
def test_equals_one_device(world, layouts, fields):
    check(world, layouts, BASE | fields)


@pytest.mark.parametrize("recipe", [again("current"), again("delayed"), again("block")])
def test_in_fp8(recipe):
    """Queries and outputs have bytes; the latents, and what they become, have not."""
    fields = dict(num_layers=3, fp8=recipe, fp8_skip=0, micro_batch_size=2, fp8_block=2)
    if recipe != "block":
        del fields["fp8_block"]
    layouts = [SEQUENCE, dict(tp=2), dict(cp=2), dict(pp=2, schedule="zb-h1", layer_split=[1, 2])]
    check(2, layouts, BASE | fields)


@needs_compiler
@pytest.mark.repetition
@pytest.mark.parametrize("flags", [{}, dict(world=2, **SEQUENCE)])
def test_compiled(flags):
    compiled = train(mutate=without_cpp, compile=True, base=BASE, **flags)
    differs_from_plain = [a - b for a, b in zip(compiled.losses, train(base=BASE).losses)]
    assert max(map(abs, differs_from_plain)) < 1e-12


def no_f_for_rotated_keys():
    tensor_parallel.shard_attention = without_f("share_rope_key")


def no_f_after_the_latents():
    tensor_parallel.shard_attention = without_f("project_kv")


def without_f(name: str, original=tensor_parallel.shard_attention):
    def shard_attention(attention, group):
        original(attention, group)
        one_device = {"share_rope_key": torch.nn.Identity, "project_kv": gpt.ProjectTogether}
        setattr(attention, name, one_device[name]())

    return shard_attention


@pytest.mark.parametrize(
    "mutate",
    [again(no_f_for_rotated_keys), again(no_f_after_the_latents)],
    ids=lambda f: f.__name__,
)
def test_the_gate_sees(mutate):
    differs(train(2, tp=2, base=BASE, mutate=mutate, steps=1), train(base=BASE, steps=1))


def collectives(rank: int, fields: dict) -> list:
    config = GPTConfig(**SHAPE | fields)
    model = families.build(config)
    tensor_parallel.apply(model, dist.group.WORLD)
    x = torch.randn(2, 8, config.hidden_size, requires_grad=True)
    table = rotary_table(rotary_frequencies(config, x.device), 8, x)
    with ranks.Collectives() as counted:
        model.blocks["0"].attention(x, gpt.Context(rotary=table)).sum().backward()
    return counted.calls


def test_backward_sums_latents_instead_of_x():
    """g of b s h in forward; in backward f of b s times the sizes of the latents."""
    for fields, query in ((LATENT, LATENT["query_rank"]), (PLAIN_QUERY, SHAPE["hidden_size"])):
        calls = ranks.run(collectives, 2, fields)[0]
        sizes = [nbytes // (2 * 8 * 4) for name, nbytes in calls if name == "all-reduce"]
        latents = [LATENT["kv_rank"], LATENT["rope_head_dim"], query]
        assert len(sizes) == len(calls) and sizes[0] == SHAPE["hidden_size"]
        assert sorted(sizes[1:]) == sorted(latents)


# --- generation -----------------------------------------------------------------------------------


def logits_apart(fields: dict, prompt: int = 4) -> float:
    """Of a prefill and steps with the cache, from the forward of the whole sequence."""
    model = loud(build(torch.float64, **SHAPE | fields)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("kv_norm.weight"):
                p.mul_(1.5)
    config, runner = model.config, generate.ModelRunner(model)
    tokens = torch.randint(config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).detach()
    cache = runner.slot.cache = Cache(12)
    with caching([model], runner.slot), torch.inference_mode():
        cache.begin_prefill([prompt - 1] * 2)
        found = [runner.compute(0, cache, tokens[:, :prompt], torch.tensor([prompt - 1] * 2))]
        for at in range(prompt, 12):
            cache.begin_decode([at] * 2, tokens.device)
            found.append(runner.compute(0, cache, tokens[:, at : at + 1], None))
    width = config.kv_rank + config.rope_head_dim
    assert {layer: x.shape for layer, x in cache.keys.items()} == {
        layer: (2, 1, 12, width) for layer in model.blocks
    }
    assert not cache.values
    apart = torch.stack(found, 1) - expected[:, prompt - 1 :]
    return (apart.abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("fields", [{}, PLAIN_QUERY])
def test_logits_with_the_cache(fields):
    """The cache has kv_rank + rope_head_dim numbers of a token in a layer."""
    assert logits_apart(fields) < 1e-10


def scaled_by_the_plain_part(monkeypatch):
    """Scores over √(head_dim - rope_head_dim)."""
    original = CachedLatents.forward

    def forward(self, attention, *rest):
        attention.head_dim, right = attention.key_size, attention.head_dim
        try:
            return original(self, attention, *rest)
        finally:
            attention.head_dim = right

    monkeypatch.setattr(CachedLatents, "forward", forward)


def cached_before_the_norm(monkeypatch):
    original = CachedLatents.forward

    def forward(self, attention, q, c, *rest):
        if self.slot.cache.positions is None:
            return original(self, attention, q, c, *rest)
        return original(self, attention, q, c / attention.kv_norm.weight, *rest)

    monkeypatch.setattr(CachedLatents, "forward", forward)


@pytest.mark.parametrize("breakage", [scaled_by_the_plain_part, cached_before_the_norm])
def test_the_logits_show(breakage, monkeypatch):
    breakage(monkeypatch)
    assert logits_apart({}) > 1e-4


@pytest.mark.parametrize("fields", [{}, again(PLAIN_QUERY), again(dict(sliding_window=4))])
def test_tokens(fields, monkeypatch):
    """Those of the plain model, beyond the context; of the server as of each prompt alone."""
    model = loud(build(torch.float64, **SHAPE | fields)).eval()
    prompts = ragged(model.config.vocab_size)
    expected = naive(model, prompts, 22, temperature=0)
    assert generate.generate(model, prompts, 22, temperature=0) == expected
    monkeypatch.setitem(SHAPES, "latent", SHAPE)
    model = make_engine_model("latent", **fields)
    requests = make_requests(20)
    for sizes in (SMALL, LARGE):
        engine = Engine(model, **sizes)
        served = serve_all(engine, requests)
        # Keys and values are one.
        assert engine.runner.cache.layers["0"].shape[:2] == (1, 1)
        engine.close()
        assert as_alone(served, answers_alone(model, requests), requests)


def generated(rank: int, path, layouts: list[dict], prompts) -> list:
    found = []
    for layout in layouts:
        groups = Groups.make("cpu", 2, **layout)
        model, _ = load_model(path, groups=groups)
        found.append(generate.generate(model, prompts, 9, temperature=0, cp_group=groups.cp))
    return found


def test_tokens_of_layouts(tmp_path):
    """Each tensor-parallel rank has the latents of all tokens, and its own heads' matrices."""
    model = loud(build(torch.float64, **SHAPE)).eval()
    prompts = ragged(model.config.vocab_size)
    save(tmp_path, model)
    expected = generate.generate(model, prompts, 9, temperature=0)
    layouts = [dict(tp=2), dict(pp=2), dict(cp=2)]
    for found in ranks.run(generated, 2, tmp_path, layouts, prompts):
        assert found == [expected] * 3


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(kv_rank=0), "query_rank 10: needs kv_rank"),
        (dict(kv_rank=-1), "kv_rank -1: must be at least 0"),
        (dict(rope_head_dim=0), "rope_head_dim 0: with kv_rank 12 it is a part of head_dim 12"),
        (dict(rope_head_dim=12), "rope_head_dim 12: with"),
        (dict(rope_head_dim=3), "even, above 0"),
        (dict(value_head_dim=14), "value_head_dim 14: must be at most head_dim 12"),
        (dict(num_kv_heads=2), "num_kv_heads 2: not with the latents of kv_rank 12; 4 would fit"),
        (dict(positions="learned"), "positions learned: not with the latents"),
        (dict(qk_norm=True), "qk_norm True: not with"),
        (dict(attention_bias="qkv"), "attention_bias qkv: not with"),
        (dict(rotary_share=0.5), "rotary_share 0.5: not with"),
    ],
)
def test_refused(fields, words):
    with pytest.raises(FieldError, match=words):
        GPTConfig(2, 32, 4, llama=True, **LATENT | fields)


def test_what_is_left_out():
    config = MoEConfig(2, 32, 4, llama=True, **LATENT)
    assert "key" not in targets_of(AdapterConfig("lora"), config)
    with pytest.raises(FieldError, match="value is no target of peft lora in this model"):
        targets_of(AdapterConfig("lora", peft_targets=("value",)), config)
    with pytest.raises(ExportError, match="kv_rank 12"):
        check_export(config)
