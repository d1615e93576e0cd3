"""ViT beside transformers: logits, gradients, folders there and back."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import again
from safetensors.torch import load_file, save_file
from small_run import equal, tensors_of
from their_models import shaken

import models.picture_huggingface
from base.errors import InputError
from course.parity import relative
from inference import huggingface
from inference.architectures import HuggingFaceError
from inference.hf_config import to_model_config
from inference.huggingface import export_folder, import_folder
from inference.loading import load_model
from models.picture_runs import VIT_PRESETS
from models.pictures import Context, read_picture, to_tensor
from models.vit import ViTConfig
from run import checkpoint

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
        num_labels=g.randrange(2, 9),
        hidden_act=g.choice(("gelu", "gelu_new")),
    )


def theirs(seed: int, **fields):
    """A ViT of transformers, with norms and biases away from 1 and 0."""
    torch.manual_seed(seed)
    config = transformers.ViTConfig(**shape(seed) | fields)
    return shaken(transformers.ViTForImageClassification(config))


def ours(path: Path, **fields):
    """The model of a checkpoint, with other fields of its configuration."""
    model, index = load_model(path, shape_class=ViTConfig)
    other = ViTConfig(**index["model"] | fields).build()
    other.load_state_dict(model.state_dict())
    return other


def our_logits(model, pictures: torch.Tensor) -> torch.Tensor:
    tokens = torch.zeros(len(pictures), model.config.seq_length, dtype=torch.long)
    return model(tokens, None, Context(pictures=pictures))[:, 0]


@pytest.fixture
def folder(tmp_path) -> Path:
    theirs(0).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(again(n) for n in range(1, 40))])
def test_logits_and_gradients(seed, tmp_path):
    """1e-5 in float32, of every logit and every gradient, with both attentions."""
    model = theirs(seed)
    model.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    size = model.config.image_size
    pictures = torch.rand(3, 3, size, size) * 2 - 1
    weights = torch.randn(3, model.config.num_labels)
    logits = model(pictures).logits
    (logits * weights).sum().backward()
    # The gradients under our names: saved and imported as if they were weights.
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(tmp_path / "gradients")
    import_folder(tmp_path / "gradients", tmp_path / "ours of gradients")
    gradients = tensors_of(tmp_path / "ours of gradients", "model.")
    expected = {f"gradient of {n}": g for n, g in gradients.items()} | {"logits": logits.detach()}
    for attention in ("explicit", "fused"):
        other = ours(tmp_path / "ours", attention=attention)
        logits = our_logits(other, pictures)
        (logits * weights).sum().backward()
        got = {f"gradient of {n}": p.grad for n, p in other.named_parameters()}
        got["logits"] = logits.detach()
        assert got.keys() == expected.keys()
        worst = {label: apart.max().item() for label, apart in relative(got, expected)}
        assert max(worst.values()) < 1e-5, (attention, max(worst, key=worst.get), worst)


SWAPS = [
    again("blocks.*.attention.query", "blocks.*.attention.key"),
    ("blocks.*.attention_norm", "blocks.*.mlp_norm"),
    again("blocks.*.attention.value", "blocks.*.attention.output"),
]


@pytest.mark.parametrize("first, second", SWAPS)
def test_a_wrong_table_shows(folder, tmp_path, monkeypatch, first, second):
    table = models.picture_huggingface.VIT.modules
    locations = table[first], table[second]
    monkeypatch.setitem(table, first, locations[1])
    monkeypatch.setitem(table, second, locations[0])
    import_folder(folder, tmp_path / "ours")
    model = theirs(0)
    pictures = torch.rand(2, 3, model.config.image_size, model.config.image_size)
    with torch.no_grad():
        got, expected = our_logits(ours(tmp_path / "ours"), pictures), model(pictures).logits
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


# --- refusals -------------------------------------------------------------------------------------

# Changes of config.json, and words of the refusal.
REFUSED = [
    ({"hidden_act": "relu"}, 'hidden_act is "relu"; this project has only "gelu" or "gelu_new"'),
    ({"qkv_bias": False}, "qkv_bias is false"),
    ({"num_channels": 1}, "num_channels is 1; this project has only 3"),
    ({"image_size": [8, 8]}, r"image_size is \[8, 8\]; this project takes an integer"),
    ({"patch_size": 7}, "patch_size 7: must divide picture_size"),
    ({"id2label": {"1": "a"}}, "id2label has not one name for each"),
    ({"id2label": {"0": 1}}, "config.json: Expected `str`"),
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


@pytest.mark.parametrize("class_tokens", [0, 8])
def test_a_vit_that_transformers_lacks(class_tokens):
    sizes = dict(num_layers=1, hidden_size=16, num_heads=2)
    config = ViTConfig(**sizes, class_tokens=class_tokens)
    words = f"ViTForImageClassification has no .*class_tokens {class_tokens}"
    with pytest.raises(HuggingFaceError, match=words):
        huggingface.architecture_of(config)
