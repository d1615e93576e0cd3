"""lm-eval, the evaluation harness of EleutherAI (arXiv 2405.14782), with this project's models.

lm-eval has thousands of tasks: their data, their prompts, and how an answer counts. It asks a model
through three methods of an `LM`, with texts. `HarnessLM` turns the texts into tokens, and asks
evaluate.Evaluator:

    loglikelihood          [(context, continuation)]    -> [(log p, whether greedy)]
    loglikelihood_rolling  [(text,)]                    -> [log p]
    generate_until         [(context, {"until": ..})]   -> [text]

The same texts become the same tokens as in lm-eval's own backend for `transformers` (HFLM), so that
the answers are the same too, item by item (tests/test_evaluate.py).

lm-eval runs on rank 0; how the other ranks follow: inference/evaluation_commands.py.

    python -m inference.evaluate --checkpoint RUN --tasks NAME

Not covered: images; a model that thinks before it answers (its thoughts are part of the answer).
"""

import json
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path

from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from base import terminal
from finetune.sft import Chat
from generate import check_options
from inference.answers import unfinished
from inference.evaluate import Evaluator, Request, check, encode_pair
from run.config import ConfigError
from run.tokenizer import begin_id

ROOT = Path(__file__).resolve().parent.parent
# of a generation, where a task does not say
MAX_TOKENS = 256
MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


# --- what lm-eval asks ----------------------------------------------------------------------------


class HarnessLM(LM):
    """A model as lm-eval sees it."""

    def __init__(self, evaluator: Evaluator, call: Callable, chat: Chat | None = None):
        """call(name, *arguments): calls this method of the evaluator on every rank. chat: where
        texts are conversations."""
        super().__init__()
        self.evaluator = evaluator
        self.tokenizer = evaluator.tokenizer
        self.call_ranks = call
        # what the evaluator raised: no fault of a task
        self.failure: Exception | None = None
        self.chat = chat
        self.begin = begin_id(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """With the begin token, if the tokenizer has one and the text has not."""
        # a chat template's special tokens are tokens for a tokenizer without files too
        ids = self.chat.tokenizer.encode(text).ids if self.chat else self.tokenizer.encode(text)
        ids = [int(i) for i in ids]
        bos = self.tokenizer.bos
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def call(self, name: str, *arguments):
        try:
            return self.call_ranks(name, *arguments)
        except Exception as e:
            self.failure = e
            raise

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        pairs = [self.pair(*request.args) for request in requests]
        return self.call("log_likelihoods", pairs)

    def pair(self, context: str, continuation: str) -> Request:
        """Raises ConfigError for a continuation that cannot be scored."""
        pair = encode_pair(self.encode, context, continuation, self.begin)
        try:
            check(pair, self.evaluator.config.seq_length)
        except ValueError as e:
            where = f"after {context[-40:]!r} comes {continuation[:40]!r}"
            raise ConfigError(f"--tasks: {where}: {e}") from None
        return pair

    def loglikelihood_rolling(self, requests) -> list[float]:
        # HFLM too puts the begin token before a text that begins with it, and so scores it
        texts = [self.encode(request.args[0]) for request in requests]
        return self.call("rolling", texts, self.begin)

    def generate_until(self, requests) -> list[str]:
        texts = {}
        # those with equal options together
        for options in dict.fromkeys(json.dumps(request.args[1]) for request in requests):
            numbers = [n for n, r in enumerate(requests) if json.dumps(r.args[1]) == options]
            prompts = [self.encode(requests[n].args[0]) for n in numbers]
            max_tokens, until, sampling = generation_options(json.loads(options))
            if max_tokens >= self.evaluator.config.seq_length:
                raise ConfigError(
                    f"--tasks: {max_tokens} new tokens (max_gen_toks) leave no room for a prompt in"
                    f" the model's context of {self.evaluator.config.seq_length}"
                )
            prompts = [prompt or [self.begin] for prompt in prompts]
            written = self.call("generate", prompts, max_tokens, until, sampling)
            texts |= zip(numbers, written)
        return [texts[n] for n in range(len(requests))]

    # -- conversations

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt=True) -> str:
        template = self.chat.template
        if add_generation_prompt:
            return template.render(chat_history, ask=True).text
        return unfinished(template, chat_history)

    def chat_template(self, chat_template=False) -> str:
        return self.chat.template.text if self.chat else ""

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name.replace("/", "__")


def generation_options(options: dict) -> tuple[int, list[str], dict]:
    """(new tokens, texts that end, sampling as of generate.stream) of a task's generation_kwargs.
    Raises ConfigError for one that is not known here."""
    options = dict(options)
    until = options.pop("until", None) or []
    lengths = [options.pop(name, None) for name in MAX_TOKENS_NAMES]
    max_tokens = next((int(n) for n in lengths if n is not None), MAX_TOKENS)
    temperature = float(options.pop("temperature", 0.0))
    samples = options.pop("do_sample", None)
    restriction = {name: options.pop(name) for name in ("top_k", "top_p") if name in options}
    sampling = {"temperature": 0.0}
    if samples or (samples is None and temperature > 0):
        sampling = {"temperature": temperature or 1.0} | restriction
    if options.get("num_beams") == 1:
        del options["num_beams"]
    try:
        check_options(max_tokens, **{"top_k": 0, "top_p": 1.0} | sampling)
    except ValueError as e:
        raise ConfigError(f"--tasks: generation_kwargs: {e}") from None
    if options:
        raise ConfigError(
            f"--tasks: generation_kwargs has {', '.join(options)}, and generate.py has no such"
            " option; until, max_gen_toks, do_sample, temperature, top_k and top_p would fit"
        )
    return max_tokens, [until] if isinstance(until, str) else list(until), sampling


# --- tasks ----------------------------------------------------------------------------------------


def find_tasks(names: list[str], folders: list[str]) -> tuple[TaskManager, list[str]]:
    """(lm-eval's tasks, the names of those to run). names: may have patterns, such as mmlu_*.
    folders: with task files of the user's own. Raises ConfigError."""
    for folder in folders:
        if not folder or not Path(folder).is_dir():
            raise ConfigError(f"--include-path {shlex.quote(folder)}: no such folder")
    # those of lm-eval take seconds to list
    manager = TaskManager(include_path=folders, include_defaults=False)
    if manager.match_tasks(names) != sorted(names):
        manager = TaskManager(include_path=folders)
    for name in names:
        if not manager.match_tasks([name]):
            raise ConfigError(
                f"--tasks {shlex.quote(name)}: lm-eval has no task of this name; lm-eval ls tasks"
                " shows those it has, and --include-path DIR adds your own"
            )
    return manager, manager.match_tasks(names)


def run_tasks(
    lm: HarnessLM, manager: TaskManager, names: list[str], fewshot: int | None, limit: int | None
) -> dict:
    """lm-eval's results, with each item. Raises ConfigError for data that cannot be had, and for a
    task that cannot be asked."""
    # patterns may stand for hundreds
    flag = f"--tasks {textwrap.shorten(' '.join(names), 100)}"
    try:
        return simple_evaluate(
            lm,
            tasks=names,
            task_manager=manager,
            num_fewshot=fewshot,
            limit=limit,
            apply_chat_template=lm.chat is not None,
            log_samples=True,
        )
    except OSError as e:
        raise ConfigError(
            f"{flag}: lm-eval cannot have their data ({terminal.one_line(e)});"
            " without a network, --include-path DIR with task files and data of your own would fit"
        ) from None
    except Exception as e:
        if isinstance(e, ConfigError) or e is lm.failure:
            raise
        raise ConfigError(f"{flag}: {fault_of(e)}") from None


def fault_of(e: Exception) -> str:
    """What is wrong with a task, by what lm-eval raised: it has no classes of errors."""
    if "Sample larger than population" in str(e):
        return "fewer examples than --num-fewshot, or num_fewshot of the task, asks for"
    if isinstance(e, ImportError):
        return f"a package is missing ({terminal.one_line(e)}): pip install it"
    if isinstance(e, OverflowError):
        return "a perplexity is too large for a number; the metric bits_per_byte would fit"
    what = ": ".join(word for word in (type(e).__name__, terminal.one_line(e)) if word)
    return f"lm-eval cannot ask this ({what}); mend the file of the task, or its data"


def find_template(chat: Chat) -> Chat:
    """Raises ConfigError where the model has no chat template of its own."""
    if chat.template.text == chat.tokenizer.plain_template():
        raise ConfigError(
            "--apply-chat-template: the folder of --checkpoint has no chat template; leave the flag"
            " out"
        )
    return chat


def table_of(results: dict) -> str:
    """As lm-eval prints it: tasks, and groups of tasks."""
    columns = [column for column in ("results", "groups") if results.get(column)]
    return "\n".join(make_table(results, column) for column in columns)
