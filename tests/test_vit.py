"""ViT (models/vit.py): every layout gives the loss, gradients and parameters of one device; its
runs and their data."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import random_layouts
import torch
from parity import SMALL, again, check, differs, gates, needs_compiler, same, train, without_cpp
from PIL import Image
from small_run import equal, lines_of, refusal, run, tensors_of, write_lines
from test_checkpoint import trained
from test_compositions import small_loss_scale

import sequence_parallel
from base.json_files import JSONError
from base.model_config import FieldError
from course import ranks
from models import use_picture, vit
from models.picture_data import PictureData
from models.picture_runs import ViTRun
from models.pictures import Context, Drawn, open_pictures, read_picture, to_tensor
from models.shapes import drawing, edited
from models.vit import ViTConfig, to_patches, to_pictures
from run import checkpoint
from run.config import ConfigError
from run.data import DataError

KEPT = SMALL.keys() - {"seq_length", "vocab_size"}
VIT = {name: SMALL[name] for name in KEPT} | dict(command="vit.py", model="tiny", num_layers=4)
VIT |= dict(picture_size=16, patch_size=4, class_tokens=2)
# 9 patches, whose mean is read
MEAN = VIT | dict(picture_size=9, patch_size=3, class_tokens=0)

FULL, SELECTIVE = dict(recompute="full"), dict(recompute="selective")
SEQUENCE = dict(tp=2, sequence_parallel=True)
FUSED = dict(dropout=0.0, attention="fused")
ZERO_3 = dict(zero_stage=3, micro_batch_size=2)
ZB_H1 = dict(pp=2, schedule="zb-h1")
FP8 = dict(fp8="delayed", fp8_scales="any", fp8_skip=0, micro_batch_size=2)
HYBRID = dict(data_parallel_replicate_degree=2, zero_stage=3)

CASES = {
    "a sequence in two": (VIT, 2, [SEQUENCE | FULL]),
    "two stages": (VIT | dict(class_tokens=1), 2, [ZB_H1, dict(pp=2, layer_split=[0, 4])]),
    "the mean": (MEAN, 2, [dict(tp=2), ZERO_3 | SELECTIVE]),
}
MORE = {
    "four": (VIT, 4, [SEQUENCE | ZB_H1 | FULL]),
    # The embedding alone, then the head alone.
    "four, uneven": (
        VIT,
        4,
        [SEQUENCE | dict(pp=2, layer_split=split) for split in ([0, 4], [4, 0])],
    ),
    "one rank": (VIT, 1, [SELECTIVE, FULL | FUSED, dict(micro_batch_size=1)]),
    "the mean in two": (MEAN | dict(picture_size=12), 2, [SEQUENCE, SEQUENCE | FULL]),
    "a class token in three": (
        MEAN | dict(class_tokens=3, num_heads=3, hidden_size=24),
        3,
        [dict(tp=3, sequence_parallel=True) | SELECTIVE, dict(tp=3)],
    ),
    "class tokens on every shard": (VIT | dict(class_tokens=16), 2, [SEQUENCE]),
    "tensor": (VIT, 2, [dict(tp=2), dict(tp=2) | FULL, SEQUENCE | FUSED]),
    "stages": (
        VIT,
        2,
        [
            dict(pp=2),
            dict(pp=2, schedule="gpipe") | SELECTIVE,
            dict(pp=2, layer_split=[3, 1]),
            dict(pp=2, layer_split=[4, 0]),
            dict(pp=2, virtual_stages=2),
            ZB_H1 | FULL,
        ],
    ),
    "data": (VIT, 2, [dict(zero_stage=stage, micro_batch_size=2) for stage in range(4)]),
    "three replicas": (VIT | dict(global_batch_size=6), 3, [ZERO_3, dict(zero_stage=2)]),
    "on 4": (
        VIT,
        4,
        [
            HYBRID,
            HYBRID | dict(zero_stage=1),
            ZERO_3 | ZB_H1,
            SEQUENCE | ZERO_3 | FULL,
            dict(pp=4),
            dict(pp=2, virtual_stages=2, zero_stage=2),
            dict(tp=4),
            dict(tp=2, pp=2),
        ],
    ),
    "fp8": (VIT | FP8, 2, [SEQUENCE | FULL, dict(tp=2), ZB_H1, ZERO_3]),
    "fp8, current": (VIT | FP8 | dict(fp8="current"), 2, [SEQUENCE]),
    "kernels off": (VIT | dict(kernels="off"), 2, [SEQUENCE]),
}


@gates(CASES, MORE)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)


@pytest.mark.parametrize(
    "flags, seed",
    [
        ("--pictures", 9),
        *[again("--pictures", seed) for seed in range(100, 140)],
        *[again("--pictures --fp8", seed) for seed in range(8)],
        *[again("--pictures --hybrid", seed) for seed in range(8)],
    ],
)
def test_random_layouts(flags, seed):
    random_layouts.check(random_layouts.drawn(flags, seed))


@needs_compiler
@pytest.mark.repetition
@pytest.mark.parametrize("world, flags", [(1, FULL), (2, SEQUENCE), (2, ZERO_3)], ids=str)
def test_compiled(world, flags):
    one = train(base=VIT, steps=1)
    same(train(world, base=VIT, steps=1, mutate=without_cpp, compile=True, **flags), one)


@pytest.mark.repetition
def test_float32():
    check(2, [SEQUENCE, dict(pp=2)], VIT | dict(precision="fp32"), 1, 1e-5)


@pytest.mark.repetition
def test_float16():
    """As near as 11 bits of mantissa are."""
    one = train(base=VIT, steps=1, dropout=0.0)
    flags = SEQUENCE | dict(precision="fp16", dropout=0.0)
    half = train(2, base=VIT, steps=1, mutate=small_loss_scale, **flags)
    largest = max(gradient.abs().max() for gradient in one.gradients.values())
    for name, gradient in one.gradients.items():
        # a key bias has no gradient
        scale = max(gradient.abs().max(), 1e-3 * largest)
        assert (half.gradients[name] - gradient).abs().max() < 0.01 * scale, name


# --- the gate can fail ----------------------------------------------------------------------------


def head_counted_by_each_rank():
    def forward(self, x, targets=None):
        if self.group is not None:
            x = sequence_parallel.gather_sequence(x, self.group)
        return self.read(x, targets)

    vit.WholeHead.forward = forward


def patches_of_the_first_shard():
    def share_sequence(self, group):
        self.shard = 0, group.size()

    vit.PatchEmbedding.share_sequence = share_sequence


def causal_mask():
    vit.see_all = lambda block, config: None


@pytest.mark.parametrize(
    "mutate, flags",
    [
        (head_counted_by_each_rank, SEQUENCE),
        (patches_of_the_first_shard, SEQUENCE),
        again(causal_mask, dict(tp=2)),
    ],
)
def test_gate_sees(mutate, flags):
    differs(train(2, base=VIT, steps=1, mutate=mutate, **flags), train(base=VIT, steps=1))


# --- the model ------------------------------------------------------------------------------------


def test_patches_by_hand():
    """Row by row, a patch's first channel first; and back."""
    pictures = torch.arange(32.0).view(1, 2, 4, 4)
    patches = to_patches(pictures, 2)
    assert patches[0].tolist() == [
        [0, 1, 4, 5, 16, 17, 20, 21],
        [2, 3, 6, 7, 18, 19, 22, 23],
        [8, 9, 12, 13, 24, 25, 28, 29],
        [10, 11, 14, 15, 26, 27, 30, 31],
    ]
    assert to_pictures(patches, 2).equal(pictures)


@pytest.mark.parametrize("class_tokens", [0, 1])
def test_every_patch_is_seen(class_tokens):
    """Each pixel of the picture has a gradient from each label."""
    config = ViTConfig(1, 16, 2, picture_size=6, patch_size=2, class_tokens=class_tokens, classes=3)
    pictures = torch.rand(1, 3, 6, 6, requires_grad=True)
    tokens = torch.zeros(1, config.seq_length, dtype=torch.long)
    logits = config.build()(tokens, None, Context(pictures=pictures))
    for label in range(3):
        (gradient,) = torch.autograd.grad(logits[0, 0, label], pictures, retain_graph=True)
        assert gradient.abs().min() > 0


SIZES = dict(num_layers=1, hidden_size=16, num_heads=2)


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(patch_size=15), "patch_size 15: must divide picture_size 224"),
        (dict(picture_size=0), "picture_size 0: must be at least 1"),
        (dict(class_tokens=-1), "class_tokens -1: must be at least 0"),
        (dict(classes=0), "classes 0"),
        (dict(activation="relu"), "activation relu: must be exact-gelu"),
        (dict(positions="rotary"), "positions rotary: must be learned"),
    ],
)
def test_refused_shapes(fields, words):
    with pytest.raises(FieldError) as refused:
        ViTConfig(**SIZES | fields)
    assert str(refused.value).startswith(words)


# --- the data -------------------------------------------------------------------------------------


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def make_folder(folder: Path, labels: tuple[str, ...], count: int = 8) -> Path:
    """A folder of folders: dark pictures of the first label, brighter ones of the next."""
    for n in range(count):
        which = n % len(labels)
        pixels = np.random.default_rng(n).integers(0, 40, (9, 12, 3)) + 200 * which // (
            len(labels) - 1 or 1
        )
        path = folder / labels[which] / f"{n}.png"
        save(path, pixels.astype(np.uint8))
        path.with_suffix(".txt").write_text(f"number {n}\n")
    return folder


def test_a_folder_of_folders(tmp_path):
    """The middle square, the label of the folder, the caption of the file beside it."""
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, 4:12] = 255
    save(tmp_path / "white" / "a.png", pixels)
    (tmp_path / "white" / "a.txt").write_text(" all white \n")
    save(tmp_path / "black" / "deep" / "b.PNG", 0 * pixels)
    (tmp_path / "black" / ".hidden.png").touch()
    (tmp_path / "folder.png").mkdir()
    pictures = open_pictures([str(tmp_path)], 8)
    found = {example.label: example for example in pictures}
    assert found.keys() == {"white", "deep"}
    assert to_tensor([found["white"].picture]).eq(1).all()
    assert to_tensor([found["deep"].picture]).eq(-1).all()
    assert (found["white"].caption, found["deep"].caption) == ("all white", "")
    # A run that goes on says so where a picture is another one.
    save(tmp_path / "white" / "a.png", np.random.default_rng(0).integers(0, 255, pixels.shape, "B"))
    assert open_pictures([str(tmp_path)], 8).content != pictures.content


def test_a_folder_with_metadata(tmp_path):
    pixels = np.full((4, 4, 3), 100, dtype=np.uint8)
    for name in "abc":
        save(tmp_path / "pictures" / f"{name}.png", pixels + ord(name) - ord("a"))
    lines = [
        {"file_name": "pictures/a.png", "text": "first", "label": 7},
        {"file_name": "pictures/b.png", "text": "then", "source": "pictures/c.png"},
    ]
    write_lines(tmp_path / "metadata.jsonl", lines)
    found = {e.caption: e for e in open_pictures([str(tmp_path)], 4)}
    assert found["first"].label == "7" and found["first"].source is None
    assert found["then"].label == "" and found["then"].source[0, 0, 0] == 102


def test_lines_about_one_picture_stay_together(tmp_path):
    """None is trained on and held out."""
    lines = [{"file_name": f"{n % 30}.png", "text": f"{n} of {n % 30}"} for n in range(90)]
    for n in range(30):
        save(tmp_path / f"{n}.png", np.zeros((4, 4, 3), dtype=np.uint8))
    write_lines(tmp_path / "metadata.jsonl", lines)
    parts = [PictureData(open_pictures([str(tmp_path)], 4), 1, 0, held) for held in (False, True)]
    trained, held_out = ([d.example(n).caption for n in range(d.num_sequences)] for d in parts)
    assert len(held_out) == 3 and len(set(trained + held_out)) == 90
    assert not {text.split()[2] for text in held_out} & {text.split()[2] for text in trained}
    assert parts[0].describe() == "87 to train on, 3 held out"


@pytest.mark.parametrize("name", ["0.txt", "0.png"])
def test_a_file_that_is_damaged(name, tmp_path):
    """A caption that is not UTF-8; a picture that Pillow calls an error of syntax."""
    path = make_folder(tmp_path, ("a", "b"), 2) / "a" / name
    if name == "0.txt":
        path.write_bytes(b"\xff")
    else:
        save(path, np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8))
        before, _, after = path.read_bytes().rpartition(b"IDAT")
        path.write_bytes(before + b"\0\0\0\0" + after)
    with pytest.raises(DataError, match=f"{name}: cannot be read"):
        list(open_pictures([str(tmp_path)], 4))


def test_how_a_file_is_read(tmp_path):
    """Grey of 16 bits; what is transparent becomes white; a camera that was held upside down."""
    path, half = tmp_path / "a.png", np.zeros((4, 4, 4), dtype=np.uint8)
    save(path, np.full((4, 4), 40_000, dtype=np.uint16))
    assert (read_picture(path, 4) == 40_000 // 256).all()
    half[:2, :, 3] = 255
    save(path, half)
    assert read_picture(path, 4)[:, 0, 0].tolist() == [0, 0, 255, 255]
    turned = Image.Exif()
    turned[0x0112] = 3
    Image.fromarray(half[..., 3]).save(path, exif=turned)
    assert read_picture(path, 4)[:, 0, 0].tolist() == [0, 0, 255, 255]


def test_an_edit_begins_with_its_source():
    """In a drawn pair, the caption says how to come from there to the picture."""
    for n in range(5):
        pair, before = Drawn(5, 16, True)[n], drawing(n)
        after, words = edited(before, n)
        assert np.array_equal(pair.source, before.draw(16)) and pair.caption == words
        assert np.array_equal(pair.picture, after.draw(16)) and after != before


@pytest.mark.parametrize("missing", ["in every line", "in one line"])
def test_edits_need_sources(missing, tmp_path):
    lines = [{"file_name": f"{n}.png", "source": "0.png", "text": "edit"} for n in range(3)]
    for line in lines if missing == "in every line" else lines[1:2]:
        del line["source"]
    for n in range(3):
        save(tmp_path / f"{n}.png", np.zeros((4, 4, 3), dtype=np.uint8))
    write_lines(tmp_path / "metadata.jsonl", lines)
    with pytest.raises(DataError, match=r'\.png has no "source" in metadata.jsonl'):
        open_pictures([str(tmp_path)], 4, edits=True)
    (tmp_path / "deep").mkdir()
    (tmp_path / "metadata.jsonl").rename(tmp_path / "deep" / "metadata.jsonl")
    with pytest.raises(DataError, match=f"has a metadata.jsonl in {tmp_path}/deep; name this"):
        open_pictures([str(tmp_path)], 4)


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"text": "a"}', "metadata.jsonl, line 1: .*file_name"),
        ("[1]", "metadata.jsonl, line 1: Expected `object`"),
        ('{"file_name": "a.png"}\n{"file_name": "no.png"}', r"no.png: cannot be read \(No such"),
        ('{"file_name": "metadata.jsonl"}', "metadata.jsonl: cannot be read .*; mend this, or"),
        ('{"file_name": "a.png"}', r"needs two pictures or more \(.png, .jpg, .jpeg\), and has 1"),
        (b"\xff", "metadata.jsonl, line 1: not JSON"),
    ],
)
def test_a_folder_that_cannot_be_read(text, words, tmp_path):
    save(tmp_path / "a.png", np.zeros((4, 4, 3), dtype=np.uint8))
    text = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "metadata.jsonl").write_bytes(text)
    with pytest.raises((DataError, JSONError), match=words):
        list(open_pictures([str(tmp_path)], 4))


# --- runs -----------------------------------------------------------------------------------------

FLAGS = "--picture-size 8 --patch-size 4 --num-layers 1 --hidden-size 16 --num-heads 2"
FLAGS += (
    " --global-batch-size 4 --eval-every 0 --warmup-steps 0 --lr 0.01 --min-lr 0.01 --device cpu"
)


def vit_run(*words) -> tuple:
    return ("-m", "models.vit", *" ".join(map(str, (FLAGS, *words))).split())


@pytest.mark.parametrize(
    "words, message",
    [
        ("--data shapes --patch-size 3", "--patch-size 3: must divide --picture-size 8"),
        ("--data shapes --classes 3", "--classes 3: the data has 16 labels"),
        ("--data shapes shapes", "--data shapes shapes: names one set of pictures"),
        ("--data nowhere", "--data nowhere: is neither shapes, nor digits, nor a folder"),
        ("--data {one}", "--data {one}: needs two labels or more, and a label for each"),
        ("--data {bare}", "--data {bare}: needs two labels or more, and a label for each"),
        ("--data {broken}", "0.png: cannot be read (cannot identify image file"),
        ("--data shapes --class-tokens -1", "--class-tokens -1: must be at least 0"),
    ],
)
def test_refused_flags(words, message, tmp_path, capsys):
    folders = {name: tmp_path / name for name in ("one", "bare", "broken")}
    make_folder(folders["one"], ("a",), 2)
    make_folder(folders["broken"], ("a", "b"), 2)
    (folders["broken"] / "a" / "0.png").write_bytes(b"no picture")
    make_folder(folders["bare"], ("a",), 2)
    lines = [{"file_name": "a/0.png", "label": "a"}, {"file_name": "a/1.png"}]
    write_lines(folders["bare"] / "metadata.jsonl", lines)
    out = tmp_path / "out"
    said = refusal(capsys, *vit_run(words.format(**folders), "--out", out))
    assert message.format(**folders) in said
    assert not list(out.glob("**/*.safetensors"))


@pytest.mark.parametrize("tp, size, k", [(2, 8, 1), (4, 12, 2), (3, 16, 0), (4, 8, 4)])
def test_class_tokens_that_would_fit(tp, size, k):
    """Where t does not divide the sequence, the message names a number that makes it fit."""
    fields = dict(model="tiny", picture_size=size, patch_size=4, hidden_size=48, num_heads=12)
    fields |= dict(tp=tp, sequence_parallel=True)
    if ((size // 4) ** 2 + k) % tp == 0:
        assert ViTRun(class_tokens=k, **fields).model_config().seq_length % tp == 0
        return
    with pytest.raises(ConfigError, match=r"--class-tokens \d+ would fit") as refused:
        ViTRun(class_tokens=k, **fields).model_config()
    fits = int(re.search("--class-tokens ([0-9]+) would", str(refused.value))[1])
    assert k < fits < k + tp
    assert ViTRun(class_tokens=fits, **fields).model_config().seq_length % tp == 0


def test_a_broken_picture_in_the_middle(tmp_path, capsys):
    """Where its first bytes are right, the run ends when it comes to it, and names it in a line."""
    folder = make_folder(tmp_path / "data", ("a", "b"), 24)
    examples = open_pictures([str(folder)], 8)
    path = folder / examples.files[11].file_name
    path.write_bytes(path.read_bytes()[:60])
    assert run(*vit_run("--data", folder, "--out", tmp_path / "out", "--steps 6")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and re.search(
        rf"step \d: {path}: cannot be read \(.*leave it out", lines[0]
    )
    path.write_bytes(b"no picture")
    assert f"{path}: cannot be read" in refusal(capsys, *vit_run("--data", folder))


def test_a_run_learns_and_goes_on(tmp_path, capsys):
    """A folder of two labels: a run that goes on equals one that never stopped, names its labels,
    and refuses data of others."""
    words = ("--data", make_folder(tmp_path / "data", ("dark", "bright"), 24), "--dropout 0.1")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(*vit_run(*words, "--steps 24 --out", whole)) == 0
    assert run(*vit_run(*words, "--steps 9 --out", out)) == 0
    assert run(*vit_run(*words, "--steps 24 --resume --out", out)) == 0
    assert equal(tensors_of(whole), tensors_of(out))
    assert lines_of(whole)[-1]["eval_accuracy"] == 1.0
    assert (out / "sample.txt").read_text().splitlines()[0] in (
        "dark (right: dark)",
        "bright (right: bright)",
    )
    assert checkpoint.read_index(checkpoint.find(out))["labels"] == ["bright", "dark"]
    files = [str(tmp_path / "data" / name) for name in ("bright/1.png", "dark/0.png")]
    use_picture.main(["label", "--checkpoint", str(out), "--picture", *files])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [line["picture"] for line in said] == files
    assert [next(iter(line["labels"])) for line in said] == ["bright", "dark"]
    assert all(sum(line["labels"].values()) == pytest.approx(1) for line in said)
    for labels in (("dark", "light"), ("dark", "light", "bright")):
        other = make_folder(tmp_path / f"{len(labels)} labels", labels, 24)
        said = refusal(capsys, *vit_run("--steps 25 --resume --out", out), "--data", other)
        assert f"--data {other}: has other labels than" in said


def test_a_model_of_other_labels_is_fine_tuned(tmp_path, capsys):
    """Other labels: a new head, all else of --load. Some of its labels: its head too."""
    flags = "--lr 0 --min-lr 0 --steps 1"
    base = ("--data", make_folder(tmp_path / "a", ("x", "y", "z"), 24), "--out", tmp_path / "base")
    assert run(*vit_run(*base, "--steps 2")) == 0
    for labels, kept in ((("x", "w"), False), (("z", "y"), True)):
        data, out = make_folder(tmp_path / "".join(labels), labels), tmp_path / f"of {labels[1]}"
        words = ["--load", tmp_path / "base", "--data", data, flags, "--out"]
        assert run(*vit_run(*words), out) == 0
        assert ("for other labels" in capsys.readouterr().out) != kept
        before, after = (tensors_of(path, "model.") for path in (tmp_path / "base", out))
        for name, tensor in before.items():
            assert after[name].equal(tensor) == (kept or not name.startswith("head.output"))
        index = checkpoint.read_index(checkpoint.find(out))
        assert index["labels"] == (["x", "y", "z"] if kept else ["w", "x"])
        assert index["model"]["classes"] == len(index["labels"])
    # The run of other labels goes on.
    words = "--load", tmp_path / "base", "--data", tmp_path / "xw", flags, "--steps 2 --resume"
    assert run(*vit_run(*words, "--out"), tmp_path / "of w") == 0
    assert lines_of(tmp_path / "of w")[-1]["step"] == 2
    words = "--load", tmp_path / "base", "--data", tmp_path / "xw", "--picture-size 12 --out"
    assert "picture_size is 8 there and 12" in refusal(capsys, *vit_run(*words, tmp_path / "c"))


PAIRS = {
    "class tokens": (VIT, [(2, SEQUENCE), (2, dict(pp=2, virtual_stages=2))]),
    "the mean": (MEAN, [(2, ZERO_3), (2, dict(tp=2))]),
    "on 4": (VIT, [(4, ZERO_3 | ZB_H1), (1, {})]),
}


@pytest.mark.parametrize(
    "base, layouts", [PAIRS["class tokens"], again(*PAIRS["the mean"]), again(*PAIRS["on 4"])]
)
def test_a_checkpoint_loads_under_another_layout(tmp_path, base, layouts):
    """The losses go on as those of one device that never stopped."""
    whole, _ = ranks.run(trained, 1, 1, base, [None], None, 4)[0][0]
    (saving, saved), (loading, loaded) = layouts
    ranks.run(trained, saving, saving, base | saved, [None], str(tmp_path), 2)
    found = ranks.run(trained, loading, loading, base | loaded, [str(tmp_path)], None, 2)[0]
    assert found[0][0] == pytest.approx(whole[2:], rel=1e-10)
