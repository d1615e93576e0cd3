"""ViT and CLIP beside transformers: logits, gradients, folders there and back."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import again
from safetensors.torch import load_file, save_file
from small_run import equal, run, tensors_of
from their_models import shaken

import models.picture_huggingface
from base.errors import InputError
from base.model_config import least_parameters
from course.parity import relative
from inference import adapters, export, huggingface
from inference.architectures import HuggingFaceError
from inference.hf_config import to_model_config
from inference.huggingface import export_folder, import_folder, untrained, write_checkpoint
from inference.loading import load_model
from models.clip import CLIPConfig
from models.clip_runs import CLIP_PRESETS
from models.dit import DiTConfig
from models.picture_data import caption_ids
from models.picture_runs import VIT_PRESETS
from models.pictures import Context, read_picture, to_tensor
from models.vit import ViTConfig
from run import checkpoint
from run.tokenizer import ByteTokenizer, FileTokenizer

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def shape(seed: int) -> dict:
    """Odd sizes, drawn from a seed."""
    g = random.Random(seed)
    a, p = g.choice((2, 3, 5)), g.choice((2, 3, 5))
    return dict(
        num_attention_heads=a,
        hidden_size=a * g.choice((4, 7, 9)),
        intermediate_size=g.randrange(20, 60),
        num_hidden_layers=g.randrange(1, 4),
        image_size=p * g.randrange(2, 5),
        patch_size=p,
    )


# The end token of CLIP's captions.
END, V = 60, 61


def text_shape(seed: int, largest: int) -> dict:
    g = random.Random(-1 - seed)
    a = g.choice((1, 2))
    # In narrow norms the gradient is nothing but rounding.
    h = a * g.randrange(4, largest // a + 1)
    shape = dict(num_attention_heads=a, hidden_size=h, intermediate_size=4 * h, vocab_size=V)
    shape |= dict(num_hidden_layers=g.randrange(1, 4), max_position_embeddings=g.randrange(5, 12))
    return shape | dict(eos_token_id=END)


def theirs(seed: int, name: str = "vit", **fields):
    """A model of transformers, with norms and biases away from 1 and 0."""
    torch.manual_seed(seed)
    sizes, g = shape(seed), random.Random(seed)
    if name == "vit":
        sizes |= dict(num_labels=g.randrange(2, 9), hidden_act=g.choice(("gelu", "gelu_new")))
        config = transformers.ViTConfig(**sizes | fields)
        return shaken(transformers.ViTForImageClassification(config))
    text = text_shape(seed, sizes["hidden_size"])
    config = transformers.CLIPConfig(
        text_config=text, vision_config=sizes, projection_dim=g.randrange(5, 20)
    )
    return shaken(transformers.CLIPModel(config))


def ours(path: Path, **fields):
    """The model of a checkpoint, with other fields of its configuration."""
    model, index = load_model(path, shape_class=None)
    other = type(model.config)(**index["model"] | fields).build()
    other.load_state_dict(model.state_dict())
    return other


def our_logits(model, pictures: torch.Tensor, captions=None) -> torch.Tensor:
    """Of a CLIP: [pictures, captions]"""
    b, s = len(pictures), model.config.seq_length
    context = Context(pictures=pictures)
    if captions is None:
        return model(torch.zeros(b, s, dtype=torch.long), None, context)[:, 0]
    ends = (captions == END).int().argmax(1, keepdim=True)
    y = model(torch.nn.functional.pad(captions, (0, s - captions.shape[1])), ends, context)
    return y[:, 1] @ y[:, 0].T


def their_logits(model, pictures: torch.Tensor, captions=None) -> torch.Tensor:
    if captions is None:
        return model(pictures).logits
    return model(captions, pictures).logits_per_image


def inputs(model, seed: int = 0) -> tuple:
    """Three pictures and, of a CLIP, as many captions: tokens, the end, padding."""
    g = torch.Generator().manual_seed(seed)
    whole = getattr(model.config, "vision_config", model.config)
    pictures = torch.rand(3, 3, whole.image_size, whole.image_size, generator=g) * 2 - 1
    if whole is model.config:
        return (pictures,)
    m = model.config.text_config.max_position_embeddings
    captions = torch.randint(END, (3, m), generator=g)
    return pictures, captions.scatter(1, torch.tensor([[1], [m // 2], [m - 1]]), END)


@pytest.fixture
def folder(tmp_path) -> Path:
    theirs(0).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


# --- the same numbers -----------------------------------------------------------------------------


def of_theirs(model, given, weights, tmp_path: Path) -> dict:
    """Logits, and gradients under our names: saved and imported as if they were weights."""
    logits = their_logits(model, *given)
    (logits * weights).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.float().save_pretrained(tmp_path / "gradients")
    import_folder(tmp_path / "gradients", tmp_path / "ours of gradients")
    gradients = tensors_of(tmp_path / "ours of gradients", "model.")
    return {f"gradient of {n}": g for n, g in gradients.items()} | {"logits": logits.detach()}


@pytest.mark.parametrize("name", ["vit", "clip"])
@pytest.mark.parametrize("seed", [0, *(again(n) for n in range(1, 40))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logits_and_gradients(name, seed, dtype, tmp_path):
    """Every logit and every gradient, with both attentions: 1e-5 in float32, and in float64 1e-6,
    as near as a folder in float32 has them. In float32 sums of a text's few tokens are rounding
    noise: there a CLIP's gradients are those of tensors with 1% of the largest gradient or more."""
    model = theirs(seed, name)
    model.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    model = model.to(dtype)
    given = inputs(model, seed)
    given = given[0].to(dtype), *given[1:]
    with torch.no_grad():
        weights = torch.randn(their_logits(model, *given).shape).to(dtype)
    expected = of_theirs(model, given, weights, tmp_path)
    largest = max(x.abs().max() for label, x in expected.items() if label != "logits")
    for attention in ("explicit", "fused"):
        other = ours(tmp_path / "ours", attention=attention).to(dtype)
        logits = our_logits(other, *given)
        (logits * weights).sum().backward()
        got = {f"gradient of {n}": p.grad for n, p in other.named_parameters()}
        got["logits"] = logits.detach()
        assert got.keys() == expected.keys()
        worst = {label: apart.max().item() for label, apart in relative(got, expected)}
        if (name, dtype) == ("clip", torch.float32):
            small = [label for label, x in expected.items() if x.abs().max() < 0.01 * largest]
            worst = {label: apart for label, apart in worst.items() if label not in small}
            assert len(worst) > len(small)
        print(name, seed, dtype, attention, max(worst.values()), max(worst, key=worst.get))
        tolerance = 1e-5 if dtype == torch.float32 else 1e-6
        assert max(worst.values()) < tolerance, (attention, max(worst, key=worst.get), worst)


SWAPS = [
    again("vit", "blocks.*.attention.query", "blocks.*.attention.key"),
    ("vit", "blocks.*.attention_norm", "blocks.*.mlp_norm"),
    ("clip", "text.*.attention.query", "text.*.attention.key"),
    again("clip", "picture.*.attention_norm", "picture.*.mlp_norm"),
    again("vit", "blocks.*.attention.value", "blocks.*.attention.output"),
]


@pytest.mark.parametrize("name, first, second", SWAPS)
def test_a_wrong_table_shows(tmp_path, monkeypatch, name, first, second):
    model = theirs(1, name)
    model.save_pretrained(tmp_path / "hf")
    table = getattr(models.picture_huggingface, name.upper()).modules
    locations = table[first], table[second]
    monkeypatch.setitem(table, first, locations[1])
    monkeypatch.setitem(table, second, locations[0])
    import_folder(tmp_path / "hf", tmp_path / "ours")
    given = inputs(model)
    with torch.no_grad():
        got, expected = our_logits(ours(tmp_path / "ours"), *given), their_logits(model, *given)
    assert (got - expected).abs().max() > 1e-3 * expected.abs().max()


# --- pictures as numbers --------------------------------------------------------------------------


def noise(side: int) -> np.ndarray:
    return np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)


OTHERS = {
    "of CLIP": {},
    "of ImageNet": dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]),
    "none": dict(do_normalize=False),
}


@pytest.mark.parametrize(
    "fields", [OTHERS["of CLIP"], *map(again, list(OTHERS.values())[1:])], ids=OTHERS
)
def test_mean_and_std_are_in_the_weights(fields, folder, tmp_path):
    """A picture of a file has the logits of transformers, by its own preprocessor, and again after
    an export."""
    model, side = theirs(0), theirs(0).config.image_size
    sizes = dict(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    transformers.CLIPImageProcessor(**sizes, **fields).save_pretrained(folder)
    import_folder(folder, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "back")
    back = transformers.ViTForImageClassification.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        got = our_logits(ours(tmp_path / "ours"), to_tensor([noise(side)]))
        for other, path in ((model, folder), (back, tmp_path / "back")):
            processor = transformers.AutoImageProcessor.from_pretrained(path)
            numbers = processor(images=noise(side), return_tensors="pt").pixel_values
            expected = other(numbers).logits
            assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    if fields != OTHERS["none"]:
        assert not equal(tensors_of(tmp_path / "ours"), tensors_of_folder(folder, tmp_path))


def test_a_clip_has_mean_and_std_in_its_weights(tmp_path):
    """In the positions too, as it has no bias."""
    model = theirs(0, "clip")
    side = model.config.vision_config.image_size
    model.save_pretrained(tmp_path / "hf")
    sizes = dict(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    processor = transformers.CLIPImageProcessor(**sizes)
    processor.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    pictures = [noise(side), noise(side) // 3]
    captions = inputs(model)[1][:2]
    with torch.no_grad():
        numbers = processor(images=pictures, return_tensors="pt").pixel_values
        expected = their_logits(model, numbers, captions)
        got = our_logits(ours(tmp_path / "ours"), to_tensor(pictures), captions)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def tensors_of_folder(folder: Path, tmp_path: Path) -> dict:
    """As they are, without a preprocessor."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "preprocessor_config.json").unlink()
    import_folder(copy, tmp_path / "copied")
    return tensors_of(tmp_path / "copied")


def test_an_exported_preprocessor_reads_a_file_as_we_do(folder, tmp_path):
    """The middle square, bicubic; where the file has another size, to a few of 255 levels."""
    from PIL import Image

    import_folder(folder, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "back")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back")
    side = theirs(0).config.image_size
    for width, height, levels in ((side, side, 0.01), (6 * side, 4 * side, 4)):
        ramp = (
            np.linspace(0, 255, width)[None, :, None] * np.linspace(0.2, 1, height)[:, None, None]
        )
        image = Image.fromarray(np.broadcast_to(ramp, (height, width, 3)).astype(np.uint8))
        image.save(tmp_path / "a.png")
        here = to_tensor([read_picture(tmp_path / "a.png", side)])
        there = processor(images=image, return_tensors="pt").pixel_values
        assert (here - there).abs().max() < levels / 127.5


# --- there and back -------------------------------------------------------------------------------


def test_there_and_back(tmp_path, capsys):
    """What we export loads in transformers without a word, bit for bit; imported and exported again
    it is the same folder. The labels go along."""
    labels = {0: "a cat", 1: "Ü", 2: "b"}
    names = dict(id2label=labels, label2id={name: n for n, name in labels.items()}, num_labels=3)
    model = theirs(0, **names)
    model.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    assert huggingface.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr()
    count = sum(p.numel() for p in model.parameters())
    assert f"ViTForImageClassification, {count:,} parameters" in said.out
    assert "no preprocessor_config.json: mean and std are taken as 0.5" in said.out + said.err
    assert checkpoint.read_index(tmp_path / "ours")["labels"] == list(labels.values())
    assert huggingface.main(["export", str(tmp_path / "ours"), str(tmp_path / "a")]) == 0
    model_class = transformers.ViTForImageClassification
    loaded, report = model_class.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(report.values()), report
    assert equal(loaded.state_dict(), model.state_dict())
    assert loaded.config.id2label == labels and loaded.config.label2id == names["label2id"]
    pictures = torch.rand(2, 3, model.config.image_size, model.config.image_size)
    with torch.no_grad():
        assert loaded(pictures).logits.equal(model(pictures).logits)
    import_folder(tmp_path / "a", tmp_path / "b")
    assert equal(tensors_of(tmp_path / "b"), tensors_of(tmp_path / "ours"))
    export_folder(tmp_path / "b", tmp_path / "c")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()


def test_an_imported_model_is_trained_and_exported(folder, tmp_path):
    """Its shape and its weights are those of --load: without a learning rate they stay."""
    import_folder(folder, tmp_path / "ours")
    words = f"--load {tmp_path / 'ours'} --data shapes --steps 1 --lr 0 --min-lr 0 --device cpu"
    words += f" --global-batch-size 4 --eval-every 0 --warmup-steps 0 --out {tmp_path / 'run'}"
    assert run("-m", "models.vit", *words.split()) == 0
    export_folder(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    # The labels of shapes are others than those of the folder.
    assert before.keys() == after.keys() and len(after["classifier.bias"]) == 16
    kept = [name for name in before if not name.startswith("classifier.")]
    assert equal(*({name: tensors[name] for name in kept} for tensors in (before, after)))


def rewrite(folder: Path, change) -> None:
    """The tensors of a folder become change(tensors)."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_parts_that_no_logit_reads(folder, tmp_path):
    """The pooler and the mask token of other classes."""
    import_folder(folder, tmp_path / "a")
    others = {"vit.pooler.dense.bias": torch.ones(3)}
    others["vit.embeddings.mask_token"] = torch.ones(1, 1, 3)
    rewrite(folder, lambda tensors: tensors | others)
    import_folder(folder, tmp_path / "b")
    assert equal(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))


@pytest.mark.parametrize("preset", ["vit-base", "vit-large", "vit-huge"])
def test_presets_are_the_published_shapes(preset):
    """What transformers has by default is ViT-Base."""
    fields, count = VIT_PRESETS[preset]
    config = ViTConfig(**fields)
    with torch.device("meta"):
        assert sum(p.numel() for p in config.make().parameters()) == count
    if preset == "vit-base":
        default = json.loads(transformers.ViTConfig(num_labels=1000).to_json_string(False))
        assert to_model_config(default | {"architectures": ["ViTForImageClassification"]}) == config


def test_a_clip_there_and_back(tmp_path):
    """As a ViT's, in several files; its captions' end token goes along with the tokenizer."""
    model = theirs(0, "clip")
    model.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    write_tokenizer(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "a")
    loaded, report = transformers.CLIPModel.from_pretrained(
        tmp_path / "a", output_loading_info=True
    )
    assert not any(report.values()), report
    assert equal(loaded.state_dict(), model.state_dict())
    assert loaded.config.text_config.eos_token_id == END
    with torch.no_grad():
        assert their_logits(loaded, *inputs(model)).equal(their_logits(model, *inputs(model)))
    import_folder(tmp_path / "a", tmp_path / "b")
    assert equal(tensors_of(tmp_path / "b"), tensors_of(tmp_path / "ours"))
    export_folder(tmp_path / "b", tmp_path / "c")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()
    ours = FileTokenizer(str(tmp_path / "ours" / "tokenizer.json"))
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert there("b a").input_ids == caption_ids(ours, "b a", 3)[0] == [1, 0, END]


def test_a_clip_with_a_narrow_text_is_loaded(tmp_path):
    """How many numbers its tensors have at least: each half counts at its own width."""
    sizes = dict(num_layers=8, hidden_size=64, num_heads=2, picture_size=4, patch_size=2)
    config = CLIPConfig(**sizes, text_layers=6, text_hidden_size=8, text_heads=2, vocab_size=257)
    state, model = untrained({"tokenizer": "bytes"}, dataclasses.asdict(config)), config.build()
    write_checkpoint(tmp_path / "ours", config, state, model.get_parameter)
    assert equal(
        load_model(tmp_path / "ours", shape_class=None)[0].state_dict(), model.state_dict()
    )
    matrices = (p for n, p in model.named_parameters() if p.dim() > 1 and "head" not in n)
    assert 0.9 < least_parameters(config) / sum(p.numel() for p in matrices) <= 1


def write_tokenizer(folder: Path, end: int = END) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = [*"ab", *map(str, range(end - 2)), "<end>"]
    words = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_captions_of_bytes(tmp_path):
    """The tokenizer of an exported CLIP ends a text as our data does."""
    config = CLIPConfig(2, 16, 2, picture_size=4, patch_size=2, text_hidden_size=8, vocab_size=257)
    state = untrained({"tokenizer": "bytes"}, dataclasses.asdict(config))
    write_checkpoint(tmp_path / "ours", config, state, config.build().get_parameter)
    export_folder(tmp_path / "ours", tmp_path / "hf")
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    found = there(["a cat", "é"], padding="max_length", max_length=9, return_tensors="pt").input_ids
    for ids, text in zip(found, ("a cat", "é")):
        right, end = caption_ids(ByteTokenizer(), text, 9)
        assert ids.tolist() == right[: end + 1] + [256] * (8 - end)


def test_a_published_clip():
    """What transformers has by default is the first one."""
    default = json.loads(transformers.CLIPConfig().to_json_string(False))
    expected = CLIPConfig(**CLIP_PRESETS["clip-vit-base-32"][0])
    assert to_model_config(default | {"architectures": ["CLIPModel"]}) == expected
    # Fields that are left out, and those of older files, which have more of them.
    bare = {"architectures": ["CLIPModel"]}
    assert to_model_config(bare) == expected
    older = bare | {"text_config": {"hidden_size": 8}, "text_config_dict": {"vocab_size": 100}}
    assert to_model_config(older) == dataclasses.replace(expected, vocab_size=100)


# --- refusals -------------------------------------------------------------------------------------

# Changes of config.json, and words of the refusal.
REFUSED = [
    ({"hidden_act": "relu"}, 'hidden_act is "relu"; this project has only "gelu" or "gelu_new"'),
    ({"qkv_bias": False}, "qkv_bias is false"),
    ({"num_channels": 1}, "num_channels is 1; this project has only 3"),
    ({"image_size": [8, 8]}, r"image_size is \[8, 8\]; this project takes an integer"),
    ({"patch_size": 7}, "patch_size 7: must divide image_size"),
    ({"id2label": {"1": "a"}}, "id2label has not one name for each"),
    ({"id2label": {"0": 1}}, "id2label: Expected `str`"),
    ({"id2label": {"0": "a"}}, "classifier.weight is F32 .* there"),
    ({"num_hidden_layers": 7}, "num_layers 7: there are tensors of"),
]


@pytest.mark.parametrize("changes, words", REFUSED)
def test_what_does_not_fit(changes, words, folder, tmp_path, capsys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(InputError, match=words):
        import_folder(folder, tmp_path / "ours")
    assert huggingface.main(["import", str(folder), str(tmp_path / "ours")]) == 2
    assert not (tmp_path / "ours").exists()


PREPROCESSORS = [
    ({"do_rescale": False}, "do_rescale is false"),
    ({"rescale_factor": 1 / 127.5}, "rescale_factor not 1/255"),
    ({"image_mean": [0.5]}, "must be three numbers"),
    ({"image_processor_type": "CLIPImageProcessor"}, "must be three numbers"),
    ({"image_std": [0.5, 0.0, 0.5]}, "std > 0"),
    ({"image_std": "half"}, "Expected `array`"),
]


@pytest.mark.parametrize("fields, words", PREPROCESSORS)
def test_preprocessors_that_do_not_fit(fields, words, folder, tmp_path):
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match=words):
        import_folder(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


PATCHES = "vit.embeddings.patch_embeddings.projection.weight"
TENSORS = [
    (lambda t: {n: x for n, x in t.items() if n != PATCHES}, f"{PATCHES} is missing"),
    (lambda t: t | {PATCHES: t[PATCHES].flatten(1)}, f"{PATCHES} is F32"),
    (lambda t: t | {"vit.extra": torch.ones(2)}, "vit.extra has no place here"),
]


@pytest.mark.parametrize("change, words", TENSORS)
def test_tensors_that_do_not_fit(change, words, folder, tmp_path):
    rewrite(folder, change)
    with pytest.raises(HuggingFaceError, match=words):
        import_folder(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


CLIP_REFUSED = [
    ({"text_config": {"hidden_act": "gelu"}}, 'text_config.hidden_act is "gelu"'),
    ({"text_config": {"hidden_size": "9"}}, 'text_config.hidden_size is "9"; .* an integer'),
    ({"text_config": {"layer_norm_eps": 1e-6}}, "layer_norm_eps is 1e-05; another field .* 1e-06"),
    ({"text_config": [1]}, "text_config holds no fields"),
    ({"vision_config": {"attention_dropout": 0.1}}, "vision_config.attention_dropout is 0.1"),
    (
        {"vision_config": {"image_size": 33}},
        "patch_size 32: must divide vision_config.image_size 33",
    ),
    ({"vision_config": {"hidden_size": 252}}, "text_hidden_size 512: must be .* at most"),
]


@pytest.mark.parametrize("fields, words", CLIP_REFUSED)
def test_a_clip_that_does_not_fit(fields, words):
    with pytest.raises(HuggingFaceError, match=words):
        to_model_config({"architectures": ["CLIPModel"]} | fields)


def test_an_end_token_that_transformers_reads_otherwise(tmp_path):
    theirs(0, "clip").save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", end=2)
    import_folder(tmp_path / "hf", tmp_path / "ours")
    with pytest.raises(HuggingFaceError, match="the end token is 2"):
        export_folder(tmp_path / "ours", tmp_path / "back")


def test_a_clip_whose_text_has_another_mlp(tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    text = sizes | dict(vocab_size=V, max_position_embeddings=5, intermediate_size=24)
    picture = sizes | dict(image_size=4, patch_size=2)
    config = transformers.CLIPConfig(text_config=text, vision_config=picture)
    transformers.CLIPModel(config).save_pretrained(tmp_path / "hf")
    words = r"layers.0.mlp.fc1.weight is F32 \[24, 8\] there, and .* \[32, 8\] here"
    with pytest.raises(HuggingFaceError, match=words):
        import_folder(tmp_path / "hf", tmp_path / "ours")


SMALL = dict(hidden_size=16, num_heads=2, picture_size=4, patch_size=2)
NO_CLASS = "of -m models.dit: no class of transformers is one"
WITHOUT = [
    (huggingface, ["export", "CK", "OUT"], DiTConfig(1, **SMALL), NO_CLASS),
    (adapters, ["merge", "CK", "CK", "OUT"], DiTConfig(1, **SMALL), NO_CLASS),
    (
        adapters,
        ["merge", "CK", "CK", "OUT"],
        ViTConfig(1, **SMALL),
        "a whole model, not an adapter",
    ),
    (export, ["CK", "OUT"], DiTConfig(1, **SMALL), NO_CLASS),
    (export, ["CK", "OUT"], ViTConfig(1, **SMALL), "a model of -m models.vit: no graph is made"),
]


@pytest.mark.parametrize("command, argv, config, words", WITHOUT)
def test_what_is_not_made_of_a_model(command, argv, config, words, tmp_path, capsys):
    state = untrained({"tokenizer": "bytes"}, dataclasses.asdict(config))
    write_checkpoint(tmp_path / "ck", config, state, config.build().get_parameter)
    paths = {"CK": str(tmp_path / "ck"), "OUT": str(tmp_path / "out")}
    assert command.main([paths.get(word, word) for word in argv]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("class_tokens", [0, 8])
def test_a_vit_that_transformers_lacks(class_tokens):
    sizes = dict(num_layers=1, hidden_size=16, num_heads=2)
    config = ViTConfig(**sizes, class_tokens=class_tokens)
    words = f"ViTForImageClassification has no .*class_tokens {class_tokens}"
    with pytest.raises(HuggingFaceError, match=words):
        huggingface.architecture_of(config)
