"""One training step on one device: this project beside Hugging Face transformers' GPT-2, in turn, in one process.

    python comparisons/single_device.py [--threads 2] [--rounds 15]

The same shapes, random tokens, fused AdamW, clipping; no dropout. A round runs one step of each; the ratio is the median over
rounds of (their seconds / our seconds). Both use scaled_dot_product_attention. In bf16 ours keeps fp32 masters and moments, and
theirs trains in plain bf16, which is less work. The matmul peak is measured between the rounds. The share of it is model FLOPs
(gpt.flops_per_token) over the time of forward and backward; the optimizer's time stands apart.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import data
import gpt
import report
import train
from report import median, spread, timed

CASES = {
    "small": dict(model="gpt2", num_layers=4, hidden_size=256, num_heads=8, seq_length=256, vocab_size=8192, dropout=0.0, global_batch_size=8),
    "gpt2-124m": dict(model="gpt2", seq_length=256, dropout=0.0, global_batch_size=2),
}
KINDS = {"matrix multiplications": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
         "attention": ("scaled_dot_product", "flash_attention"),
         "GELU": ("gelu",), "norm": ("layer_norm",),
         "cross entropy": ("_CrossEntropy", "aten::exp", "aten::amax", "aten::div", "aten::gather", "aten::scatter", "aten::log"),
         "embedding": ("embedding", "index"),
         "copies, sums and zeros": ("aten::add", "aten::copy_", "aten::fill_", "aten::zero_", "aten::sum", "aten::clone", "aten::mul", "aten::sub")}


class Random:
    """Random tokens that are already in memory."""

    def __init__(self, batch: int, s: int, v: int):
        rows = torch.randint(v, (batch, s + 1), generator=torch.Generator().manual_seed(0))
        self.fixed = data.Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.ones(batch, s, dtype=torch.bool), torch.arange(batch))

    def batch(self, samples):
        return self.fixed

    def counted_tokens(self, samples):
        return self.fixed.labels.numel()


def transformers_step(c: gpt.GPTConfig, batch: data.Batch, dtype, device):
    import transformers
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.seq_length, n_embd=c.hidden_size, n_layer=c.num_layers, n_head=c.num_heads,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="sdpa")).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batch = batch.to(device)
    labels = torch.cat((batch.tokens[:, :1], batch.labels), 1)[:, :c.seq_length]           # it shifts the labels itself

    def step():
        optimizer.zero_grad()
        model(input_ids=batch.tokens, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return step


def breakdown(step) -> dict[str, float]:
    """Share of the time of one step by kind of operation, from the profiler."""
    with torch.profiler.profile() as profile:
        step()
    shares = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profile.key_averages():
        kind = next((k for k, names in KINDS.items() if any(n in event.key for n in names)), "the rest")
        shares[kind] += event.self_cpu_time_total
    total = sum(shares.values())
    return {k: v / total for k, v in shares.items()}


def measure(name: str, precision: str, rounds: int, device: str) -> dict:
    config = train.Config(**CASES[name], precision=precision, micro_batch_size=CASES[name]["global_batch_size"])
    trainer = train.Trainer(config, torch.device(device), None)
    c, dtype = trainer.model_config, train.DTYPES[precision]
    dataset = Random(config.global_batch_size, c.seq_length, c.vocab_size)
    theirs = transformers_step(c, dataset.fixed, dtype, device)
    tokens, times, peaks = dataset.counted_tokens(None), [], []
    for i in range(-2, rounds):                                          # two rounds to warm up
        backward = timed(lambda: trainer.forward_backward(1, dataset))
        update = timed(lambda: trainer.update(1))
        other = timed(theirs)
        peak = report.matmul_flops(dtype, device, repeats=3)
        if i >= 0:
            times.append((backward, update, other))
            peaks.append(peak)
    flops, peak = tokens * gpt.flops_per_token(c), median(peaks)
    result = {
        "tokens_per_second": tokens / median([b + u for b, u, _ in times]),
        "transformers_tokens_per_second": tokens / median([o for _, _, o in times]),
        "ratio": spread([o / (b + u) for b, u, o in times]),
        "matmul_peak_flops": spread(peaks),
        "share_of_peak_outside_optimizer": spread([flops / b / p for (b, _, _), p in zip(times, peaks)]),
        "share_of_peak": flops / median([b + u for b, u, _ in times]) / peak,
        "optimizer_share_of_step": median([u / (b + u) for b, u, _ in times]),
        "breakdown_outside_optimizer": breakdown(lambda: trainer.forward_backward(1, dataset)) if device == "cpu" else None,
    }
    if device == "cuda":
        result["mfu_against_989_tflops"] = flops / median([b + u for b, u, _ in times]) / 989e12
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train.keep_freed_memory()                                            # as train.py does; transformers has the good of it too
    results = {}
    print(f"{'':<22}{'tokens/s':>10}{'transformers':>14}{'ratio':>8}{'of matmul peak':>16}{'optimizer':>11}")
    for name in args.cases:
        for precision in args.precisions:
            r = results[f"{name} {precision}"] = measure(name, precision, args.rounds, args.device)
            print(f"{name + ' ' + precision:<22}{r['tokens_per_second']:>10,.0f}{r['transformers_tokens_per_second']:>14,.0f}{r['ratio']['median']:>8.2f}"
                  f"{r['share_of_peak_outside_optimizer']['median']:>15.0%} {r['optimizer_share_of_step']:>10.0%}", flush=True)
            if r["breakdown_outside_optimizer"]:
                print("    " + ", ".join(f"{k} {v:.0%}" for k, v in sorted(r["breakdown_outside_optimizer"].items(), key=lambda kv: -kv[1]) if v >= 0.005))
    report.save("single_device", {"results": results})


if __name__ == "__main__":
    main()
