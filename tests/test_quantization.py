"""Weights in 8 and 4 bits: errors of at most half a step, torchao's numbers, kernels that multiply
as the naive way does, and a quantised model that is the plain one with other weights."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from parity import again
from test_generate import SAMPLED, build, loud, ragged, save
from test_gpt import GPT_SHAPES, LLAMA_SHAPES

import generate
from base.groups import Groups
from base.model_config import FieldError, MoEConfig
from course import ranks
from inference import cli, quantization, weight_layouts
from inference.quantization import GROUPS, Int4Matrix, Int8Matrix, by_kernel, dequantized
from pipeline_parallel import stages_of

KINDS = {"int8": Int8Matrix.of, "int4": Int4Matrix.of}
# tied, with norms and biases; untied, with fewer key heads; tied, gated, with a scaled embedding;
# biases and norms of queries and keys; a norm of the embedding
SHAPES = {
    "gpt": GPT_SHAPES[0],
    "llama": LLAMA_SHAPES[1],
    "gemma": LLAMA_SHAPES[1] | dict(tied=True, embedding_scale=True, activation="geglu"),
    "qwen": LLAMA_SHAPES[1] | dict(qk_norm=True, attention_bias="qkv", head_dim=16),
    "bloom": GPT_SHAPES[0] | dict(positions="alibi", embedding_norm=True),
}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- matrices -------------------------------------------------------------------------------------


def test_by_hand():
    matrix = Int8Matrix.of(torch.tensor([[-2.55, 1.0, 0.02], [0.0, 0.0, 0.0]]))
    # 2.55 / 127.5 = 0.02
    assert matrix.q.tolist() == [[-128, 50, 1], [0, 0, 0]]
    assert matrix.dequantize()[0].tolist() == pytest.approx([-2.56, 1.0, 0.02])
    matrix = Int4Matrix.of(torch.tensor([[-0.3, 0.15, 0.0, 0.45, 7.0]]), group=4)
    # the last number, alone in its group, is filled up with its copies
    assert matrix.q.tolist() == [[0 << 4 | 9, 6 << 4 | 15, 0, 0]]
    assert matrix.scale_and_zero[:, 0].flatten().tolist() == pytest.approx(
        [0.05, 0.1, 1e-6, 7 + 8e-6]
    )
    expected = torch.tensor([[-0.3, 0.15, 0.0, 0.45, 7.0]])
    torch.testing.assert_close(matrix.dequantize(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [64, 40, 7])
def test_errors_are_at_most_half_a_step(width):
    """Of every number: with a row of zeros, one of equal numbers, outliers, numbers on one side."""
    w = normal(12, width)
    w[0], w[1], w[2, 3], w[3] = 0, 0.7, 50, w[3].abs() + 5
    int8, int4 = Int8Matrix.of(w), Int4Matrix.of(w)
    step = (w.abs().amax(1, keepdim=True) / 127.5).clamp(min=1e-6)
    assert ((int8.dequantize() - w).abs() <= 0.501 * step).all()
    for begin in range(0, width, 32):
        group = slice(begin, begin + 32)
        span = w[:, group].amax(1) - w[:, group].amin(1)
        error = (int4.dequantize() - w)[:, group].abs().amax(1)
        assert (error <= 0.501 * span / 15 + 2e-6).all()


def as_torchao(matrix):
    """The same numbers as a tensor of torchao, a weight for nn.Linear. Int4: on a CPU, in the order
    of its kernel (`stored(by_kernel)`), with groups of at most 128."""
    if isinstance(matrix, Int8Matrix):
        from torchao.quantization import Int8Tensor

        scale = matrix.scale.unsqueeze(1)
        return Int8Tensor(matrix.q, scale, [1, matrix.shape[1]], scale.dtype)
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    return Int4OpaqueTensor(matrix.q, matrix.scale_and_zero, [1, matrix.group], matrix.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_of_torchao(dtype):
    """Bit for bit, and so is the product."""
    torchao = pytest.importorskip("torchao.quantization")
    w = normal(48, 64).to(dtype)
    linear = torch.nn.Linear(64, 48, bias=False, dtype=dtype)
    linear.weight = torch.nn.Parameter(w.clone())
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    ours = Int8Matrix.of(w)
    assert ours.q.equal(linear.weight.qdata)
    assert ours.scale.float().equal(linear.weight.scale[:, 0])
    x = normal(5, 64, seed=1).to(dtype)
    y = F.linear(x, as_torchao(ours))
    assert y.equal(linear(x)) and y.equal(dequantized(ours, x, None))


@pytest.mark.parametrize("group", GROUPS[:3])
def test_int4_of_torchao(group):
    """float32: the numbers, the scales and their order in memory, bit for bit."""
    module = pytest.importorskip("torchao.prototype.quantization.int4.int4_opaque_tensor")
    w = normal(48, 2 * group)
    theirs = module.Int4OpaqueTensor.from_hp(w, [1, group])
    ours = Int4Matrix.of(w, group).stored(by_kernel)
    assert ours.q.equal(theirs.qdata)
    assert ours.scale_and_zero.equal(theirs.scale_and_zero)
    x = normal(3, 2 * group, seed=1)
    y = F.linear(x, as_torchao(ours))
    assert y.equal(F.linear(x, theirs)) and y.equal(by_kernel(ours, x, None))
    # from 16 bits: computed in float32 here, so that errors are smaller
    w = w.bfloat16()
    theirs = distance(module.Int4OpaqueTensor.from_hp(w, [1, group]), w)
    ours = distance(as_torchao(Int4Matrix.of(w, group).stored(by_kernel)), w)
    assert 0.95 * theirs < ours < theirs


def distance(tensor, w):
    """How far the weights of a kernel are from w: their product with the identity."""
    rows = torch.eye(w.shape[1], dtype=w.dtype)
    return (F.linear(rows, tensor).t().float() - w.float()).norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, width", [(1, 64), (5, 80), (40, 64)])
def test_kernels_multiply_alike(kind, dtype, n, width):
    """Naive and fast, beside the product in float64: with few rows and many, in groups that the
    width fills or does not."""
    check_kernel(KINDS[kind](normal(48, width).to(dtype)), dtype, n, "cpu")


def check_kernel(matrix, dtype, n, device):
    out, width = matrix.shape
    x = normal(n, 1, width, seed=1).to(device, dtype)
    bias = normal(out, seed=2).to(device, dtype)
    # the numbers themselves, not rounded to 16 bits
    exact = copy.copy(matrix)
    name = "scale" if isinstance(matrix, Int8Matrix) else "scale_and_zero"
    setattr(exact, name, getattr(matrix, name).double())
    expected = F.linear(x.double(), exact.dequantize(), bias.double())
    limit = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert matrix.layouts() == [dequantized, by_kernel]
    for layout in matrix.layouts():
        y = layout(matrix.stored(layout), x, bias)
        assert y.shape == (n, 1, out) and y.dtype == dtype
        assert (y - expected).abs().max() <= limit * expected.abs().max()


def test_what_has_no_kernel():
    assert Int4Matrix.of(normal(33, 64)).layouts() == [dequantized]
    # the kernel would read beyond the matrix
    assert Int8Matrix.of(normal(32, 24)).layouts() == [dequantized]
    for make in KINDS.values():
        assert make(normal(32, 64, dtype=torch.float64)).layouts() == [dequantized]


# --- a model --------------------------------------------------------------------------------------


def noisy(**shape):
    """A model in float64 with weights, biases and norms that matter."""
    model = loud(build(torch.float64, **shape)).requires_grad_(False).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.add_(normal(*p.shape, seed=len(name), dtype=torch.float64) * 0.3)
    return model


def with_other_weights(model, make):
    """The plain model, with each matrix rounded by itself: what the quantised one computes."""
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        if name.startswith("blocks.") and p.dim() == 2:
            p.copy_(make(p).dequantize())
        elif name in ("embedding.tokens.weight", "head.output.weight"):
            p.copy_(Int8Matrix.of(p).dequantize())
    return model


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model(family, kind):
    """Logits and tokens are those of the plain model with rounded weights; tied matrices are one;
    bytes are those of the formula."""
    model = noisy(**SHAPES[family])
    expected = with_other_weights(model, KINDS[kind])
    tokens = torch.tensor([ragged(model.config.vocab_size)[3]])
    prompts = ragged(model.config.vocab_size)
    matrices = [p.shape for n, p in model.named_parameters() if n.startswith("b") and p.dim() == 2]
    quantization.apply(model, 16, kind)
    difference = (model(tokens) - expected(tokens)).abs().max()
    assert difference < 1e-12 * expected(tokens).abs().max()
    texts = generate.generate(expected, prompts, 12, **SAMPLED)
    assert generate.generate(model, prompts, 12, **SAMPLED) == texts
    tied = model.head.output.matrix is model.embedding.tokens.matrix
    assert tied == model.config.tied
    in_blocks = sum(quantized_bytes(kind, *shape) for shape in matrices)
    of_blocks = [
        m.matrix for m in model.blocks.modules() if isinstance(m, weight_layouts.DecodeLinear)
    ]
    assert sum(matrix.nbytes for matrix in of_blocks) == in_blocks
    vocabulary = quantized_bytes("int8", model.config.vocab_size, model.config.hidden_size)
    rest = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    total = in_blocks + (1 if tied else 2) * vocabulary + sum(rest.values())
    assert quantization.weight_bytes(model) == total


def quantized_bytes(kind, out, width):
    """With scales in float64."""
    groups = -(-width // 32)
    return out * (width + 8 if kind == "int8" else groups * (16 + 2 * 8))


def on_two_stages(rank, path, prompts):
    """The tokens of a pipeline for each kind."""
    results = []
    for kind in KINDS:
        groups = Groups.make("cpu", 2, pp=2)
        model, _ = cli.load_model(path, torch.device("cpu"), torch.float64, groups)
        for stage in stages_of(model):
            quantization.apply(stage, kind=kind)
        results.append(generate.generate(model, prompts, 8, **SAMPLED))
    return results


def test_pipeline(tmp_path):
    """A tied model over two stages: each has its copy in int8, and the tokens are one device's."""
    model = noisy(**SHAPES["gpt"] | dict(num_layers=2))
    save(tmp_path, model)
    prompts = ragged(model.config.vocab_size)
    expected = []
    for make in KINDS.values():
        rounded = with_other_weights(model, make)
        expected.append(generate.generate(rounded, prompts, 8, **SAMPLED))
    for of_rank in ranks.run(on_two_stages, 2, str(tmp_path), prompts):
        assert of_rank == expected


SHARDED = dict(num_layers=2, hidden_size=128, num_heads=4, ffn_hidden_size=192)
SHARDED |= dict(vocab_size=97, seq_length=32)
OF_TWO = {
    # with biases, tied; a gate, fewer key heads; norms of queries and keys
    "gpt": SHARDED,
    "llama": SHARDED | dict(llama=True, num_kv_heads=2),
    "qwen": SHARDED | dict(llama=True, qk_norm=True, attention_bias="qkv"),
    "falcon": SHARDED | dict(num_kv_heads=2, parallel_block=True, positions="rotary"),
    "one key": SHARDED | dict(llama=True, num_kv_heads=1),
    "nemotron": SHARDED | dict(llama=True, norm="layernorm1p", activation="squared-relu"),
}


def on_shards(rank, paths, prompts, pp, mutate):
    """The tokens, logits and bytes of each model under tp 2 in each kind."""
    results = []
    if mutate:
        mutate()
    for path in paths:
        for kind in KINDS:
            groups = Groups.make("cpu", 2 * pp, tp=2, pp=pp)
            model, _ = cli.load_model(path, torch.device("cpu"), torch.float64, groups)
            for stage in stages_of(model):
                quantization.apply(stage, 16, kind)
            tokens = generate.generate(model, prompts, 8, **SAMPLED)
            logits = model(torch.tensor([prompts[3]])) if pp == 1 else None
            results.append((tokens, logits, quantization.weight_bytes(*stages_of(model))))
    return results


def one_scale_for_each_rank():
    of_rank = quantization.row_scale
    quantization.row_scale = lambda w, ranks: of_rank(w, None)


def of_shards(tmp_path, names, world, mutate=None):
    """(what each rank has, and one device) of each model in each kind."""
    prompts, paths, whole = ragged(97), [], []
    for name in names:
        model = noisy(**OF_TWO[name])
        save(tmp_path / name, model)
        paths.append(str(tmp_path / name))
        for kind, make in KINDS.items():
            rounded = with_other_weights(model, make)
            tokens = generate.generate(rounded, prompts, 8, **SAMPLED)
            logits = rounded(torch.tensor([prompts[3]]))
            quantization.apply(one := copy.deepcopy(model), 16, kind)
            whole.append((tokens, logits, quantization.weight_bytes(one)))
    return ranks.run(on_shards, world, paths, prompts, world // 2, mutate), whole


@pytest.mark.parametrize(
    "names", [["gpt", "qwen"], again(["llama", "nemotron", "falcon", "one key"])]
)
def test_two_ranks(names, tmp_path):
    """Shards have the numbers of the whole quantised model, so tokens and logits are one device's;
    a rank has half of its bytes, and the norms and the biases of sums whole."""
    found, expected = of_shards(tmp_path, names, 2)
    for of_rank in found:
        for (tokens, logits, nbytes), (whole, exact, of_whole) in zip(of_rank, expected):
            assert tokens == whole
            assert (logits - exact).abs().max() < 1e-12 * exact.abs().max()
            assert 0.5 * of_whole < nbytes < 0.6 * of_whole


def test_a_scale_for_each_rank_is_seen(tmp_path):
    """Without the largest number of all ranks int8's rows have other scales."""
    found, expected = of_shards(tmp_path, ["gpt"], 2, mutate=one_scale_for_each_rank)
    (_, int8, _), (_, int4, _) = found[0]
    assert (int8 - expected[0][1]).abs().max() > 1e-4 * expected[0][1].abs().max()
    assert (int4 - expected[1][1]).abs().max() < 1e-12 * expected[1][1].abs().max()


@pytest.mark.repetition
def test_four_ranks(tmp_path):
    found, expected = of_shards(tmp_path, OF_TWO, 4)
    for of_rank in found:
        assert [tokens for tokens, *_ in of_rank] == [tokens for tokens, *_ in expected]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save(path, build(**LLAMA_SHAPES[1] | dict(vocab_size=257, seq_length=64)))
    return str(path)


def test_command(folder, capsys, monkeypatch):
    """--weights reaches the model, in bfloat16 if nothing else is asked for."""
    seen = []
    original = quantization.apply

    def apply(model, texts, **options):
        original(model, texts, **options)
        seen.append((model.head.output.matrix.scale.dtype, texts, options))

    monkeypatch.setattr(quantization, "apply", apply)
    flags = ["--checkpoint", folder, "--prompt", "ab", "--max-tokens", "4", "--device", "cpu"]
    assert generate.main([*flags, "--weights", "int8"]) == 0
    more = ["--weights", "int4", "--group-size", "64", "--precision", "fp32"]
    assert generate.main([*flags, *more]) == 0
    assert "4 tokens" in capsys.readouterr().err
    assert seen == [
        (torch.bfloat16, 1, dict(kind="int8", group=32)),
        (torch.float32, 1, dict(kind="int4", group=64)),
    ]


def test_what_is_refused():
    experts = MoEConfig(2, 32, 4, num_experts=4)
    with pytest.raises(FieldError, match=r"experts of this model \(num_experts 4\)"):
        quantization.check(experts, "int4")
    # int4: 32 numbers on one rank, of 96 and 192 columns of the two row-parallel layers
    config = MoEConfig(2, 96, 6, ffn_hidden_size=192)
    quantization.check(config, "int8", tp=6)
    quantization.check(config, "int4", tp=3)
    for t, group, fits in ((2, 32, "[1, 3]"), (3, 64, "[1]")):
        with pytest.raises(FieldError, match=f"tp {t}: .* {group} numbers .*{re.escape(fits)}"):
            quantization.check(config, "int4", tp=t, group=group)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n, width", [(1, 128), (5, 80), (40, 1024)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_on_a_gpu(kind, n, width):
    matrix = KINDS[kind](normal(48, width).bfloat16().cuda())
    x = torch.ones(n, width, dtype=torch.bfloat16, device="cuda")
    if math.isinf(weight_layouts.time_of(by_kernel, matrix.stored(by_kernel), x, None)):
        pytest.skip("PyTorch has no such kernel for this device")
    check_kernel(matrix, torch.bfloat16, n, "cuda")
