"""What a run of reinforcement learning leaves for people: rl.png, and answers in samples.jsonl."""

import json
import os
from pathlib import Path

from base.json_files import JSONError, read_lines
from run.finish import leave

# How many held-out prompts have their answers written, at every evaluation.
SAMPLES = 4
# a panel each: field of metrics.jsonl -> its title
PANELS = {
    "reward": "reward",
    "kl": "KL from the reference, nats per answer",
    "clip_share": "share of tokens whose update was clipped",
    "answer_tokens": "tokens of an answer",
}


def write_samples(out: str, step: int, dataset, answers: list, rewards: list[float]) -> None:
    """Add the first answers, and their rewards, to OUT/samples.jsonl. Lines of this step or a later
    one are removed: a run that was killed has left them, and writes them again."""
    path = Path(out) / "samples.jsonl"
    lines = []
    try:
        lines = [line for _, line in read_lines(path) if line["step"] < step]
    except (JSONError, KeyError, TypeError):
        # there is no file yet; or one that cannot be read, which is begun anew
        pass
    for answer, reward in list(zip(answers, rewards))[:SAMPLES]:
        prompt = dataset.question(answer.sample).text
        text = dataset.text(answer.ids)
        lines.append({"step": step, "prompt": prompt, "answer": text, "reward": reward})
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)


def finish(run) -> None:
    """The end of a run: OUT/rl.png, and the last answers on the screen."""
    leave(run.world, run.out / "rl.png", lambda path: plot(run.metrics.lines, path))
    lines = [line for _, line in read_lines(run.out / "samples.jsonl")][-SAMPLES:]
    run.world.say(f"the last answers to {len(lines)} of the held-out prompts:")
    for line in lines:
        run.world.say(f"reward {line['reward']:.3g}: {line['prompt']!r} -> {line['answer']!r}")
    run.world.say(f"{run.out}: rl.png, samples.jsonl, metrics.jsonl, checkpoints")


def plot(lines: list[dict], path: Path) -> None:
    """lines: of metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 2, figsize=(9, 8), layout="constrained")
    steps = [line["step"] for line in lines]
    for panel, (field, title) in zip(axes.flat, PANELS.items()):
        panel.plot(steps, [line[field] for line in lines], linewidth=0.8)
        panel.set(xlabel="step", title=title)
    evaluated = [line for line in lines if "eval_reward" in line]
    points = [line["step"] for line in evaluated], [line["eval_reward"] for line in evaluated]
    axes[0, 0].plot(*points, "o-", color="tab:orange", label="held out")
    axes[0, 0].legend()
    seconds = {
        name: [line[f"{name}_seconds"] for line in lines] for name in ("rollout", "training")
    }
    axes[2, 0].stackplot(steps, *seconds.values(), labels=list(seconds))
    axes[2, 0].set(xlabel="step", title="seconds of a step")
    axes[2, 0].legend()
    points = [line["kl"] for line in lines], [line["reward"] for line in lines]
    axes[2, 1].scatter(*points, c=steps, s=12, cmap="viridis")
    axes[2, 1].set(xlabel="KL; later steps are lighter", title="reward against KL")
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
