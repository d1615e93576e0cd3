"""Every field of a request and of a message that OpenAI's and vLLM's servers know: obeyed, or in
the list of those that change nothing, or refused by its name."""

import json
from pathlib import Path

import published_tokenizers
import pytest
import test_sft
from msgspec import structs

from finetune.chat import Chat
from finetune.chat_template import ChatError, ChatTemplate, ChatTokenizer
from run.tokenizer import ByteTokenizer, make_tokenizer

pytest.importorskip("aiohttp", reason="pyproject.toml names it")
from inference import api

SAID = [{"role": "user", "content": "a"}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
# fields that each server knows, and that are not obeyed here
OPENAI = """
    audio best_of frequency_penalty function_call functions logit_bias modalities moderation
    prediction presence_penalty reasoning_effort response_format suffix tool_choice tools
    verbosity web_search_options
""".split()
VLLM = """
    add_special_tokens allowed_token_ids bad_words cache_salt chat_template detokenize documents
    do_sample guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
    guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
    kv_transfer_params length_penalty logits_processors min_p min_tokens mm_processor_kwargs
    prompt_embeds prompt_logprobs repeat_penalty repetition_detection repetition_penalty
    return_token_ids return_tokens_as_token_ids skip_special_tokens
    spaces_between_special_tokens stop_token_ids structural_tag structured_outputs
    thinking_token_budget truncate_prompt_tokens typical_p use_beam_search vllm_xargs
""".split()
# of messages
PARTS = dict(
    audio={"id": "x"},
    annotations=[{"type": "url_citation"}],
    function_call={"name": "f"},
    prefix=True,
    reasoning="why",
    refusal="no",
    thinking="why",
    weight=0,
)
BOTH = [(api.Completion, {"prompt": "a"}), (api.ChatCompletion, {"messages": SAID})]


def read(kind, **fields):
    return kind.read(json.dumps(fields).encode())


def known_to_the_package() -> set[str]:
    """The fields of the installed openai package."""
    pytest.importorskip("openai", reason="pyproject.toml names it")
    from openai.types import completion_create_params as texts
    from openai.types.chat import completion_create_params as chats

    kinds = (texts.CompletionCreateParamsBase, chats.CompletionCreateParamsBase)
    return {name for kind in kinds for name in kind.__annotations__}


@pytest.mark.parametrize("kind, asked", BOTH)
def test_what_would_change_the_answer_is_refused(kind, asked):
    for name in (*OPENAI, *VLLM, "nobody_knows_this"):
        with pytest.raises(api.ApiError) as refused:
            read(kind, **asked, **{name: "x"})
        error = refused.value.body["error"]
        assert (refused.value.status, error["param"]) == (400, name)
        assert name in error["message"]
        # null counts as left out
        read(kind, **asked, **{name: None})


@pytest.mark.parametrize("kind, asked", BOTH)
def test_what_changes_nothing_is_not_refused(kind, asked):
    plain = read(kind, **asked)
    for name, values in api.NEUTRAL.items():
        for value in values:
            assert read(kind, **asked, **{name: value}) == plain
    for name in api.IGNORED:
        assert read(kind, **asked, **{name: "x"}) == plain
    assert read(kind, **asked, best_of=1) == plain
    assert read(kind, **asked, n=2, best_of=2).n == 2


def test_the_walk_knows_all_fields():
    """Each field of the openai package is in one list, and in one only."""
    obeyed = {field.encode_name for kind, _ in BOTH for field in structs.fields(kind)}
    lists = [obeyed, api.IGNORED, OPENAI, VLLM]
    assert known_to_the_package() <= set().union(*lists)
    assert sum(map(len, lists)) == len(set().union(*lists))
    assert api.NEUTRAL.keys() - {"echo"} <= {*OPENAI, *VLLM}


def test_streams_say_no_more_than_asked():
    asked = read(api.Completion, prompt="a", stream_options={"include_usage": True})
    assert asked.stream_options.include_usage
    with pytest.raises(api.ApiError, match="") as refused:
        read(api.Completion, prompt="a", stream_options={"continuous_usage_stats": True})
    error = refused.value.body["error"]
    assert "continuous_usage_stats" in error["message"] and error["param"] == "stream_options"


# --- messages -------------------------------------------------------------------------------------


def test_parts_of_messages_that_are_refused():
    for name, value in PARTS.items():
        with pytest.raises(api.ApiError) as refused:
            read(api.ChatCompletion, messages=[*SAID, {**SAID[0], name: value}])
        error = refused.value.body["error"]
        assert name in error["message"] and error["param"] == "messages"
    empty = dict.fromkeys(PARTS.keys() & {"audio", "function_call", "refusal"}) | {
        "annotations": []
    }
    asked = read(api.ChatCompletion, messages=[SAID[0] | empty])
    assert [each.plain() for each in asked.messages] == SAID
    for message in ({"role": "user"}, {"role": "assistant", "content": None, "tool_calls": []}):
        with pytest.raises(api.ApiError, match=""):
            read(api.ChatCompletion, messages=[message])


# as Qwen's newer templates: thoughts of earlier turns, calls of tools, a switch for thinking
TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls %}{{ '<tool_call>' + call.function.name }}
{{- call.function.arguments | tojson }}{% endfor %}
{%- if m.tool_call_id %}{{ 'for ' + m.tool_call_id }}{% endif %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"""
HISTORY = [
    {"role": "user", "content": "2 + 2?", "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "add"},
    {"role": "tool", "content": "4", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is  "},
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Name of a template -> (ours, transformers' tokenizer)."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("chat")
    published_tokenizers.write("qwen", folder)
    tokenizer = make_tokenizer(str(folder / "tokenizer.json"))
    texts = {"own": TEMPLATE, "trims": TEMPLATE.replace("m.content }}", "m.content | trim }}")}
    trl = pytest.importorskip("trl", reason="pyproject.toml names it")
    for file in Path(trl.__file__).parent.glob("chat_templates/qwen3*.jinja"):
        texts[file.stem] = file.read_text()
    found = {}
    for name, text in texts.items():
        chat_tokenizer = ChatTokenizer(tokenizer)
        template = ChatTemplate(text, name, chat_tokenizer.token_names())
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        theirs.chat_template = text
        model = api.Model("m", None, Chat(template, chat_tokenizer))
        found[name] = tokenizer, model, theirs
    assert len(found) > 3
    return found


def for_transformers(messages: list[dict]) -> list[dict]:
    """Where an object stands for the arguments of a call."""
    text = json.dumps(messages)
    return json.loads(text.replace(json.dumps(CALL["function"]["arguments"]), '{"a": 2}'))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True, "bos_token": "x"}},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"continue_final_message": True},
    ],
)
def test_conversations_are_those_of_transformers(options, chats):
    """Thoughts, calls of tools, and the choices of a request."""
    prompts = set()
    for name, (tokenizer, model, theirs) in chats.items():
        for end in range(1, len(HISTORY) + 1):
            messages = HISTORY[:end]
            if options.get("continue_final_message") and messages[-1]["content"] is None:
                continue
            asked = read(api.ChatCompletion, messages=messages, **options)
            (ids,) = asked.prompts(tokenizer, model, 1000)
            choices = {"add_generation_prompt": "continue_final_message" not in options} | options
            choices |= choices.pop("chat_template_kwargs", {})
            expected = theirs.apply_chat_template(for_transformers(messages), **choices)[
                "input_ids"
            ]
            assert ids == expected, (name, end)
            prompts.add(tuple(ids))
    assert len(prompts) > 8


def test_choices_that_exclude_each_other(chats):
    tokenizer, model, _ = chats["own"]
    choices = dict(add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(api.ApiError) as refused:
        read(api.ChatCompletion, messages=SAID, **choices)
    assert all(name in refused.value.body["error"]["message"] for name in choices)
    # a name of the template's own
    asked = read(api.ChatCompletion, messages=SAID, chat_template_kwargs={"messages": []})
    with pytest.raises(ValueError, match="messages"):
        asked.prompts(tokenizer, model, 1000)


def test_what_is_nested_deeply():
    """A text or one line: for calls of tools, and for what a template reads beside messages."""
    model = api.Model("m", None, test_sft.chat_of(ByteTokenizer()))
    for depth in (100, *range(800, 1000, 4), 1500):
        nested = "[" * depth + "]" * depth
        call = {"function": {"name": "f", "arguments": nested}}
        choices = '{"a": ' + nested + "}"
        bodies = [json.dumps({"messages": [SAID[0] | {"tool_calls": [call]}]})]
        bodies.append(f'{{"messages": {json.dumps(SAID)}, "chat_template_kwargs": {choices}}}')
        for body in bodies:
            try:
                assert api.ChatCompletion.read(body.encode()).prompts(None, model, 99)
            except (ChatError, api.ApiError) as e:
                assert "nested too deeply" in str(e) and depth > 100
