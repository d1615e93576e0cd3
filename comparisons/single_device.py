"""One training step on one device: this project beside Hugging Face transformers' GPT-2, in turn,
in one run.

    python comparisons/single_device.py [--threads 2] [--rounds 15] [--toy] [--out DIR]

The same shapes, random tokens, fused AdamW, clipping, scaled_dot_product_attention; no dropout.
Three processes take turns, a step each, while the others wait: ours as train.py runs it;
transformers as it comes; and transformers with the setting of the memory allocator that train.py
makes on CPUs. Ratios are medians over rounds of (their seconds / our seconds). In bf16 ours keeps
fp32 masters and moments, and theirs trains in plain bf16, which is less work. The share of the
matmul peak, which is measured in every round, is model FLOPs (gpt.flops_per_token) over the time of
forward and backward; the optimizer's time stands apart."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from report import median, spread, timed

import data
import gpt
import train
from lessons import ranks
from runtime.world import Groups, keep_freed_memory

CASES = {
    "small": dict(
        model="gpt2",
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        seq_length=256,
        vocab_size=8192,
        dropout=0.0,
        global_batch_size=8,
    ),
    "gpt2-124m": dict(model="gpt2", seq_length=256, dropout=0.0, global_batch_size=2),
}
TOY = {
    "toy": dict(
        model="gpt2",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        seq_length=32,
        vocab_size=512,
        dropout=0.0,
        global_batch_size=2,
    )
}
KINDS = {
    "matrix multiplications": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "GELU": ("gelu",),
    "norm": ("layer_norm",),
    "cross entropy": (
        "_CrossEntropy",
        "aten::exp",
        "aten::amax",
        "aten::div",
        "aten::gather",
        "aten::scatter",
        "aten::log",
    ),
    "embedding": ("embedding", "index"),
    "copies, sums and zeros": (
        "aten::add",
        "aten::copy_",
        "aten::fill_",
        "aten::zero_",
        "aten::sum",
        "aten::clone",
        "aten::mul",
        "aten::sub",
    ),
}


class Random:
    """Random tokens that are already in memory."""

    def __init__(self, batch: int, s: int, v: int):
        self.s = s
        rows = torch.randint(v, (batch, s + 1), generator=torch.Generator().manual_seed(0))
        self.fixed = data.Batch(
            rows[:, :-1].contiguous(),
            rows[:, 1:].contiguous(),
            torch.ones(batch, s, dtype=torch.bool),
            torch.arange(batch),
        )

    def batch(self, samples):
        # sample n is row n, over and over
        first = samples[0] % len(self.fixed.tokens)
        whole = self.fixed
        rows = slice(first, first + len(samples))
        return data.Batch(
            whole.tokens[rows], whole.targets[rows], whole.loss_mask[rows], whole.samples[rows]
        )

    def counted_tokens(self, samples):
        return self.fixed.targets.numel()


def transformers_step(c: gpt.GPTConfig, batch: data.Batch, dtype, device):
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.seq_length,
            n_embd=c.hidden_size,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            attn_implementation="sdpa",
        )
    ).to(device, dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batch = batch.to(device)
    # it shifts the targets itself
    targets = torch.cat((batch.tokens[:, :1], batch.targets), 1)[:, : c.seq_length]

    def step():
        optimizer.zero_grad()
        model(input_ids=batch.tokens, labels=targets, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def breakdown(step) -> dict[str, float]:
    """Share of the time of one step by kind of operation, from the profiler."""
    with torch.profiler.profile() as profile:
        step()
    shares = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profile.key_averages():
        kind = next(
            (k for k, names in KINDS.items() if any(n in event.key for n in names)), "the rest"
        )
        shares[kind] += event.self_cpu_time_total
    total = sum(shares.values())
    return {k: v / total for k, v in shares.items()}


def on_rank(rank: int, fields: dict, precision: str, rounds: int, device: str):
    """Rank 0 is this project, 1 transformers, 2 transformers with our allocator setting. Returns
    seconds per round."""
    if rank != 1 and device == "cpu":
        keep_freed_memory()
    config = train.Config(**fields, precision=precision)
    c = config.model_config()
    dtype = train.DTYPES[precision]
    dataset = Random(config.global_batch_size, c.seq_length, c.vocab_size)
    if rank == 0:
        trainer = train.Trainer(config, torch.device(device), Groups())
        steps = [
            lambda: trainer.forward_backward(1, dataset),
            lambda: trainer.update(1),
            lambda: report.matmul_flops(dtype, device, repeats=3),
        ]
    else:
        steps = [transformers_step(c, dataset.fixed, dtype, device)]
    times = []
    # two rounds to warm up
    for _ in range(rounds + 2):
        for turn in range(dist.get_world_size()):
            dist.barrier()
            if turn == rank:
                times.append([timed(step) for step in steps[:2]])
                if rank == 0:
                    times[-1].append(steps[2]())
    dist.barrier()
    shares = breakdown(steps[0]) if rank == 0 and device == "cpu" else None
    dist.barrier()
    return times[2:], shares


def measure(fields: dict, precision: str, rounds: int, device: str, threads: int) -> dict:
    (ours, shares), (plain, _), (same, _) = ranks.run(
        on_rank, 3, fields, precision, rounds, device, threads=threads, timeout=300
    )
    config = train.Config(**fields).model_config()
    tokens = fields["global_batch_size"] * config.seq_length
    flops = tokens * gpt.flops_per_token(config)
    seconds = median([b + u for b, u, _ in ours])
    result = {
        "tokens_per_second": tokens / seconds,
        "transformers_tokens_per_second": tokens / median([t for (t,) in plain]),
        "ratio": spread([t / (b + u) for (b, u, _), (t,) in zip(ours, plain)]),
        "ratio_with_our_allocator_setting": spread(
            [t / (b + u) for (b, u, _), (t,) in zip(ours, same)]
        ),
        "matmul_peak_flops": spread([p for _, _, p in ours]),
        "share_of_peak_outside_optimizer": spread([flops / b / p for b, _, p in ours]),
        "share_of_peak": flops / seconds / median([p for _, _, p in ours]),
        "optimizer_share_of_step": median([u / (b + u) for b, u, _ in ours]),
        "breakdown_outside_optimizer": shares,
    }
    if device == "cuda":
        result["mfu_against_989_tflops"] = flops / seconds / 989e12
    return result


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"]
    )
    args = report.parse(parser)
    cases = TOY if args.toy else {name: CASES[name] for name in args.cases}
    if args.toy:
        args.rounds = 1
        args.threads = 1
        args.precisions = ["fp32"]
    torch.set_num_threads(args.threads)
    results = {}
    print(
        f"{'':<22}{'tokens/s':>10}{'transformers':>14}{'ratio':>8}{'same allocator':>16}{'of matmul peak':>16}{'optimizer':>11}"
    )
    for name, fields in cases.items():
        for precision in args.precisions:
            r = results[f"{name} {precision}"] = measure(
                fields, precision, args.rounds, args.device, args.threads
            )
            print(
                f"{name + ' ' + precision:<22}{r['tokens_per_second']:>10,.0f}{r['transformers_tokens_per_second']:>14,.0f}{r['ratio']['median']:>8.2f}{r['ratio_with_our_allocator_setting']['median']:>16.2f}{r['share_of_peak_outside_optimizer']['median']:>15.0%}"
                f" {r['optimizer_share_of_step']:>10.0%}",
                flush=True,
            )
            if r["breakdown_outside_optimizer"]:
                print(
                    "    "
                    + ", ".join(
                        f"{k} {v:.0%}"
                        for k, v in sorted(
                            r["breakdown_outside_optimizer"].items(), key=lambda kv: -kv[1]
                        )
                        if v >= 0.005
                    )
                )
    report.save("single_device", {"results": results}, args)


if __name__ == "__main__":
    main()
