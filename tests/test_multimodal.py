"""A model that reads pictures (models/multimodal.py): every layout is one device, also with frozen
parts, and with ranks that have no picture; runs in stages; questions about a picture."""

import re
from pathlib import Path

import pytest
import torch
from parity import SMALL, again, check, differs, gates, train, trainer_of
from PIL import Image
from small_run import as_flags, equal, refusal, run, tensors_of

import generate
from base.model_config import FieldError
from course.synthetic import Seen
from finetune.packing import Example
from models import ask_picture, multimodal
from models.multimodal import MultimodalConfig, part_of
from models.multimodal_runs import PRESETS, Answers, MultimodalRun, prompt_of
from models.pictures import Context, Drawn, drawing
from models.vit import ViTConfig
from run import checkpoint
from run.checkpoint import CheckpointError
from run.data import DataError
from run.tokenizer import make_tokenizer
from sequence_parallel import gather_sequence

GPT2 = SMALL | dict(command="multimodal.py", model="tiny-gpt2", picture_size=8, patch_size=4)
GPT2 |= dict(vision_hidden_size=24, vision_heads=2, vision_class_tokens=2)
# Grouped-query attention, one matrix of projection, a tower of CLIP's.
LLAMA = GPT2 | dict(model="tiny", projection="linear", vision_encoder="clip")
STAGE_1 = dict(freeze=["vision", "decoder"])
STAGE_2 = dict(freeze=["vision"])

FULL, SEQUENCE = dict(recompute="full"), dict(tp=2, sequence_parallel=True)
ZB_H1 = dict(pp=2, schedule="zb-h1")
# Micro-batches of one sample: a rank without a picture beside one with.
ZERO = [dict(zero_stage=stage, micro_batch_size=1) for stage in range(4)]

CASES = {
    "gpt2": (GPT2, 2, [SEQUENCE | FULL, ZB_H1 | dict(layer_split=[0, 2])]),
    "llama": (LLAMA, 2, [ZERO[3]]),
    "projection learns": (LLAMA | STAGE_1, 2, [SEQUENCE, ZERO[2]]),
}
MORE = {
    f"{name}, {learns}, all": (base | frozen, 2, [SEQUENCE | FULL, dict(tp=2), ZB_H1, *ZERO])
    for name, base in (("gpt2", GPT2), ("llama", LLAMA))
    for learns, frozen in (("all learn", {}), ("1", STAGE_1), ("2", STAGE_2))
} | {
    "on 4": (
        LLAMA,
        4,
        [
            SEQUENCE | FULL | dict(pp=2),
            ZERO[3] | ZB_H1,
            ZERO[2] | dict(data_parallel_replicate_degree=2),
            ZERO[3] | SEQUENCE,
        ],
    ),
    "virtual stages": (GPT2 | dict(num_layers=4), 2, [dict(pp=2, virtual_stages=2)]),
    "one rank": (GPT2, 1, [dict(recompute="selective"), dict(micro_batch_size=1)]),
}


@gates(CASES, MORE)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)


def features_learn_from_their_own_shard():
    """The all-gather without its adjoint."""

    def gather(x, group):
        whole, n, at = gather_sequence(x.detach(), group), x.shape[1], group.rank() * x.shape[1]
        return torch.cat((whole[:, :at], x, whole[:, at + n :]), 1)

    multimodal.gather_sequence = gather


def test_the_gate_sees_a_gather_without_its_adjoint():
    one = train(base=GPT2, steps=1)
    broken = train(2, base=GPT2, steps=1, mutate=features_learn_from_their_own_shard, **SEQUENCE)
    differs(broken, one)


def test_a_micro_batch_without_a_picture_gives_the_tower_no_gradient():
    t = trainer_of(GPT2)
    data = Seen(t.model_config)
    rows = data.batch([3, 4, 5])
    assert not rows.pictures.any() and rows.tokens.max() < t.model_config.vocab_size
    y = t.model(rows.tokens, rows.targets, rows.context())
    y.sum().backward()
    of_tower = [p for n, p in t.stages[0].named_parameters() if part_of(n) != "decoder"]
    assert of_tower and all(p.grad is None for p in of_tower)
    assert all(not p.main_grad.any() for p in of_tower)


@pytest.mark.parametrize("frozen", [["vision", "decoder"], ["vision"]], ids=str)
def test_frozen_parts_stay_as_they_are(frozen):
    t = trainer_of(LLAMA, freeze=frozen)
    data = Seen(t.model_config)
    before = {n: p.detach().clone() for n, p in t.model.named_parameters()}
    for step in (1, 2):
        t.forward_backward(step, data)
        t.update(step)
    for name, p in t.model.named_parameters():
        learns = part_of(name) not in frozen and not name.endswith("key.bias")
        assert p.equal(before[name]) != learns, name


# --- data -----------------------------------------------------------------------------------------

SHAPE = MultimodalConfig(**PRESETS["tiny"][0])
TOKENIZER = make_tokenizer("bytes")


def answers(examples, s: int = 80, seed: int | None = None) -> Answers:
    return Answers(examples, s, seed, False, tokenizer=TOKENIZER, shape=SHAPE)


def test_only_the_answer_counts():
    data = answers(Drawn(100, 32))
    asked = set()
    for n in range(20):
        batch, (question, answer) = data.batch([n]), data.words(n)
        asked.add(question)
        assert drawing(n).questions[question] == answer
        counted = batch.targets[0][batch.loss_mask[0]].tolist()
        assert counted == [*answer.encode(), TOKENIZER.eot]
        assert data.counted_tokens([n]) == len(counted)
        first = int(batch.loss_mask[0].long().argmax())
        read = batch.tokens[0, : first + 1].tolist()
        assert read == [*range(257, 257 + 16), *question.encode(), ord("\n")]
    assert asked == set(drawing(0).questions)


def test_the_token_that_begins_a_text_comes_before_the_picture():
    tokenizer = make_tokenizer("bytes")
    tokenizer.bos = 7
    data = Answers(Drawn(100, 32), 80, None, False, tokenizer=tokenizer, shape=SHAPE)
    question = data.words(0)[0].encode()
    assert data.row(0).ids[: 17 + len(question)] == [7, *range(257, 257 + 16), *question]


class Asked(Drawn):
    def __init__(self, question: str, answer: str):
        super().__init__(10, 32)
        self.asked = {question: answer}

    def questions(self, n):
        return self.asked


@pytest.mark.parametrize(
    "question, answer, words",
    [("what is it?", "", "has no answer"), ("what is it?", 60 * "a", "more than --seq-length 80")],
)
def test_a_question_without_a_fitting_answer(question, answer, words):
    with pytest.raises(DataError, match=words):
        answers(Asked(question, answer)).counted_tokens([0])
    assert isinstance(answers(Asked(question, 51 * "a")).row(0), Example)


class Targets(Answers):
    """Targets that are given. targets: [n, s]"""

    targets = None

    def batch(self, samples):
        batch = super().batch(samples)
        return batch if self.targets is None else batch._replace(targets=self.targets[samples])


def test_an_answer_is_right_where_each_of_its_tokens_is():
    t = trainer_of(GPT2, seq_length=80, vocab_size=257)
    data = Targets(Drawn(100, 8), 80, None, False, tokenizer=TOKENIZER, shape=t.model_config)
    likeliest = t.task.answers(data, 3)[:, 2:].long()
    counted = data.batch(range(3)).loss_mask
    # One answer is wrong at its last token, one has other targets that do not count.
    last = counted[0].nonzero()[-1]
    wrong, beside = torch.zeros_like(likeliest), ~counted & (torch.arange(3) == 1).unsqueeze(1)
    wrong[0, last] = 1
    data.targets = (likeliest + wrong + beside) % 257
    assert t.task.answers(data, 3)[:, 1].tolist() == [0, 1, 1]


# --- runs -----------------------------------------------------------------------------------------

RUN = dict(device="cpu", eval_every=0, global_batch_size=2, hidden_size=16, num_heads=2)
OF_PICTURES = RUN | dict(picture_size=8, patch_size=4, class_tokens=2)
OF_CLIP = dict(text_layers=2, text_hidden_size=16, text_heads=2, embedding_size=8)
# The flags of a model of pictures, and its first block for them.
TOWERS = {
    "vit": (OF_PICTURES | dict(num_layers=2), 0),
    "clip": (OF_PICTURES | OF_CLIP | dict(num_layers=4), 2),
}
OF_TEXT = RUN | dict(num_layers=1, seq_length=64, ffn_hidden_size=24)


BASE = ["-m", "models.multimodal", *as_flags(device="cpu", eval_every=0, global_batch_size=2)]
RATE = as_flags(min_lr=1e-3, warmup_steps=0)


def first_stage(folder: Path, tower: str) -> tuple[list, Path]:
    """(flags of the first stage of LLaVA, one step of it). It starts from a tower and a GPT."""
    text = folder / "text.txt"
    text.write_text("what colour is it?\nred\n" * 100)
    text = dict(data=text, cache=folder / "cache")
    flags = as_flags(**TOWERS[tower][0], steps=1, out=folder / tower)
    assert run("-m", f"models.{tower}", *flags) == 0
    assert run(*as_flags(**OF_TEXT, **text, steps=1, out=folder / "gpt")) == 0
    parts = as_flags(vision=folder / tower, decoder=folder / "gpt")
    flags = [*BASE, *parts, *RATE, "--freeze", "vision", "decoder"]
    assert run(*flags, *as_flags(steps=1, out=folder / "1")) == 0
    return flags, folder / "1"


@pytest.mark.parametrize("tower", ["vit", again("clip")])
def test_a_run_starts_from_a_tower_and_a_decoder(tmp_path, capsys, tower):
    """And leaves a whole model, which can be asked."""
    _, out = first_stage(tmp_path, tower)
    first = TOWERS[tower][1]
    theirs, decoder = (tensors_of(tmp_path / name, "model.") for name in (tower, "gpt"))
    for name, tensor in tensors_of(out, "model.").items():
        if part_of(name) == "vision":
            name = name.removeprefix(multimodal.PREFIXES["vision"])
            # It has one layer, of two.
            name = name.replace("blocks.0", f"blocks.{first}")
            assert tensor.equal(theirs[name]), name
        elif part_of(name) == "decoder":
            assert tensor.equal(decoder[name]), name
    Image.fromarray(drawing(0).draw(8)).save(tmp_path / "a.png")
    asked = as_flags(checkpoint=out, picture=tmp_path / "a.png", prompt="what shape is it?")
    assert checkpoint.read_index(checkpoint.find(out))["model"]["vision_layers"] == 1
    # The answer ends where the picture would leave the context: after 64 positions.
    assert ask_picture.main([*asked, "--max-tokens", "1000", "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    room = 64 + 1 - (4 + len("what shape is it?\n"))
    assert "64 tokens: 5 of the picture, 59 of question" in said and f"{room} tokens" in said


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(activation="gelu"), "activation is gelu, and a tower has exact-gelu"),
        (dict(norm_eps=0.1), "norm_eps is 0.1, and a tower has 1e-12"),
        (dict(num_layers=1), "has one layer for pictures, which a tower leaves out"),
    ],
)
def test_a_tower_that_would_compute_something_else(tmp_path, monkeypatch, fields, words):
    shape = ViTConfig(**dict(num_layers=2, hidden_size=8, num_heads=2) | fields)
    monkeypatch.setattr(checkpoint, "read_index", lambda path: {"model": {}})
    monkeypatch.setattr(checkpoint, "read_model", lambda path, **_: (shape, {}))
    with pytest.raises(CheckpointError, match=words):
        MultimodalRun(vision=tmp_path).model_config()


@pytest.mark.repetition
def test_a_frozen_run_goes_on_and_is_gone_on_from(tmp_path):
    flags, out = first_stage(tmp_path, "vit")
    assert run(*BASE, *as_flags(steps=2, out=out), "--resume") == 0
    assert run(*flags, *as_flags(steps=2, out=tmp_path / "whole")) == 0
    assert equal(tensors_of(out), tensors_of(tmp_path / "whole"))
    second = tmp_path / "2"
    last = as_flags(load=out, freeze="vision", steps=1, lr=1e-3, out=second)
    assert run(*BASE, *RATE, *last) == 0
    before, after = (tensors_of(folder, "model.") for folder in (out, second))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if not name.endswith("key.bias"):
            assert tensor.equal(after[name]) == (part_of(name) == "vision"), name


@pytest.mark.parametrize("preset", ["tiny", "tiny-gpt2"])
def test_an_answer_is_that_of_the_training_model(preset):
    torch.manual_seed(0)
    shape = MultimodalConfig(**PRESETS[preset][0] | dict(hidden_size=32, vision_class_tokens=1))
    torch.set_default_dtype(torch.float64)
    try:
        model = shape.build().eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for p in model.parameters():
        # Answers of an untrained model are of one letter.
        p.data += 0.3 * torch.randn_like(p)
    batch = answers(Drawn(100, 32)).batch([7])
    question = list(answers(Drawn(100, 32)).words(7)[0].encode())
    pictures = batch.context()._replace(pictures=batch.pictures.double())
    tokens = torch.tensor([prompt_of(TOKENIZER, question, shape)])
    with torch.no_grad():
        logits = model(tokens, None, pictures)
        written = tokens
        for _ in range(5):
            likeliest = model(written, None, pictures)[:, -1:].argmax(-1)
            written = torch.cat((written, likeliest), 1)
        ask_picture.show(model, pictures.pictures)
        assert (model(tokens) - logits).abs().max() < 1e-10
    found = generate.generate(model, tokens.tolist(), 5, temperature=0)[0]
    assert found == written[0, tokens.shape[1] :].tolist() and len(found) == 5


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(vision_heads=3), "vision_heads 3: must divide vision_hidden_size 128"),
        (dict(vision_layers=0), "vision_layers 0: must be at least 1"),
        (dict(patch_size=5), "patch_size 5: must divide picture_size 32"),
        (dict(seq_length=16), "seq_length 16: must be more than the 16 positions of a picture"),
        (dict(projection="conv"), "projection conv: must be linear or mlp2x_gelu"),
    ],
)
def test_refused_shapes(fields, words):
    with pytest.raises(FieldError) as refused:
        MultimodalConfig(**PRESETS["tiny"][0] | fields)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(freeze="head"), "--freeze head: must be vision, decoder, or both"),
        (dict(freeze="vision"), "--freeze vision: the vision would stay as drawn at random"),
        (dict(vision="nowhere"), "nowhere: no such folder"),
        (dict(decoder="nowhere"), "nowhere: no such folder"),
    ],
)
def test_refused_flags(capsys, flags, words):
    assert words in refusal(capsys, "-m", "models.multimodal", *as_flags(**flags))


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(tp=2, vision_heads=1), "--tp 2: must divide --vision-heads 1"),
        (SEQUENCE | dict(vision_class_tokens=1), "--tp 2 does not divide 16 patches and 1 pos"),
        (SEQUENCE | dict(seq_length=81), "--seq-length 81: must be divisible by --tp 2"),
    ],
)
def test_layouts_that_the_tower_does_not_fit(flags, words):
    from run import rules
    from run.config import ConfigError

    with pytest.raises(ConfigError) as refused:
        rules.validate(MultimodalRun(**flags), 2)
    assert words in str(refused.value)


# --- transformers ---------------------------------------------------------------------------------

# Their names -> ours, in this order.
NAMES = {
    r"^model\.vision_tower\.(vision_model\.)?": multimodal.PREFIXES["vision"],
    r"^model\.multi_modal_projector\.linear_1": "embedding.pictures.projection.first",
    r"^model\.multi_modal_projector\.linear_2": "embedding.pictures.projection.second",
    r"^model\.language_model\.embed_tokens": "embedding.tokens",
    r"^model\.language_model\.norm": "head.norm",
    r"^lm_head": "head.output",
    r"^model\.language_model\.": "",
    r"embeddings\.patch_embedding": "embedding.patches.patch",
    r"embeddings\.class_embedding": "embedding.patches.class_tokens",
    r"embeddings\.position_embedding.weight": "embedding.patches.positions",
    r"pre_layrnorm": "embedding.picture_norm",
    r"(encoder\.)?layers\.": "blocks.",
    r"input_layernorm|layer_norm1": "attention_norm",
    r"post_attention_layernorm|layer_norm2": "mlp_norm",
    r"self_attn": "attention",
    r"q_proj": "query",
    r"k_proj": "key",
    r"v_proj": "value",
    r"(o|out)_proj": "output",
    r"fc1|up_proj": "up",
    r"fc2|down_proj": "down",
    r"gate_proj": "gate",
}


@pytest.mark.repetition
def test_logits_are_those_of_llava():
    transformers = pytest.importorskip("transformers")
    sizes = dict(num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    text = transformers.LlamaConfig(
        **sizes, hidden_size=32, num_key_value_heads=2, vocab_size=70, rms_norm_eps=1e-5
    )
    sizes |= dict(num_hidden_layers=3, hidden_size=24)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=12, patch_size=4)
    torch.manual_seed(0)
    parts = dict(vision_config=vision, text_config=text)
    config = transformers.LlavaConfig(**parts, image_token_index=69)
    theirs = transformers.LlavaForConditionalGeneration(config).double().eval()
    shape = MultimodalConfig(
        **dict(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=96),
        **dict(llama=True, vocab_size=69, seq_length=32, picture_size=12, patch_size=4),
        **dict(vision_layers=2, vision_hidden_size=24, vision_heads=4, vision_encoder="clip"),
    )
    ours, values = shape.build().double(), dict(theirs.named_parameters())
    parameters = dict(ours.named_parameters())
    for name, value in values.items():
        # Weights of any size: theirs begin with biases of 0.
        value.data += 0.1 * torch.randn_like(value)
        for pattern, ours_name in NAMES.items():
            name = re.sub(pattern, ours_name, name)
        if name in parameters:
            p = parameters.pop(name)
            p.data = value.data.reshape(-1, *p.shape[1:])[: len(p)].clone()
    assert not parameters
    picture, picture_ids = torch.randn(1, 3, 12, 12).double(), torch.arange(69, 78)
    before, after = torch.tensor([1, 5]), torch.tensor([7, 8, 9])
    ids = torch.cat((before, torch.full((9,), 69), after))[None]
    with torch.no_grad():
        expected = theirs(input_ids=ids, pixel_values=picture).logits[..., :69]
        tokens = torch.cat((before, picture_ids, after))[None]
        found = ours(tokens, None, Context(pictures=picture))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
