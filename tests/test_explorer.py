"""docs/explorer.html is what course/page/explorer.py writes, and computes what Python computes.

The page's formulas stand in course/page/formulas.js, by hand. Where `node` is there, they give what
the lessons give, in random settings and on cases by hand. With Chromium and Playwright (pip install
playwright; no part of this project needs it) the page itself is used: its numbers, its keyboard,
its looks.
"""

import itertools
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

import context_parallel
import moe
import pipeline_parallel
import recompute
import schedules
import sequence_parallel
import tensor_parallel
from base.model_config import FieldError, MoEConfig
from course.page import explorer
from planning import drawing
from planning import memory as planned
from planning.inputs import TRAIN, Layout
from run import rules
from run.presets import PRESETS

ROOT = Path(__file__).parent.parent


def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["explorer.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        explorer.main()
    assert left.value.code == 2
    assert f"--out {tmp_path}: Is a directory; name a file" in capsys.readouterr().err


def test_page_is_up_to_date(tmp_path, monkeypatch, capsys):
    """Byte for byte what `python -m course.page.explorer` writes."""
    out = tmp_path / "new" / "page.html"
    monkeypatch.setattr("sys.argv", ["explorer.py", "--out", str(out)])
    explorer.main()
    assert f"open {out.as_uri()}" in capsys.readouterr().out
    same = out.read_bytes() == (ROOT / "docs" / "explorer.html").read_bytes()
    assert same, (
        "docs/explorer.html is not what `python -m course.page.explorer` writes: run it, and commit"
    )


def test_page_loads_nothing():
    page = (ROOT / "docs" / "explorer.html").read_text()
    for word in ("http:", "https:", "src=", "@import", "url(", "fetch(", "XMLHttpRequest"):
        assert word not in page, word


# --- what Python computes -------------------------------------------------------------------------

# The page has no V.
SCHEDULES = tuple(name for name in schedules.NAMES if name not in schedules.V_SHAPED)
TIMES = ("forward", "input", "weight", "transfer")


def time_lines(name: str, s: dict) -> dict | str:
    """Of the settings of the page, by the names of its controls; the message of what cannot be."""
    p, m, v = s["p"], s["m"], s["v"]
    forward, backward, weight, transfer = (s[key] for key in TIMES)
    try:
        schedule = schedules.lists(name, p, m, v)
    except schedules.ScheduleError as e:
        return f"{e}; {rules.multiples(m, p)}"
    cost = schedules.Cost(forward / v, backward / v, weight / v, transfer)
    events = schedules.simulate(schedule, cost)
    idle = schedules.bubble(events)
    end = max(e.end for e in events)
    changes = (schedules.IN_FLIGHT, schedules.DEFERRED)
    return {
        "events": [list(e) for e in events],
        "waits": waits_of(events, schedules.placement_of(name, p, v), transfer),
        "bubble": idle,
        "formula": schedules.bubble_formula(name, p, m, v, cost),
        # ideal + idle = total
        "idleOfTotal": idle / (1 + idle),
        "idle": [end - sum(e.end - e.start for e in events if e.rank == r) for r in range(p)],
        "inFlight": schedules.in_flight(schedule),
        "deferred": schedules.deferred_weight_gradients(schedule),
        "held": [[held(events, r, end / 2, change) for change in changes] for r in range(p)],
    }


def waits_of(events: list, placement: schedules.Placement, transfer: float) -> list:
    """For each event, pairs [number of an event, when its result is there]: the actions whose
    results it needs, and at the end the one before it on its own rank."""
    actions = [schedules.Action(*e[1:4]) for e in events]
    made = {
        schedules.result_of(action, event.rank, placement): i
        for i, (action, event) in enumerate(zip(actions, events))
    }
    last = {}
    found = []
    for i, (action, event) in enumerate(zip(actions, events)):
        waits = {}
        for result in schedules.needs(action, event.rank, placement):
            other = made[result]
            waits[other] = events[other].end + transfer * (events[other].rank != event.rank)
        if event.rank in last:
            before = last[event.rank]
            waits.pop(before, None)
            waits[before] = events[before].end
        last[event.rank] = i
        found.append([list(pair) for pair in waits.items()])
    return found


def held(events: list, rank: int, time: float, change: dict[str, int]) -> int:
    return sum(change[e.op] for e in events if e.rank == rank and e.end <= time)


NAMES = {"tp": "t", "pp": "p", "virtual_stages": "v", "seq_length": "s", "num_experts": "experts"}


def check_context(config, cp: int, sequence_ranks: int) -> str:
    """The message of what run/rules.py refuses beside context parallelism."""
    pieces, length = 2 * cp * sequence_ranks, config.seq_length
    if cp > 1 and sequence_ranks > 1 and length % pieces:
        rule = f"must be divisible by 2 cp t under sequence parallelism, here {pieces}"
        return f"s {length}: {rule}; {rules.multiples(length, pieces)}"
    return ""


def memory(s: dict) -> list[float] | str:
    """Weights, gradients, optimizer state and activations of the rank that holds most, and their
    sum, micro-batches in flight; or the message of what cannot be. In mixed
    precision, under 1F1B or interleaved.

    The bytes of parameters are the planner's, which test_planning_counts.py holds to as-rank. The
    activations are those of the paper's layer (recompute.py), of which a fused core and a ring keep
    no s² matrix.
    """
    t, p, dp, cp, ep, sequence = (s[key] for key in ("tp", "pp", "dp", "cp", "ep", "sp"))
    v = s["vp"] if p > 1 else 1
    name = "interleaved" if v > 1 else "1f1b"
    fields = PRESETS[s["preset"]][0] | {"seq_length": s["s"], "num_experts": s["experts"]}
    try:
        config = MoEConfig(**fields)
        tensor_parallel.check(config, t, t * p * dp * cp)
        if sequence:
            sequence_parallel.check(config, t)
        pipeline_parallel.check(config.num_layers, schedules.Placement(p, v))
        context_parallel.check(config, cp, t, "ring")
        moe.check(config, ep, dp * cp)
        refused = check_context(config, cp, t if sequence else 1)
        m, b, granularity = s["micro"], s["b"], s["recompute"]
        schedule = [] if refused else schedules.lists(name, p, m, v)
    except FieldError as e:
        return e.message(lambda field: NAMES.get(field, field.replace("_", " ")))
    except schedules.ScheduleError as e:
        refused = f"{e}; {rules.multiples(m, p)}"
    if refused:
        return refused
    sizes = dict(micro_batch_size=b, global_batch_size=m * b * dp, recompute=granularity)
    choices = dict(virtual_stages=v, zero_stage=s["zero"], sequence_parallel=sequence)
    layout = Layout(tp=t, pp=p, dp=dp, ep=ep, cp=cp, **sizes, **choices)
    of_ranks = [planned.state(config, layout, TRAIN, rank) for rank in range(p)]
    keeps_no_scores = config.attention == "fused" or cp > 1
    if granularity == "none" and keeps_no_scores:
        granularity = "selective"
    h, length = config.hidden_size, config.seq_length
    layer = recompute.layer_bytes(length, b, h, config.num_heads, t, sequence, granularity, cp)
    in_flight = schedules.in_flight(schedule)[0] / v
    outside = recompute.outside_layers_bytes(length, b, h, config.vocab_size, t, p, sequence, cp)
    layers = config.num_layers / p * in_flight
    if m >= 2 * p:
        paper = recompute.first_stage_layers(config.num_layers, p, v)
        assert layers == pytest.approx(paper)
    parts = [*max(of_ranks, key=sum), layer * layers + outside]
    return [*parts, sum(parts), in_flight]


# --- random settings ------------------------------------------------------------------------------


def random_schedule(rng, name: str) -> dict:
    """Settings of the page, by the names of its controls."""
    p = rng.randint(1, 8)
    m = rng.choice([rng.randint(1, 24), p * rng.randint(1, 4)])
    v = rng.randint(1, 4) if name == "interleaved" else 1
    times = {key: rng.randint(1, 40) / 10 for key in ("forward", "input", "weight")}
    transfer = rng.choice([0, rng.randint(0, 40) / 20])
    return dict(schedule=name, p=p, m=m, v=v, transfer=transfer, **times)


def random_memory(rng) -> dict:
    preset = rng.choice(list(PRESETS))
    fields = PRESETS[preset][0]
    power = [1, 1, 1, 2, 4, 8]
    return dict(
        view="memory",
        preset=preset,
        s=rng.choice([fields["seq_length"], rng.randint(1, 64) * 128]),
        experts=rng.choice([fields.get("num_experts", 0), 0, rng.choice([1, 4, 6, 16])]),
        tp=rng.choice([*power, 3]),
        pp=rng.choice([*power, 5]),
        vp=rng.choice([1, 1, 2, 3]),
        dp=rng.choice([1, 8, 24, 64, 100]),
        cp=rng.choice([1, 1, 1, 2, 4, 6]),
        micro=rng.choice([rng.randint(1, 24), 8, 16]),
        ep=rng.choice([1, 1, 1, 1, 2, 3]),
        zero=rng.randint(0, 3),
        b=rng.randint(1, 8),
        recompute=rng.choice(["none", "selective", "full"]),
        sp=rng.choice([True, False]),
    )


def memory_settings(rng, possible: int, refused: int) -> list[dict]:
    """So many layouts that can be, and so many that cannot."""
    found = {list: [], str: []}
    while len(found[list]) < possible or len(found[str]) < refused:
        s = random_memory(rng)
        found[type(memory(s))].append(s)
    return found[list][:possible] + found[str][:refused]


def worst_difference(found, expected) -> float:
    """The largest relative difference of two numbers in the same place. What is no number must be
    equal."""
    if isinstance(expected, dict):
        found, expected = [found[key] for key in expected], list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        pairs = zip(found, expected)
        return max((worst_difference(x, y) for x, y in pairs), default=0.0)
    if isinstance(expected, str):
        assert found == expected
        return 0.0
    return abs(found - expected) / max(abs(expected), 1e-300) if found != expected else 0.0


# what the page's formulas give, in the form of Python's
GIVEN = """
const givenLines = (l) => {
  if (l.error) return l.error.rule;
  const row = (e) => [e.rank, e.op, e.chunk, e.microBatch, e.start, e.end];
  const waits = (e) => e.waits.map(([other, there]) => [l.events.indexOf(other), there]);
  const held = (ofRank) => [IN_FLIGHT, DEFERRED].map((c) => heldAt(l.end / 2, ofRank, c));
  const lists = { events: l.events.map(row), waits: l.events.map(waits), held: l.ranks.map(held) };
  return { ...l, ranks: l.ranks.length, ...lists };
};
const givenBytes = (s) => {
  const m = memory(s);
  return m.error?.rule ?? [...m.parts, m.total, m.inFlight];
};
"""


def in_node(result: str):
    """What an expression is that calls the page's formulas."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine: JavaScript is not run")
    formulas = (ROOT / "course" / "page" / "formulas.js").read_text()
    code = f"{explorer.constants()}{formulas}{GIVEN}console.log(JSON.stringify({result}))"
    done = subprocess.run([node, "-"], input=code, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


# how many random settings; with --all 500
SIZES = pytest.mark.parametrize("n", [60, pytest.param(500, marks=pytest.mark.repetition)])


@SIZES
def test_time_lines_on_random_settings(n):
    """Of every schedule: starts, ends, what is waited for, bubbles, what is held, messages."""
    rng = random.Random(0)
    settings = [random_schedule(rng, SCHEDULES[i % len(SCHEDULES)]) for i in range(n)]
    expected = [time_lines(s["schedule"], s) for s in settings]
    assert sum(isinstance(lines, str) for lines in expected) > n / 17
    found = in_node(f"{json.dumps(settings)}.map((s) => givenLines(timeLines(s.schedule, s)))")
    assert worst_difference(found, expected) <= 1e-12


@SIZES
def test_memory_on_random_settings(n):
    """Bytes of each part, micro-batches in flight; a quarter of the settings cannot be, with the
    same message."""
    settings = memory_settings(random.Random(0), n - n // 4, n // 4)
    expected = [memory(s) for s in settings]
    found = in_node(f"{json.dumps(settings)}.map(givenBytes)")
    assert worst_difference(found, expected) <= 1e-12


def test_examples_show_layouts_that_can_be():
    """Each preset has a word of what to look at, each example an address of the page's own
    settings; its layout can be, and so has bytes."""
    page = (ROOT / "course" / "page" / "page.html").read_text()
    usual = dict(preset="megatron-7.5b", tp=1, pp=1, vp=1, dp=64, cp=1, ep=1, zero=1, b=1)
    usual |= dict(micro=8, recompute="selective", sp=True)
    assert len(explorer.TEXTS["examples"]) > 5
    for example in explorer.TEXTS["examples"]:
        pairs = [pair.split("=") for pair in example["address"].split("&")]
        assert all(f'id="{name}"' in page for name, _ in pairs), example
        s = usual | {name: int(text) if text.isdigit() else text for name, text in pairs}
        shape = PRESETS[s["preset"]][0]
        s = dict(s=shape["seq_length"], experts=shape.get("num_experts", 0)) | s
        assert isinstance(memory(s), list), memory(s)
    assert all(model["why"] for model in in_node("Object.values(PRESETS)"))


def test_text_has_the_colour_of_the_figures():
    rng = random.Random(0)
    colours = [[rng.random() for _ in "rgb"] for _ in range(200)]
    expected = [drawing.text_on(colour) for colour in colours]
    assert in_node(f"{json.dumps(colours)}.map(textOn)") == expected
    assert set(expected) == {"black", "white"}


# --- the page in a browser ------------------------------------------------------------------------

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# where a change of settings is done, and what is shown after it
SHOWN = """
(hash) => {
  location.hash = hash;
  readAddress();
  show();
  const value = (element) => Number(element.dataset.value);
  const marked = (i) => document.querySelectorAll(`#chart-${i} [data-value]`);
  const facts = (i) => [...marked(i)].map(value);
  const lines = charts.map((c, i) => c.error ? c.error.rule : facts(i));
  const set = document.querySelector("#stack tr[aria-current]");
  const words = set?.querySelector(".words");
  const memory = words ? words.textContent : set && [...set.querySelectorAll("td")].map(value);
  return [lines, memory, document.getElementById("ignored").textContent];
}"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api",
        reason="no Playwright: the page is not opened (pip install playwright)",
    )
    paths = [path for path in map(shutil.which, CHROMIUM) if path]
    if not paths:
        pytest.skip("no Chromium on this machine: the page is not opened")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=paths[0], args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, request):
    """visit(address): the page in a tab. Nothing may go wrong or be asked for meanwhile."""
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    console, requests = [], []
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: console.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    own = explorer.DEFAULT.as_uri()

    def visit_address(address: str = ""):
        page.goto("about:blank")
        page.goto(f"{own}#{address}")
        return page

    yield visit_address
    context.close()
    assert not console
    assert all(url.split("#")[0] == own or url == "data:," for url in requests)


def address(s: dict) -> str:
    return "&".join(f"{k}={json.dumps(v).strip(chr(34))}" for k, v in s.items())


def facts(name: str, s: dict) -> list[float] | str:
    """What the page says of a time line."""
    lines = time_lines(name, s | {"v": s["v"] if name == "interleaved" else 1})
    if isinstance(lines, str):
        return lines
    p, v = s["p"], s["v"] if name == "interleaved" else 1
    rank = min(s["rank"], p - 1)
    events = [schedules.Event(*event) for event in lines["events"]]
    found = [lines["bubble"], lines["formula"], lines["idleOfTotal"], max(e.end for e in events)]
    numbers = held(events, rank, s["time"], schedules.IN_FLIGHT), lines["inFlight"][rank]
    micro_batches = [n / v for n in numbers]
    config = MoEConfig(**PRESETS["megatron-7.5b"][0])
    if config.num_layers % (p * v):
        return found + micro_batches
    layer = recompute.layer_bytes(2048, 1, config.hidden_size, 32, 1, True, "selective")
    return found + micro_batches + [n * layer * config.num_layers / p for n in micro_batches]


def test_page_shows_what_python_computes(visit):
    """200 random settings: bubbles, ends, what a rank holds at a time, bytes, messages."""
    rng = random.Random(1)
    page = visit()
    for i in range(100):
        s = random_schedule(rng, SCHEDULES[i % len(SCHEDULES)])
        s |= dict(below=rng.choice(("none", *SCHEDULES)), rank=rng.randint(0, 8))
        # before any schedule of so many micro-batches ends
        s["time"] = round(rng.random() * s["m"] * (s["forward"] + s["input"] + s["weight"]), 3)
        names = [name for name in (s["schedule"], s["below"]) if name != "none"]
        found, _, ignored = page.evaluate(SHOWN, address(s))
        assert not ignored
        assert worst_difference(found, [facts(name, s) for name in names]) <= 1e-12
    for s in memory_settings(rng, 80, 20):
        _, found, ignored = page.evaluate(SHOWN, address(s))
        assert not ignored
        assert worst_difference(found, memory(s)) <= 1e-12


GARBAGE = [
    "",
    "%",
    "&&&===",
    "p=banana&m=-1&v=1e99&forward=NaN&transfer=Infinity",
    "__proto__=1&constructor=2&toString=3",
    "view=nothing&schedule=&zoom=0.5&time=-3",
    "view=memory&preset=none&tp=0&b=1.5&s=&sp=maybe",
    "<script>alert(1)</script>=<img>",
    "p=4&p=5&" + "x" * 5000,
    "%E0%A4%A=%FF",
]


def test_garbage_in_the_address_is_named_and_left_out(visit):
    for text in GARBAGE:
        page = visit(text)
        known = page.evaluate("controls.every((c) => holds(c, String(valueOf(c))))")
        charts = page.evaluate("charts.length + document.querySelectorAll('#stack tr').length")
        assert known and charts, text
        ignored = page.locator("#ignored").text_content()
        assert bool(ignored) == bool(text), text
        assert len(ignored) < 400


@pytest.mark.parametrize("visit", [(390, "light")], indirect=True)
def test_extreme_settings(visit):
    """Every slider at both ends, alone and all together, in every schedule."""
    page = visit()
    sliders = page.evaluate("controls.filter((c) => c.type === 'range').map((c) => c.id)")
    for end in ("min", "max"):
        for ids in [*([one] for one in sliders if one != "time"), sliders]:
            for name in SCHEDULES:
                problem = page.evaluate(
                    """([ids, end, name]) => {
                      change({ ...Object.fromEntries(ids.map((id) => [id, byId(id)[end]])),
                        schedule: name });
                      const text = document.body.textContent;
                      return /NaN|undefined|Infinity/.test(byId("schedules").innerHTML)
                        || document.documentElement.scrollWidth > innerWidth; }""",
                    [ids, end, name],
                )
                assert not problem, (ids, end, name)
            page.get_by_role("button", name="Reset").first.click()


def tab_to(page, test: str, most: int = 60) -> None:
    """Press Tab until the focused element passes a test."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(f"((e) => {test})(document.activeElement)"):
            return
    raise AssertionError(f"Tab does not reach {test}")


KEYS = {"range": "ArrowRight", "select-one": "ArrowDown", "number": "ArrowUp", "checkbox": "Space"}


@pytest.mark.parametrize(
    "view, start",
    [("schedules", "schedule=interleaved&below=gpipe"), ("memory", "view=memory&tp=2&pp=2")],
)
def test_every_setting_is_changed_by_keys_alone(visit, view, start):
    page = visit(start)
    find = f"[...byId('{view}').querySelectorAll('input, select')].map((c) => c.id)"
    for name in page.evaluate(find):
        page = visit(start)
        before = page.evaluate(f"String(valueOf(byId('{name}')))")
        tab_to(page, f"e.id === '{name}'")
        kind = page.evaluate("document.activeElement.type")
        page.keyboard.press(KEYS[kind])
        after = page.evaluate(f"String(valueOf(byId('{name}')))")
        assert after != before, name
        page.wait_for_function(f"location.hash.includes('{name}={after}')")


def test_a_number_that_is_cleared_stays_empty(visit):
    """Until another is typed; meanwhile the rule is shown."""
    page = visit("view=memory")
    page.fill("#tp", "")
    assert page.evaluate("byId('tp').value") == ""
    rule = "t tensor parallel: a whole number from 1 to 1,024"
    assert rule in page.locator("#stack").text_content()
    page.locator("#tp").press_sequentially("4")
    page.wait_for_function("location.hash === '#view=memory&tp=4'")
    assert page.locator("#stack table").is_visible()


def test_views_charts_and_buttons_by_keys_alone(visit):
    page = visit()
    waits = page.locator("#waits")
    tab_to(page, "e.classList.contains('time')")
    assert "F of micro-batch 0 on rank 0" in waits.text_content()
    assert "waits for nothing" in waits.text_content()
    for key, words in [
        ("ArrowDown", "F of micro-batch 0 on rank 1"),
        ("End", "B of micro-batch 7 on rank 1"),
        ("Enter", "B of micro-batch 7 on rank 2"),
        ("ArrowLeft", "B of micro-batch 6 on rank 2"),
        ("Home", "F of micro-batch 0 on rank 2"),
        ("ArrowUp", "F of micro-batch 1 on rank 1"),
        ("ArrowRight", "F of micro-batch 2 on rank 1"),
        ("Escape", "Point at an action"),
    ]:
        page.keyboard.press(key)
        assert words in waits.text_content(), key
    tab_to(page, "e.tagName === 'SUMMARY'")
    page.keyboard.press("Enter")
    assert page.locator("#chart-0 table").is_visible()
    page = visit("p=5")
    tab_to(page, "e.role === 'tab' || e.getAttribute('role') === 'tab'")
    page.keyboard.press("ArrowRight")
    assert page.locator("#memory").is_visible() and not page.locator("#schedules").is_visible()
    page.wait_for_function("location.hash.includes('view=memory')")
    page = visit("view=memory&preset=llama2-70b&tp=3")
    rule = "t 3: must divide num heads 64; [1, 2, 4] would fit"
    assert rule in page.locator("#stack").text_content()
    tab_to(page, "e.textContent.trim() === 't = 4'")
    page.keyboard.press("Enter")
    assert page.evaluate("byId('tp').value") == "4"
    assert page.evaluate("document.activeElement.id") == "tp"
    tab_to(page, "e.textContent === 'Reset these settings'")
    page.keyboard.press("Enter")
    page.wait_for_function("location.hash === '#view=memory'")


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_play_pause_and_step_by_keys_alone(visit, motion):
    """Without motion the time stands at ends of actions only."""
    page = visit("time=0")
    page.emulate_media(reduced_motion=motion)
    time = "byId('time').valueAsNumber"
    tab_to(page, "e.id === 'play'")
    page.keyboard.press("Enter")
    assert page.locator("#play").text_content() == "Pause"
    page.wait_for_function(f"{time} > 0.5")
    assert (page.evaluate(time) == 1) == (motion == "reduce")
    page.keyboard.press("Enter")
    assert page.locator("#play").text_content() == "Play"
    stands = page.evaluate(time)
    page.wait_for_timeout(100)
    assert page.evaluate(time) == stands
    page.wait_for_function(f"location.hash === '#time=' + {time}")
    page = visit("time=1.5&speed=4&below=none&p=1&m=1")
    tab_to(page, "e.getAttribute('aria-label') === 'one action on'")
    page.keyboard.press("Enter")
    assert page.evaluate(time) == 3
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate(time) == 1
    tab_to(page, "e.id === 'time'")
    page.keyboard.press("Space")
    page.wait_for_function(f"{time} === 3 && byId('play').textContent === 'Play'")


# many actions in few pixels: the rectangles of one chart, and whether they are in lanes
DRAWN = """() => [charts[0].narrow, document.querySelectorAll("#chart-0 .action").length]"""


@pytest.mark.parametrize("visit", [(390, "light")], indirect=True)
def test_many_chunks_are_drawn_as_few_strips(visit):
    start = "schedule=interleaved&below=none&p=8&m=16&v=12"
    page = visit(start)
    narrow, strips = page.evaluate(DRAWN)
    assert narrow and strips < 8 * 12 * 16
    # the strip at a place is the action of that time
    page.locator("#chart-0 .action").first.click(position={"x": 2, "y": 4})
    assert "F of micro-batch" in page.locator("#waits").text_content()
    page = visit(f"{start}&zoom=64")
    assert page.evaluate(DRAWN) == [False, 2 * 8 * 12 * 16]


# text that is too small or too pale, and controls without a name
LOOKS = """() => {
  const problems = [];
  const light = (c) => {
    const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((x) => {
      x /= 255;
      return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour; }
    return getComputedStyle(document.body).backgroundColor; };
  for (const e of document.querySelectorAll("body *:not(script):not(noscript):not(option)")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest("[disabled]")) continue;
    const style = getComputedStyle(e);
    const small = parseFloat(style.fontSize) < 12 && e.tagName !== "SUB";
    if (small) problems.push(`small: ${e.outerHTML}`);
    const svg = e.closest("svg");
    const box = e.classList.contains("label") && e.previousElementSibling.getAttribute("fill");
    const [a, b] = [light(svg ? style.fill : style.color), light(box || behind(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) problems.push(`${contrast.toFixed(1)}: ${e.outerHTML.slice(0, 200)}`);
  }
  for (const c of document.querySelectorAll("input, select, button")) {
    const named = c.labels?.length || c.textContent.trim() || c.hidden;
    if (!named) problems.push(`no name: ${c.outerHTML}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) problems.push("scrolls sideways");
  return problems;
}"""
STATES = {
    "schedules": "",
    "interleaved": "schedule=interleaved&below=1f1b&v=4&m=8&transfer=0.1&time=14",
    "refused": "schedule=interleaved&m=6&p=5&foo=bar",
    "memory": "view=memory",
    "experts": "view=memory&preset=mixtral-8x7b&ep=8&compare=ep&tp=2",
    "context": "view=memory&preset=llama3.1-8b&dp=1&tp=8&cp=8&compare=cp&zero=3",
    "chunks": explorer.TEXTS["examples"][2]["address"],
    "no-layout": "view=memory&preset=llama2-70b&tp=3&compare=tp",
}


@pytest.mark.parametrize(
    "visit", [*itertools.product([390, 768, 1280], ["light", "dark"])], indirect=True, ids=str
)
def test_looks(visit, tmp_path):
    """No sideways scrolling, text of 12 pixels, contrast of 4.5, a name for every control. The
    pictures are in pytest's --basetemp."""
    for name, text in STATES.items():
        page = visit(text)
        if name == "interleaved":
            page.locator("#chart-1 .action").nth(30).click()
        assert page.evaluate(LOOKS) == [], name
        page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
