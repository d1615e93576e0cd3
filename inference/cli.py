"""The command line of generate.py: flags, checks, one prompt, a file of prompts, or a conversation.

    python generate.py --checkpoint runs/default --prompt "def "
    python generate.py --checkpoint runs/default --prompt-file prompts.jsonl > answers.jsonl
    torchrun --nproc-per-node 4 generate.py --tp 2 --pp 2 --checkpoint HF_DIR --interactive

The order is the same for each command that generates or evaluates:

    command         the launcher of the ranks, arguments, errors, the exit status
    check_flags     all that can be known before the ranks meet
    connect         the ranks meet; model and tokenizer are loaded
    then            stream_text, answer_file or converse
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial

import torch

import kernels
import moe
import pipeline_parallel
import tensor_parallel
from base import terminal
from base.errors import RunError
from base.model_config import MoEConfig, divisors
from finetune.chat import message
from inference import generation_config, quantization, speculative, weight_layouts
from inference.adapted import Adapters
from inference.answers import answer_file, as_json, encode, read_prompts, stream_text
from inference.loading import check_vocabulary, find_chat, find_tokenizer, load_model, open_model
from inference.sampling import check_options
from pipeline_parallel import stages_of
from prompt_tuning import PromptError
from run import launch
from run.config import DTYPES, ConfigError, as_flags, flag_name, multiply_in
from run.tokenizer import prompt_ids
from run.world import World, why_no_gpu
from schedules import Placement

# Seconds.
HALF_AN_HOUR = 1800.0
MONTH = 30 * 86400.0


# --- from the launcher to the exit status ---------------------------------------------------------


def command(
    name: str,
    work: Callable[[argparse.Namespace, World], None],
    argv: list[str],
    parser: argparse.ArgumentParser,
) -> int:
    """Run work(args, world), under a launcher or without one. name: of the file, for messages.
    Returns the exit status."""

    def run(world: World) -> None:
        if world.rank:
            parser.error = lambda message: leave_to_rank_0(world)
        args = parser.parse_args(argv)
        with failures():
            work(args, world)

    return launch.command(name, run)


def leave_to_rank_0(world: World) -> None:
    """Every rank finds the same fault in the arguments: rank 0 prints it."""
    terminal.let_rank_0_speak(world.rank)
    sys.exit(2)


@contextlib.contextmanager
def failures():
    """What may fail while texts are generated, as RunErrors."""
    try:
        yield
    except FloatingPointError as e:
        raise RunError(f"{e}: this model has diverged", everywhere=True) from None
    except OSError as e:
        terminal.mute(sys.stdout)
        where, reason = e.filename or "standard output", e.strerror or e
        message = terminal.one_line(f"{where}: {reason}; the rest of the answers is lost")
        # The reader of the output may have seen enough (| head).
        raise RunError("" if isinstance(e, BrokenPipeError) else message) from None


# --- flags ----------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, shape_class: type[MoEConfig] = MoEConfig) -> None:
    """The flags of every command that generates. shape_class: as of loading.open_model."""
    add_model_flags(parser, shape_class)
    flag = parser.add_argument
    # inference/generation_config.py has the values of these four where none is given.
    flag("--max-tokens", type=int, help="of a continuation (default: 300, or the model's)")
    flag("--temperature", type=float, help="0: the likeliest token (default: 0.8, or the model's)")
    flag("--top-k", type=int, metavar="K", help="of the K most likely tokens (default: 0, all)")
    flag("--top-p", type=float, metavar="P", help="of tokens with probability P (default: 1, all)")
    flag("--seed", type=int, help="equal seeds give equal texts, up to rounding (default: 0)")
    before = "end before it; may be repeated"
    flag("--stop", action="append", default=[], metavar="TEXT", help=before)
    flag("--batch-size", type=int, help="prompts of a file, at a time and rank (default: 16)")


def add_model_flags(
    parser: argparse.ArgumentParser, shape_class: type[MoEConfig] = MoEConfig
) -> None:
    """Which model, and where and how it runs. shape_class: as of loading.open_model."""
    parser.set_defaults(shape_class=shape_class)
    flag = parser.add_argument
    folder = "a checkpoint, the folder of a run, or a Hugging Face folder"
    flag("--checkpoint", metavar="DIR", required=True, help=folder)
    flag("--tp", type=int, default=1, help="tensor-parallel ranks")
    flag("--pp", type=int, default=1, help="pipeline-parallel ranks; the rest is data parallel")
    parser.set_defaults(cp=1, ep=1)
    if shape_class is MoEConfig:
        flag("--cp", type=int, default=1, help="context-parallel ranks, which share long prompts")
        flag("--ep", type=int, default=1, help="data-parallel ranks that share the experts")
    split = "layers of each pipeline stage (default: equally many)"
    flag("--layer-split", type=int, nargs="+", metavar="N", help=split)
    flag("--precision", choices=tuple(DTYPES), help="default: bf16 on CUDA, fp32 on CPUs")
    flag("--tokenizer", help="needed where the one that the model was trained with has moved")
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto")
    fused = "auto: fused CUDA operations where the device has them (kernels.py)"
    flag("--kernels", choices=("auto", "off"), default="auto", help=fused)


def add_weight_flags(parser: argparse.ArgumentParser) -> None:
    """How the weights are stored (`open_weights`)."""
    flag = parser.add_argument
    bits = (
        "store the weights in 8 bits, or those of the layers in 4 (quantization.py); the default of"
        " --precision is then bf16"
    )
    flag("--weights", choices=("int8", "int4"), help=bits)
    group = "weights that share a scale with --weights int4: 32, 64, 128 or 256 (default: 32)"
    flag("--group-size", type=int, choices=quantization.GROUPS, metavar="N", help=group)


# The flags that are arguments of generate.stream.
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed")
# The least value of a flag.
LEAST = {"batch_size": 1, "seed": 0, "tp": 1, "pp": 1, "cp": 1, "ep": 1}


def check_flags(args: argparse.Namespace, world: World) -> MoEConfig:
    """Check all that can be known before any rank talks to another, and fill in the sampling flags
    that are not given. Returns the configuration of the model. Raises ConfigError, CheckpointError
    or HuggingFaceError."""
    # Flags that were given and decide which token is drawn.
    neutral = {"top_k": (None, 0), "top_p": (None, 1.0), "seed": (None,)}
    drawing = [name for name in neutral if getattr(args, name) not in neutral[name]]
    args.seed = args.seed or 0
    args.batch_size = 16 if args.batch_size is None else args.batch_size
    config = check_model_flags(args, world)
    if "" in args.stop:
        raise ConfigError("--stop '': is in every text; name one that is not empty")
    if summary := generation_config.set_defaults(args):
        world.say_aside(summary)
    try:
        check_options(args.max_tokens, args.temperature, args.top_k, args.top_p)
    except ValueError as e:
        raise ConfigError("--" + str(e).replace("_", "-", 1)) from None
    if drawing and args.temperature == 0:
        name, value = flag_name(drawing[0]), getattr(args, drawing[0])
        raise ConfigError(
            f"{name} {value}: is about drawing tokens, and --temperature 0 takes the most likely"
            " one; leave one of them out"
        )
    return config


def check_model_flags(args: argparse.Namespace, world: World) -> MoEConfig:
    """The part of `check_flags` that is about the model and its layout."""
    check_least(args, LEAST)
    if not args.checkpoint:
        raise ConfigError("--checkpoint '': names no folder")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda: no GPU can be used here ({why_no_gpu()}); --device cpu would run"
        )
    config, *_ = open_model(args.checkpoint, args.shape_class)
    check_layout(args, config, world.size)
    return config


def check_least(args: argparse.Namespace, least_of: dict[str, int]) -> None:
    """least_of: the least value of a flag, where it is given. Raises ConfigError."""
    for name, least in least_of.items():
        value = getattr(args, name, None)
        if value is not None and not least <= value < 2**31:
            raise ConfigError(f"{flag_name(name)} {value}: must be at least {least} and below 2^31")


def check_layout(args: argparse.Namespace, config: MoEConfig, num_ranks: int) -> None:
    """Raises ConfigError for a layout that this model cannot have on so many ranks."""
    product = args.tp * args.pp * args.cp
    if num_ranks % product:
        cp = f" --cp {args.cp}" if args.cp > 1 else ""
        raise ConfigError(
            f"--tp {args.tp} --pp {args.pp}{cp}: their product must divide the {num_ranks} ranks;"
            f" {divisors(num_ranks, product)} would"
        )
    check_stages(args.pp, args.layer_split, config.num_layers)
    with as_flags():
        tensor_parallel.check(config, args.tp, num_ranks)
        if args.pp > 1:
            pipeline_parallel.check(config.num_layers, Placement(args.pp), args.layer_split)
        moe.check(config, args.ep, num_ranks // args.tp // args.pp)


def check_stages(p: int, layer_split: list[int] | None, layers: int) -> None:
    """Raises ConfigError. Here the number of layers is no flag, as it is in pipeline_parallel."""
    flag = f"--pp {p}"
    rule = None
    if p > layers:
        rule = f"this model has {layers} layers; --pp {layers} or less would do"
    elif layer_split:
        flag = f"--layer-split {' '.join(map(str, layer_split))}"
        if p == 1:
            rule = "needs --pp 2 or more"
        elif len(layer_split) != p or sum(layer_split) != layers:
            rule = f"must be {p} numbers, one for a --pp rank, that add up to the {layers} layers"
    elif layers % p:
        split = " ".join(str(len(part)) for part in torch.arange(layers).tensor_split(p)[::-1])
        rule = f"does not divide the {layers} layers of this model; --layer-split {split} would do"
    if rule:
        raise ConfigError(f"{flag}: {rule}")


# --- the work -------------------------------------------------------------------------------------


def connect(
    args: argparse.Namespace,
    world: World,
    batch_size: int | None,
    timeout: float = HALF_AN_HOUR,
    adapters: Adapters | None = None,
    quantize: Callable | None = None,
):
    """Meet the other ranks, and load the model, laid out to decode `batch_size` texts at a time;
    None: as it is, for long texts. timeout: seconds a rank may wait for another. adapters: to put
    into the model. quantize(stage, texts): stores its weights in fewer bits. Returns (model,
    tokenizer, lockstep), the last as of generate.stream."""
    world.connect(args.device, timeout, tp=args.tp, pp=args.pp, ep=args.ep, cp=args.cp)
    if adapters:
        adapters.check()
    # The kernels for fewer bits multiply with 16.
    in_16_bits = world.device.type == "cuda" or quantize
    precision = args.precision or ("bf16" if in_16_bits else "fp32")
    multiply_in(precision, world.device)
    options = world.groups, args.layer_split, args.shape_class
    options += (getattr(args, "speculative", False),)
    model, index = load_model(args.checkpoint, world.device, DTYPES[precision], *options)
    if adapters:
        adapters.put(model, world.groups, args.layer_split)
    stages = stages_of(model)
    for stage in stages:
        if quantize:
            quantize(stage, batch_size or 1)
        elif batch_size:
            weight_layouts.apply(stage, batch_size)
        if args.kernels == "auto" and world.device.type == "cuda":
            why_not = kernels.apply(stage, world.device, DTYPES[precision])
            if why_not:
                world.say_aside(f"--kernels auto: {why_not}; PyTorch's own operations run")
    tokenizer = find_tokenizer(args.checkpoint, index, args.tokenizer)
    check_vocabulary(tokenizer, args.tokenizer, stages[0].config.vocab_size)
    # Experts are spread over the ranks that hold the same layers.
    lockstep = world.groups.replicas if args.ep > 1 else None
    return model, tokenizer, lockstep


def check_source(args: argparse.Namespace) -> None:
    """Where prompts come from. Raises ConfigError."""
    sources = (args.prompt, args.chat, args.prompt_file, args.interactive or None)
    if sum(source is not None for source in sources) > 1:
        raise ConfigError("--prompt, --chat, --prompt-file, --interactive: one of them")
    if args.batch_size is not None and args.prompt_file is None:
        raise ConfigError(f"--batch-size {args.batch_size}: is for --prompt-file; leave it out")


def check_speculative(args: argparse.Namespace, config: MoEConfig) -> None:
    """What speculative decoding needs. Raises ConfigError."""
    beside = dict(prompt_file=None, interactive=False, weights=None, adapter=[], pp=1, cp=1)
    beside |= dict(temperature=0.0)
    if not args.speculative:
        return
    if not config.mtp_layers or config.sliding_window:
        rule = "this model has a window, and it needs one without"
        if not config.mtp_layers:
            rule = "this model has no modules; train.py --mtp-layers 1 trains some"
        raise ConfigError(f"--speculative: {rule}")
    for name, value in beside.items():
        if getattr(args, name) != value:
            fits = "; 0 would fit" if name == "temperature" else "; leave one of them out"
            raise ConfigError(
                f"--speculative: checks drafts of one text on the ranks of --tp, by the likeliest"
                f" token, without {flag_name(name)} {getattr(args, name)}{fits}"
            )


def run(args: argparse.Namespace, world: World, stream_of: Callable) -> None:
    """What generate.py does with flags. stream_of: that of generate.py."""
    check_source(args)
    config = check_flags(args, world)
    check_speculative(args, config)
    adapters = open_adapters(args, config, named=args.prompt_file is not None)
    quantize = open_weights(args, config, adapters)
    batch_size = args.batch_size if args.prompt_file is not None else 1
    # A person may think for long.
    timeout = MONTH if args.interactive else HALF_AN_HOUR
    model, tokenizer, lockstep = connect(args, world, batch_size, timeout, adapters, quantize)
    options = sampling_options(args, world, tokenizer)
    if args.interactive:
        return converse(world, stream_of(model), tokenizer, config.seq_length, args.stop, **options)
    if args.prompt_file is not None:
        requests = world.on_rank_0(
            lambda: read_prompts(args.prompt_file, tokenizer, config.seq_length, adapters.names)
        )
        summary = answer_file(
            world,
            stream_of(model),
            tokenizer,
            requests,
            args.batch_size,
            args.stop,
            lockstep,
            write_answer,
            adapters.use if adapters.names else None,
            **options,
        )
    else:
        stream = stream_of(model, args.speculative)
        summary = continue_prompt(args, world, stream, tokenizer, config, options)
        if args.speculative:
            summary = f"{summary}; {summary.per_pass()}"
    if world.rank == 0:
        print(summary, file=sys.stderr)


def sampling_options(args: argparse.Namespace, world: World, tokenizer) -> dict:
    """Arguments of generate.stream."""
    options = {name: getattr(args, name) for name in SAMPLING}
    return options | dict(eot=tokenizer.stop_ids, cp_group=world.groups.cp)


def open_weights(
    args: argparse.Namespace, config: MoEConfig, adapters: Adapters
) -> Callable | None:
    """quantize(stage, texts) for --weights and --group-size, or None. Raises ConfigError."""
    if args.group_size and args.weights != "int4":
        raise ConfigError(
            f"--group-size {args.group_size}: is of --weights int4; int8 has a scale for each row"
        )
    if not args.weights:
        return None
    group = args.group_size or quantization.GROUP
    with as_flags():
        quantization.check(config, args.weights, args.tp, adapters.merged, group)
    return partial(quantization.apply, kind=args.weights, group=group)


def open_adapters(args: argparse.Namespace, config: MoEConfig, named: bool) -> Adapters:
    """The adapters of --adapter. named: whether they may have names. Raises ConfigError or
    CheckpointError."""
    adapters = Adapters(args.adapter, args.checkpoint, config, args.tp)
    if adapters.names and not named:
        raise ConfigError(
            f"--adapter {args.adapter[0]}: a name is for lines of --prompt-file; without it, the"
            " adapter is for every prompt"
        )
    return adapters


def write_answer(record: dict, text: str, tokens: int, finish: str) -> None:
    print(as_json(record | {"text": text, "tokens": tokens, "finish": finish}), flush=True)


def continue_prompt(
    args: argparse.Namespace, world: World, stream, tokenizer, config: MoEConfig, options: dict
):
    """Stream the continuation of --prompt, or a new text. Returns a summary of the speed."""
    if args.chat is not None:
        prompt, options["eot"] = ask(args, tokenizer, config)
    elif args.prompt is None:
        prompt = prompt_ids(tokenizer, "")
    else:
        prompt = encode(args.prompt, tokenizer, config.seq_length)
    if not prompt:
        raise PromptError(
            "a new text begins with a begin or an end token, and this tokenizer has neither that"
            " the model knows; give --prompt"
        )
    if args.speculative:
        speculative.check_room(config.seq_length, prompt, args.max_tokens)
    if world.rank:
        return stream_text(stream, tokenizer, prompt, args.stop, None, **options)
    print(args.prompt or "", end="", flush=True)
    summary = stream_text(stream, tokenizer, prompt, args.stop, sys.stdout, **options)
    print(flush=True)
    return summary


def ask(args: argparse.Namespace, tokenizer, config: MoEConfig) -> tuple[list[int], tuple]:
    """(the tokens after which the model answers --chat, the ids that end its answer). Raises
    ChatError or PromptError."""
    chat = find_chat(args.checkpoint, tokenizer, args.adapter)
    prompt = chat.prompt([message("user", args.chat)])
    if len(prompt) > config.seq_length:
        raise PromptError(
            f"--chat: the conversation has {len(prompt)} tokens, and the model's context holds"
            f" {config.seq_length}: shorten it"
        )
    return prompt, (*tokenizer.stop_ids, chat.end_of_turn())


def converse(world: World, stream, tokenizer, longest: int, stop: list[str], **options) -> None:
    """A prompt a line, until the end of the input. There is no memory from line to line. longest:
    tokens of a prompt."""
    out = sys.stdout if world.rank == 0 else None
    while True:
        line = None
        if world.rank == 0:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                pass
        line = world.gather(line)[0]
        if line is None:
            return
        try:
            prompt = encode(line, tokenizer, longest)
        except PromptError as e:
            world.say(e)
            continue
        summary = stream_text(stream, tokenizer, prompt, stop, out, **options)
        world.say("")
        world.say_aside(summary)


# --------------------------------------------------------------------------------------------------


def main(argv: list[str], stream_of: Callable) -> int:
    """generate.py. stream_of: as in `run`."""
    about = "Continue prompts with a trained model."
    parser = argparse.ArgumentParser(prog="python generate.py", description=about)
    add_flags(parser)
    flag = parser.add_argument
    flag("--prompt", help="the text to continue; without it, a new text is begun")
    question = "a message that the model answers, in its chat template (sft.py)"
    flag("--chat", metavar="QUESTION", help=question)
    lines = (
        'JSON lines with a "prompt"; the output has the same lines with "text", "tokens" and'
        ' "finish"; - is standard input'
    )
    flag("--prompt-file", metavar="FILE", help=lines)
    flag("--interactive", action="store_true", help="continue each line of input")
    drafts = "the modules of train.py --mtp-layers draft tokens; needs --temperature 0"
    flag("--speculative", action="store_true", help=drafts)
    runs = (
        "a run with --peft for the model of --checkpoint; NAME=ADAPTER, several times, for lines of"
        ' --prompt-file with an "adapter": "NAME"'
    )
    flag("--adapter", action="append", default=[], metavar="ADAPTER", help=runs)
    add_weight_flags(parser)
    return command("generate.py", partial(run, stream_of=stream_of), argv, parser)
