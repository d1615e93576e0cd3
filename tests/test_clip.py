"""CLIP (models/clip.py): layouts against one device, the loss in shards, transformers' model."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from parity import SMALL, again, check, differs, same, train, trainer_of
from PIL import Image
from small_run import as_flags, run, write_lines
from test_checkpoint import trained
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import sequence_parallel
from base.model_config import FieldError
from course import ranks
from course.training_commands import config_of
from inference.loading import load_model
from models import clip, clip_runs, use_picture
from models.clip import CLIPConfig, contrastive_losses
from models.clip_runs import CLIP_PRESETS, CLIPRun, PairTask
from models.picture_data import caption_ids
from models.pictures import Context, read_picture, to_tensor
from models.shapes import drawing
from run import least_memory
from run.config import ConfigError
from run.data import DataError
from run.rules import validate
from run.tokenizer import ByteTokenizer
from run.world import World

# Three blocks of the text, whose size is half of the picture's, and two of the picture.
SHAPE = dict(num_layers=5, text_layers=3, text_hidden_size=16, text_heads=2, text_length=36)
SHAPE |= dict(picture_size=16, patch_size=4, class_tokens=2, embedding_size=12)
CLIP = {k: v for k, v in SMALL.items() if k not in ("seq_length", "vocab_size", "dropout")}
CLIP |= dict(command="clip.py", model="tiny", **SHAPE)

FULL, MICRO = dict(recompute="full"), dict(micro_batch_size=2)
SEQUENCE = dict(tp=2, sequence_parallel=True)
STAGES = dict(pp=2, layer_split=[2, 3])
ZB_H1 = dict(pp=2, layer_split=[4, 1], schedule="zb-h1")
REPLICAS = dict(zero_stage=3, data_parallel_replicate_degree=2)
FP8 = dict(fp8="delayed", fp8_scales="any", fp8_skip=0, micro_batch_size=2)

# --- the gate -------------------------------------------------------------------------------------

CASES = {
    "tensor, data": (2, [SEQUENCE | FULL, dict(zero_stage=3)]),
    "two passes": (2, [ZB_H1 | MICRO]),
}
MORE = {
    "one rank": (1, [MICRO, FULL, dict(recompute="selective", attention="explicit")]),
    "tensor": (2, [dict(tp=2), SEQUENCE, SEQUENCE | MICRO]),
    "data": (2, [dict(zero_stage=stage) | micro for stage in range(4) for micro in ({}, MICRO)]),
    "stages": (2, [STAGES, STAGES | dict(schedule="gpipe"), dict(pp=2, layer_split=[0, 5])]),
    "stages of text alone": (2, [dict(pp=2, layer_split=[5, 0]), dict(pp=2, layer_split=[1, 4])]),
    "virtual stages": (2, [dict(pp=2, virtual_stages=2, layer_split=[1, 2, 1, 1])]),
    "three": (3, [dict(global_batch_size=9), dict(global_batch_size=9, micro_batch_size=1)]),
    "four": (4, [SEQUENCE | FULL | STAGES, REPLICAS, SEQUENCE | dict(zero_stage=1) | MICRO]),
    "four, stages": (4, [ZB_H1 | dict(zero_stage=3), dict(pp=4, layer_split=[1, 2, 1, 1])]),
}


@pytest.mark.parametrize(
    "world, layouts",
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(again(*case, id=name) for name, case in MORE.items()),
    ],
)
def test_equals_one_device(world, layouts):
    check(world, layouts, CLIP)


@pytest.mark.repetition
@pytest.mark.parametrize("layouts", [[SEQUENCE], [ZB_H1], [dict(zero_stage=3)]])
def test_fp8(layouts):
    check(2, layouts, CLIP | FP8)


@pytest.mark.repetition
def test_float32():
    check(2, [SEQUENCE, STAGES], CLIP | dict(precision="fp32"), 1, 1e-5)


@pytest.mark.repetition
@pytest.mark.parametrize("world, layout", [(2, {}), (2, ZB_H1 | MICRO), (4, REPLICAS | MICRO)])
def test_under_the_rules_of_nccl(world, layout):
    same(train(world, base=CLIP, backend="nccl-rules", **layout), train(base=CLIP))


# --- the gate can fail ----------------------------------------------------------------------------


def gradient_of_own_losses_alone():
    def gather(y, group):
        parts = list(sequence_parallel.gather_sequence(y.detach(), group).chunk(group.size(), 1))
        parts[group.rank()] = y
        return torch.cat(parts, 1)

    clip.gather_sequence = gather


def captions_of_this_rank_alone():
    PairTask.total_loss = lambda self, y, batch: contrastive_losses(y, None).sum()


@pytest.mark.parametrize(
    "mutate", [gradient_of_own_losses_alone, again(captions_of_this_rank_alone)]
)
def test_gate_sees(mutate):
    differs(train(2, steps=1, base=CLIP, mutate=mutate), train(steps=1, base=CLIP))


# --- the loss in shards ---------------------------------------------------------------------------

E = 5


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations make."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **kwargs or {})
        self.seen |= {tuple(x.shape) for x in pytree.tree_leaves(made) if isinstance(x, Tensor)}
        return made


def shard_of_the_loss(rank: int, world: int, n: int, passes: int) -> tuple:
    """On a rank with n of the pairs: (losses, gradient of the features, of the scale, shapes)"""
    g = torch.Generator().manual_seed(0)
    features = torch.randn(world * n, 2, E, generator=g, dtype=torch.float64)
    features = features[rank * n :][:n].requires_grad_()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    y = features * torch.stack((torch.ones_like(scale), scale.exp())).unsqueeze(1)
    group = dist.group.WORLD if world > 1 else None
    with Shapes() as shapes:
        if passes == 1:
            losses = contrastive_losses(y, group)
            losses.sum().backward()
        else:
            losses, gradient = clip.losses_and_gradient(y, group)
            y.backward(gradient)
    return losses.detach(), features.grad, scale.grad, shapes.seen


@pytest.mark.parametrize(
    "world, passes", [(2, 1), (3, 2), again(3, 1), again(4, 1), again(2, 2), again(4, 2)]
)
def test_the_loss_in_shards_is_that_of_one_device(world, passes):
    n = 3
    (whole,) = ranks.run(shard_of_the_loss, 1, 1, world * n, 1)
    shards = ranks.run(shard_of_the_loss, world, world, n, passes)
    losses, features, scales, shapes = zip(*shards)
    for ours, right in ((torch.cat(losses), whole[0]), (torch.cat(features), whole[1])):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    assert abs(sum(scales) - whole[2]) < 1e-12 * abs(whole[2])
    square = (world * n, world * n)
    assert square in whole[3]
    assert all((n, world * n) in seen and square not in seen for seen in shapes)


def test_the_loss_by_hand():
    """Two pairs, whose features are at right angles: z is 2 for each picture's own caption."""
    y = torch.stack((torch.eye(2), 2 * torch.eye(2)), 1)
    of_each = math.log(math.exp(2) + 1) - 2
    torch.testing.assert_close(contrastive_losses(y, None), torch.full((2,), of_each))


# --- the model ------------------------------------------------------------------------------------


def small(**changes) -> CLIPConfig:
    return CLIPConfig(**SHAPE | dict(hidden_size=32, num_heads=4, vocab_size=61) | changes)


def inputs(config: CLIPConfig, b: int = 3) -> tuple[Tensor, Tensor, Context]:
    """(tokens, ends of the captions, pictures)"""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(60, (b, config.seq_length), generator=g)
    ends = torch.randint(1, config.text_length, (b, 1), generator=g)
    pictures = torch.rand(b, 3, config.picture_size, config.picture_size, generator=g) * 2 - 1
    return tokens.scatter(1, ends, 60), ends, Context(pictures=pictures)


def test_who_sees_what():
    """A caption's feature depends on its tokens up to the end; a picture's on all patches."""
    model, (tokens, ends, context) = small().build(), inputs(small())
    y = model(tokens, ends, context)
    at = torch.arange(tokens.shape[1])
    padded = model(tokens.masked_fill(at > ends, 0), ends, context)
    assert torch.equal(padded, y)
    first = model(tokens.index_fill(1, torch.tensor([0]), 7), ends, context)
    assert torch.equal(first[:, 1], y[:, 1]) and (first[:, 0] != y[:, 0]).any(1).all()
    for corner in (0, -1):
        pictures = context.pictures.clone()
        pictures[..., corner, corner] = 0
        changed = model(tokens, ends, Context(pictures=pictures))
        assert torch.equal(changed[:, 0], y[:, 0]) and (changed[:, 1] != y[:, 1]).any(1).all()


@pytest.mark.parametrize("name", [name for name, (_, count) in CLIP_PRESETS.items() if count])
def test_published_sizes(name):
    """They are also what memory is checked for, without logits for tokens."""
    shape, count = CLIP_PRESETS[name]
    config, ranks_of = CLIPConfig(**shape), dict(tp=1, pp=1)
    assert least_memory.parameters(config) == (count, 0)
    numbers = 2 * config.seq_length * config.hidden_size * config.num_layers
    assert least_memory.activation_bytes(config, "fp32", 2, ranks_of) == 4 * numbers


def test_a_caption_is_cut_before_its_end():
    tokenizer = ByteTokenizer()
    assert caption_ids(tokenizer, "red", 6) == ([114, 101, 100, 256, 0, 0], 3)
    assert caption_ids(tokenizer, "reddish", 6) == ([114, 101, 100, 100, 105, 256], 5)
    tokenizer.bos = 1
    assert caption_ids(tokenizer, "red", 4) == ([1, 114, 101, 256], 3)


# --- transformers ---------------------------------------------------------------------------------

# Ours -> theirs, of a block and of the rest.
OF_BLOCK = {
    "attention_norm": "layer_norm1",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
NAMES = {
    "embedding.tokens.weight": "text_model.embeddings.token_embedding.weight",
    "embedding.positions.weight": "text_model.embeddings.position_embedding.weight",
    "embedding.patches.patch.weight": "vision_model.embeddings.patch_embedding.weight",
    "embedding.patches.class_tokens": "vision_model.embeddings.class_embedding",
    "embedding.patches.positions": "vision_model.embeddings.position_embedding.weight",
    "embedding.picture_norm": "vision_model.pre_layrnorm",
    "head.text_norm": "text_model.final_layer_norm",
    "head.picture_norm": "vision_model.post_layernorm",
    "head.text.weight": "text_projection.weight",
    "head.picture.weight": "visual_projection.weight",
    "head.scale": "logit_scale",
}


def their_name(name: str, text_layers: int) -> str:
    if not name.startswith("blocks."):
        return NAMES.get(name) or name.replace(prefix := name.rpartition(".")[0], NAMES[prefix])
    _, number, rest = name.split(".", 2)
    n, (module, _, kind) = int(number), rest.rpartition(".")
    half = f"text_model.encoder.layers.{n}"
    if n >= text_layers:
        half = f"vision_model.encoder.layers.{n - text_layers}"
    return f"{half}.{OF_BLOCK[module]}.{kind}"


def theirs_of(config: CLIPConfig):
    transformers = pytest.importorskip("transformers")
    text = dict(vocab_size=config.vocab_size, hidden_size=config.text_hidden_size)
    text |= dict(num_hidden_layers=config.text_layers, num_attention_heads=config.text_heads)
    text |= dict(intermediate_size=4 * config.text_hidden_size)
    text |= dict(max_position_embeddings=config.text_length, eos_token_id=60)
    picture = dict(hidden_size=config.hidden_size, num_attention_heads=config.num_heads)
    picture |= dict(num_hidden_layers=config.num_layers - config.text_layers)
    picture |= dict(intermediate_size=config.ffn_hidden_size)
    picture |= dict(image_size=config.picture_size, patch_size=config.patch_size)
    sizes = dict(text_config=text, vision_config=picture, projection_dim=config.embedding_size)
    return transformers.CLIPModel(transformers.CLIPConfig(**sizes)).eval()


def test_logits_and_gradients_are_those_of_transformers():
    config = small(class_tokens=1)
    ours, theirs = config.build().double(), theirs_of(config).double()
    of_theirs = dict(theirs.named_parameters())
    pairs = {name: of_theirs.pop(their_name(name, 3)) for name, _ in ours.named_parameters()}
    assert not of_theirs
    for name, p in ours.named_parameters():
        # Their own initial values are too small to see a wrong order of patches or heads.
        p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) / 8)
        pairs[name].data.copy_(p.data.view_as(pairs[name]))
    tokens, ends, context = inputs(config)
    context = Context(pictures=context.pictures.double())
    right = theirs(tokens[:, :36], context.pictures, return_loss=True)
    y = ours(tokens, ends, context)
    torch.testing.assert_close(y[:, 1] @ y[:, 0].T, right.logits_per_image, rtol=1e-5, atol=1e-5)
    loss = contrastive_losses(y, None).mean()
    torch.testing.assert_close(loss, right.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    right.loss.backward()
    for name, p in ours.named_parameters():
        reference = pairs[name].grad
        apart = (p.grad.view_as(reference) - reference).abs().max()
        assert apart <= 1e-5 * max(reference.abs().max(), 1e-3), name


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.repetition
def test_a_checkpoint_loads_under_another_layout(tmp_path):
    """The losses go on as those of one device that never stopped."""
    whole, _ = ranks.run(trained, 1, 1, CLIP, [None], None, 4)[0][0]
    ranks.run(trained, 2, 2, CLIP | ZB_H1, [None], str(tmp_path), 2)
    layout = CLIP | SEQUENCE | dict(zero_stage=3) | MICRO
    ((losses, _),) = ranks.run(trained, 4, 4, layout, [str(tmp_path)], None, 2)[0]
    assert losses == pytest.approx(whole[2:], rel=1e-10)


def test_evaluation(monkeypatch):
    """The right caption of a picture is sought among the different ones."""
    t = trainer_of(CLIP | dict(global_batch_size=2))
    captions = ["red", "blue", "red", "green"]
    data = SimpleNamespace(example=lambda k: SimpleNamespace(caption=captions[k]))
    texts = torch.eye(3)[[0, 1, 0, 2]]
    # The second picture is taken for a green one.
    y = torch.stack((texts, torch.eye(3)[[0, 2, 0, 2]]), 1).double()
    monkeypatch.setattr(clip_runs, "evaluation_batches", lambda *args: [])
    monkeypatch.setattr(clip_runs, "outputs", lambda *args: y)
    loss = t.task.evaluate(data, 4)
    assert t.task.eval_statistics() == {"eval_accuracy": 0.75}
    halves = [contrastive_losses(part, None).mean().item() for part in (y[:2], y[2:])]
    assert loss == pytest.approx(sum(halves) / 2)
    assert t.task.sample(None, SimpleNamespace(num_sequences=4, **vars(data))) == (
        "red (right: red)\ngreen (right: blue)\nred (right: red)\ngreen (right: green)"
    )


def test_which_caption_fits(tmp_path, capsys):
    """As the loss compares a picture with all captions."""
    out, file = tmp_path / "run", tmp_path / "a.png"
    flags = SHAPE | dict(steps=1, eval_every=0, device="cpu", out=out, hidden_size=32, num_heads=4)
    assert run("-m", "models.clip", *as_flags(**flags)) == 0
    Image.fromarray(drawing(0).draw(16)).save(file)
    captions = ["a red one", drawing(0).caption, "x"]
    words = ["--checkpoint", str(out), "--picture", str(file), str(file)]
    use_picture.main(["match", *words, "--caption", *captions])
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0] == lines[1]
    found = json.loads(lines[0])["captions"]
    model, _ = load_model(out, shape_class=CLIPConfig)
    rows = [caption_ids(ByteTokenizer(), caption, 36) for caption in captions]
    tokens = torch.tensor([ids + 18 * [0] for ids, _ in rows])
    picture = to_tensor([read_picture(file, 16)] * 3)
    y = model(tokens, torch.tensor([[end] for _, end in rows]), Context(pictures=picture))
    p = (y[0, 1] @ y[:, 0].T).softmax(0)
    assert [found[caption] for caption in captions] == pytest.approx(p.tolist(), rel=1e-5)
    for mistake in (["match", *words], ["label", *words, "--caption", "a"]):
        with pytest.raises(ConfigError, match="--caption: match needs it, and label has none"):
            use_picture.main(mistake)
    with pytest.raises(ConfigError, match="the model reads 36 tokens with the end"):
        use_picture.main(["match", *words, "--caption", 40 * "a"])


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(text_layers=5), "text_layers 5: must be at least 1 and below the 5 layers"),
        (dict(text_hidden_size=40), "text_hidden_size 40: must be at least 1 and at most the"),
        (dict(text_heads=3), "text_heads 3: must divide text_hidden_size 16; [1, 2, 4]"),
        (dict(class_tokens=0), "class_tokens 0: must be at least 1"),
        (dict(text_length=1), "text_length 1: must be at least 2"),
        (dict(dropout=0.1), "dropout 0.1: must be 0.0"),
    ],
)
def test_refused_shapes(changes, words):
    with pytest.raises(FieldError) as refused:
        small(**changes)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(text_heads=1, tp=2), "--tp 2: must divide --text-heads 1"),
        (SEQUENCE | dict(text_length=35), "--sequence-parallel: --tp 2 does not divide 16 patches"),
        (
            SEQUENCE | dict(text_length=35, class_tokens=1),
            "--text-length 35: must be divisible by --tp; 36 would fit",
        ),
        (dict(data=["shapes", "digits"]), "--data shapes digits: names one set of pictures"),
    ],
)
def test_refused_flags(flags, words):
    with pytest.raises(ConfigError) as refused:
        validate(config_of(CLIP | flags), 2)
    assert str(refused.value).startswith(words)


def test_captions_of_a_folder(tmp_path, capsys):
    """All are needed. A run says how many are cut."""
    config = config_of(CLIP | dict(data=[str(tmp_path)], text_length=6))
    words = ("red", "small", "large", "green ")
    lines = [{"file_name": f"{n}.png", "text": word} for n, word in enumerate(words)]
    for n in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{n}.png")
    write_lines(tmp_path / "metadata.jsonl", lines)
    data = config.task().open_data(config, World.from_launcher(), ByteTokenizer())
    said = "3 to train on, 1 held out; 1 captions are longer than --text-length 6"
    assert said in capsys.readouterr().out
    lines[2] = {"file_name": "2.png", "answer": "large"}
    write_lines(tmp_path / "metadata.jsonl", lines)
    with pytest.raises(DataError, match=r"2\.png has no caption; \"text\" in metadata"):
        config.task().open_data(config, None, ByteTokenizer())
    lines[2] |= {"text": "LARGE"}
    write_lines(tmp_path / "metadata.jsonl", lines)
    other = config.task().open_data(config, World.from_launcher(), ByteTokenizer())
    # Another caption, other data; the answer to a question is no caption.
    assert other[0].index["corpus"] != data[0].index["corpus"]
    assert {other[0].examples[n].caption for n in range(4)} == {"red", "small", "LARGE", "green "}


def test_dropout_is_no_flag():
    assert "dropout" not in {field.name for field in dataclasses.fields(CLIPRun)}
