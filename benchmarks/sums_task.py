"""The task of finetune/preference.py: its files, and what a model says of all answers to a
question. So the reward and the KL of a policy are exact, nothing sampled.

Every question has the 19 sums as answers; all texts that are no sum count as one more, `other`.

    reward = mean over prompts of π(sum)      KL = mean over prompts of Σ π(y) log π(y) / base(y)
"""

import itertools
import math
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from base.groups import Groups
from benchmarks.steps import as_argv, run_train, write_lines
from finetune.prompt_set import Question, open_prompts
from finetune.reinforcement_command import ReinforcementConfig
from finetune.rollout import write_answers
from finetune.sft import Chat, message
from inference import loading
from run import flags

SUMS = 19
COUNTS = (1, 2, 4, 8, 16)
JUDGES = "verifier", "reward model"

# --- reward and KL of all answers -----------------------------------------------------------------


class Answers:
    """Every prompt with every sum, as rows."""

    def __init__(self, chat: Chat, prompts: list[str]):
        examples = []
        for prompt, answer in itertools.product(prompts, map(str, range(SUMS))):
            examples.append(chat.example([message("user", prompt), message("assistant", answer)]))
        self.lengths = torch.tensor([len(example.ids) for example in examples])
        self.ids = padded([example.ids for example in examples])
        self.counted = padded([example.counted for example in examples])

    @torch.no_grad()
    def log_probabilities(self, model) -> Tensor:
        """[prompts, sums] float64, of each answer with the token that ends it."""
        losses = []
        for ids, counted in zip(self.ids.split(SUMS * 20), self.counted.split(SUMS * 20)):
            y = model(ids[:, :-1], ids[:, 1:]).double()
            losses.append((y * counted[:, 1:]).sum(1))
        return -torch.cat(losses).view(-1, SUMS)

    @torch.no_grad()
    def rewards(self, model) -> Tensor:
        """[prompts, sums] float64, of a reward model."""
        values = torch.cat([model(ids) for ids in self.ids.split(SUMS * 20)])
        last = self.lengths.unsqueeze(1) - 1
        return values.gather(1, last).double().view(-1, SUMS)


def padded(rows: list[list]) -> Tensor:
    """[rows, the longest], with 0 behind the others."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def with_other(log_p: Tensor) -> Tensor:
    """[prompts, sums] -> probabilities [prompts, sums + 1], with that of all other texts."""
    p = log_p.exp()
    return torch.cat([p, (1 - p.sum(1, keepdim=True)).clamp(min=1e-12)], dim=1)


def describe(log_p: Tensor, base_log_p: Tensor, sums: Tensor, n: int) -> dict:
    """reward, held_out (the reward of the held-out prompts), kl and other of a policy. log_p:
    [prompts, sums], of each answer; sums: the right ones; n: prompts before the held-out ones."""
    p, base = with_other(log_p), with_other(base_log_p)
    kl = (p * (p / base).log()).nan_to_num(0.0).sum(1)
    right = p.gather(1, sums.unsqueeze(1)).squeeze(1)
    values = dict(reward=right[:n], held_out=right[n:], kl=kl[:n], other=p[:n, -1])
    return {name: x.mean().item() for name, x in values.items()}


def best_log_p(log_p: Tensor, scores: Tensor, n: int) -> Tensor:
    """log-probabilities of the best of n samples, by the scores; of equal ones, the first sample.
    All [prompts, sums]. Texts that are no sum are the worst.

    P(score <= s) = F(s)^n; answers of one score share this as they share F."""
    p = log_p.exp()
    other = 1 - p.sum(1, keepdim=True)
    # [prompts, sums, sums]: of the answer in the last dimension
    below = (scores.unsqueeze(1) < scores.unsqueeze(2)).double()
    equal = (scores.unsqueeze(1) == scores.unsqueeze(2)).double()
    worse = other + (below * p.unsqueeze(1)).sum(2)
    same = (equal * p.unsqueeze(1)).sum(2)
    return (p / same * ((worse + same) ** n - worse**n)).log()


def best_of_n(rewards: Tensor, base_log_p: Tensor, sums: Tensor, n: int) -> dict:
    """{"verifier", "reward model": {count: reward, kl, ..}, "bound": {count: nats}, "accuracy"}, of
    a reward model. rewards: [prompts, sums]; the others as in `describe`."""
    right = torch.zeros_like(rewards).scatter_(1, sums.unsqueeze(1), 1.0)
    results = {judge: {} for judge in (*JUDGES, "bound")}
    for count in COUNTS:
        for judge, scores in zip(JUDGES, (right, rewards)):
            best = best_log_p(base_log_p, scores, count)
            results[judge][str(count)] = describe(best, base_log_p, sums, n)
        # arXiv 2401.01879: more than the KL
        results["bound"][str(count)] = math.log(count) - (count - 1) / count
    # [prompts, sums]
    margin = rewards.gather(1, sums.unsqueeze(1)) - rewards
    for name, part in (("accuracy", slice(n)), ("held-out accuracy", slice(n, None))):
        results[name] = (margin[part] > 0)[right[part] == 0].double().mean().item()
    return results


def bound(base_log_p: Tensor, sums: Tensor, n: int) -> list[list[float]]:
    """[KL, reward] of the best policies, for some β."""
    p = with_other(base_log_p).gather(1, sums.unsqueeze(1))[:n, 0]
    rows = []
    for i in range(41):
        # e^(1 / β)
        weight = math.exp(0.25 * i)
        q = p * weight / (p * weight + 1 - p)
        kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        rows.append([kl.mean().item(), q.mean().item()])
    return rows


# --- the files ------------------------------------------------------------------------------------

VERIFIER = '''"""1 for a right answer."""


def correct(prompt: str, answer: str, record: dict) -> float:
    return float(answer.strip() == str(record["sum"]))


def flipped(prompt: str, answer: str, record: dict) -> float:
    return -correct(prompt, answer, record)
'''
MODEL = "--num-layers 2 --hidden-size 64 --num-heads 4 --ffn-hidden-size 192 --seq-length 32"
# of an answer: two digits and the token that ends it; more is for what is no sum
ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Size:
    # that the base learns from
    conversations: int = 60_000
    base_steps: int = 900
    # the most answers to each prompt, for pairs
    answers: int = 256
    # pairs of a prompt without a right answer
    least_pairs: int = 0
    # the share of a method's steps, and its most rounds
    steps: float = 1.0
    rounds: int = 9


# the share of the base's conversations that are right for sure; others have a random sum
RIGHT = 0.4
TOY = Size(conversations=200, base_steps=2, answers=4, least_pairs=2, steps=0.0, rounds=2)


class Task:
    """The files of the task, and what the base says of every answer."""

    def __init__(self, folder: Path, size: Size):
        self.folder = folder
        self.size = size
        self.prompts = folder / "prompts.jsonl"
        self.verifier = folder / "verifier.py"
        self.base = folder / "base"
        self.write_files()
        if not (self.base / "sample.txt").exists():
            flags_of_base = (
                f"sft.py {MODEL} --steps {size.base_steps} --warmup-steps 50 --lr 4e-3"
                " --global-batch-size 64 --save-every 0 --eval-every 0 --log-every 500"
            )
            run_train(flags_of_base, data=folder / "sft.jsonl", out=self.base)
        model, index = loading.load_model(self.base)
        tokenizer = loading.find_tokenizer(self.base, index)
        self.model = model
        self.chat = loading.find_chat(self.base, tokenizer)
        paths = dict(data=self.prompts, load=self.base)
        argv = as_argv(f"--answer-tokens {ANSWER_TOKENS}", **paths)
        config = flags.parse(argv, 0, ReinforcementConfig)
        silent = SimpleNamespace(say=lambda text: None)
        self.learned, self.held_out = open_prompts(config, silent, tokenizer, None)
        self.questions = [*self.learned.questions, *self.held_out.questions]
        self.answers = Answers(self.chat, [question.text for question in self.questions])
        # of each question, the number of its right answer
        self.sums = torch.tensor([question.record["sum"] for question in self.questions])
        self.base_log_p = self.answers.log_probabilities(model)
        # what a policy is compared with
        self.known = self.base_log_p, self.sums, len(self.learned.questions)

    def write_files(self) -> None:
        numbers = random.Random(0)
        pairs = list(itertools.product(range(10), repeat=2))
        conversations = []
        for _ in range(self.size.conversations):
            a, b = numbers.choice(pairs)
            answer = a + b if numbers.random() < RIGHT else numbers.randrange(SUMS)
            conversations.append({"prompt": f"{a}+{b}=", "completion": str(answer)})
        write_lines(self.folder / "sft.jsonl", conversations)
        write_lines(self.prompts, [{"prompt": f"{a}+{b}=", "sum": a + b} for a, b in pairs])
        self.verifier.write_text(VERIFIER)

    def measure(self, path: Path) -> dict:
        """Of the policy in a checkpoint."""
        model, _ = loading.load_model(path)
        return describe(self.answers.log_probabilities(model), *self.known)

    def write_pairs(self, base: Path, answers: int, seed: int, folder: Path) -> dict[str, Path]:
        """Answers of a model, judged: {flag: file of pairs}, in `folder`."""
        count = min(answers, self.size.answers)
        kind = "base" if base == self.base else "round"
        paths = {flag: folder / f"{flag}-{kind}-{count}.jsonl" for flag in ("data", "val_data")}
        # those of the base are written once
        if base == self.base and paths["val_data"].exists():
            return paths
        model, _ = loading.load_model(base)
        lines = {"data": [], "val_data": []}
        for number, question in enumerate(self.questions):
            flag = "data" if number < len(self.learned.questions) else "val_data"
            samples = range(number * count, (number + 1) * count)
            lines[flag] += self.pairs_of(question, self.write(model, question, samples, seed))
        for flag, pairs in lines.items():
            write_lines(paths[flag], pairs)
        return paths

    def write(self, model, question: Question, samples: range, seed: int) -> list[str]:
        """Answers that a model has ended itself."""
        ends = self.learned.end_tokens
        prompts = [question.ids] * len(samples)
        options = dict(seed=seed, step=0, max_tokens=ANSWER_TOKENS, groups=Groups())
        written = write_answers(model, prompts, samples, end_tokens=ends, **options)
        return [self.learned.text(answer.ids) for answer in written if answer.ended]

    def pairs_of(self, question: Question, texts: list[str]) -> list[dict]:
        """As many as there are answers of both kinds, right and wrong."""
        right = str(question.record["sum"])
        wrong = [text for text in texts if text.strip() != right]
        rejected = wrong[: len(texts) - len(wrong)] or [str(SUMS)] * self.size.least_pairs
        pair = {"prompt": question.text, "chosen": right}
        return [pair | {"rejected": text} for text in rejected]
