"""What the age of answers costs in reward (--rollout-lag), with and without importance weights.

    python -m benchmarks.stale_rollouts [--seeds 3]

GRPO, a small GPT-2 (h 32, L 2), steps of 64 answers of at most 8 tokens to 8 prompts, two updates a
step, no KL. An answer's reward is the mean of its token ids modulo 7, at most 6; random tokens get
about 3. Every ten steps the weights of then answer 256 prompts, always with the same random
numbers: the reward is theirs, not that of the old answers. Results: stale_rollouts.json
"""

import itertools

import torch

from base import cpu
from benchmarks import report
from benchmarks.report import spread
from benchmarks.steps import Steps
from course.synthetic import Questions

FIELDS = dict(command="reinforcement.py", method="grpo", model="gpt2", num_layers=2, hidden_size=32)
FIELDS |= dict(num_heads=4, seq_length=24, vocab_size=61, dropout=0.0, precision="fp32", beta=0.0)
FIELDS |= dict(global_batch_size=64, group_size=8, answer_tokens=8, warmup_steps=0, steps=30)
RATES = (3e-3, 1e-2)
WAYS = {"lag 0": {}}
for n in (1, 4):
    WAYS[f"lag {n}"] = dict(rollout_lag=n)
    WAYS[f"lag {n}, no weights"] = dict(rollout_lag=n, importance_cap=0.0)


def rewards(fields: dict, every: int) -> dict[str, float]:
    """{step: the mean reward of the policy after it}"""
    trainer = Steps(FIELDS | fields).trainer
    questions = Questions(FIELDS["vocab_size"], FIELDS["group_size"])
    found = {}
    for step in range(1, trainer.config.steps + 1):
        trainer.forward_backward(step, questions)
        trainer.update(step)
        if step % every == 0:
            found[str(step)] = trainer.task.write(0, questions, range(256))[1].mean().item()
    return found


def main():
    args = report.parse(report.arguments(__doc__, seeds=3), seeds=1)
    toy = dict(steps=1, global_batch_size=8) if args.toy else {}
    torch.set_num_threads(1)
    cpu.set_up()
    rows = {}
    for lr, way in itertools.product(RATES, list(WAYS)[: 2 if args.toy else None]):
        fields = WAYS[way] | dict(lr=lr) | toy
        every = 1 if args.toy else 10
        runs = [rewards(fields | dict(seed=seed), every) for seed in range(args.seeds)]
        name = f"{way}, rate {lr:g}"
        rows[name] = {step: spread([run[step] for run in runs]) for step in runs[0]}
        print(name)
        report.print_results(rows[name])
    report.finish("stale_rollouts", {"toy": args.toy, "results": rows}, args, threads=1)


if __name__ == "__main__":
    main()
