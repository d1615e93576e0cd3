"""How many tokens a GPU can serve, and how soon: bytes and seconds of a layout, and the frontier.

A prompt has s tokens, an answer n. A layout has t tensor-parallel ranks, p stages, and b sequences
at a time. Bytes of a rank, where a weight has w bytes:

    weights      w x the matrices / (t p), and the vocabulary's / t
    cache        b x 2 (keys, values) L a_kv d (s + n) x 2 bytes / (t p)
    activations  what the tokens of a step need in one layer, and the logits

Seconds in which one stage takes some tokens of each sequence:

    2 FLOPs for each weight and token / FLOP/s + bytes of weights and of the cache / bytes/s
        + element-wise operations, as in training
        + L / p (start of a layer's kernels + 2 all-reduces: bytes, a wait for each doubling of t;
                 where ranks share a key head, also an exchange of its columns)

A prompt has many tokens for each weight: FLOP/s bound it. A decoding step has one token of each
sequence: bytes/s and waits bound it. A token goes through all p stages, one after the other; they
work on p groups of sequences at a time: more tokens/s, and no sequence has its token sooner. Of E
experts a step reads those that its tokens are expected to meet, E (1 - (1 - k/E)^tokens).

    python planner.py serve --model gpt3-175b --gpu h100 --input 200 --output 200 --latency 5s
    python planner.py serve --model llama2-70b --gpu h100 --latency 5s --throughput 10000

With --throughput N a layout is served c times, c = ⌈N / its tokens/s⌉: the fewest GPUs, c t p, win.

Source: arXiv 2211.05102, section 2. FLOP/s and links are those of training (planning/inputs.py).

Not covered: requests that differ in length, wait in a queue or share a prefix.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import tensor_parallel
from base.model_config import MoEConfig, block_matrices, mlp_matrices, num_mlps
from inference.scheduler import most_blocks
from planning import commands
from planning.inputs import SOFTWARE, TRAIN, Layout, Machine, Software
from planning.layer_time import Rank, read_and_written
from planning.layouts import USABLE, accepts, gib
from run import rules
from run.config import ConfigError

# Bytes of a weight in a layer's matrices, and in the embedding and the head; int4 has a scale and
# a zero point for 32 numbers (inference/quantization.py).
WEIGHTS = {"fp32": (4, 4), "bf16": (2, 2), "fp8": (1, 1), "int8": (1, 1)}
WEIGHTS |= {"int4": (0.5 + 4 / 32, 1)}
# Bytes of an activation; of a number in the cache, where it differs; of a logit.
BYTES, CACHED, LOGIT = 2, {"fp8": 1, "fp32": 4}, 4
# Sequences at a time.
BATCHES = sorted({n for power in range(10) for n in (2**power, 3 * 2**power // 2)} | {768, 1024})


class Engine(NamedTuple):
    """Constants of the serving software: fitted to published times of A100s, a row for each
    (benchmarks/serving_plan.py)."""

    # The share of the memory's bandwidth that reading reaches; seconds in which a layer's kernels
    # start.
    read: float
    layer: float
    # Seconds that an all-reduce waits for each doubling of the ranks in a node, and of the nodes.
    wait: float
    network_wait: float
    # FLOPs at the peak in whose time a weight of int8 or int4 becomes one of 16 bits.
    convert: float
    # Whose element-wise operations it has.
    software: Software = TRAIN


# Kernels that start one by one, as in 2022; CUDA graphs or fused kernels, as today.
ENGINES = {
    "eager": Engine(0.85, 98e-6, 11.6e-6, 54e-6, 0.0, SOFTWARE["megatron-2022"]),
    "graphs": Engine(0.786, 37.4e-6, 4.56e-6, 54e-6, 48.9),
}


def cache_bytes(model: MoEConfig, tokens: float, number: int = BYTES) -> float:
    """Bytes of the keys and values of so many tokens, or of their latents, in all layers."""
    if model.kv_rank:
        return model.num_layers * (model.kv_rank + model.rope_head_dim) * number * tokens
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * number * tokens


@lru_cache(maxsize=2**12)
def elementwise(machine: Machine, software: Software, model: MoEConfig, t: int, s: int) -> float:
    """Seconds of one layer's element-wise operations on s tokens of a sequence."""
    model = dataclasses.replace(model, seq_length=s, dropout=0.0, attention="fused")
    return sum(read_and_written(Rank(machine, software, model, Layout(tp=t))))


class Serving(NamedTuple):
    """A model on t x p ranks."""

    machine: Machine
    engine: Engine
    model: MoEConfig
    tp: int = 1
    pp: int = 1
    weights: str = "bf16"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def flops_per_second(self) -> float:
        shares = self.machine.constants
        return self.machine.peak * (2 * shares.fp8 if self.weights == "fp8" else shares.matmul)

    @property
    def bytes_per_second(self) -> float:
        return self.machine.memory_bandwidth * self.engine.read

    def kept(self, tokens: float) -> float:
        """How many of a sequence's tokens have keys that some layer sees."""
        return min(tokens, self.model.common_window or tokens)

    def cached(self, sequences: float, tokens: float) -> float:
        """Bytes of the keys and values of all ranks; each tensor-parallel one has all latents."""
        copies = self.tp if self.model.kv_rank else self.model.key_copies(self.tp)
        number = CACHED.get(self.weights, BYTES) * copies
        return cache_bytes(self.model, sequences * self.kept(tokens), number)

    def bytes(self, batch: int, tokens: int, budget: int) -> dict[str, float]:
        """Bytes of the fullest rank. tokens: of a prompt and its answer; budget: of a step."""
        model, t = self.model, self.tp
        h, vocabulary = model.hidden_size, model.vocab_size
        matrix, vector = WEIGHTS[self.weights]
        # a stage may have one layer more; with one stage, embedding and head are on it
        share = -(-model.num_layers // self.pp) / model.num_layers / t
        ends = 2 if self.pp == 1 and not model.tied else 1
        matrices = block_matrices(model, num_mlps(model, "num_experts")[0])
        heads = (model.num_heads + 2 * model.num_kv_heads * model.key_copies(t)) * model.head_dim
        # The residual stream, its norm and a sum whole; the rest of a layer by rank.
        numbers = 3 * h + (mlp_matrices(model) / h + heads) / t
        return {
            "weights": share * matrix * matrices + ends * vector * vocabulary * h / t,
            "cache": share * self.cached(batch, tokens),
            "activations": BYTES * min(budget, batch * tokens) * numbers
            + LOGIT * batch * vocabulary / t,
        }

    def all_reduce(self, nbytes: float) -> float:
        t, engine = self.tp, self.engine
        nodes = max(1, t // self.machine.ranks_per_node)
        wait = engine.wait * math.log2(t / nodes) + engine.network_wait * math.log2(nodes)
        return wait + 2 * (t - 1) / t * nbytes / self.machine.link(t, 1)

    def gather_heads(self, tokens: float) -> float:
        """Seconds in which ranks that share a key and value head exchange their columns of it."""
        r = self.model.key_copies(self.tp)
        if r == 1:
            return 0.0
        nbytes = 2 * BYTES * tokens * self.model.head_dim * (r - 1) / r
        return self.engine.wait * math.log2(r) + nbytes / self.machine.link(r, 1)

    def send(self, nbytes: float) -> float:
        """To the next stage."""
        if self.pp == 1:
            return 0.0
        if self.ranks <= self.machine.ranks_per_node:
            return self.engine.wait + nbytes / self.machine.node_link
        return self.engine.network_wait + nbytes / self.machine.network_link

    def stage(self, sequences: float, tokens: int, seen: float) -> float:
        """Seconds in which one stage takes `tokens` new tokens of each sequence, after `seen` of
        the cache, and sends them on."""
        model, n = self.model, sequences * tokens
        mlps, experts = num_mlps(model, "router_topk")
        used = read = block_matrices(model, mlps)
        if experts:
            k, count = model.router_topk, model.num_experts
            met = count * (1 - (1 - k / count) ** n)
            read += experts * (met - k) * mlp_matrices(model, model.expert_size)
        keys = self.kept(seen + (tokens + 1) / 2)
        width = 2 * model.head_dim
        if model.kv_rank and tokens == 1:
            # The absorbed form.
            width = 2 * model.kv_rank + model.rope_head_dim
        scores = 2 * n * keys * model.num_layers * model.num_heads * width
        seconds = (2 * n * used + scores) / self.flops_per_second
        nbytes = WEIGHTS[self.weights][0] * read + self.cached(sequences, seen)
        seconds += nbytes / self.bytes_per_second
        if self.weights in ("int8", "int4"):
            seconds += self.engine.convert * read / self.machine.peak
        activation = BYTES * n * model.hidden_size
        layer = self.engine.layer + 2 * self.all_reduce(activation) + self.gather_heads(n)
        layer += sequences * elementwise(self.machine, self.engine.software, model, self.tp, tokens)
        return seconds / self.ranks + model.num_layers / self.pp * layer + self.send(activation)

    def head(self, sequences: float) -> float:
        """Seconds of the logits of one token of each sequence, on the last stage."""
        numbers = self.model.vocab_size * self.model.hidden_size / self.tp
        read = WEIGHTS[self.weights][1] * numbers / self.bytes_per_second
        return read + 2 * sequences * numbers / self.flops_per_second

    def first_token(self, batch: int, prompt: int) -> float:
        """Seconds in which a batch of prompts goes through, in as many groups as are best."""
        found = []
        for m in (2**power for power in range(batch.bit_length() if self.pp > 1 else 1)):
            stages = (m + self.pp - 1) * self.stage(batch / m, prompt, 0)
            found.append(stages + m * self.head(batch / m))
        return min(found)

    def step(self, batch: int, seen: float) -> float:
        """Seconds in which each sequence gets its next token; a group for each stage."""
        m = min(self.pp, batch)
        return self.pp * self.stage(batch / m, 1, seen) + m * self.head(batch / m)

    def request(self, batch: int, prompt: int, answer: int) -> float:
        """Seconds in which a batch has its answers: on average half of each is there."""
        steps = (answer - 1) * self.step(batch, prompt + answer / 2)
        return self.first_token(batch, prompt) + steps


# --- which layout ---------------------------------------------------------------------------------


class Found(NamedTuple):
    """A layout with a batch, and what it gives."""

    serving: Serving
    batch: int
    # Seconds: to the first token, between two others, of the request.
    first: float
    between: float
    latency: float
    # Tokens of answers in a second, of each GPU.
    rate: float
    bytes: dict[str, float]
    # How many times the layout is served, each time by GPUs of its own.
    copies: int = 1

    @property
    def gpus(self) -> int:
        return self.copies * self.serving.ranks

    @property
    def throughput(self) -> float:
        """Tokens of answers in a second, of all copies."""
        return self.rate * self.gpus


def layouts(gpus: int, one: Serving) -> Iterator[Serving]:
    """`one`, on each t x p ranks of which so many GPUs are a multiple, in whole nodes."""
    each = one.machine.ranks_per_node
    for ranks in range(1, gpus + 1):
        if gpus % ranks or (ranks > each and ranks % each):
            continue
        for tp in range(1, ranks + 1):
            pp = ranks // tp
            divides = ranks % tp == 0 and accepts(tensor_parallel.check, one.model, tp)
            if divides and pp <= one.model.num_layers and (tp <= each or tp % each == 0):
                yield one._replace(tp=tp, pp=pp)


def fitting(one: Serving, gpus: int, prompt: int, answer: int, budget: int) -> Iterator[Found]:
    """Each layout with each batch that fits into memory."""
    room = USABLE * one.machine.memory
    for serving in layouts(gpus, one):
        for batch in BATCHES:
            nbytes = serving.bytes(batch, prompt + answer, budget)
            if sum(nbytes.values()) > room:
                break
            first = serving.first_token(batch, prompt)
            between = serving.step(batch, prompt + answer / 2)
            latency = first + (answer - 1) * between
            rate = batch * answer / latency / serving.ranks
            yield Found(serving, batch, first, between, latency, rate, nbytes)


def frontier(found: Iterator[Found]) -> list[Found]:
    """Those that no other beats in latency and in tokens/s of a GPU, the soonest first."""
    best = []
    for one in sorted(found, key=lambda one: (one.latency, -one.rate)):
        if not best or one.rate > best[-1].rate:
            best.append(one)
    return best


def fewest_gpus(found: list[Found], throughput: float) -> list[Found]:
    """Of each layout the batch with which the fewest copies write so many tokens/s; of these the
    soonest. The fewest GPUs first."""
    best: dict[Serving, Found] = {}
    for one in found:
        one = one._replace(copies=math.ceil(throughput / one.throughput))
        other = best.setdefault(one.serving, one)
        best[one.serving] = min(one, other, key=lambda x: (x.copies, x.latency))
    return sorted(best.values(), key=lambda x: (x.gpus, x.latency))


# --- the command ----------------------------------------------------------------------------------

# Tokens of a block of the cache.
BLOCK = 16
UNITS = {"ms": 1e-3, "s": 1.0}


def duration(text: str) -> float:
    """5s or 500ms, in seconds."""
    unit = "ms" if text.endswith("ms") else "s"
    return commands.number(text.removesuffix(unit)) * UNITS[unit]


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = commands.Parser("serve", "Layouts that serve a model: how soon, how many tokens.")
    parser.add_machine(gpus=64)
    parser.add_argument("--model", required=True, help="a preset")
    parser.add_counts(
        ("input", 200, "tokens of each prompt"),
        ("output", 200, "tokens of each answer"),
        ("budget", 2048, "tokens of a step"),
        ("top", 8, "how many layouts"),
    )
    words = "of a whole request, at most: 5s, 500ms"
    parser.add_argument("--latency", type=duration, default=None, metavar="TIME", help=words)
    words = "tokens/s of all GPUs together, at least: the fewest GPUs that write so many"
    parser.add_argument("--throughput", type=commands.number, default=None, metavar="N", help=words)
    words = "of each weight (default: bf16)"
    parser.add_argument("--weights", choices=list(WEIGHTS)[1:], default="bf16", help=words)
    return parser.parse_args(argv)


def found_by(case: argparse.Namespace, one: Serving) -> list[Found]:
    """The frontier within --latency; with --throughput, what reaches it. Raises ConfigError where
    there is none."""
    found = list(fitting(one, case.gpus, case.input, case.output, case.budget))
    if not found:
        tokens = case.input + case.output
        least = min(sum(x.bytes(1, tokens, case.budget).values()) for x in layouts(case.gpus, one))
        room = f"{gib(USABLE * one.machine.memory)} GiB for tensors; more GPUs would fit"
        room += ", or --weights int4" if case.weights != "int4" else ", or fewer tokens"
        rule = f"every layout takes at least {gib(least)} GiB on each, of which"
        raise ConfigError(f"--gpus {case.gpus}: {rule} {one.machine.name} has {room}")
    within = [x for x in found if x.latency <= (case.latency or x.latency)]
    if not within:
        soonest = math.ceil(1000 * min(x.latency for x in found))
        rule = f"the soonest layout takes longer; {soonest}ms would fit, or less --output"
        raise ConfigError(f"--latency {1000 * case.latency:g}ms: {rule}")
    if case.throughput is None:
        return frontier(iter(within))
    found = fewest_gpus(within, case.throughput)
    if found[0].gpus > case.gpus:
        most = int(max(x.rate * (case.gpus - case.gpus % x.serving.ranks) for x in within))
        # Whole nodes, of whole copies.
        unit = math.lcm(found[0].serving.ranks, one.machine.ranks_per_node)
        limit = f" within --latency {1000 * case.latency:g}ms" if case.latency else ""
        rule = f"{case.gpus} GPUs write at most {most} tokens/s{limit}; that would fit"
        gpus = -(-found[0].gpus // unit) * unit
        if gpus <= rules.MOST_SEQUENCES:
            rule += f", or --gpus {gpus}"
        raise ConfigError(f"--throughput {case.throughput:g}: {rule}")
    return [x for x in found if x.gpus <= case.gpus]


# Heading, width, text.
COLUMNS = [
    ("tp", 3, lambda x: str(x.serving.tp)),
    ("pp", 4, lambda x: str(x.serving.pp)),
    ("batch", 6, lambda x: str(x.batch)),
    ("first, s", 10, lambda x: f"{x.first:.3f}"),
    ("between, ms", 13, lambda x: f"{1e3 * x.between:.1f}"),
    ("request, s", 12, lambda x: f"{x.latency:.2f}"),
    ("tokens/s/GPU", 14, lambda x: f"{x.rate:,.1f}"),
    ("weights", 9, lambda x: f"{x.bytes['weights'] / 2**30:.1f}"),
    ("cache", 8, lambda x: f"{x.bytes['cache'] / 2**30:.1f}"),
    ("activ.", 8, lambda x: f"{x.bytes['activations'] / 2**30:.1f}"),
]
# With --throughput, before these.
OF_COPIES = [
    ("GPUs", 4, lambda x: str(x.gpus)),
    ("copies", 7, lambda x: str(x.copies)),
    ("tokens/s", 10, lambda x: f"{x.throughput:,.0f}"),
]


def table(found: list[Found], columns: list = COLUMNS) -> str:
    rows = [[text(x) for *_, text in columns] for x in found]
    names, widths, _ = zip(*columns)
    return commands.aligned([names, *rows], widths)


def command_of(case: argparse.Namespace, x: Found) -> str:
    one = x.serving
    words = ["-m", "inference.serve", "--checkpoint", "CHECKPOINT", "--tp", one.tp, "--pp", one.pp]
    # Block 0 is scratch (serve.BlockPool).
    tokens, window = case.input + case.output, one.model.common_window
    blocks = x.batch * math.ceil(one.kept(tokens) / BLOCK)
    # a prompt behind a window needs more while it is computed
    blocks = 1 + max(blocks, most_blocks(tokens, BLOCK, case.budget, window))
    each, more = divmod(one.model.num_layers, one.pp)
    if more:
        # The last stages have one more.
        words += ["--layer-split", *[each] * (one.pp - more), *[each + 1] * more]
    words += ["--max-sequences", x.batch, "--block-size", BLOCK, "--blocks", blocks]
    words += ["--budget", case.budget, "--precision", "bf16"]
    if case.weights != "bf16":
        words += ["--weights", case.weights]
    launcher = commands.launcher(one.ranks, one.machine.ranks_per_node)
    return commands.wrapped([*launcher, *map(str, words)])


def main(argv: list[str]) -> None:
    case = arguments(argv)
    machine, model = commands.machine_of(case), commands.Config(model=case.model).model_config()
    if case.input + case.output > model.seq_length:
        rule = f"with --input {case.input} they are {case.input + case.output}, and the context of"
        rule += f" --model {case.model} holds {model.seq_length}; fewer would fit"
        raise ConfigError(f"--output {case.output}: {rule}")
    if case.weights == "fp8" and not machine.has_fp8:
        raise ConfigError(f"--weights fp8: {machine.name} has no FP8; h100 or h200 would fit")
    found = found_by(case, Serving(machine, ENGINES["graphs"], model, weights=case.weights))
    print(
        f"{case.model} on {machine.name}, {gib(machine.memory)} GiB each, at most {case.gpus}:"
        f" prompts of {case.input:,} tokens, answers of {case.output:,}; {case.weights} weights"
    )
    if case.throughput:
        best = found[0]
        print("", table(found[: case.top], OF_COPIES + COLUMNS), "", sep="\n")
        copies = f"; this serves one of its {best.copies} copies" if best.copies > 1 else ""
        print(f"The first takes the fewest GPUs{copies}:\n")
    else:
        # Some of the frontier, its last among them.
        step = (len(found) - 1) / max(1, case.top - 1)
        shown = sorted({len(found) - 1 - round(i * step) for i in range(case.top)})
        print("", table([found[i] for i in shown]), "", sep="\n")
        best = found[-1]
        copies = case.gpus // best.serving.ranks
        room = f"; {case.gpus} GPUs hold {copies} of it" if copies > 1 else ""
        print(f"The last has the most tokens/s of a GPU{room}:\n")
    is_plain = best.serving.tp == 1 and not model.num_experts
    if case.weights == "bf16" or (case.weights != "fp8" and is_plain):
        print(command_of(case, best))
    else:
        rule = "int8 and int4 are there for --tp 1 and without experts"
        print(f"serve.py has no --weights {case.weights} for it: {rule}")
