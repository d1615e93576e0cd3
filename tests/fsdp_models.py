"""Small models of many structures, for tests of fsdp.py: by hand, of transformers, and at random.

Neither 2 nor 3 ranks divide H = 7, so units have padding. A sample follows from (step, rank,
micro-batch), so that one process can run the samples of all ranks, and what a rank skips too."""

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

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(100 * self.step + 10 * self.rank + self.micro)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator(), dtype=torch.float64)

    def x(self) -> Tensor:
        return self.randn(2, 3, H)

    def tokens(self, length: int = 5) -> Tensor:
        return torch.randint(VOCABULARY, (2, length), generator=self.generator())


def mean_square(model: nn.Module, sample: Sample) -> Tensor:
    return model(sample.x()).square().mean()


@dataclass(frozen=True)
class Case:
    """A model, its units, and the loss of a sample."""

    build: Callable[[], nn.Module]
    # as in fsdp.apply
    units: object
    loss: Callable[[nn.Module, Sample], Tensor] = mean_square
    # Whether ranks run other units, or in another order, or another number of times.
    skips: bool = False
    tolerance: float = 1e-10

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()


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
    """Every block of the decoder reads the encoder's result, as a keyword."""

    def __init__(self, tied: bool = False, reverse: bool = False, layers: int = 2):
        """reverse: parts are registered in another order than they run."""
        super().__init__()
        parts = dict(
            embedding=nn.Embedding(VOCABULARY, H),
            encoder=blocks(layers),
            decoder=blocks(layers),
            head=nn.Linear(H, VOCABULARY, bias=False),
        )
        for name in reversed(parts) if reverse else parts:
            self.add_module(name, parts[name])
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embedding(source)
        for block in self.encoder:
            memory = block(memory)
        y = self.embedding(target[:, :-1])
        for block in self.decoder:
            y = block(y, memory=memory)
        return F.cross_entropy(self.head(y).flatten(0, 1), target[:, 1:].flatten())


def translate(model: nn.Module, sample: Sample) -> Tensor:
    return model(sample.tokens(4), sample.tokens())


class Captions(nn.Module):
    """A tower of blocks reads a picture, and a decoder its result; or the decoder has text alone."""

    def __init__(self, frozen: bool = False, tower_dtype: torch.dtype = torch.float64):
        super().__init__()
        self.tower = blocks(3)
        self.decoder = EncoderDecoder(layers=2)
        self.tower.requires_grad_(not frozen)
        self.tower_dtype = tower_dtype

    def double(self) -> "Captions":
        super().double()
        self.tower.to(self.tower_dtype)
        return self

    def forward(self, picture: Tensor | None, text: Tensor, tower_learns: bool = True) -> Tensor:
        y = self.decoder.embedding(text[:, :-1])
        memory = None
        if picture is not None:
            with torch.set_grad_enabled(tower_learns):
                memory = picture.to(self.tower_dtype)
                for block in self.tower:
                    memory = block(memory)
            memory = memory.double()
        for block in self.decoder.decoder:
            y = block(y, memory=memory)
        return F.cross_entropy(self.decoder.head(y).flatten(0, 1), text[:, 1:].flatten())


def caption(model: nn.Module, sample: Sample) -> Tensor:
    return model(sample.x(), sample.tokens())


def caption_some(model: nn.Module, sample: Sample) -> Tensor:
    """Rank 0 has no picture at first, then none in its second micro-batch, while the tower of rank
    1 does not learn; at last nobody has one."""
    text_alone = (sample.step == 0 and sample.rank == 0) or sample.micro == 1 or sample.step == 2
    tower_learns = (sample.step, sample.rank) != (1, 1)
    return model(None if text_alone else sample.x(), sample.tokens(), tower_learns)


class TwoTowers(nn.Module):
    """Text and pictures, one tower each, compared at the end."""

    def __init__(self, layers: int = 3):
        super().__init__()
        self.text = blocks(layers)
        self.pictures = blocks(layers)
        # without a dimension, as in CLIP
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, text: Tensor, picture: Tensor) -> Tensor:
        for block in self.text:
            text = block(text)
        for block in self.pictures:
            picture = block(picture)
        return self.scale.exp() * text * picture


class Stack(nn.Module):
    """Blocks, run in the order of a call. A table and a linear layer belong to no block."""

    def __init__(self, reentrant: bool | None = None, in_place: bool = False):
        """reentrant: how torch recomputes blocks; None: it does not."""
        super().__init__()
        self.first = nn.Linear(H, H)
        self.blocks = blocks(3)
        self.table = nn.Parameter(torch.randn(3, H))
        self.reentrant = reentrant
        self.in_place = in_place

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.first(x) + self.table
        for i in order:
            if self.reentrant is None:
                x = self.blocks[i](x)
            else:
                x = checkpoint(self.blocks[i], x, use_reentrant=self.reentrant)
            if self.in_place:
                x += 1
                x.relu_()
        return x


def in_order(order_of: Callable[[Sample], tuple], model: nn.Module, sample: Sample) -> Tensor:
    return model(sample.x(), order_of(sample)).square().mean()


def other_order(sample: Sample) -> tuple:
    return (0, 2, 1) if (sample.rank + sample.step) % 2 else (0, 1, 2)


def other_number(sample: Sample) -> tuple:
    return ((0, 1, 1, 2), (2,), (0, 1, 2))[(sample.rank + sample.step + sample.micro) % 3]


def siamese(model: nn.Module, sample: Sample) -> Tensor:
    """Two forwards, one backward."""
    return (model(sample.x()) - model(sample.x().square())).square().mean()


class Talker(Block):
    """Has keywords only, and a result of which one tensor is its input, and one is not used."""

    def forward(self, *, hidden: Tensor, options: dict) -> dict:
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
SMALL |= dict(intermediate_size=12, max_position_embeddings=8, attn_implementation="eager")
PICTURE = dict(image_size=4, patch_size=2, num_channels=1, num_labels=3)
T5 = dict(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
T5 |= dict(dropout_rate=0.0, decoder_start_token_id=0)
CLIP = dict(text_config=SMALL | dict(eos_token_id=2, projection_dim=6), projection_dim=6)
CLIP |= dict(vision_config=SMALL | PICTURE | dict(projection_dim=6))
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def theirs(model_type: str, recompute: bool = False, head: str = "", **fields) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **fields)
    family = "AutoModel" + (f"For{head}" if head else "")
    model = getattr(transformers, family).from_config(config).train()
    if recompute:
        model.gradient_checkpointing_enable()
    return model


def named(*classes: str) -> Callable[[str, nn.Module], bool]:
    """Modules by the names of their classes."""
    return lambda name, module: type(module).__name__ in classes


def loss_of_tokens(model: nn.Module, sample: Sample) -> Tensor:
    return model(input_ids=sample.tokens(), labels=sample.tokens()).loss


def loss_of_pictures(model: nn.Module, sample: Sample) -> Tensor:
    labels = sample.tokens(1)[:, 0] % 3
    return model(pixel_values=sample.randn(2, 1, 4, 4), labels=labels).loss


def loss_of_pairs(model: nn.Module, sample: Sample) -> Tensor:
    pictures = sample.randn(2, 1, 4, 4)
    return model(input_ids=sample.tokens(), pixel_values=pictures, return_loss=True).loss


llama = partial(theirs, "llama", head="CausalLM", **SMALL)
bert = partial(theirs, "bert", head="MaskedLM", **SMALL | NO_DROPOUT)
vit = partial(theirs, "vit", head="ImageClassification", **SMALL | PICTURE | NO_DROPOUT)

CASES = {
    "U-Net": Case(UNet, Block),
    "encoder-decoder": Case(EncoderDecoder, Block, translate),
    "encoder-decoder, tied": Case(partial(EncoderDecoder, tied=True), Block, translate),
    "encoder-decoder, tied, embedding and head are units": Case(
        partial(EncoderDecoder, tied=True), (Block, nn.Embedding, nn.Linear), translate
    ),
    "encoder-decoder, registered backwards": Case(
        partial(EncoderDecoder, reverse=True), Block, translate
    ),
    "frozen tower": Case(partial(Captions, frozen=True), Block, caption),
    "trained tower": Case(Captions, Block, caption),
    "two towers": Case(TwoTowers, Block, lambda m, s: m(s.x(), s.x().exp()).square().mean()),
    "used twice": Case(Stack, Block, partial(in_order, lambda sample: (0, 1, 0, 2, 2))),
    "blocks in a list; loose parameters": Case(Stack, Block),
    "ViT": Case(vit, named("ViTLayer"), loss_of_pictures),
    "Llama": Case(llama, named("LlamaDecoderLayer"), loss_of_tokens),
    "Llama, recomputed": Case(
        partial(llama, recompute=True), named("LlamaDecoderLayer"), loss_of_tokens
    ),
    "BERT": Case(bert, named("BertLayer"), loss_of_tokens),
    "T5": Case(partial(theirs, "t5", head="Seq2SeqLM", **T5), named("T5Block"), loss_of_tokens),
    "CLIP": Case(partial(theirs, "clip", **CLIP), named("CLIPEncoderLayer"), loss_of_pairs),
    "keywords, results in a dictionary": Case(Talkers, Talker),
    "a tower that a rank does not use": Case(Captions, Block, caption_some, skips=True),
    "another order": Case(Stack, Block, partial(in_order, other_order), skips=True),
    "another number of times": Case(Stack, Block, partial(in_order, other_number), skips=True),
    "mixed types": Case(
        partial(Captions, tower_dtype=torch.float32), Block, caption, tolerance=1e-5
    ),
    "a unit in a unit": Case(lambda: nn.Sequential(Pair(), Block(), Pair()), (Block, Pair)),
    "recomputed": Case(partial(Stack, reentrant=False), Block),
    "recomputed, reentrant": Case(partial(Stack, reentrant=True), Block),
    "results changed in place": Case(partial(Stack, in_place=True), Block),
    "siamese": Case(Stack, Block, siamese),
}


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

    def forward(self, x: Tensor | None = None, *, options: dict | None = None):
        x = options["x"] if x is None else x
        y = x + self.gain * torch.tanh(self.linear(self.norm(x)))
        return dict(tuple=(y, x), dictionary=dict(rest=[None, x], y=y)).get(self.manner, y)

    def call(self, x: Tensor, sample: Sample) -> Tensor:
        y = self(options=dict(x=x)) if self.manner == "keyword" else self(x)
        return dict(tuple=lambda: y[0], dictionary=lambda: y["y"]).get(self.manner, lambda: y)()


class Plain(nn.Sequential):
    """torch's container that has a forward."""

    def __init__(self, draw: random.Random):
        super().__init__(nn.Linear(H, H), nn.Tanh(), nn.Sequential(nn.Linear(H, H), nn.Tanh()))

    def call(self, x: Tensor, sample: Sample) -> Tensor:
        return self(x)


@dataclass(frozen=True)
class Call:
    """A line of a node's program: which child runs, and where it is skipped."""

    child: int
    # "110": samples run it whose numbers add up to 0, 1, 3, 4, 6 ..
    runs: str
    # None: not recomputed; else torch's use_reentrant.
    reentrant: bool | None


class Node(nn.Module):
    """Children in containers, run in the order of a program that may run one of them twice."""

    def __init__(self, draw: random.Random, depth: int, may_skip: bool):
        super().__init__()
        kinds = [Leaf, Leaf, Plain] + [partial(Node, depth=depth - 1, may_skip=may_skip)] * depth
        # A node has a leaf at least.
        children = [Leaf(draw), *[draw.choice(kinds)(draw) for _ in range(draw.randint(0, 2))]]
        draw.shuffle(children)
        self.held = nn.ModuleDict(dict(a=contained(children[:1], draw)))
        self.held["b"] = contained(children[1:], draw)
        self.gain = nn.Parameter(torch.ones(())) if draw.random() < 0.3 else 1.0
        order = [*range(len(children)), *draw.choices(range(len(children)), k=draw.randint(0, 1))]
        draw.shuffle(order)
        runs = ["1", "1", "01", "110", "0001"] if may_skip else ["1"]
        recomputed = [None, None, False, True]
        self.program = [Call(i, draw.choice(runs), draw.choice(recomputed)) for i in order]
        # Whether ranks run it forwards and backwards in turn.
        self.turns = may_skip and draw.random() < 0.2

    def extra_repr(self) -> str:
        return "\n".join(map(str, self.program)) + "\nin turns" * self.turns

    def forward(self, x: Tensor, sample: Sample) -> Tensor:
        children = held_by(self.held)
        number = sample.step + sample.rank + sample.micro
        for call in reversed(self.program) if self.turns and number % 2 else self.program:
            if call.runs[number % len(call.runs)] == "0":
                continue
            run = partial(children[call.child].call, sample=sample)
            if call.reentrant is None:
                x = run(x)
            else:
                x = checkpoint(run, x, use_reentrant=call.reentrant)
        return self.gain * x

    call = forward


def contained(modules: list[nn.Module], draw: random.Random) -> nn.Module:
    """Modules in a list, a dictionary, or lists in a list."""
    kind = draw.choice(["list", "dictionary", "lists"])
    if kind == "list":
        return nn.ModuleList(modules)
    if kind == "dictionary":
        return nn.ModuleDict({f"m{i}": module for i, module in enumerate(modules)})
    return nn.ModuleList([nn.ModuleList([module]) for module in modules])


def held_by(module: nn.Module) -> list[nn.Module]:
    """The modules in containers in a container."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [module]
    return [inner for child in module.children() for inner in held_by(child)]


class Drawn(nn.Module):
    """A random tree of nodes, with tied and frozen parameters, between two layers."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.first = nn.Linear(H, H)
        self.body = Node(draw, depth=2, may_skip=draw.random() < 0.6)
        self.head = nn.Linear(H, 2)
        linears = [m for m in self.modules() if isinstance(m, nn.Linear) and m is not self.head]
        for layer in linears:
            if draw.random() < 0.15:
                layer.weight = draw.choice(linears).weight
        for part in [*self.body.modules(), *self.body.parameters()]:
            if draw.random() < 0.04:
                part.requires_grad_(False)

    def forward(self, sample: Sample) -> Tensor:
        return self.head(self.body(self.first(sample.x()), sample))


@dataclass(frozen=True)
class Chosen:
    names: list[str]

    def __call__(self, name: str, module: nn.Module) -> bool:
        return name in self.names


def random_case(seed: int) -> Case:
    model = Drawn(random.Random(seed))
    draw = random.Random(-seed)
    nodes = [module for module in model.modules() if isinstance(module, Node)]
    skips = any(node.turns or any("0" in call.runs for call in node.program) for node in nodes)
    callable_names = [
        name
        for name, module in model.named_modules()
        if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]
    chosen = draw.sample(callable_names, draw.randint(1, len(callable_names)))
    units = draw.choice([Leaf, Node, (Leaf, Node), nn.Linear, Chosen(chosen)])
    return Case(
        lambda: Drawn(random.Random(seed)),
        units,
        lambda model, sample: model(sample).square().mean(),
        skips,
    )
