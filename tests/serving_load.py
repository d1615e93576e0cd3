"""Requests by the hundred for inference/serve.py on the loopback address: good ones, bad ones,
clients that go away, a full queue, preemptions. Nothing leaks (blocks, memory, files), and answers
are those of generate.py."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import generate
from inference.answers import encode, text_of
from inference.loading import find_tokenizer, load_model

aiohttp = pytest.importorskip("aiohttp", reason="pyproject.toml names it")

ROOT = Path(__file__).parent.parent
# 69 blocks hold the longest text; those of 16 answers do not always fit
LIMITS = "--port 0 --max-sequences 16 --queue 32 --blocks 70 --deadline 60".split()
BAD = [{}, {"prompt": "a", "n": 0}, {"prompt": "a", "tools": [1]}, {"prompt": "a" * 9000}]
BAD += [{"prompt": "a", "model": "x"}, {"prompt": [10**6]}, {"prompt": "a", "temperature": -1}]
WORDS = ("The quick", "hello", "def add", "Größe", "2 o'clock", "user")


class Load:
    """The clients."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.url = url
        self.session = session
        self.random = random.Random(1)
        # how requests ended
        self.ends = Counter()
        # (prompt, seed, max_tokens, text)
        self.answers = []

    async def request(self) -> None:
        g = self.random
        draw, words, seed = g.random(), f"{g.choice(WORDS)} {g.randrange(40)}", g.randrange(1000)
        fields = {"prompt": words, "max_tokens": g.randint(1, 60), "seed": seed}
        patience = None
        if draw < 0.15:
            fields = g.choice(BAD)
        elif draw < 0.35:
            fields |= {"stream": g.random() < 0.7, "n": g.choice([1, 4]), "max_tokens": 400}
            patience = g.uniform(0.005, 0.4)
        else:
            fields["stream"] = draw < 0.6
        try:
            async with asyncio.timeout(patience):
                status, text = await self.post(fields)
            self.ends[str(status)] += 1
            if status == 200 and "n" not in fields:
                self.answers.append((words, seed, fields["max_tokens"], text))
        except TimeoutError:
            self.ends["went away"] += 1
        except aiohttp.ClientError:
            self.ends["no server"] += 1

    async def post(self, fields: dict) -> tuple[int, str]:
        async with self.session.post(f"{self.url}/v1/completions", json=fields) as response:
            if response.status != 200:
                return response.status, ""
            if not fields["stream"]:
                return 200, (await response.json())["choices"][0]["text"]
            text = ""
            async for line in response.content:
                if line.startswith(b"data: {"):
                    text += "".join(c["text"] for c in json.loads(line[6:])["choices"])
            return 200, text

    async def many(self, count: int, at_once: int) -> None:
        places = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with places:
                await self.request()

        await asyncio.gather(*(one() for _ in range(count)))

    async def metric(self, name: str) -> int:
        async with self.session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        return int(float(re.search(rf"^serve_{name} (\S+)", text, re.MULTILINE)[1]))


async def ask(url: str, ranks: list[int], requests: int, kill: bool) -> Load:
    """In four parts; in the second one the queue is full. Prints what the server holds after each.
    Raises AssertionError for blocks that are not free."""
    # connections that are kept would count as files
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        load = Load(url, session)
        for part in range(4):
            asked = asyncio.create_task(load.many(requests // 4, 80 if part == 1 else 24))
            if kill and part == 2:
                await asyncio.sleep(0.5)
                os.kill(ranks[-1], signal.SIGKILL)
                await asked
                return load
            await asked
            await asyncio.sleep(0.5)
            used, preemptions = [await load.metric(x) for x in ("blocks_used", "preemptions_total")]
            statuses = [Path(f"/proc/{pid}/status").read_text() for pid in ranks]
            memory = [int(re.search(r"VmRSS:\s+(\d+)", text)[1]) // 1024 for text in statuses]
            files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ranks]
            print(
                memory, "MiB", files, "files", used, "blocks", preemptions, "preemptions", load.ends
            )
            assert used == 0
        return load


def wrong_answers(answers: list, model: str, count: int) -> int:
    """How many of `count` answers are not those of generate.py alone."""
    loaded, index = load_model(model)
    tokenizer = find_tokenizer(model, index)
    wrong = 0
    for prompt, seed, max_tokens, text in random.Random(0).sample(
        answers, min(count, len(answers))
    ):
        ids = encode(prompt, tokenizer, 1024)
        options = dict(seed=seed, temperature=1.0, eot=tokenizer.stop_ids)
        (written,) = generate.generate(loaded, [ids], max_tokens, **options)
        wrong += text != text_of(tokenizer, ids, written)
    return wrong


def run(model: str, requests: int, pp: int, kill: bool) -> tuple[int, int]:
    """(exit status of the server, wrong answers of 200). kill: the last rank, half way."""
    words = ["-m", "inference.serve", "--checkpoint", model, *LIMITS]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(pp)]
    command = [sys.executable, *(launcher if pp > 1 else []), *words, "--pp", str(pp)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    url = process.stdout.readline().split()[0]
    ranks = [process.pid]
    if pp > 1:
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        ranks = sorted(map(int, found.stdout.split()))
    load = asyncio.run(ask(url, ranks, requests, kill))
    if not kill:
        os.kill(ranks[0], signal.SIGTERM)
    return process.wait(60), wrong_answers(load.answers, model, 200)
