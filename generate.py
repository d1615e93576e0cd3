"""Text from a checkpoint, one token at a time.

    python generate.py --checkpoint runs/default --prompt "def "

Each new token is drawn from softmax(logits / temperature), after everything but the `top_k` likeliest tokens, or but the
smallest set whose probability reaches `top_p` (nucleus sampling, arXiv 1904.09751), has been left out. Temperature 0 takes the
likeliest. There is no key-value cache: every step runs the whole sequence again, which is simple, and slow for long ones.
"""
import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import checkpoint
import sharding
from gpt import GPT, GPTConfig
from tokenizer import TokenizerError, make_tokenizer


@torch.no_grad()
def generate(model: GPT, prompt: list[int], max_tokens: int, temperature=1.0, top_k=0, top_p=1.0, seed=0, eot: int | None = None,
             multiple_of: int = 1):
    """Yield up to `max_tokens` token ids after `prompt` (at least one id; the last seq_length count). Stops before `eot`.
    multiple_of: t for a sequence-parallel model, which takes lengths that t divides; all of its ranks call this with the same arguments."""
    device = next(model.parameters()).device
    ids = torch.tensor([prompt], dtype=torch.long, device=device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_tokens):
        recent = ids[:, -model.config.seq_length:]
        padded = F.pad(recent, (0, -recent.shape[1] % multiple_of))      # at the end, where no token before can see it
        logits = model(padded)[0, recent.shape[1] - 1]
        token = choose(logits.float().cpu(), temperature, top_k, top_p, generator)
        if token == eot:
            return
        yield token
        ids = torch.cat((ids, ids.new_tensor([[token]])), dim=1)


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token id from logits [V]. Raises FloatingPointError for a model that has diverged."""
    if temperature == 0:
        return int(logits.argmax())
    ordered, ids = (logits / temperature).sort(descending=True, stable=True)
    if top_k:
        ordered[top_k:] = -torch.inf
    probabilities = ordered.softmax(0)
    if not probabilities.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0            # the likeliest always stays
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def load_model(path: Path, device="cpu", dtype=torch.float32) -> tuple[GPT, dict]:
    """The model of a checkpoint, and the checkpoint's index. Raises CheckpointError."""
    index = checkpoint.read_index(path)
    try:
        with torch.device("meta"):
            model = GPT(GPTConfig(**index["model"]))
    except (TypeError, ValueError) as e:
        raise checkpoint.CheckpointError(f"{path}/index.json does not describe a model of this project ({e})") from None
    sharding.materialise(model, device, dtype)
    checkpoint.load(path, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
    return model.eval(), index


def main():
    parser = argparse.ArgumentParser(description="Continue a prompt with a trained model.")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or the folder of a run")
    parser.add_argument("--prompt", default="", help="empty: start a new document")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest tokens that make up probability P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="if the one that the model was trained with has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if not 0 <= args.temperature < float("inf") or args.top_k < 0 or not 0 < args.top_p <= 1 or args.max_tokens < 0 or not 0 <= args.seed < 2**63:
        parser.error("--temperature, --top-k, --max-tokens and --seed must be at least 0 and finite, --top-p above 0 and at most 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no usable CUDA device")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    try:
        path = checkpoint.find(args.checkpoint)
        model, index = load_model(path, device)
        beside = path.parent.parent / "tokenizer.json"                   # train.py keeps a copy in the run's folder
        tokenizer = make_tokenizer(args.tokenizer or (str(beside) if beside.exists() else str(index["config"].get("tokenizer"))))
    except (checkpoint.CheckpointError, TokenizerError) as e:
        print(f"generate.py: {e}", file=sys.stderr)
        sys.exit(2)
    prompt = list(tokenizer.encode(args.prompt))
    ids, shown = [int(i) for i in prompt], args.prompt
    print(shown, end="", flush=True)
    for token in generate(model, ids or [tokenizer.eot], args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed,
                          tokenizer.eot):
        ids.append(token)
        text = tokenizer.decode(ids)                                     # of everything: a token may be part of a character
        if not text.endswith("\ufffd"):                                  # half a character: wait for the rest
            print(text[len(shown):], end="", flush=True)
            shown = text
    print()


if __name__ == "__main__":
    main()
