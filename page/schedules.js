// The view of schedules: time lines, what an action waits for, what is held at one moment.

const ROW = 24;
const LEFT = 104;
// what is drawn; and the action that is chosen: { chart, event, kept }
let charts = [];
let chosen = null;

function simulated(name, s) {
  const v = name === "interleaved" ? s.v : 1;
  const chart = { key: name, name: optionName("schedule", name), p: s.p, m: s.m, v };
  try {
    const lines = formulas_time_lines(name, s.p, s.m, v, s.forward, s.input, s.weight, s.transfer);
    return { ...chart, lines, transfer: s.transfer, end: py.max(lines.events.map((e) => e.end)) };
  } catch (error) {
    if (!(error instanceof schedules_ScheduleError)) throw error;
    return { ...chart, error: `${py.str(error)}; ${refusal_multiples(s.m, s.p)}`, end: 0 };
  }
}

function showSchedules(s) {
  const names = s.below === "none" ? [s.schedule] : [s.schedule, s.below];
  const before = charts;
  charts = names.map((name) => simulated(name, s));
  chosen = chosen && again(chosen, charts[before.indexOf(chosen.chart)]);
  const end = py.max(charts.map((c) => c.end));
  byId("time").max = end || 1;
  byId("time").disabled = end === 0;
  const interleaved = names.includes("interleaved");
  byId("v").disabled = !interleaved;
  byId("v-hint").textContent = interleaved ? "" : "Only interleaved has v above 1.";
  for (const i of [0, 1]) showChart(byId(`chart-${i}`), charts[i], end);
  byId("legend").innerHTML = legend();
  showTime();
  showWaits();
}

// The same action as before, in a chart with other settings; null where there is none.
function again({ event, kept }, chart) {
  const action = JSON.stringify(event.slice(0, 4));
  const found = chart?.lines?.events.find((e) => JSON.stringify(e.slice(0, 4)) === action);
  return found ? { chart, event: found, kept } : null;
}

// --- one chart --------------------------------------------------------------------------------

// Where the papers' formula is not for these settings.
function formulaNote(chart) {
  const s = settings();
  if (s.transfer > 0) return "by formula, without transfers";
  const beyond = chart.key === "zb-h1" && (s.m < s.p || s.weight > s.forward);
  return beyond ? "by formula, for m ≥ p and T<sub>W</sub> ≤ T<sub>F</sub>" : "by formula";
}

function showChart(section, chart, end) {
  section.hidden = !chart;
  if (!chart) return;
  const sizes = `p ${chart.p}, m ${chart.m}${chart.v > 1 ? `, v ${chart.v}` : ""}`;
  const head = `<h2>${chart.name} <span class="hint">${sizes}</span></h2>`;
  if (chart.error) {
    section.innerHTML = `${head}<p class="error" role="alert">${escape(chart.error)}</p>`;
    return;
  }
  const { bubble, idle_of_total, formula } = chart.lines;
  const facts = [
    ["bubble", "idle / ideal time", bubble, percent(bubble)],
    ["formula", formulaNote(chart), formula, percent(formula)],
    ["idle_of_total", "idle / total time", idle_of_total, percent(idle_of_total)],
    ["end", "ends at", chart.end, number(chart.end)],
  ];
  const fact = ([id, term, value, text]) =>
    `<div><dt>${term}</dt><dd data-fact="${id}" data-value="${value}">${text}</dd></div>`;
  const label = `${chart.name}, ${sizes}: arrow keys go from action to action`;
  const open = section.querySelector("details")?.open ? "open" : "";
  const table = `<summary>${chart.name} as a table</summary><div class="tight"></div>`;
  section.innerHTML = `${head}<dl class="facts">${facts.map(fact).join("")}</dl>
    <div class="lines"><svg class="gauges" width="${LEFT}" aria-hidden="true"></svg>
    <div><svg class="time" tabindex="0" role="application" aria-roledescription="time lines"
      aria-label="${label}" aria-describedby="waits"></svg></div></div>
    <details ${open}>${table}</details>`;
  chart.section = section;
  chart.svg = section.querySelector(".time");
  drawTimeLines(chart.svg, chart, end);
  chart.svg.onpointermove = (event) => point(chart, event.target.dataset.i, false);
  chart.svg.onclick = (event) => point(chart, event.target.dataset.i, true);
  const byKeys = () => !chosen && chart.svg.matches(":focus-visible");
  chart.svg.onfocus = () => byKeys() && choose(chart, chart.lines.events[0], false);
  chart.svg.onkeydown = (event) => pressed(chart, event);
}

function drawTimeLines(svg, chart, end) {
  const width = Math.max(200, svg.parentElement.clientWidth) * byId("zoom").valueAsNumber - 2;
  const height = chart.p * ROW;
  chart.x = (time) => (time / end) * (width - 1);
  const parts = [];
  for (let rank = 0; rank < chart.p; rank++) parts.push(box("idle", rank, 0, chart.x(chart.end)));
  chart.lines.events.forEach((e, i) => {
    const [fill, ink] = shade(e, chart);
    const [x, w] = [chart.x(e.start), chart.x(e.end) - chart.x(e.start)];
    const kind = w > 4 ? "action" : "action thin";
    parts.push(box(kind, e.rank, x, w, `data-i="${i}" fill="${fill}"`));
    const names = [`${e.op}${e.micro_batch}`, `${e.micro_batch}`];
    const name = names.find((text) => 7.2 * text.length + 3 < w);
    if (name) {
      const place = `x="${x + w / 2}" y="${e.rank * ROW + 16}"`;
      parts.push(`<text class="label ${ink}" ${place}>${name}</text>`);
    }
  });
  svg.setAttribute("width", width);
  svg.setAttribute("height", height + 24);
  svg.innerHTML = `${parts.join("")}${ticks(chart.x, end, width, height)}
    <g class="marks"></g><path class="now"/>`;
}

function box(kind, rank, x, width, more = "") {
  const place = `x="${x}" y="${rank * ROW + 1}" width="${width}" height="${ROW - 2}"`;
  return `<rect class="${kind}" ${place} ${more}/>`;
}

// The axis: at most one number in 60 pixels.
function ticks(x, end, width, height) {
  const least = (60 * end) / width;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
  let text = "";
  for (let k = 0; k * step <= end; k++) {
    const at = x(k * step);
    const anchor = k === 0 ? "start" : at + 30 > width ? "end" : "middle";
    text += `<path class="tick" d="M${at} ${height}v5"/><text class="quiet" x="${at}"
      y="${height + 18}" text-anchor="${anchor}">${number(k * step, 6)}</text>`;
  }
  return text;
}

// The colour of an action, darker in later chunks, and the class of the text that is read on it.
function shade(e, chart) {
  const brightness = 1 - (0.45 * e.chunk) / Math.max(1, chart.v - 1);
  const hex = schedules_COLOURS.get(e.op);
  const rgb = [1, 3, 5].map((i) => (parseInt(hex.slice(i, i + 2), 16) / 255) * brightness);
  return [`rgb(${rgb.map((c) => Math.round(255 * c))})`, schedules_text_on(rgb)];
}

function legend() {
  const ops = new Set(charts.flatMap((c) => (c.lines ? c.lines.events.map((e) => e.op) : [])));
  const entry = (colour, name) => `<span><i style="background:${colour}"></i>${name}</span>`;
  const entries = [...ops].map((op) => entry(schedules_COLOURS.get(op), schedules_MEANINGS.get(op)));
  if (ops.size) entries.push(entry("var(--idle)", "idle"));
  if (charts.some((c) => c.lines && c.v > 1)) entries.push("<span>darker: a later chunk</span>");
  return entries.join("");
}

// --- what an action waits for -----------------------------------------------------------------

const waitsOf = ({ lines, p, v, transfer }, event) =>
  formulas_waits_for(event, lines.events, p, v, transfer);

// those whose results came last of all
const lastOf = (waits) => waits.filter(([, time]) => time === py.max(waits.map((w) => w[1])));

function choose(chart, event, kept) {
  chosen = chart && { chart, event, kept };
  showWaits();
}

function point(chart, i, keep) {
  if (i === undefined && keep) choose(null);
  else if (i !== undefined && (keep || !chosen?.kept)) choose(chart, chart.lines.events[i], keep);
}

// Arrow keys in a focused chart.
function pressed(chart, key) {
  const now = chosen?.chart === chart ? chosen.event : chart.lines.events[0];
  const onRank = (rank) => chart.lines.events.filter((e) => e.rank === rank);
  const own = onRank(now.rank);
  const at = own.indexOf(now);
  const distance = (e) => Math.abs(e.start + e.end - now.start - now.end);
  const moves = {
    ArrowLeft: () => own[at - 1],
    ArrowRight: () => own[at + 1],
    ArrowUp: () => py.sorted(onRank(now.rank - 1), distance)[0],
    ArrowDown: () => py.sorted(onRank(now.rank + 1), distance)[0],
    Home: () => own[0],
    End: () => own.at(-1),
    Enter: () => lastOf(waitsOf(chart, now))[0]?.[0],
  };
  if (key.ctrlKey || key.metaKey || key.altKey) return;
  if (key.key === "Escape") choose(null);
  if (!(key.key in moves)) return;
  key.preventDefault();
  const next = moves[key.key]() ?? now;
  choose(chart, next, true);
  const frame = chart.svg.parentElement;
  const inView = chart.x(next.start) - frame.scrollLeft;
  if (inView < 0 || inView > frame.clientWidth - 30) frame.scrollLeft = chart.x(next.start) - 40;
}

function showWaits() {
  for (const { svg } of charts) if (svg) svg.querySelector(".marks").innerHTML = "";
  // in sight while an action is chosen
  byId("waits").parentElement.classList.toggle("sticky", chosen !== null);
  if (!chosen) {
    byId("waits").innerHTML = "<p>Point at an action, or focus a chart and use arrow keys.</p>";
    return;
  }
  const { chart, event } = chosen;
  const waits = waitsOf(chart, event);
  const last = lastOf(waits);
  const chunk = (e) => (chart.v > 1 ? `, chunk ${e.chunk}` : "");
  const name = (e) => `${e.op} of micro-batch ${e.micro_batch}${chunk(e)}`;
  const tie = last.length > 1 ? "last, at the same time" : "the last";
  const lines = waits.map((wait, i) => {
    const [e, time] = wait;
    const isBefore = e.rank === event.rank && i === waits.length - 1;
    const rank = e.rank === event.rank ? "this rank" : `rank ${e.rank}`;
    const there = time > e.end ? `, is here at ${number(time)}` : "";
    return `<li>${name(e)} on ${rank}${isBefore ? ", the action before" : ""}:
      ends at ${number(e.end)}${there} ${last.includes(wait) ? `<b>(${tie})</b>` : ""}</li>`;
  });
  byId("waits").innerHTML = `<p><b>${name(event)} on rank ${event.rank}, ${chart.name}</b>, from
    ${number(event.start)} to ${number(event.end)}, waits for ${waits.length ? "" : "nothing"}</p>
    <ul>${lines.join("")}</ul>`;
  chart.svg.querySelector(".marks").innerHTML = marks(chart, event, waits, last);
}

// A frame around the chosen action, and a line from the end of each that it waits for.
function marks(chart, event, waits, last) {
  const x = chart.x(event.start);
  const middle = (rank) => rank * ROW + ROW / 2;
  let text = box("chosen", event.rank, x, chart.x(event.end) - x);
  for (const wait of waits) {
    const [from, y] = [chart.x(wait[0].end), middle(wait[0].rank)];
    const kind = last.includes(wait) ? "wait" : "wait early";
    text += `<path class="${kind}" d="M${from} ${y}L${x} ${middle(event.rank)}"/>`;
    text += `<circle class="dot" cx="${from}" cy="${y}" r="4"/>`;
  }
  return text;
}

// --- one moment -------------------------------------------------------------------------------

function showTime() {
  const time = byId("time").valueAsNumber;
  document.querySelector("output[for=time]").textContent = number(time);
  for (const chart of charts) if (chart.lines) showHeld(chart, time);
}

// A line at that time, and what each rank holds then.
function showHeld(chart, time) {
  const { events, in_flight, deferred } = chart.lines;
  const width = (chunks) => (46 * chunks) / py.max(in_flight);
  const bottom = chart.p * ROW;
  let [gauges, rows] = ["", ""];
  for (let rank = 0; rank < chart.p; rank++) {
    const now = formulas_held(events, rank, time, schedules_IN_FLIGHT);
    const later = formulas_held(events, rank, time, schedules_DEFERRED);
    const work = py.sum(events.filter((e) => e.rank === rank).map((e) => e.end - e.start));
    const place = `y="${rank * ROW + 16}"`;
    gauges += `<text x="0" ${place}>rank ${rank}</text>
      ${box("idle", rank, 50, width(in_flight[rank]))}${box("gauge", rank, 50, width(now))}
      <text x="54" ${place}>${now}/${in_flight[rank]}</text>`;
    const cells = [rank, now, in_flight[rank], later, deferred[rank], number(chart.end - work)];
    rows += `<tr>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`;
  }
  const heads = ["rank", "in flight", "most", "W to do", "most", "idle in all"];
  const svg = chart.section.querySelector(".gauges");
  svg.setAttribute("height", bottom + 24);
  svg.innerHTML = `${gauges}<text class="quiet" x="50" y="${bottom + 18}">in flight</text>`;
  chart.section.querySelector(".tight").innerHTML = `<table>
    <caption>At time ${number(time)}: chunks in flight, and those whose W is still to do</caption>
    <thead><tr>${heads.map((head) => `<th scope="col">${head}</th>`).join("")}</tr></thead>
    <tbody>${rows}</tbody></table>`;
  chart.svg.querySelector(".now").setAttribute("d", `M${chart.x(time)} 0V${bottom + 5}`);
}

// Arrow keys on the scrubber: to the next moment at which an action ends.
byId("time").addEventListener("keydown", (key) => {
  const direction = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[key.key];
  if (!direction) return;
  key.preventDefault();
  const time = byId("time").valueAsNumber;
  const ends = charts.flatMap((c) => (c.lines ? c.lines.events.map((e) => e.end) : []));
  const beyond = [0, ...ends].filter((t) => (t - time) * direction > 1e-9);
  if (beyond.length) change({ time: String(direction > 0 ? py.min(beyond) : py.max(beyond)) });
});
