"""Each family of models: what transformers computes, there and back, and one device's numbers under
every technique."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import their_models
import torch
import torch.nn.functional as F
from parity import SMALL, again, check, needs_compiler, same, train, without_cpp
from safetensors.torch import load_file, save_file
from small_run import equal, tensors_of
from test_prompt_tuning import config as prompt_config
from their_models import shaken, their_model

import families
import generate
import moe
from base import rotary_scaling
from base.groups import Groups
from base.model_config import MoEConfig
from course import ranks
from course.parity import relative
from inference.architectures import HuggingFaceError
from inference.hf_config import to_hf_config, to_model_config
from inference.huggingface import export_folder, import_folder
from inference.kv_cache import Cache
from inference.loading import load_model
from run import checkpoint

transformers = pytest.importorskip("transformers")

LIKE_LLAMA = dict(num_key_value_heads=2, intermediate_size=48, max_position_embeddings=32)
# as transformers 4 and 5 take it
SIZES = LIKE_LLAMA | dict(
    rope_theta=500.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # with this base some pairs keep their angle, some are between, some turn slower
    "original_max_position_embeddings": 48,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    # a high of 8 turns: some pairs keep their angle, some are between, some turn slower
    "beta_fast": 8.0,
    "original_max_position_embeddings": 96,
}
HALF = SIZES["rope_parameters"] | {"partial_rotary_factor": 0.5}
FINE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)

# dense layers alone
LATENT = SIZES | dict(num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=8)
LATENT |= dict(qk_rope_head_dim=4, v_head_dim=6, first_k_dense_replace=2)
GROUPS = dict(first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=2, n_group=4)
GROUPS |= dict(topk_group=2, num_experts_per_tok=3, moe_intermediate_size=20)
LIMITED = "group_limited_greedy"
MSCALE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "mscale": 0.7}
MSCALE |= {"mscale_all_dim": 0.9, "original_max_position_embeddings": 48}
MIXED = dict(use_sliding_window=True, sliding_window=5)
LOCAL_FIRST = ["sliding_attention", "full_attention"]
# family -> (its name in transformers, fields of its configuration)
FAMILIES = {
    "gpt1": ("openai-gpt", dict(n_positions=32)),
    "gpt2": ("gpt2", dict(n_positions=32, n_inner=80)),
    "llama": ("llama", SIZES),
    "llama 3": ("llama", SIZES | dict(rope_parameters=LLAMA3)),
    "yarn": ("qwen2", SIZES | dict(rope_parameters=YARN)),
    "smollm": ("llama", SIZES | dict(tie_word_embeddings=True)),
    "llama with biases": ("llama", SIZES | dict(attention_bias=True, mlp_bias=True, head_dim=16)),
    "mistral": ("mistral", SIZES | dict(sliding_window=5)),
    "mistral head": ("mistral", SIZES | dict(sliding_window=None, head_dim=16)),
    "qwen2": ("qwen2", SIZES),
    "qwen2 tied": ("qwen2", SIZES | dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", SIZES | dict(head_dim=16)),
    "windows": ("qwen2", SIZES | MIXED | dict(layer_types=LOCAL_FIRST)),
    "last window": ("qwen3", SIZES | MIXED | dict(head_dim=16, max_window_layers=1)),
    # with a token for padding, transformers leaves out the gradient of its embedding
    "gemma": ("gemma", SIZES | dict(num_key_value_heads=1, head_dim=16, pad_token_id=None)),
    "bloom, 8 heads": ("bloom", dict(seq_length=32, num_attention_heads=8)),
    # no power of two
    "bloom, 6 heads": ("bloom", dict(seq_length=32, hidden_size=48, num_attention_heads=6)),
    "mixtral": ("mixtral", SIZES | dict(num_local_experts=4, sliding_window=None)),
    "qwen2 experts": ("qwen2_moe", SIZES | FINE | dict(shared_expert_intermediate_size=40)),
    "qwen3 experts": ("qwen3_moe", SIZES | FINE | dict(head_dim=16, norm_topk_prob=True)),
    "falcon": ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=80)),
    "nemotron": ("nemotron", SIZES | dict(head_dim=16, rope_parameters=HALF)),
    "deepseek v2": ("deepseek_v2", LATENT | dict(q_lora_rank=None)),
    "deepseek v3": ("deepseek_v3", LATENT | dict(rope_parameters=MSCALE)),
    "deepseek v2, experts": ("deepseek_v2", LATENT | GROUPS | dict(topk_method=LIMITED)),
    "deepseek v3, experts": ("deepseek_v3", LATENT | GROUPS),
}
SEED = torch.Generator().manual_seed(0)
# longer than the window
TOKENS = torch.randint(61, (2, 24), generator=SEED)
TARGETS = torch.randint(61, (2, 24), generator=SEED)
# the longest is beyond the window of 5, so the first ones reach it at other steps
PROMPTS = [TOKENS[0, :n].tolist() for n in (3, 1, 9, 6)]
NEW_TOKENS = 7


def theirs(family: str):
    """A model of transformers, with norms and biases away from 1 and 0."""
    model_type, fields = FAMILIES[family]
    return shaken(their_model(model_type, **fields))


def save_theirs(model, folder: Path) -> None:
    """In files of 20 KB, so that a model has several."""
    has_experts = hasattr(model.config, "num_experts_per_tok")
    options = dict(save_original_format=True) if has_experts else {}
    model.save_pretrained(folder, max_shard_size="20KB", **options)


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """A folder of transformers, and the checkpoint that we made of it, for each family."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        save_theirs(theirs(family), folder / family / "hf")
        import_folder(folder / family / "hf", folder / family / "ours")
    return folder


def ours(path: Path, **fields):
    """The model of a checkpoint, with other fields of its configuration."""
    model, _ = load_model(path)
    # in transformers a router's loss is no part of what a model computes
    other = moe.build(dataclasses.replace(model.config, dropout=0.0, aux_loss=0.0, **fields))
    other.load_state_dict(model.state_dict())
    return other


def gradients(model, path: Path) -> dict[str, torch.Tensor]:
    """Of a model of transformers whose backward has run, under our names: its gradients, saved and
    imported as if they were its weights."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    save_theirs(model, path / "hf")
    import_folder(path / "hf", path / "ours")
    found = tensors_of(path / "ours")
    # A router's bias has no gradient.
    found = {name: g for name, g in found.items() if not name.endswith("router.bias")}
    return {name.replace("model.", "gradient of ", 1): g for name, g in found.items()}


# --- the same numbers as transformers -------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, imported, tmp_path):
    """1e-5 in float32, of every logit and every gradient, with both attentions."""
    model = theirs(family)
    logits = model(TOKENS).logits
    F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum").backward()
    expected = {"logits": logits.detach()} | gradients(model, tmp_path)
    for attention in ("explicit", "fused"):
        other = ours(imported / family / "ours", attention=attention)
        other(TOKENS, TARGETS).sum().backward()
        got = {"logits": other(TOKENS).detach()}
        learned = [(name, p) for name, p in other.named_parameters() if p.requires_grad]
        got |= {f"gradient of {name}": p.grad for name, p in learned}
        assert got.keys() == expected.keys()
        worst = {name: apart.max().item() for name, apart in relative(got, expected)}
        assert max(worst.values()) < 1e-5, (attention, max(worst, key=worst.get), worst)


@torch.no_grad()
def greedy(family: str) -> list[list[int]]:
    """What transformers gives, each prompt alone."""
    model = theirs(family)
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        # without a mask it takes token 0 for padding
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def generate_each(rank: int, folder: Path, families: list[str], layouts: list[dict]) -> list:
    """Greedy tokens of each family under each layout."""
    found = []
    for layout in layouts:
        groups = Groups.make("cpu", 2, **layout)
        for family in families:
            model, _ = load_model(folder / family / "ours", groups=groups)
            options = dict(temperature=0, cp_group=groups.cp)
            found.append(generate.generate(model, PROMPTS, NEW_TOKENS, **options))
    return found


def test_generation(imported):
    """Token for token, of prompts in one batch, where transformers has one at a time; beyond the
    window; under tp 2, pp 2 and cp 2."""
    # what is of its own in each; a Gemma's one head of keys and values is not for two ranks
    for_two = ["gpt2", "yarn", "mistral", "windows", "qwen3", "bloom, 6 heads", "mixtral"]
    layouts = [dict(tp=2), dict(pp=2), dict(cp=2)]
    expected = {family: greedy(family) for family in FAMILIES}
    for family in FAMILIES:
        model, _ = load_model(imported / family / "ours")
        found = generate.generate(model, PROMPTS, NEW_TOKENS, temperature=0)
        assert found == expected[family], family
    of_ranks = ranks.run(generate_each, 2, imported, for_two, layouts)
    for found in of_ranks:
        assert found == 3 * [expected[family] for family in for_two]


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family, imported, tmp_path):
    """What we export loads as the same class, with the same weights, bit for bit; imported again it
    is the same checkpoint, and exported again the same folder, config.json too."""
    path = imported / family / "ours"
    export_folder(path, tmp_path / "a")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    expected = theirs(family)
    # a Mistral without a window is a Llama; of dense layers alone the two DeepSeeks are one
    if family not in ("mistral head", "deepseek v2"):
        assert type(loaded) is type(expected)
    state = loaded.state_dict()
    assert equal(state, expected.state_dict())
    config = import_folder(tmp_path / "a", tmp_path / "b")
    assert config == MoEConfig(**checkpoint.read_index(path)["model"])
    assert equal(tensors_of(tmp_path / "b"), tensors_of(path))
    export_folder(tmp_path / "b", tmp_path / "c")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()


def test_multi_token_prediction_is_left_out(imported, tmp_path, capsys):
    """A published DeepSeek-V3 has a module behind its last layer; import says that it skips it."""
    family = imported / "deepseek v3, experts"
    folder = shutil.copytree(family / "hf", tmp_path / "hf")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        last = {name: t for name, t in tensors.items() if name.startswith("model.layers.1.")}
        tensors |= {name.replace("layers.1", "layers.2"): t.clone() for name, t in last.items()}
        save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(8, 16)}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    import_folder(folder, tmp_path / "ours")
    assert "num_nextn_predict_layers 1" in capsys.readouterr().err
    assert equal(tensors_of(tmp_path / "ours"), tensors_of(family / "ours"))
    assert checkpoint.read_index(tmp_path / "ours")["config"]["model"] == "deepseek-v3"


MSCALES = [{}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_factor": 1.7}]


@pytest.mark.parametrize("scales", MSCALES)
def test_yarn(scales):
    """Frequencies and the factor of cos and sin as transformers has them, DeepSeek's mscale too."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(rope_parameters=YARN | scales)
    their_config = their_model("qwen2", **SIZES | rope).config
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](their_config, "cpu")
    config = to_model_config(
        their_config.to_dict() | dict(architectures=["Qwen2ForCausalLM"]) | rope
    )
    model = families.build(config)
    found = model.rotary_frequencies(config, torch.device("cpu"))
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)
    assert config.rotary_scale == pytest.approx(scale)
    assert model.rotary_table(8, TOKENS.double())[0][0, 0].item() == pytest.approx(scale)


def newest_of_the_batch(cache, x, columns):
    """The last columns of the padded prompts, not of each sequence."""
    return x[:, :, -columns:]


def not_modulo(cache, last, used, columns):
    """Column j holds position j."""
    return torch.arange(used).expand(len(last), -1)


@torch.no_grad()
def both(path: Path) -> tuple[list, list]:
    """Greedy tokens with the cache and without."""
    model, _ = load_model(path)
    # weights so large that the next token depends on what the newest one attends to
    for p in model.parameters():
        if p.dim() > 1:
            p *= 3
    cached, plain = (
        generate.generate(model, PROMPTS, NEW_TOKENS, temperature=0, cached=cached)
        for cached in (True, False)
    )
    return cached, plain


@pytest.mark.parametrize(
    "family, method, breakage",
    [
        ("mistral", "newest", newest_of_the_batch),
        ("mistral", "positions_in", not_modulo),
        ("windows", "positions_in", not_modulo),
        ("bloom, 6 heads", "update_masks", lambda cache, dtype, locals: None),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_cache_is_seen(family, method, breakage, imported, monkeypatch):
    """What a cache with fewer columns than tokens, and one with slopes, needs: without it a batch
    of unequal prompts gets other tokens."""
    cached, plain = both(imported / family / "ours")
    assert cached == plain
    monkeypatch.setattr(Cache, method, breakage)
    cached, plain = both(imported / family / "ours")
    assert cached != plain


def test_the_scale_of_an_embedding_in_bfloat16():
    """Bit for bit: √48 is 6.9375 there, and not 6.9282."""
    from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

    config = MoEConfig(2, 48, 4, vocab_size=61, llama=True, embedding_scale=True)
    embedding = moe.build(config).bfloat16().embedding
    their_embedding = GemmaTextScaledWordEmbedding(61, 48, None, 48**0.5).bfloat16()
    their_embedding.weight = embedding.tokens.weight
    assert torch.equal(embedding(TOKENS), their_embedding(TOKENS))


def test_yarn_is_seen(monkeypatch, imported):
    """Without the temperature, or with Llama 3's interpolation, logits are others."""
    expected = ours(imported / "yarn" / "ours")(TOKENS)
    other = ours(imported / "yarn" / "ours")
    other.rotary_frequencies = rotary_scaling.llama3
    assert (other(TOKENS) - expected).abs().max() > 1e-3
    monkeypatch.setattr(MoEConfig, "rotary_scale", 1.0)
    assert (ours(imported / "yarn" / "ours")(TOKENS) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["gemma", "bloom, 6 heads", "qwen3", "mistral", "nemotron"])
def test_bfloat16(family, imported):
    """No further from the logits of 32 bits than transformers is: the scale of a Gemma's embedding,
    its norms' 1 + w and the slopes of a BLOOM are rounded as there."""
    with torch.no_grad():
        exact = theirs(family)(TOKENS).logits
        expected = theirs(family).bfloat16()(TOKENS).logits.float()
        model, _ = load_model(imported / family / "ours", dtype=torch.bfloat16)
        got = model(TOKENS).float()
    ours_off, theirs_off = ((x - exact).abs().mean() / exact.abs().mean() for x in (got, expected))
    assert 0 < ours_off < 1.5 * theirs_off, (ours_off, theirs_off)


# --- under every technique ------------------------------------------------------------------------

# Presets, made small: with fewer heads of keys and values, with a window that hides something.
PRESETS = {
    "llama3.2-1b": dict(num_kv_heads=2),
    "mistral-7b": dict(num_kv_heads=2, sliding_window=5),
    "qwen2.5-7b": dict(num_kv_heads=2, sliding_window=5, window_pattern="10"),
    "qwen3-0.6b": dict(num_kv_heads=2, head_dim=16),
    "gemma-7b": dict(num_kv_heads=2, head_dim=16),
    "bloom-7b1": dict(num_heads=6, hidden_size=48),
    "falcon-180b": dict(num_kv_heads=2),
    "nemotron-3-8b": dict(num_heads=2),
}
LONGER = dict(model="llama2-7b", rotary_factor=4.0, rotary_scaling="yarn")
LONGER |= dict(num_kv_heads=2, rotary_original_length=256)
# dropout's masks are on explicit attention; the other attention, and documents in a row
PLAIN, PACKED = dict(), dict(dropout=0.0, document_mask=True)
LAYOUTS = [
    PLAIN | dict(tp=2, sequence_parallel=True, recompute="selective", head_chunk=5),
    PACKED | dict(pp=2, micro_batch_size=4),
]


def of_family(name: str) -> dict:
    return SMALL | dict(model=name, ffn_hidden_size=56) | PRESETS[name]


def test_layouts():
    """The gate, of every family: tensor and sequence parallelism, recomputation, a head in chunks;
    of every other one: stages, documents. And ZeRO stage 3, of Qwen3, with YaRN."""
    layouts = [of_family(name) | LAYOUTS[0] for name in PRESETS]
    layouts += [of_family(name) | LAYOUTS[1] for name in list(PRESETS)[::2]]
    sharded = of_family("qwen3-0.6b") | LONGER | dict(model="qwen3-0.6b", zero_stage=3)
    check(2, [*layouts, sharded | dict(micro_batch_size=2)])


@pytest.mark.repetition
def test_four_ranks():
    both = dict(tp=2, pp=2, sequence_parallel=True, zero_stage=1, micro_batch_size=2)
    check(4, [of_family(name) | PACKED | both for name in PRESETS])


FP8 = dict(fp8="delayed", fp8_scales="any", fp8_skip=0, micro_batch_size=2)


@pytest.mark.repetition
@pytest.mark.parametrize(
    "base",
    [of_family(name) for name in ("falcon-180b", "nemotron-3-8b", "qwen2.5-7b")] + [SMALL | LONGER],
    ids=["falcon-180b", "nemotron-3-8b", "windows", "yarn"],
)
def test_more_layouts(base):
    """Of blocks side by side, of positions on a part of each head, of windows in some layers, of
    YaRN."""
    more = [dict(cp=2), dict(cp=2, cp_kind="all-to-all", dropout=0.0), dict(recompute="full")]
    more += [dict(pp=2, num_layers=3, layer_split=[2, 1], schedule="zb-h1")]
    more += [dict(pp=2, num_layers=4, virtual_stages=2), dict(zero_stage=3, micro_batch_size=2)]
    more += [dict(peft="lora", lora_rank=2, tp=2), dict(peft="adapter", adapter_size=4, tp=2)]
    more += [FP8 | dict(tp=2, sequence_parallel=True, recompute="full")]
    check(2, [base | layout for layout in more])


@needs_compiler
@pytest.mark.repetition
@pytest.mark.parametrize("name", [*list(PRESETS)[1:2], *list(PRESETS)[3:]])
def test_compiled(name):
    base = of_family(name) | dict(num_layers=1)
    flags = dict(tp=2, sequence_parallel=True, compile=True, mutate=without_cpp)
    same(train(2, base=base, steps=1, **flags), train(base=base, steps=1))


ADAPTERS = [
    ("qwen3-0.6b", dict(peft="lora", lora_rank=2, peft_targets=["query", "output", "up"])),
    ("gemma-7b", dict(peft="adapter", adapter_size=4)),
    ("bloom-7b1", dict(peft="ia3")),
]


def test_layouts_of_adapters():
    """Where the rows of a matrix are not the hidden size, and where norms are not LayerNorm."""
    layouts = [dict(tp=2, sequence_parallel=True), dict(zero_stage=3, micro_batch_size=2)]
    cases = [of_family(name) | peft | layout for name, peft in ADAPTERS for layout in layouts]
    check(2, cases)


def test_layouts_of_prompts(tmp_path):
    """Virtual tokens before a scaled embedding, and before one with a norm."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(prompt_config(style="p-tuning", p_tuning=dict(encoder_hidden=6))))
    prompts = dict(command="prompt_tuning.py", prompt_config=str(path))
    prompts |= dict(dropout=0.0, micro_batch_size=2)
    layouts = [dict(tp=2, sequence_parallel=True), dict(zero_stage=3)]
    names = ("gemma-7b", "bloom-7b1", "mistral-7b")
    check(2, [of_family(name) | prompts | layout for name in names for layout in layouts])


# --- refusals -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def their_config(imported):
    """their_config(family, changes): a config.json of transformers; `...` removes a field."""

    def config_of(family: str, changes: dict) -> dict:
        changed = json.loads((imported / family / "hf" / "config.json").read_text()) | changes
        return {name: value for name, value in changed.items() if value is not ...}

    return config_of


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
TWO_KINDS = ["full_attention", "sliding_attention"]
BLOOM = "bloom, 6 heads"
# family, changes of its config.json, and words of the refusal, with ".." between them
REFUSED = [
    ("llama", {"layer_types": TWO_KINDS}, "layer_types is .. one attention for all layers"),
    ("qwen3", {"layer_types": [*TWO_KINDS, "full_attention"]}, "layer_types is .. for each layer"),
    ("qwen2", {"layer_types": ["full_attention", "chunked"]}, "layer_types is .. for each layer"),
    ("llama", {"rope_parameters": LINEAR}, 'rope_parameters is .. "linear" .. rope_type llama3'),
    ("llama", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_"),
    (
        "llama",
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 9.0}},
        "rotary_low_frequency 9.0: must be above 0 and below rotary_high_frequency 4.0",
    ),
    ("qwen2", {"rope_parameters": YARN | {"beta_slow": 9.0}}, "low_frequency 9.0: .. below .. 8.0"),
    ("qwen2", {"rope_parameters": YARN | {"truncate": False}}, "rope_type .. with truncate true"),
    ("qwen2", {"rope_parameters": YARN | {"attention_factor": -1.0}}, "attention_factor is -1.0"),
    ("llama", {"attention_bias": 1.5}, "attention_bias is 1.5"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    (BLOOM, {"apply_residual_connection_post_layernorm": True}, "_post_layernorm is true"),
    (BLOOM, {"n_head": 5}, "n_head 5: must divide hidden_size 48"),
    ("deepseek v3, experts", {"n_group": 0}, "n_group 0: must divide n_routed_experts 8"),
    (
        BLOOM,
        {"slow_but_exact": True, "pretraining_tp": 2},
        "slow_but_exact is true with pretraining_tp 2",
    ),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("falcon", {"new_decoder_architecture": False}, "new_decoder_architecture is false"),
    ("falcon", {"num_ln_in_parallel_attn": 1}, "num_ln_in_parallel_attn is 1"),
    (
        "nemotron",
        {"rope_parameters": HALF | {"partial_rotary_factor": 0.3}},
        "rotary_share 0.3: must be",
    ),
]


@pytest.mark.parametrize("family, changes, words", REFUSED)
def test_what_gpt_py_does_not_compute(family, changes, words, their_config):
    """Named, with its value and what would fit. A config.json without the change is taken."""
    to_model_config(their_config(family, {}))
    with pytest.raises(HuggingFaceError) as refused:
        to_model_config(their_config(family, changes))
    assert all(word in str(refused.value) for word in words.split(" .. "))


def test_what_older_files_say(their_config):
    """Names and absences of transformers 4."""
    old = their_config("bloom, 6 heads", {"n_embed": 48, "num_attention_heads": 6, "n_head": ...})
    assert to_model_config(old) == to_model_config(their_config("bloom, 6 heads", {}))
    scaled = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    old = {"rope_theta": 500.0, "rope_scaling": scaled, "rope_parameters": ...}
    assert to_model_config(their_config("llama 3", old)) == to_model_config(
        their_config("llama 3", {})
    )
    renamed = {"rope_percent": 0.5, "rope_theta": 500.0, "rope_parameters": ...}
    assert to_model_config(their_config("nemotron", renamed)) == to_model_config(
        their_config("nemotron", {})
    )
    # Gemma's first files; Mistral's first, and its later ones
    old = {"hidden_act": "gelu", "hidden_activation": ..., "layer_types": ...}
    assert to_model_config(their_config("gemma", old)) == to_model_config(their_config("gemma", {}))
    windows = {...: 4096, None: 0, 7: 7}
    for there, here in windows.items():
        mistral = their_config("mistral", {"sliding_window": there, "layer_types": ...})
        assert to_model_config(mistral).sliding_window == here
    # null is a key for each query; without the field a class has a number of its own
    for family in ("llama", "qwen2", "qwen3", "mixtral"):
        null = their_config(family, {"num_key_value_heads": None})
        assert to_model_config(null).num_kv_heads == 4
    mixtral = their_config("mixtral", {"num_attention_heads": 16, "num_key_value_heads": ...})
    assert to_model_config(mixtral).num_kv_heads == 8


LLAMA = dict(llama=True)
BLOOM_BUT = dict(positions="alibi", embedding_norm=True)
EXPERTS = LLAMA | dict(num_experts=4, router="topk", router_topk=2)
NO_CLASS = [
    (dict(positions="alibi"), "no class .*: GPT2LMHeadModel has no positions alibi"),
    (dict(num_kv_heads=2), "GPT2LMHeadModel has no num_kv_heads 2"),
    (LLAMA | dict(qk_norm=True, mlp_bias=True), "LlamaForCausalLM has no qk_norm True"),
    (
        LLAMA | dict(embedding_scale=True, sliding_window=8),
        "MistralForCausalLM has no embedding_scale",
    ),
    (LLAMA | dict(attention_bias="qkv", norm="layernorm"), "Qwen2ForCausalLM has no norm la"),
    (BLOOM_BUT | dict(head_dim=16, ffn_hidden_size=8), "has no ffn_hidden_size 8, head_dim 16$"),
    (dict(parallel_block=True), "GPT2LMHeadModel has no parallel_block True"),
    (LLAMA | dict(rotary_share=0.5), "LlamaForCausalLM has no rotary_share 0.5$"),
    (EXPERTS | dict(sliding_window=8), "MixtralForCausalLM has no sliding_window 8$"),
    (EXPERTS | dict(router="sinkhorn", aux_loss=0.0), "router sinkhorn, .* --router topk"),
    (EXPERTS | dict(router_topk=1), "router_topk 1, .* --router-topk 2"),
    (EXPERTS | dict(expert_every=2), "expert_every 2; .* --expert-every 1"),
    (EXPERTS | dict(llama=False), "num_experts 4: GPT2LMHeadModel has none"),
]


@pytest.mark.parametrize("fields, words", NO_CLASS, ids=str)
def test_a_model_that_no_class_describes(fields, words):
    with pytest.raises(HuggingFaceError, match=words):
        to_hf_config(MoEConfig(2, 32, 4, **fields))


# --- configurations drawn at random ---------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        dict(head_dim=12),
        # a window that begins after the last layer
        dict(use_sliding_window=True, sliding_window=4, max_window_layers=2),
    ],
    ids=str,
)
def test_qwen2_as_the_library_computes_it(fields, tmp_path):
    config = their_models.their_config("qwen2", **LIKE_LLAMA, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens).logits
        got = ours(tmp_path / "ours", attention="explicit")(tokens)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


CLASSES = "gpt2 llama mistral qwen2 qwen3 gemma bloom mixtral nemotron qwen2_moe qwen3_moe".split()
# field -> values that somebody's folder has
VARIED = {
    "num_key_value_heads": [1, 2, 4],
    "tie_word_embeddings": [True, False],
    "hidden_act": ["silu", "gelu", "relu"],
    "activation_function": ["gelu", "gelu_new", "relu"],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "norm_eps": [1e-5, 1e-3],
    "head_dim": [8, 12],
    "sliding_window": [None, 4],
    "use_sliding_window": [False, True],
    "rms_norm_eps": [1e-5, 1e-3],
    "layer_norm_epsilon": [1e-5, 1e-3],
    "scale_attn_weights": [True, False],
    "scale_attn_by_inverse_layer_idx": [True, False],
    "reorder_and_upcast_attn": [True, False],
    "apply_residual_connection_post_layernorm": [True, False],
    "slow_but_exact": [True, False],
    "num_experts_per_tok": [1, 2, 3],
    "attention_dropout": [0.0, 0.1],
    "n_inner": [None, 48],
}


@pytest.mark.parametrize("seed", [*range(8), *map(again, range(8, 120))])
def test_configurations_of_the_library(seed, tmp_path):
    """The library's defaults, then with a few fields changed: the same logits, or refused with one
    line that names a field."""
    g = random.Random(seed)
    name = CLASSES[seed % len(CLASSES)]
    # sizes alone; everything else is the library's default
    config = their_models.their_config(name, **{} if name in ("gpt2", "bloom") else LIKE_LLAMA)
    fields = sorted(field for field in VARIED if hasattr(config, field))
    changed = {} if seed < len(CLASSES) else g.sample(fields, g.randint(1, 3))
    for field in changed:
        setattr(config, field, g.choice(VARIED[field]))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "hf")
    try:
        import_folder(tmp_path / "hf", tmp_path / "ours")
    except HuggingFaceError as e:
        assert changed and "\n" not in str(e), str(e)
        ours_of = {"num_key_value_heads": "num_kv_heads", "num_experts_per_tok": "router_topk"}
        names = [*changed, *(ours_of.get(field, field) for field in changed)]
        beside = ("layer_types", "weight", "bias", "head_dim", "sliding_window")
        assert any(word in str(e) for word in (*names, *beside)), (changed, str(e))
        return
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(tokens).logits
        got = ours(tmp_path / "ours", attention="explicit")(tokens)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max(), changed
