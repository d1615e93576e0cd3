// The view of schedules: time lines, what an action waits for, what is held at one moment.

const ROW = 24;
// pixels, of the longest action
const NARROW = 4;
// what is drawn, and of which settings; the action that is chosen: { i: its chart, event, kept }
let charts = [];
let drawn = "";
let chosen = null;

function showSchedules(s) {
  const now = JSON.stringify([{ ...s, time: 0, rank: 0, speed: 0 }, innerWidth]);
  const ids = ["schedule", "below"].filter((id) => s[id] !== "none");
  if (now !== drawn) charts = ids.map((id) => chartOf(id, s));
  const end = Math.max(...charts.map((c) => c.end));
  Object.assign(byId("time"), { max: end || 1, disabled: end === 0 });
  if (now !== drawn) drawCharts(s, end);
  drawn = now;
  showTime(s);
}

function drawCharts(s, end) {
  byId("v").disabled = charts.every((c) => c.key !== "interleaved");
  byId("v-hint").hidden = !byId("v").disabled;
  byId("chart-1").hidden = charts.length === 1;
  charts.forEach((chart, i) => showChart(chart, i, end, s));
  byId("legend").innerHTML = legend();
  const again = charts[chosen?.i]?.events.find((e) => e.id === chosen.event.id);
  choose(again && { ...chosen, event: again });
}

function chartOf(id, s) {
  const v = s[id] === "interleaved" ? s.v : 1;
  const sizes = `p ${s.p}, m ${s.m}${v > 1 ? `, v ${v}` : ""}`;
  const chart = { key: s[id], name: optionName(id), sizes, v, events: [], end: 0 };
  return { ...chart, ...timeLines(s[id], { ...s, v }) };
}

function showChart(chart, i, end, s) {
  const { name, sizes, error } = chart;
  const section = byId(`chart-${i}`);
  const open = section.querySelector("details")?.open ? "open" : "";
  section.innerHTML = `<h2>${name} <span class="hint">${sizes}</span></h2>
    ${error ? refusal(error) : ""}`;
  if (error) return;
  const width = Math.max(200, section.clientWidth - 104) * s.zoom - 2;
  const height = chart.idle.length * ROW + GRAPH + 28;
  chart.x = (at) => (at / end) * (width - 1);
  const idle = chart.idle.map((_, rank) => box("idle", rank, 0, chart.x(chart.end)));
  const numbered = chart.events.map((e, n) => ({ ...e, n, lane: 0, lanes: 1 }));
  chart.narrow = Math.max(...numbered.map((e) => chart.x(e.end - e.start))) < NARROW;
  const actions = (chart.narrow ? runs(numbered) : numbered).map((e) => drawAction(e, chart));
  section.innerHTML += `<dl class="row">${facts(chart, s)}</dl><div class="lines">
    <svg class="gauges" width="104" height="${height}" aria-hidden="true"></svg>
    <div><svg class="time" width="${width}" height="${height}" tabindex="0" role="application"
      aria-roledescription="time lines" aria-describedby="waits"
      aria-label="${name}, ${sizes}: arrow keys go from action to action">
      ${[...idle, ...actions, ...ticks(chart.x, end, width, height - 24)].join("")}
      <g class="curve"></g><path class="now"/><g class="marks"></g></svg></div></div>
    <p class="holds hint"></p>
    <details ${open}><summary>${name} as a table</summary><div></div></details>`;
  const svg = section.querySelector(".time");
  svg.onpointermove = (event) => point(i, under(i, event), false);
  svg.onclick = (event) => point(i, under(i, event), true);
  svg.onfocus = () => !chosen && svg.matches(":focus-visible") && point(i, 0, false);
  svg.onkeydown = (event) => pressed(i, event);
}

function facts(chart, s) {
  const percent = (x) => `${number(100 * x, 1)}%`;
  const beyond = chart.key === "zb-h1" && (s.m < s.p || s.weight > s.forward);
  const ends = beyond ? ", for m ≥ p and T<sub>W</sub> ≤ T<sub>F</sub>" : "";
  const fact = ([name, x, text]) =>
    `<div><dt>${name}</dt><dd data-value="${x}">${text(x)}</dd></div>`;
  return [
    ["idle / ideal time", chart.bubble, percent],
    [`by formula${s.transfer > 0 ? ", without transfers" : ends}`, chart.formula, percent],
    ["idle / total time", chart.idleOfTotal, percent],
    ["ends at", chart.end, (x) => number(x)],
  ].map(fact).join("");
}

// lane: of so many in a row.
function box(kind, rank, x, width, more = "", lane = 0, lanes = 1) {
  const height = (ROW - 2) / lanes;
  const y = rank * ROW + 1 + lane * height;
  const place = `x="${x}" y="${y}" width="${width}" height="${height}"`;
  return `<rect class="${kind}" ${place} ${more}/>`;
}

// Narrow actions: those of one kind and chunk that follow each other on a rank are drawn as one,
// and each kind has a lane.
function runs(events) {
  const kinds = [...new Set(events.map((e) => e.op))];
  // of each rank: since when it works without a pause, until when
  const [since, until, open, all] = [{}, {}, {}, []];
  for (const e of events) {
    if (!(until[e.rank] >= e.start - 1e-9)) since[e.rank] = e.start;
    const row = `${e.rank} ${e.op} ${since[e.rank]}`;
    const isNew = open[row]?.chunk !== e.chunk;
    if (isNew) all.push((open[row] = { ...e, lane: kinds.indexOf(e.op), lanes: kinds.length }));
    open[row].end = until[e.rank] = e.end;
  }
  return all;
}

// Darker in later chunks; with a name where there is room.
function drawAction(e, { x, v, narrow }) {
  const brightness = 1 - (0.45 * e.chunk) / Math.max(1, v - 1);
  const hex = [1, 3, 5].map((at) => COLOURS[e.op].slice(at, at + 2));
  const rgb = hex.map((digits) => (parseInt(digits, 16) / 255) * brightness);
  const fill = `rgb(${rgb.map((c) => Math.round(255 * c))})`;
  const width = (narrow ? 1 : 0.98) * (x(e.end) - x(e.start));
  const names = narrow ? [] : [e.op + e.microBatch, `${e.microBatch}`];
  const name = names.find((t) => 7.2 * t.length + 3 < width);
  const place = `x="${x(e.start) + width / 2}" y="${e.rank * ROW + 16}"`;
  const more = `data-i="${e.n}" fill="${fill}"`;
  return `${box("action", e.rank, x(e.start), width, more, e.lane, e.lanes)}
    ${name ? `<text class="label" ${place} style="fill: ${textOn(rgb)}">${name}</text>` : ""}`;
}

// The axis: at most one number in 60 pixels.
function ticks(x, end, width, height) {
  const least = (60 * end) / width;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
  const tick = (k) => {
    const at = x(k * step);
    const anchor = k === 0 ? "start" : at + 30 > width ? "end" : "middle";
    return `<path stroke="gray" d="M${at} ${height}v5"/><text class="quiet" x="${at}"
      y="${height + 18}" text-anchor="${anchor}">${number(k * step, 6)}</text>`;
  };
  return range(Math.floor(end / step) + 1).map(tick);
}

function legend() {
  const ops = new Set(charts.flatMap((c) => c.events.map((e) => e.op)));
  const entries = [...ops].map((op) => legendEntry(COLOURS[op], MEANINGS[op]));
  const darker = charts.some((c) => c.v > 1) ? "<span>darker: a later chunk</span>" : "";
  const lanes = "<span>narrow actions: a lane for each kind; zoom in to see one by one</span>";
  const narrow = charts.some((c) => c.narrow) ? lanes : "";
  return entries.join("") + legendEntry("var(--idle)", "idle") + darker + narrow;
}

// The number of the action under the pointer: where many are drawn as one, of that at this time.
function under(i, { target, clientX, currentTarget }) {
  const { events, x } = charts[i];
  const first = events[target.dataset.i];
  const right = clientX - currentTarget.getBoundingClientRect().left;
  const isHere = (e) => e.rank === first.rank && e.op === first.op && e.start >= first.start;
  return first && Math.max(events.findIndex((e) => isHere(e) && x(e.end) >= right), 0);
}

// Action n of a chart is pointed at; without n, what is no action.
function point(i, n, kept) {
  if (n === undefined && kept) choose(null);
  if (n === undefined || (chosen?.kept && !kept)) return;
  choose({ i, event: charts[i].events[n], kept });
  if (kept) change({ rank: chosen.event.rank });
}

// Arrow keys in a focused chart.
function pressed(i, key) {
  const { events, ranks } = charts[i];
  const now = chosen?.i === i ? chosen.event : events[0];
  const own = ranks[now.rank];
  const at = own.indexOf(now);
  const distance = (e) => Math.abs(e.start + e.end - now.start - now.end);
  const nearest = (rank) => ranks[rank]?.toSorted((a, b) => distance(a) - distance(b))[0];
  const along = { ArrowLeft: own[at - 1], ArrowRight: own[at + 1], Home: own[0], End: own.at(-1) };
  const others = { ArrowUp: nearest(now.rank - 1), ArrowDown: nearest(now.rank + 1) };
  const moves = { ...along, ...others, Enter: lastOf(now)[0]?.[0] };
  if (key.ctrlKey || key.metaKey || key.altKey) return;
  if (key.key === "Escape") choose(null);
  if (key.key !== " " && !(key.key in moves)) return;
  key.preventDefault();
  if (key.key === " ") return play();
  const event = moves[key.key] ?? now;
  point(i, events.indexOf(event), true);
  const frame = key.currentTarget.querySelector(".chosen");
  frame.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function choose(what) {
  chosen = what;
  for (const marks of document.querySelectorAll(".marks")) marks.innerHTML = "";
  // in sight while an action is chosen
  byId("panel").classList.toggle("sticky", Boolean(chosen));
  byId("waits").innerHTML = "<p>Point at an action, or focus a chart and use arrow keys.</p>";
  if (!chosen) return;
  const chart = charts[chosen.i];
  byId("waits").innerHTML = waitsText(chosen.event, chart);
  byId(`chart-${chosen.i}`).querySelector(".marks").innerHTML = marks(chosen.event, chart);
}

// Of what an action waits for, that which came last: then it starts.
const lastOf = ({ waits, start }) => waits.filter(([, there]) => there === start);

function waitsText(event, { name, v }) {
  const last = lastOf(event);
  const tie = last.length > 1 ? "last, at the same time" : "the last";
  const named = (e) => `${e.op} of micro-batch ${e.microBatch}${v > 1 ? `, chunk ${e.chunk}` : ""}`;
  const lines = event.waits.map((wait, i) => {
    const [e, there] = wait;
    const isBefore = e.rank === event.rank && i === event.waits.length - 1;
    const rank = e.rank === event.rank ? "this rank" : `rank ${e.rank}`;
    return `<li>${named(e)} on ${rank}${isBefore ? ", the action before" : ""}: ends at
      ${number(e.end)}${there > e.end ? `, is here at ${number(there)}` : ""}
      ${last.includes(wait) ? `<b>(${tie})</b>` : ""}</li>`;
  });
  return `<p><b>${named(event)} on rank ${event.rank}, ${name}</b>, from ${number(event.start)} to
    ${number(event.end)}, waits for ${lines.length ? "" : "nothing"}</p><ul>${lines.join("")}</ul>`;
}

// A frame around the chosen action, and a line from the end of each that it waits for.
function marks(event, { x }) {
  const middle = (rank) => rank * ROW + ROW / 2;
  const last = lastOf(event);
  const lines = event.waits.map((wait) => {
    const [from, y] = [x(wait[0].end), middle(wait[0].rank)];
    return `<path class="wait ${last.includes(wait) ? "" : "early"}"
      d="M${from} ${y}L${x(event.start)} ${middle(event.rank)}"/>
      <circle cx="${from}" cy="${y}" r="4"/>`;
  });
  return box("chosen", event.rank, x(event.start), x(event.end) - x(event.start)) + lines.join("");
}
