"""Every field of tokenizer_config.json that transformers knows, with a value that changes
something: the same ids and texts here as there, or a refusal that names the field."""

import inspect
import json
import re
from pathlib import Path

import published_tokenizers as published
import pytest
from parity import again
from published_tokenizers import KINDS
from test_tokenizer import edit_json

from run.tokenizer import FileTokenizer, TokenizerError, prompt_ids

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()

NEW = "<|new|>"
# Field -> a value that is not the published one. ANY: a token of the vocabulary that is none of
# the added tokens.
ANY = object()
VALUES = dict(
    bos_token=ANY,
    eos_token=ANY,
    unk_token=ANY,
    sep_token=ANY,
    pad_token=ANY,
    cls_token=ANY,
    mask_token={"__type": "AddedToken", "content": ANY},
    image_token=ANY,
    extra_special_tokens=[ANY],
    additional_special_tokens=[ANY],
    model_specific_special_tokens={"image_token": ANY},
    add_prefix_space=True,
    split_special_tokens=True,
    fix_mistral_regex=True,
    fast_tokenizer_files=["tokenizer.4.0.0.json"],
    add_bos_token=False,
    add_eos_token=True,
    legacy=True,
    errors="ignore",
    clean_up_tokenization_spaces=True,
    use_default_system_prompt=True,
    model_max_length=4,
    max_len=4,
    padding_side="left",
    truncation_side="left",
    model_input_names=["input_ids"],
    verbose=True,
    processor_class="Processor",
    backend="tokenizers",
    name_or_path="elsewhere",
    tokenizer_file="elsewhere.json",
    vocab_file="elsewhere.json",
    tokenizer_truncation={"max_length": 2, "stride": 0, "strategy": "longest_first"},
    tokenizer_padding={"length": 9, "pad_id": 0, "pad_token": "<pad>"},
    tokenizer_class="PreTrainedTokenizerFast",
    chat_template="{{ bos_token }}",
    chat_control_tokens=["hello"],
    response_template={},
    response_schema={},
    auto_map={},
    is_local=False,
    local_files_only=False,
    added_tokens_decoder={},
)
VALUES["tokenizer_truncation"]["direction"] = "right"
VALUES["tokenizer_padding"] |= {"pad_type_id": 0, "direction": "right", "pad_to_multiple_of": None}
# What transformers itself fills in, or what JSON cannot hold.
NOT_OF_THE_FILE = {"vocab", "merges", "tokenizer_object", "tokenizer", "post_processor"}
NOT_OF_THE_FILE |= {"_json_truncation", "_json_padding", "_spm_precompiled_charsmap", "gguf_file"}
NOT_OF_THE_FILE |= {"init_inputs", "unk_id", "self", "kwargs", "args"}
# About the text of an id, not about the ids of a text.
OF_TEXTS = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"}
TEXTS = [
    "hello world",
    " hello  World É",
    "  1234",
    "x<|new|>y",
    "x <|new|> y",
    "a{0} b",
    "a {0}  b",
]
TEXTS += ["hellohello{0}{1}x ", "ba{1}", "{1}"]


def a_token(folder: Path) -> str:
    """A token of the vocabulary that is none of the added tokens."""
    file = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"] for token in file["added_tokens"]}
    vocabulary = file["model"]["vocab"]
    # a list of pieces and their probabilities, or a dictionary
    names = [each if isinstance(each, str) else each[0] for each in vocabulary]
    return next(name for name in names if re.fullmatch("[a-z]{2,}", name) and name not in added)


def published_folder(kind: str, folder: Path) -> Path:
    published.write(kind, folder)
    published.write_json(folder / "config.json", {"model_type": KINDS[kind].model_type})
    return folder


def remove_numbers(folder: Path) -> None:
    """As folders were before there was added_tokens_decoder."""
    content = json.loads((folder / "tokenizer_config.json").read_text())
    del content["added_tokens_decoder"]
    published.write_json(folder / "tokenizer_config.json", content)


def with_token(value, token: str):
    if value is ANY:
        return token
    if isinstance(value, list):
        return [with_token(each, token) for each in value]
    if isinstance(value, dict):
        return {key: with_token(each, token) for key, each in value.items()}
    return value


def differences(folder: Path, kind: str) -> set[str]:
    """The texts with other ids, or other texts of their ids, than in transformers."""
    ours = FileTokenizer(str(folder / "tokenizer.json"))
    # Llama 2's class is built anew from its vocabulary (docs/training.md)
    loader = transformers.AutoTokenizer
    if kind == "llama2":
        loader = transformers.PreTrainedTokenizerFast
    theirs = loader.from_pretrained(folder)
    differing = set()
    for pattern in TEXTS:
        text = pattern.format(KINDS[kind].specials[-1], a_token(folder))
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        same = ours.encode(text) == ids and prompt_ids(ours, text) == theirs(text)["input_ids"]
        # an end token never becomes text here
        kept = [i for i in ids if i not in ours.stop_ids]
        same &= ours.decode(ids) == theirs.decode(kept, skip_special_tokens=True)
        if not same:
            differing.add(pattern)
    if ours.eot != theirs.eos_token_id and theirs.eos_token_id is not None:
        differing.add("the end token")
    return differing


def check(folder: Path, kind: str, word: str, before: set[str]) -> str:
    """Returns the refusal, or nothing."""
    try:
        assert differences(folder, kind) <= before, (kind, word)
        return ""
    except TokenizerError as e:
        assert word in str(e) and str(folder) in str(e) and "\n" not in str(e)
        return str(e)


def test_the_walk_is_over_every_field():
    base = transformers.PreTrainedTokenizerBase
    fast = transformers.PreTrainedTokenizerFast
    classes = [transformers.GPT2Tokenizer, transformers.Qwen2Tokenizer]
    classes += [transformers.LlamaTokenizer, transformers.GemmaTokenizer]
    known = {name for cls in classes for name in inspect.signature(cls.__init__).parameters}
    for function in (base.__init__, fast.__init__, base._from_pretrained, base.from_pretrained):
        source = inspect.getsource(function)
        known |= set(re.findall(r"kwargs\.(?:pop|get|setdefault)\(\s*\"(\w+)\"", source))
        known |= set(re.findall(r"\"(\w+)\" in (?:init_kwargs|kwargs|tokenizer_config)", source))
    known |= set(base.SPECIAL_TOKENS_ATTRIBUTES)
    # arguments of a call, not of the file
    known -= set("files_loaded _from_pipeline proxies gguf_file _from_auto _commit_hash".split())
    known -= {"max_length", "stride", "subfolder"}
    known -= {"truncation_strategy", "pad_token_type_id", "pad_to_multiple_of", "from_slow"}
    assert known - NOT_OF_THE_FILE - OF_TEXTS - VALUES.keys() == set()


# built as another kind is
LIKE_ANOTHER = ("smollm", "mistral", "bloom")


@pytest.mark.parametrize("kind", [again(kind) if kind in LIKE_ANOTHER else kind for kind in KINDS])
def test_each_field(tmp_path, kind):
    """Tokens that the vocabulary has, and that it does not."""
    folder = published_folder(kind, tmp_path / "hf")
    config = folder / "tokenizer_config.json"
    content = config.read_text()
    before = differences(folder, kind)
    refused = {}
    for field, value in VALUES.items():
        for token in (a_token(folder), NEW):
            edit_json(config, **{field: with_token(value, token)})
            # with it, transformers reads no older field
            if field == "additional_special_tokens":
                edit_json(config, extra_special_tokens=[])
            refused[field, token == NEW] = check(folder, kind, field, before)
            config.write_text(content)
    always = {"split_special_tokens", "fix_mistral_regex", "fast_tokenizer_files"}
    always |= {"added_tokens_decoder"}
    prefix = {"add_prefix_space"} if kind not in ("llama2", "mistral") else set()
    assert {field for field, is_new in refused if refused[field, False]} == always | prefix
    names = {field for field, value in VALUES.items() if with_token(value, NEW) != value}
    assert {field for field, is_new in refused if refused[field, True]} == always | prefix | names
    assert "AutoTokenizer.from_pretrained" in refused["eos_token", True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_before_a_text(tmp_path, kind):
    """Whoever reads the file or obeys the field adds one, or neither does."""
    folder = published_folder(kind, tmp_path / "hf")
    before = differences(folder, kind)

    def refusals():
        for value in (True, False):
            edit_json(folder / "tokenizer_config.json", add_prefix_space=value)
            yield bool(check(folder, kind, "add_prefix_space", before))

    adds = kind in ("llama2", "mistral")
    assert [*refusals()] == [not adds, adds]
    file = folder / "tokenizer.json"
    file.write_text(re.sub(r'("add_prefix_space": ?)false', r"\1true", file.read_text()))
    adds |= kind not in ("gemma", "unigram")
    assert [*refusals()] == [not adds, adds]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_with_numbers(tmp_path, kind):
    """A new one is added; the others must be as in tokenizer.json."""
    folder = published_folder(kind, tmp_path / "hf")
    config = folder / "tokenizer_config.json"
    content = config.read_text()
    before = differences(folder, kind)
    plain = FileTokenizer(str(folder / "tokenizer.json"))
    number, token = plain.tokenizer.get_vocab_size(), {"content": NEW, "special": True}

    def with_(number, **fields):
        config.write_text(content)
        decoder = json.loads(content)["added_tokens_decoder"]
        decoder[str(number)] = decoder.get(str(number), {}) | fields
        if not fields:
            del decoder[str(number)]
        edit_json(config, added_tokens_decoder=decoder)
        return check(folder, kind, "added_tokens_decoder: ", before)

    for special in (True, False):
        assert not with_(number, **token | {"special": special})
        ours = FileTokenizer(str(folder / "tokenizer.json"))
        assert ours.encode(NEW) == [number] and ours.vocab_size == number + 1
        assert ours.fingerprint != plain.fingerprint
    assert f"has id {number + 1}, and would get {number}" in with_(number + 1, **token)
    # in the order of the ids, whatever the order in the file
    decoder = {str(number + 1): {"content": "<|newer|>"}, str(number): token}
    decoder |= json.loads(content)["added_tokens_decoder"]
    edit_json(config, added_tokens_decoder=decoder)
    assert not check(folder, kind, "added_tokens_decoder", before)
    # it is a name of another field now, and so special
    assert not with_(number, **token) and not edit_json(config, eos_token=NEW)
    assert not check(folder, kind, "eos_token", before)
    assert FileTokenizer(str(folder / "tokenizer.json")).eot == number
    last = plain.vocabulary[KINDS[kind].specials[-1]]
    for flag in ("lstrip", "rstrip", "single_word"):
        assert f"has another {flag} than" in with_(last, **{flag: True})
        assert f"has another {flag} than" in with_(number, **token | {flag: True})
    assert f"lacks '{KINDS[kind].specials[-1]}' of" in with_(last)
    named = [value for key, value in KINDS[kind].config.items() if key.endswith("_token")]
    if KINDS[kind].specials[-1] not in json.dumps(named):
        assert "has another special than" in with_(last, special=False)
    else:
        assert not with_(last, special=False)


@pytest.mark.parametrize("kind", KINDS)
def test_what_published_folders_say(tmp_path, kind):
    """Fields that repeat tokenizer.json change neither ids nor the record in a checkpoint."""
    folder = published_folder(kind, tmp_path / "hf")
    with_config = FileTokenizer(str(folder / "tokenizer.json"))
    assert not with_config.obey_config()
    file = json.loads((folder / "tokenizer.json").read_text())
    assert with_config.vocab_size == len(with_config.vocabulary)
    # the older files of a folder: without numbers, and with the tokens in a file of their own
    (folder / "special_tokens_map.json").unlink()
    edit_json(folder / "tokenizer_config.json", bos_token="")
    remove_numbers(folder)
    older = {token["content"]: token["id"] for token in file["added_tokens"]}
    published.write_json(folder / "added_tokens.json", older)
    assert not FileTokenizer(str(folder / "tokenizer.json")).obey_config()
    published.write_json(folder / "added_tokens.json", older | {NEW: len(with_config.vocabulary)})
    assert f"has '{NEW}'" in check(folder, kind, "added_tokens.json", set())


def test_an_older_folder_names_its_end_in_another_file(tmp_path):
    """transformers reads special_tokens_map.json only where there is no added_tokens_decoder."""
    folder = published_folder("qwen", tmp_path)
    published.write_json(folder / "special_tokens_map.json", {"eos_token": "<|im_start|>"})
    assert not check(folder, "qwen", "eos_token", set())
    remove_numbers(folder)
    assert not check(folder, "qwen", "eos_token", set())
    assert FileTokenizer(str(folder / "tokenizer.json")).token_of(302) == "<|im_end|>"


@pytest.mark.parametrize(
    "field, value",
    [
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", {"3": 3}),
        ("add_prefix_space", "yes"),
        ("extra_special_tokens", [3]),
    ],
)
def test_fields_of_another_type(tmp_path, field, value):
    folder = published_folder("gpt2", tmp_path)
    edit_json(folder / "tokenizer_config.json", **{field: value})
    with pytest.raises(TokenizerError, match=f"tokenizer_config.json: {field}: Expected"):
        FileTokenizer(str(folder / "tokenizer.json"))
