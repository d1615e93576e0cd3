// The page: settings to and from the address, and what is drawn. Every number that is shown comes
// from the functions above, which are Python's.

const byId = (id) => document.getElementById(id);
const controls = [...document.querySelectorAll("[data-setting]")];
const views = ["schedules", "memory"];
const GB = 1e9;
const LIMITS = [24, 80, 141];

const number = (x, digits = 2) => x.toLocaleString("en", { maximumFractionDigits: digits });
const percent = (x) => `${number(100 * x, 1)}%`;
const gigabytes = (x) => `${number(x / GB, x < 10 * GB ? 2 : x < 1000 * GB ? 1 : 0)} GB`;
const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const nameOf = (select, value) => [...select.options].find((o) => o.value === value).text;

// --- settings and the address -----------------------------------------------------------------

const isNumber = (control) => control.type === "range" || control.type === "number";
const valueOf = (control) => (control.type === "checkbox" ? control.checked : control.value);
const initial = new Map();

function settings() {
  const read = (c) => (isNumber(c) ? c.valueAsNumber : valueOf(c));
  const found = Object.fromEntries(controls.map((c) => [c.id, read(c)]));
  return { ...found, zero: Number(found.zero) };
}

// A control's value where no address gives one. Sequence and experts are those of the model.
function standard(control) {
  const preset = PRESETS[byId("preset").value];
  if (control.id === "s") return String(preset.rows[0][FIELDS.indexOf("seq_length")]);
  return control.id === "experts" ? String(preset.experts) : initial.get(control);
}

function put(control, value) {
  if (control.type === "checkbox") control.checked = value === true || value === "true";
  else control.value = value;
}

// Whether a control can have a value, which is text.
function fits(control, value) {
  if (control.type === "checkbox") return value === "true" || value === "false";
  if (!isNumber(control)) return [...control.options].some((o) => o.value === value);
  if (value.trim() === "" || !Number.isFinite(Number(value))) return false;
  const before = control.value;
  put(control, value);
  const same = Number(control.value) === Number(value) && control.validity.valid;
  control.value = before;
  return same;
}

function readAddress() {
  const given = [...new URLSearchParams(location.hash.slice(1))];
  byId("time").max = 1e9;
  const known = new Map();
  for (const [key, value] of given) {
    const control = controls.find((c) => c.id === key);
    if (control && fits(control, value)) known.set(control, value);
  }
  // the model first: what is standard depends on it
  for (const control of [byId("preset"), ...controls]) {
    put(control, known.get(control) ?? standard(control));
  }
  const ignored = given.filter(([key]) => ![...known.keys()].some((c) => c.id === key));
  byId("ignored").textContent = ignored.length
    ? `Not understood in the address, and left out: ${ignored.map((x) => x.join("=")).join(", ").slice(0, 200)}`
    : "";
}

let waiting = 0;
function writeAddress() {
  const changed = controls.filter((c) => String(valueOf(c)) !== String(standard(c)));
  const hash = new URLSearchParams(changed.map((c) => [c.id, valueOf(c)]));
  // some browsers limit how often
  clearTimeout(waiting);
  waiting = setTimeout(() => history.replaceState(null, "", `#${hash}`), 150);
}

// --- schedules --------------------------------------------------------------------------------

const ROW = 24;
const LEFT = 104;
// what is drawn, and the action that is chosen: { chart, event, kept }
let charts = [];
let chosen = null;

const title = (e) => `${e.op} of micro-batch ${e.micro_batch}`;
const chunkOf = (e, chart) => (chart.v > 1 ? `, chunk ${e.chunk}` : "");

function simulated(name, s) {
  const v = name === "interleaved" ? s.v : 1;
  const chart = { name: nameOf(byId("schedule"), name), p: s.p, m: s.m, v, transfer: s.transfer };
  try {
    const lines = formulas_time_lines(name, s.p, s.m, v, s.forward, s.input, s.weight, s.transfer);
    return { ...chart, lines, key: name, end: py.max(lines.events.map((e) => e.end)) };
  } catch (error) {
    if (!(error instanceof schedules_ScheduleError)) throw error;
    return { ...chart, error: py.str(error), end: 0 };
  }
}

function showSchedules(s) {
  const names = s.below === "none" ? [s.schedule] : [s.schedule, s.below];
  charts = names.map((name) => simulated(name, s));
  chosen = null;
  const end = Math.max(...charts.map((c) => c.end));
  const time = byId("time");
  time.max = end || 1;
  time.disabled = end === 0;
  const interleaved = names.includes("interleaved");
  byId("v").disabled = !interleaved;
  byId("v-hint").textContent = interleaved ? "" : "Only interleaved has v above 1.";
  for (const i of [0, 1]) showChart(byId(`chart-${i}`), charts[i], i, end);
  showTime();
  showWaits();
}

function formulaNote(chart) {
  const { key, p, m, transfer } = chart;
  if (transfer > 0) return "by formula, without transfers";
  return key === "zb-h1" && m < p ? "by formula, for m of p or more" : "by formula";
}

function showChart(section, chart, i, end) {
  section.hidden = !chart;
  if (!chart) return;
  const parts = chart.v > 1 ? `, v ${chart.v}` : "";
  const head = `<h2>${chart.name} <span class="hint">p ${chart.p}, m ${chart.m}${parts}</span></h2>`;
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
  section.innerHTML = `${head}<dl class="facts">${facts.map(fact).join("")}</dl>
    <div class="lines"><svg class="gauges" width="${LEFT}" aria-hidden="true"></svg><div>
    <svg class="time" tabindex="0" role="application" aria-roledescription="time lines"
      aria-label="${chart.name}: ${chart.p} ranks, ${chart.m} micro-batches. Arrow keys go from
      action to action." aria-describedby="waits"></svg></div></div>
    ${i === charts.length - 1 ? legend() : ""}
    <details><summary>${chart.name} as a table</summary><div class="tight"></div></details>`;
  drawTimeLines(section.querySelector(".time"), chart, end);
}

function legend() {
  const ops = [...new Set(charts.flatMap((c) => (c.lines ? c.lines.events.map((e) => e.op) : [])))];
  const words = { F: "F forward", B: "B backward", I: "I input gradient", W: "W weight gradient" };
  const entry = (op) => `<span><i style="background:${schedules_COLOURS.get(op)}"></i>${words[op]}</span>`;
  const idle = '<span><i style="background:var(--idle)"></i>idle</span>';
  const later = charts.some((c) => c.v > 1) ? "<span>darker: a later chunk</span>" : "";
  return `<div class="legend">${ops.map(entry).join("")}${idle}${later}</div>`;
}

// The colour of an action, and whether dark text can be read on it.
function shade(e, chart) {
  const brightness = 1 - (0.45 * e.chunk) / Math.max(1, chart.v - 1);
  const hex = schedules_COLOURS.get(e.op);
  const rgb = [1, 3, 5].map((i) => Math.round(parseInt(hex.slice(i, i + 2), 16) * brightness));
  const linear = rgb.map((c) => (c / 255) ** 2.2);
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return [`rgb(${rgb})`, luminance > 0.18 ? "dark" : "light"];
}

function drawTimeLines(svg, chart, end) {
  const width = Math.max(200, svg.parentElement.clientWidth) * byId("zoom").valueAsNumber - 2;
  const height = chart.p * ROW;
  chart.x = (time) => (time / end) * (width - 1);
  let text = "";
  for (let rank = 0; rank < chart.p; rank++) {
    text += `<rect class="idle" y="${rank * ROW + 1}" width="${chart.x(chart.end)}" height="${ROW - 2}"/>`;
  }
  chart.lines.events.forEach((e, i) => {
    const [fill, ink] = shade(e, chart);
    const [x, w, y] = [chart.x(e.start), chart.x(e.end) - chart.x(e.start), e.rank * ROW + 1];
    text += `<rect data-i="${i}" x="${x}" y="${y}" width="${w}" height="${ROW - 2}" fill="${fill}"/>`;
    const names = [`${e.op}${e.micro_batch}`, `${e.micro_batch}`];
    const label = names.find((name) => 7.2 * name.length + 3 < w);
    if (label) text += `<text class="label ${ink}" x="${x + w / 2}" y="${y + 15}">${label}</text>`;
  });
  // at most one tick in 60 pixels
  const least = (60 * end) / width;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
  for (let k = 0; k * step <= end; k++) {
    const x = chart.x(k * step);
    const anchor = x + 30 > width ? "end" : k === 0 ? "start" : "middle";
    text += `<path class="tick" d="M${x} ${height}v5"/>`;
    text += `<text class="quiet" text-anchor="${anchor}" x="${x}" y="${height + 18}">${number(k * step, 6)}</text>`;
  }
  svg.setAttribute("width", width);
  svg.setAttribute("height", height + 24);
  svg.innerHTML = `${text}<g class="marks"></g><path class="now"/>`;
  svg.onpointermove = (event) => point(chart, event, false);
  svg.onclick = (event) => point(chart, event, true);
  svg.onfocus = () => !chosen && svg.matches(":focus-visible") && choose(chart, chart.lines.events[0], false);
  svg.onkeydown = (event) => pressed(chart, event);
  chart.svg = svg;
}

function point(chart, event, keep) {
  const i = event.target.dataset.i;
  if (keep && i === undefined) return choose(null);
  if (i === undefined || (chosen?.kept && !keep)) return;
  choose(chart, chart.lines.events[i], keep);
}

function choose(chart, event, kept) {
  chosen = chart && { chart, event, kept };
  showWaits();
}

// Arrow keys in a focused chart.
function pressed(chart, key) {
  const events = chart.lines.events;
  const now = chosen?.chart === chart ? chosen.event : events[0];
  const onRank = (rank) => events.filter((e) => e.rank === rank);
  const [own, at] = [onRank(now.rank), onRank(now.rank).indexOf(now)];
  // on another rank, what runs at the same time or is nearest to it
  const beside = (rank) => py.sorted(onRank(rank), (e) => Math.abs(e.start + e.end - now.start - now.end))[0];
  const moves = {
    ArrowLeft: () => own[at - 1],
    ArrowRight: () => own[at + 1],
    ArrowUp: () => beside(now.rank - 1),
    ArrowDown: () => beside(now.rank + 1),
    Home: () => own[0],
    End: () => own.at(-1),
    Enter: () => lastOf(waitsOf(chart, now))[0]?.[0],
    Escape: () => null,
  };
  if (!(key.key in moves) || key.ctrlKey || key.metaKey || key.altKey) return;
  key.preventDefault();
  const next = moves[key.key]();
  if (next === null) choose(null);
  else choose(chart, next ?? now, true);
  if (next) keepInView(chart, next);
}

function keepInView(chart, e) {
  const box = chart.svg.parentElement;
  const [left, right] = [chart.x(e.start), chart.x(e.end)];
  if (left < box.scrollLeft || right > box.scrollLeft + box.clientWidth) box.scrollLeft = left - 40;
}

const waitsOf = (chart, e) => formulas_waits_for(e, chart.lines.events, chart.p, chart.v, chart.transfer);
// those that came last of all
const lastOf = (waits) => waits.filter(([, time]) => time === py.max(waits.map((w) => w[1])));

function showWaits() {
  for (const chart of charts) if (chart.svg) chart.svg.querySelector(".marks").innerHTML = "";
  if (!chosen) {
    byId("waits").innerHTML = "<p>Point at an action, or focus a chart and use the arrow keys.</p>";
    return;
  }
  const { chart, event } = chosen;
  const waits = waitsOf(chart, event);
  const last = lastOf(waits);
  const line = (wait) => {
    const [e, time] = wait;
    const own = e.rank === event.rank;
    const where = own ? "on this rank" : `on rank ${e.rank}`;
    const before = wait === waits.at(-1) && own ? ", the action before it" : "";
    const there = time > e.end ? `ended at ${number(e.end)}, there at ${number(time)}` : `ended at ${number(time)}`;
    const which = last.includes(wait) ? (last.length > 1 ? ": among the last" : ": <b>the last</b>") : "";
    return `<li>${title(e)}${chunkOf(e, chart)} ${where}${before}, ${there}${which}</li>`;
  };
  const ready = waits.length ? "It waits for" : "It waits for nothing.";
  byId("waits").innerHTML = `<p><b>${chart.name}, rank ${event.rank}: ${title(event)}${chunkOf(event, chart)}</b>,
    from ${number(event.start)} to ${number(event.end)}. ${ready}</p><ul>${waits.map(line).join("")}</ul>`;
  chart.svg.querySelector(".marks").innerHTML = marks(chart, event, waits, last);
}

// Around the chosen action, and from the end of each action that it waits for.
function marks(chart, event, waits, last) {
  const [x, y] = [chart.x(event.start), event.rank * ROW];
  let text = `<rect class="chosen" x="${x}" y="${y + 1}" width="${chart.x(event.end) - x}" height="${ROW - 2}"/>`;
  for (const wait of waits) {
    const [from, row] = [chart.x(wait[0].end), wait[0].rank * ROW + ROW / 2];
    const kind = last.includes(wait) ? "" : " early";
    text += `<path class="wait${kind}" d="M${from} ${row}L${x} ${y + ROW / 2}"/>`;
    text += `<circle class="wait" cx="${from}" cy="${row}" r="3"/>`;
  }
  return text;
}

// The scrubber: a line through the charts, and what each rank holds.
function showTime() {
  const time = byId("time").valueAsNumber;
  document.querySelector("output[for=time]").textContent = number(time);
  charts.forEach((chart, i) => {
    if (!chart.lines) return;
    const section = byId(`chart-${i}`);
    chart.svg.querySelector(".now").setAttribute("d", `M${chart.x(time)} 0V${chart.p * ROW + 5}`);
    const { events, in_flight, deferred } = chart.lines;
    const most = py.max(in_flight);
    let [gauges, rows] = ["", ""];
    for (let rank = 0; rank < chart.p; rank++) {
      const now = formulas_held(events, rank, time, schedules_IN_FLIGHT);
      const later = formulas_held(events, rank, time, schedules_DEFERRED);
      const y = rank * ROW;
      gauges += `<text x="0" y="${y + 16}">rank ${rank}</text>
        <rect class="idle" x="50" y="${y + 3}" width="${(46 * in_flight[rank]) / most}" height="${ROW - 6}"/>
        <rect class="gauge" x="50" y="${y + 3}" width="${(46 * now) / most}" height="${ROW - 6}"/>
        <text x="54" y="${y + 16}">${now}/${in_flight[rank]}</text>`;
      const mine = events.filter((e) => e.rank === rank);
      const idle = chart.end - py.sum(mine.map((e) => e.end - e.start));
      rows += `<tr><td>${rank}</td><td>${now}</td><td>${in_flight[rank]}</td><td>${later}</td>
        <td>${deferred[rank]}</td><td>${number(idle)}</td></tr>`;
    }
    const svg = section.querySelector(".gauges");
    svg.setAttribute("height", chart.p * ROW + 24);
    svg.innerHTML = `${gauges}<text class="quiet" x="50" y="${chart.p * ROW + 18}">in flight</text>`;
    section.querySelector(".tight").innerHTML = `<table><caption class="hint">At time ${number(time)}:
      chunks in flight, and those that wait for their W</caption>
      <thead><tr><th scope="col">rank</th><th scope="col">in flight</th><th scope="col">most</th>
      <th scope="col">W to do</th><th scope="col">most</th><th scope="col">idle, in all</th></tr></thead>
      <tbody>${rows}</tbody></table>`;
  });
}

// Arrow keys on the scrubber: the next moment at which an action ends.
byId("time").addEventListener("keydown", (event) => {
  const direction = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
  if (!direction) return;
  event.preventDefault();
  const time = event.target.valueAsNumber;
  const ends = charts.flatMap((c) => (c.lines ? c.lines.events.map((e) => e.end) : []));
  const beyond = [0, ...ends].filter((t) => (t - time) * direction > 1e-9);
  if (beyond.length) event.target.value = Math[direction > 0 ? "min" : "max"](...beyond);
  changed(event);
});

// --- memory -----------------------------------------------------------------------------------

const PARTS = ["weights", "gradients", "state", "activations"];
const WORDS = { state: "optimizer state" };
const POWERS = [1, 2, 4, 8, 16, 32, 64];
const VALUES = {
  zero: [0, 1, 2, 3],
  recompute: ["none", "selective", "full"],
  tp: POWERS.slice(0, 5),
  pp: POWERS,
  vp: [1, 2, 3, 4],
  dp: [...POWERS, 256, 1024],
  b: POWERS.slice(0, 5),
  ep: POWERS.slice(0, 5),
};

function modelOf(s) {
  const row = PRESETS[s.preset].rows[s.experts > 0 ? 1 : 0];
  const fields = Object.fromEntries(FIELDS.map((field, i) => [field, row[i]]));
  return new routers_MoEConfig({ ...fields, seq_length: s.s, num_experts: s.experts });
}

// What a field of Python is called on this page.
function fieldName(field) {
  const control = controls.find((c) => c.dataset.field === field);
  return control ? control.labels[0].textContent.split(" ")[0] : field.replaceAll("_", " ");
}

function memoryOf(s) {
  const v = s.pp > 1 ? s.vp : 1;
  try {
    const memory = formulas_memory(modelOf(s), s.tp, s.pp, v, s.dp, s.ep, s.zero, s.b, s.sp, s.recompute);
    return { memory, total: py.sum(memory) };
  } catch (error) {
    if (!(error instanceof model_config_FieldError)) throw error;
    return { error, text: error.message(fieldName) };
  }
}

function showMemory(s) {
  byId("vp").disabled = s.pp === 1;
  byId("sp").disabled = s.tp === 1;
  const stack = byId("stack");
  const wrong = controls.filter((c) => c.type === "number" && !c.validity.valid);
  for (const c of controls) if (c.type === "number") c.setAttribute("aria-invalid", !c.validity.valid);
  const empty = controls.filter((c) => c.type === "number" && c.value === "" && !wrong.includes(c));
  if (wrong.length + empty.length) {
    const rule = (c) => `${c.labels[0].textContent} must be a whole number from ${number(c.min * 1)} to ${number(c.max * 1)}`;
    stack.innerHTML = `<p class="error" role="alert">${[...wrong, ...empty].map(rule).join("; ")}</p>`;
    byId("ranks").textContent = "";
    return;
  }
  byId("ranks").textContent = `${number(s.tp * s.pp * s.dp)} ranks: t p N = ${s.tp} · ${s.pp} · ${s.dp}`;
  const values = VALUES[s.compare].includes(s[s.compare])
    ? VALUES[s.compare]
    : [...VALUES[s.compare], s[s.compare]].sort((a, b) => a - b);
  const rows = values.map((value) => ({ value, ...memoryOf({ ...s, [s.compare]: value }) }));
  const now = rows[values.indexOf(s[s.compare])];
  const label = nameOf(byId("compare"), s.compare);
  stack.innerHTML = `<h2>${s.preset} ${modelNote(s)}</h2>${summary(now)}
    <div class="legend">${PARTS.map(part).join("")}</div><svg role="img"></svg>
    <div class="tight">${table(rows, now, label)}</div>${caveats(s)}`;
  drawStack(stack.querySelector("svg"), rows, now, label);
}

const part = (name) => `<span><i style="background:var(--${name})"></i>${WORDS[name] ?? name}</span>`;

function modelNote(s) {
  const c = modelOf(s);
  return `<span class="hint">${c.num_layers} layers, h ${number(c.hidden_size)}, ${c.num_heads} heads</span>`;
}

function summary(row) {
  if (row.error) {
    // numbers that the rule lets through, where the page has the field
    const control = controls.find((c) => c.dataset.field === row.error.field);
    const fit = Array.isArray(row.error.args[3]) && control ? row.error.args[3] : [];
    const set = (n) => `<button type="button" data-set="${control.id}" data-to="${n}">${fieldName(row.error.field)} = ${n}</button>`;
    return `<div class="error" role="alert"><p>${escape(row.text)}</p>${fit.map(set).join(" ")}</div>`;
  }
  const held = LIMITS.filter((limit) => row.total <= limit * GB);
  const words = held.length ? `fits into ${held.join(", ")} GB` : `does not fit into ${LIMITS.at(-1)} GB`;
  return `<p role="status"><b data-fact="total" data-value="${row.total}">${gigabytes(row.total)}</b>
    on the rank that holds most: ${words}.</p>`;
}

function table(rows, now, label) {
  const cell = (x, i) => `<td data-value="${x}" data-part="${PARTS[i] ?? "total"}">${number(x / GB, 2)}</td>`;
  const line = (row) =>
    row.error
      ? `<td colspan="5" style="text-align:left">${escape(row.text)}</td>`
      : [...row.memory, row.total].map(cell).join("");
  const body = rows.map(
    (row) => `<tr${row === now ? ' class="chosen-row" aria-current="true"' : ""}><td>${row.value}</td>${line(row)}</tr>`,
  );
  const heads = [label, ...PARTS.map((name) => WORDS[name] ?? name), "total"];
  return `<table><caption class="hint">GB on the rank that holds most</caption><thead><tr>
    ${heads.map((head) => `<th scope="col">${head}</th>`).join("")}</tr></thead><tbody>${body.join("")}</tbody></table>`;
}

function caveats(s) {
  const c = modelOf(s);
  const notes = [];
  if (c.attention === "fused")
    notes.push("Without dropout this model's attention is fused. It keeps no s² matrix, as with selective.");
  if (c.llama) notes.push("The activations are those of a GPT's layer of this size; a Llama's differ somewhat.");
  if (c.num_experts)
    notes.push("The activations count one MLP of 4h for a token; with experts a layer keeps more.");
  return notes.map((note) => `<p class="hint">${note}</p>`).join("");
}

function drawStack(svg, rows, now, label) {
  const width = Math.max(240, svg.parentElement.clientWidth);
  const totals = rows.filter((row) => row.memory).map((row) => row.total / GB);
  // longer bars are cut off, so that the lines of the GPUs stay apart
  const most = Math.min(600, Math.max(160, ...totals) * 1.02);
  const x = (gb) => (Math.min(gb, most) / most) * (width - 2);
  const [top, step] = [22, 46];
  let text = "";
  rows.forEach((row, i) => {
    const y = top + i * step;
    const bold = row === now ? "bold" : "";
    if (row === now) text += `<rect class="current" x="1" y="${y + 1}" width="${width - 2}" height="${step - 2}" rx="4"/>`;
    text += `<text class="${bold}" x="6" y="${y + 16}">${label} ${row.value}</text>`;
    if (row.error) {
      text += `<text class="wrong end" x="${width - 6}" y="${y + 16}">not possible</text>`;
      return;
    }
    const cut = row.total / GB > most ? ", cut off here" : "";
    text += `<text class="end ${bold}" x="${width - 6}" y="${y + 16}">${gigabytes(row.total)}${cut}</text>`;
    let from = 0;
    row.memory.forEach((bytes, k) => {
      const to = from + bytes / GB;
      text += `<rect x="${x(from)}" y="${y + 22}" width="${x(to) - x(from)}" height="17" fill="var(--${PARTS[k]})"/>`;
      from = to;
    });
  });
  const bottom = top + rows.length * step;
  for (const limit of LIMITS) {
    const end = x(limit) + 40 > width ? "end" : "";
    text += `<path class="limit" d="M${x(limit)} 18V${bottom}"/>`;
    text += `<text class="${end}" text-anchor="middle" x="${x(limit)}" y="13">${limit}${limit === LIMITS.at(-1) ? " GB" : ""}</text>`;
  }
  svg.setAttribute("width", width);
  svg.setAttribute("height", bottom + 4);
  svg.setAttribute("aria-label", `One bar for each ${label}, beside 24, 80 and 141 GB. The numbers are in the table below.`);
  svg.innerHTML = text;
}

// --- events -----------------------------------------------------------------------------------

function show() {
  const s = settings();
  for (const name of views) {
    byId(name).hidden = name !== s.view;
    byId(`tab-${name}`).setAttribute("aria-selected", name === s.view);
    byId(`tab-${name}`).tabIndex = name === s.view ? 0 : -1;
  }
  for (const output of document.querySelectorAll("output")) output.textContent = number(byId(output.htmlFor[0]).valueAsNumber);
  if (s.view === "schedules") showSchedules(s);
  else showMemory(s);
}

function changed(event) {
  const id = event.target.id;
  if (id === "preset") for (const name of ["s", "experts", "ep"]) put(byId(name), standard(byId(name)));
  if (id === "time") showTime();
  else show();
  writeAddress();
}

function setView(name) {
  byId("view").value = name;
  show();
  writeAddress();
}

for (const name of Object.keys(PRESETS)) {
  byId("preset").add(new Option(name, name, name === "megatron-7.5b", name === "megatron-7.5b"));
}
for (const control of controls) {
  initial.set(control, valueOf(control));
  control.addEventListener("input", changed);
}
for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => setView(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = views.find((name) => name !== tab.dataset.view);
    setView(other);
    byId(`tab-${other}`).focus();
  });
}
for (const button of document.querySelectorAll("[data-reset]")) {
  button.addEventListener("click", () => {
    for (const control of button.form.querySelectorAll("[data-setting]")) put(control, initial.get(control));
    show();
    writeAddress();
  });
}
byId("stack").addEventListener("click", (event) => {
  const { set, to } = event.target.dataset;
  if (!set) return;
  put(byId(set), to);
  show();
  writeAddress();
  byId(set).focus();
});
addEventListener("hashchange", () => {
  readAddress();
  show();
});
addEventListener("resize", show);
readAddress();
show();
