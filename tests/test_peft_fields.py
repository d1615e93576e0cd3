"""Every field of peft's LoraConfig and IA3Config: what finetune/adapters.py imports has the logits
that peft itself computes from the folder, or the folder is refused and the message names the
field."""

import copy
import dataclasses
import json
import re

import pytest
import torch
from parity import again
from test_adapter_files import SHAPES, TOKENS, command, difference, unmerged, whole_value
from test_generate import build, loud, save

from inference import huggingface
from inference.peft_folder import IGNORED

# peft warns of many of these fields
pytestmark = pytest.mark.filterwarnings("ignore")

# method -> its configuration in peft
METHODS = {"lora": "LoraConfig", "ia3": "IA3Config"}
CASES = [
    *[("lora", "gpt"), ("ia3", "llama")],
    *[again("lora", "llama"), again("lora", "bloom"), again("ia3", "gpt"), again("ia3", "bloom")],
]
# {0} and {1} below: a module with query, key and value, or one of these; and the MLP's second one
MODULES = {
    "gpt": ("c_attn", "mlp.c_proj"),
    "llama": ("k_proj", "down_proj"),
    "bloom": ("query_key_value", "dense_4h_to_h"),
}
# values that are not the default; a field that is not here, of this peft or a later one, has OTHERS
VALUES = {
    "task_type": ["CAUSAL_LM"],
    "peft_type": ["LOHA", "ADALORA"],
    "auto_mapping": [{"base_model_class": "x", "parent_library": "transformers"}],
    "peft_version": ["0.1.0"],
    "base_model_name_or_path": ["somewhere/else"],
    "revision": ["main"],
    "inference_mode": [True, False],
    "fan_in_fan_out": [True, False],
    "r": [2, 8, 12, 0, -1],
    "lora_alpha": [3, 0.5, 64, 0],
    "lora_dropout": [0.3],
    "use_rslora": [True],
    "target_modules": ["{0}", ["{0}"], ".*{1}", ["{0}", "{1}", "nowhere"], "all-linear", "(", []],
    "exclude_modules": [["{0}"], "{1}", ".*{1}", ["nowhere"], [], "", "*"],
    "feedforward_modules": [[], ["{0}"], ["{0}", "{1}"], ".*{1}", "{0}", "(", None],
    "bias": ["all", "lora_only"],
    "init_lora_weights": [False, "gaussian", "orthogonal", "pissa", "olora", "mica", "loftq"],
    "init_ia3_weights": [False],
    "rank_pattern": [{"{0}": 9}, {"{0}": 12}, {"{0}": 9, "{1}": 5}, {".*{1}": 2, "x": 3}, {"(": 3}],
    "alpha_pattern": [{"{0}": 64}, {"{0}": 18}, {"1..*{1}": 2, "{1}": 0.5}, {"nowhere": 3}],
    "layers_to_transform": [0, [0], [1]],
    "megatron_core": ["megatron.other"],
    "qalora_group_size": [8],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 1.5}],
}
OTHERS = [0, 1, True, "x", [], {}, [0], {"x": 1}]
# what is fine alone, two and three at a time
TOGETHER = [
    {"use_rslora": True, "rank_pattern": {"{0}": 12}},
    {"use_rslora": True, "alpha_pattern": {"{0}": 18}},
    {"rank_pattern": {"{0}": 12}, "alpha_pattern": {"{0}": 18}},
    {"rank_pattern": {"{0}": 12}, "alpha_pattern": {"{1}": 18}},
    {"rank_pattern": {"{0}": 2}, "alpha_pattern": {"{0}": 18}, "use_rslora": True},
    {"target_modules": "all-linear", "exclude_modules": ["{0}"]},
]


@pytest.fixture(scope="module")
def peft():
    """The library: its import takes a second."""
    return pytest.importorskip("peft", reason="pyproject.toml names it")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A folder with a base of each shape, and the same models in transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("fields")
    transformers.utils.logging.disable_progress_bar()
    theirs = {}
    for shape in MODULES:
        save(folder / shape, loud(build(**SHAPES[shape])))
        huggingface.export_folder(folder / shape, folder / f"{shape}-hf")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{shape}-hf")
        theirs[shape] = model.eval()
    return folder, theirs


def named(value, shape: str):
    """A value of VALUES with the names of modules in it."""
    if isinstance(value, dict):
        return {named(key, shape): named(each, shape) for key, each in value.items()}
    if isinstance(value, list):
        return [named(each, shape) for each in value]
    if isinstance(value, str):
        return value.replace("{0}", MODULES[shape][0]).replace("{1}", MODULES[shape][1])
    return value


def usual(method: str, shape: str) -> dict:
    first, second = MODULES[shape]
    if method == "ia3":
        return {"target_modules": [first, second], "feedforward_modules": [second]}
    return {"target_modules": [first, second], "r": 4, "lora_alpha": 6}


def write(peft, model, method: str, fields: dict, path) -> torch.Tensor:
    """Write a folder of peft with values that do something. Returns its logits."""
    config = getattr(peft, METHODS[method])(**fields)
    made = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_" in name or "ia3_l" in name:
                p.copy_(whole_value(name.replace("ia3_l", "scale"), p.shape))
                # finetune/adapters.py scales no queries: of all heads, or head by head
                if "c_attn.ia3_l" in name:
                    p[: len(p) // 3] = 1
                if "query_key_value.ia3_l" in name:
                    p.view(made.config.n_head, 3, -1)[:, 0] = 1
        logits = made.eval()(TOKENS).logits
    made.save_pretrained(path)
    return logits


def imported(peft, bases, shape: str, path, change: dict, capsys, logits=None):
    """peft's logits, which are those of the import; None where it is refused by name. logits: where
    they are known; otherwise peft reads the folder too."""
    folder, theirs = bases
    out = path.with_name(f"{path.name}-{len(list(path.parent.iterdir()))}")
    status, _, err = command(capsys, "import", path, "--base", folder / shape, out)
    if status:
        assert err.count("\n") == 1
        assert any(re.search(rf"\b{name}\b", err) for name in change), (change, err)
        return None
    if logits is None:
        with torch.no_grad():
            model = copy.deepcopy(theirs[shape])
            logits = peft.PeftModel.from_pretrained(model, path)(TOKENS).logits
    assert difference(unmerged(folder / shape, out)(TOKENS), logits) < 1e-5, change
    return logits


@pytest.mark.parametrize("method, shape", CASES)
def test_what_is_written_into_a_folder(method, shape, peft, bases, tmp_path, capsys):
    """The tensors stay. A field that is ignored changes nothing in peft either."""
    path = tmp_path / "peft"
    write(peft, bases[1][shape], method, usual(method, shape), path)
    file = path / "adapter_config.json"
    config = json.loads(file.read_text())
    before = imported(peft, bases, shape, path, {}, capsys)
    became = {}
    for field in dataclasses.fields(getattr(peft, METHODS[method])):
        for value in named(VALUES.get(field.name, OTHERS), shape):
            file.write_text(json.dumps(config | {field.name: value}))
            logits = imported(peft, bases, shape, path, {field.name: value}, capsys)
            word = "refused"
            if logits is not None:
                word = "same" if torch.equal(logits, before) else "other"
            became.setdefault(field.name, set()).add(word)
    ignored = {name for name, words in became.items() if words == {"same"}}
    changing = {name for name, words in became.items() if "other" in words}
    assert ignored == IGNORED & became.keys() | {"lora_dropout"} & became.keys()
    expected = {"lora_alpha", "use_rslora", "alpha_pattern"}
    assert changing == (expected if method == "lora" else set())


@pytest.mark.parametrize("method, shape", CASES)
def test_what_peft_makes(method, shape, peft, bases, tmp_path, capsys):
    """Each field, and several, with the tensors that peft makes for them."""
    fields = getattr(peft, METHODS[method]).__dataclass_fields__.keys()
    changes = [{name: value} for name, values in VALUES.items() for value in values]
    changes = [c for c in changes if {*c} <= fields - IGNORED]
    same = []
    for n, change in enumerate(changes + TOGETHER * (method == "lora")):
        change = named(change, shape)
        path = tmp_path / f"peft-{n}"
        try:
            fields = usual(method, shape) | change
            logits = write(peft, bases[1][shape], method, fields, path)
        except Exception:
            # peft itself refuses it
            continue
        # in the words of the user: peft makes a list of "all-linear"
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        if imported(peft, bases, shape, path, change, capsys, logits) is not None:
            same.append(change)
    assert len(same) > (25 if method == "lora" else 7), same
    assert ({"target_modules": "all-linear"} in same) == (method == "lora")
