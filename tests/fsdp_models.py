"""Small models of many structures, for tests of fsdp.py: by hand, of transformers, and at random.

Neither 2 nor 3 ranks divide H = 7, so units have padding. A sample follows from (step, rank,
micro-batch), so that one process can run the samples of all ranks, and skip what a rank skips."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

H = 7
VOCABULARY = 11


@dataclass(frozen=True)
class Sample:
    """One micro-batch of one rank."""

    step: int
    rank: int
    micro: int

    @property
    def number(self) -> int:
        return self.step + self.rank + self.micro

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(100 * self.step + 10 * self.rank + self.micro)

    def x(self, *shape: int) -> Tensor:
        return torch.randn(*(shape or (2, 3, H)), generator=self.generator(), dtype=torch.float64)

    def tokens(self, length: int = 5) -> Tensor:
        return torch.randint(VOCABULARY, (2, length), generator=self.generator())


def mean_square(model: nn.Module, sample: Sample) -> Tensor:
    return model(sample.x()).square().mean()


@dataclass(frozen=True)
class Case:
    """A model, its units as for fsdp.apply, and the loss of a sample."""

    build: Callable[[], nn.Module]
    units: object
    loss: Callable[[nn.Module, Sample], Tensor] = mean_square
    # Whether ranks run other units, or in another order, or another number of times.
    skips: bool = False
    # The name of a part in float32.
    narrow: str = ""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().double()
        if self.narrow:
            model.get_submodule(self.narrow).float()
        return model


# --- models by hand -------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inputs: int = H, outputs: int = H):
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.up = nn.Linear(inputs, 2 * H)
        self.down = nn.Linear(2 * H, outputs)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is not None:
            x = x + memory.mean(1, keepdim=True)
        return self.down(F.gelu(self.up(self.norm(x))))


def blocks(n: int) -> nn.ModuleList:
    return nn.ModuleList([Block() for _ in range(n)])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList([Block(H, 6), Block(6, 5)])
        self.middle = Block(5, 5)
        self.ups = nn.ModuleList([Block(5 + 5, 6), Block(6 + 6, H)])

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for down in self.downs:
            x = down(x)
            skipped.append(x)
        x = self.middle(x)
        for up in self.ups:
            x = up(torch.cat([x, skipped.pop()], dim=-1))
        return x


class EncoderDecoder(nn.Module):
    """The encoder reads tokens or a picture; each block of the decoder reads its result."""

    def __init__(self, tied: bool = False, backwards: bool = False, frozen: bool = False):
        """backwards: parts are registered in another order than they run. frozen: the encoder."""
        super().__init__()
        parts = dict(embedding=nn.Embedding(VOCABULARY, H), encoder=blocks(3), decoder=blocks(2))
        parts["head"] = nn.Linear(H, VOCABULARY, bias=False)
        for name in reversed(parts) if backwards else parts:
            self.add_module(name, parts[name])
        self.encoder.requires_grad_(not frozen)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, source: Tensor | None, text: Tensor, encoder_learns: bool = True) -> Tensor:
        """source: tokens, a picture, or None: the decoder has text alone."""
        y = self.embedding(text[:, :-1])
        memory = source
        if source is not None:
            if not source.is_floating_point():
                memory = self.embedding(source)
            with torch.set_grad_enabled(encoder_learns):
                for block in self.encoder:
                    memory = block(memory.to(block.norm.weight.dtype))
            memory = memory.to(y.dtype)
        for block in self.decoder:
            y = block(y, memory=memory)
        return F.cross_entropy(self.head(y).flatten(0, 1), text[:, 1:].flatten())


def translate(model: nn.Module, sample: Sample) -> Tensor:
    return model(sample.tokens(4), sample.tokens())


def caption(model: nn.Module, sample: Sample) -> Tensor:
    return model(sample.x(), sample.tokens())


def caption_some(model: nn.Module, sample: Sample) -> Tensor:
    """First rank 0 has text alone, then all have in the second micro-batch, and the encoder of rank
    1 does not learn; at last nobody has a picture."""
    text_alone = (sample.step == 0 and sample.rank == 0) or sample.micro == 1 or sample.step == 2
    encoder_learns = (sample.step, sample.rank) != (1, 1)
    return model(None if text_alone else sample.x(), sample.tokens(), encoder_learns)


class TwoTowers(nn.Module):
    """Text and pictures, one tower each, compared at the end."""

    def __init__(self):
        super().__init__()
        self.text = blocks(3)
        self.pictures = blocks(3)
        # It has no dimension, as in CLIP.
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        text, picture = x, x.exp()
        for block in self.text:
            text = block(text)
        for block in self.pictures:
            picture = block(picture)
        return self.scale.exp() * text * picture


class Stack(nn.Module):
    """Blocks, run in the order of a call. A table and a linear layer belong to no block."""

    def __init__(
        self, n: int = 3, reentrant: bool | None = None, in_place: bool = False, k: int = 1
    ):
        """reentrant: how torch recomputes k blocks at a time; None: it does not."""
        super().__init__()
        self.k = k
        self.first = nn.Linear(H, H)
        self.blocks = blocks(n)
        self.table = nn.Parameter(torch.randn(3, H))
        self.reentrant = reentrant
        self.in_place = in_place

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.first(x) + self.table
        for i in range(0, len(order), self.k):
            part = nn.Sequential(*[self.blocks[j] for j in order[i : i + self.k]])
            x = run(part, x, self.reentrant)
            if self.in_place:
                x += 1
                x.relu_()
        return x


def run(function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool | None) -> Tensor:
    return function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)


def in_order(*orders: tuple[int, ...]) -> Callable[[nn.Module, Sample], Tensor]:
    """The loss of a Stack: the orders take turns, with steps and ranks."""

    def loss(model: nn.Module, sample: Sample) -> Tensor:
        return model(sample.x(), orders[sample.number % len(orders)]).square().mean()

    return loss


def siamese(model: nn.Module, sample: Sample) -> Tensor:
    """Two forwards, one backward."""
    return (model(sample.x()) - model(sample.x().square())).square().mean()


def evaluated(model: nn.Module, sample: Sample) -> Tensor:
    """Forward, another one without gradients, backward."""
    y = model(sample.x())
    with torch.no_grad():
        other = model(sample.x().square())
    return (y * other).square().mean()


class Unused(Stack):
    """Nobody uses the result of its second block."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](self.first(x))
        self.blocks[1](y)
        return self.blocks[2](y)


class Talker(Block):
    """Has keywords only, and a result of which one tensor is its input, and one is not used."""

    def forward(self, *, hidden: dict, options: dict) -> dict:
        y = super().forward(hidden["x"])
        return dict(of=options, y=(y, [hidden["x"], None]), unused=y.sum())


class Talkers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(dict(a=Talker(), b=nn.ModuleList([Talker(), Talker()])))

    def forward(self, x: Tensor) -> Tensor:
        for talker in (self.layers["a"], *self.layers["b"]):
            y, (same, _) = talker(hidden=dict(x=x), options=dict(eps=1))["y"]
            x = y + same
        return x


class Pair(nn.Module):
    """A unit with units in it, and a layer of its own between them."""

    def __init__(self):
        super().__init__()
        self.both = blocks(2)
        self.between = nn.Linear(H, H)
        self.gain = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.both[1](self.between(self.both[0](x)))


# --- models of transformers -----------------------------------------------------------------------

SMALL = dict(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
SMALL |= dict(intermediate_size=12, max_position_embeddings=8)
SMALL |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
PICTURE = SMALL | dict(image_size=4, patch_size=2, num_channels=1, num_labels=3)
T5 = dict(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
T5 |= dict(dropout_rate=0.0, decoder_start_token_id=0)
CLIP = dict(text_config=SMALL | dict(eos_token_id=2), vision_config=PICTURE, projection_dim=6)


def theirs(model_type: str, head: str, recompute: bool = False, **fields) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = getattr(transformers, f"AutoModel{head}").from_config(config).train()
    if recompute:
        model.gradient_checkpointing_enable()
    return model


def named(class_name: str) -> Callable[[str, nn.Module], bool]:
    return lambda name, module: type(module).__name__ == class_name


def of_tokens(model: nn.Module, sample: Sample) -> Tensor:
    return model(input_ids=sample.tokens(), labels=sample.tokens()).loss


def of_pictures(model: nn.Module, sample: Sample) -> Tensor:
    labels = sample.tokens(1)[:, 0] % 3
    return model(pixel_values=sample.x(2, 1, 4, 4), labels=labels).loss


def of_pairs(model: nn.Module, sample: Sample) -> Tensor:
    pictures = sample.x(2, 1, 4, 4)
    return model(input_ids=sample.tokens(), pixel_values=pictures, return_loss=True).loss


# --- the table ------------------------------------------------------------------------------------

tied = partial(EncoderDecoder, tied=True)
backwards = partial(EncoderDecoder, backwards=True)
llama = partial(theirs, "llama", "ForCausalLM", **SMALL)
bert = partial(theirs, "bert", "ForMaskedLM", **SMALL)
vit = partial(theirs, "vit", "ForImageClassification", **PICTURE)
t5 = partial(theirs, "t5", "ForSeq2SeqLM", **T5)

CASES = {
    "U-Net": Case(UNet, Block),
    "encoder-decoder": Case(EncoderDecoder, Block, translate),
    "encoder-decoder, tied": Case(tied, Block, translate),
    "tied layers are units": Case(tied, (Block, nn.Embedding, nn.Linear), translate),
    "encoder-decoder, registered backwards": Case(backwards, Block, translate),
    "frozen tower": Case(partial(EncoderDecoder, frozen=True), Block, caption),
    "trained tower": Case(EncoderDecoder, Block, caption),
    "two towers": Case(TwoTowers, Block),
    "used twice": Case(Stack, Block, in_order((0, 1, 0, 2, 2))),
    "blocks in a list, loose parameters": Case(Stack, Block),
    "ViT": Case(vit, named("ViTLayer"), of_pictures),
    "Llama": Case(llama, named("LlamaDecoderLayer"), of_tokens),
    "Llama, recomputed": Case(
        partial(llama, recompute=True), named("LlamaDecoderLayer"), of_tokens
    ),
    "BERT": Case(bert, named("BertLayer"), of_tokens),
    "T5": Case(t5, named("T5Block"), of_tokens),
    "CLIP": Case(partial(theirs, "clip", "", **CLIP), named("CLIPEncoderLayer"), of_pairs),
    "keywords, results in a dictionary": Case(Talkers, Talker),
    "a tower that a rank does not use": Case(EncoderDecoder, Block, caption_some, skips=True),
    "another order": Case(
        partial(Stack, n=5), Block, in_order((0, 1, 2, 3, 4), (0, 4, 3, 2, 1)), skips=True
    ),
    "a rank stops early": Case(
        partial(Stack, n=5), Block, in_order((0,), (0, 1, 2, 3, 4)), skips=True
    ),
    "another number": Case(Stack, Block, in_order((0, 1, 1, 2), (2,), (0, 1)), skips=True),
    "mixed types": Case(EncoderDecoder, Block, caption, narrow="encoder"),
    "a unit in a unit": Case(lambda: nn.Sequential(Pair(), Block(), Pair()), (Block, Pair)),
    "recomputed": Case(partial(Stack, reentrant=False), Block),
    "recomputed, reentrant": Case(partial(Stack, reentrant=True), Block),
    "recomputed together": Case(partial(Stack, reentrant=False, k=3), Block),
    "results changed in place": Case(partial(Stack, in_place=True), Block),
    "siamese": Case(Stack, Block, siamese),
    "evaluated between": Case(Stack, Block, evaluated),
    "a result that nobody uses": Case(Unused, Block),
    "a unit that returns its input": Case(
        lambda: nn.Sequential(nn.Identity(), Block(), nn.Dropout(0.0), Block(), nn.Identity()),
        (Block, nn.Identity, nn.Dropout),
    ),
    "torch's Transformer": Case(
        partial(nn.Transformer, 8, 2, 2, 2, 12, dropout=0.0, batch_first=True),
        (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
        lambda model, sample: model(sample.x(2, 3, 8), sample.x(2, 4, 8)).square().mean(),
    ),
}

OF_TRANSFORMERS = ("ViT", "Llama", "Llama, recomputed", "BERT", "T5", "CLIP")


# --- models that are drawn ------------------------------------------------------------------------


class Leaf(nn.Module):
    """One layer, in one of four manners of speaking to its caller."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.linear = nn.Linear(H, H, bias=draw.random() < 0.5)
        self.gain = nn.Parameter(torch.ones(H)) if draw.random() < 0.3 else 1.0
        self.manner = draw.choice(["tensor", "tuple", "dictionary", "keyword"])

    def extra_repr(self) -> str:
        return self.manner

    def forward(self, x: Tensor) -> Tensor | tuple | dict:
        y = x + self.gain * torch.tanh(self.linear(self.norm(x)))
        return dict(tuple=(y, x), dictionary=dict(rest=[None, x], y=y)).get(self.manner, y)


@dataclass(frozen=True)
class Call:
    """A line of a node's program."""

    child: int
    # "110": samples run it whose numbers are 0, 1, 3, 4, 6 ..
    runs: str
    reentrant: bool | None


class Node(nn.Module):
    """Children in containers, run in the order of a program that may run one of them twice."""

    def __init__(self, draw: random.Random, depth: int, may_skip: bool, shares: bool):
        super().__init__()
        node = partial(Node, depth=depth - 1, may_skip=may_skip, shares=shares)
        kinds = [Leaf, Leaf, plain, *[node] * depth]
        # A node has a leaf at least.
        children = [Leaf(draw), *[draw.choice(kinds)(draw) for _ in range(draw.randint(0, 2))]]
        draw.shuffle(children)
        self.gain = nn.Parameter(torch.ones(())) if draw.random() < 0.3 else 1.0
        self.held = nn.ModuleDict(dict(a=contained(children[:1], draw)))
        self.held["b"] = contained(children[1:], draw)
        twice = draw.randint(0, 1) if shares else 0
        order = [*range(len(children)), *draw.choices(range(len(children)), k=twice)]
        draw.shuffle(order)
        runs = ["1", "1", "01", "110", "0001"] if may_skip else ["1"]
        # torch's reentrant kind computes the gradient of each use apart, which is refused.
        recomputed = [None, None, False] if shares else [None, False, True]
        self.program = [Call(i, draw.choice(runs), draw.choice(recomputed)) for i in order]
        # Whether ranks run it forwards and backwards in turn. Stage 3 refuses to do so with a layer
        # that runs twice.
        self.turns = may_skip and not shares and draw.random() < 0.4

    def extra_repr(self) -> str:
        return "\n".join(map(str, self.program)) + "\nin turns" * self.turns

    def forward(self, x: Tensor, sample: Sample) -> Tensor:
        children = held_by(self.held)
        # Stage 3 refuses a layer that runs more often than in the first forward.
        runs_all = sample.step == sample.rank == 0
        for call in reversed(self.program) if self.turns and sample.number % 2 else self.program:
            if runs_all or call.runs[sample.number % len(call.runs)] == "1":
                x = run(partial(call_child, children[call.child], sample), x, call.reentrant)
        return self.gain * x


def plain(draw: random.Random) -> nn.Sequential:
    return nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Sequential(nn.Linear(H, H), nn.Tanh()))


def call_child(child: nn.Module, sample: Sample, x: Tensor) -> Tensor:
    if isinstance(child, Node):
        return child(x, sample=sample)
    y = child(x=x) if getattr(child, "manner", "") == "keyword" else child(x)
    if isinstance(y, Tensor):
        return y
    return y["y"] if isinstance(y, dict) else y[0]


def contained(modules: list[nn.Module], draw: random.Random) -> nn.Module:
    """Modules in a list, a dictionary, or lists in a list."""
    kind = draw.choice(["list", "dictionary", "lists"])
    if kind == "dictionary":
        return nn.ModuleDict({f"m{i}": module for i, module in enumerate(modules)})
    return nn.ModuleList(modules if kind == "list" else [nn.ModuleList([m]) for m in modules])


def held_by(module: nn.Module) -> list[nn.Module]:
    """The modules in containers in a container."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [module]
    return [inner for child in module.children() for inner in held_by(child)]


class Drawn(nn.Module):
    """A random tree of nodes, with tied and frozen parameters, between two layers."""

    def __init__(self, seed: int):
        super().__init__()
        draw = random.Random(seed)
        self.first = nn.Linear(H, H)
        may_skip, shares = draw.random() < 0.6, draw.random() < 0.6
        self.body = Node(draw, depth=2, may_skip=may_skip, shares=shares)
        linears = [module for module in self.modules() if isinstance(module, nn.Linear)]
        for layer in linears:
            if shares and draw.random() < 0.2:
                layer.weight = draw.choice(linears).weight
        for part in [*self.body.modules(), *self.body.parameters()]:
            if draw.random() < 0.04:
                part.requires_grad_(False)

    def forward(self, sample: Sample) -> Tensor:
        return self.body(self.first(sample.x()), sample).square().mean()


@dataclass(frozen=True)
class Chosen:
    """Units by their names."""

    names: list[str]

    def __call__(self, name: str, module: nn.Module) -> bool:
        return name in self.names


def random_case(seed: int) -> Case:
    model = Drawn(seed)
    draw = random.Random(-seed - 1)
    nodes = [module for module in model.modules() if isinstance(module, Node)]
    skips = any(node.turns or any("0" in call.runs for call in node.program) for node in nodes)
    callable_names = [name for name, module in model.named_modules() if held_by(module) == [module]]
    callable_names.remove("")
    chosen = draw.sample(callable_names, draw.randint(1, len(callable_names)))
    units = draw.choice([Leaf, Node, (Leaf, Node), nn.Linear, Chosen(chosen)])
    return Case(partial(Drawn, seed), units, lambda model, sample: model(sample), skips)
