// The view of memory: a bar of its parts for each value of one setting.

const GB = 1e9;
const GPUS = [24, 80, 141];
const PARTS = Object.keys(PART_COLOURS);
const POWERS = [1, 2, 4, 8, 16];
// the values that are compared, beside the one that is set
const COMPARED = {
  zero: [0, 1, 2, 3],
  recompute: ["none", "selective", "full"],
  pp: [...POWERS, 32, 64],
  vp: [1, 2, 3, 4],
  dp: [...POWERS, 32, 64, 256, 1024],
};

const gigabytes = (bytes, digits = 2) => number(bytes / GB, digits, digits);
const ranksOf = (s) => s.tp * s.pp * s.cp * s.dp;
const shortly = (bytes) => `${gigabytes(bytes, bytes < 10 * GB ? 2 : 1)} GB`;

function showMemory(s) {
  byId("vp").disabled = s.pp === 1;
  byId("sp").disabled = s.tp === 1;
  const wrong = controls.filter((c) => c.type === "number" && !c.validity.valid);
  byId("ranks").textContent = wrong.length ? "" : `t p cp N = ${number(ranksOf(s))} ranks`;
  const ends = (c) => `a whole number from ${number(Number(c.min))} to ${number(Number(c.max))}`;
  const rules = wrong.map((c) => `${c.labels[0].textContent.trim()}: ${ends(c)}`);
  byId("stack").innerHTML = wrong.length ? refusal({ rule: rules.join("; ") }) : compared(s);
}

function compared(s) {
  const set = s[s.compare];
  const values = [...new Set([...(COMPARED[s.compare] ?? POWERS), set])];
  if (typeof set === "number") values.sort((a, b) => a - b);
  const mark = (value) => (value === set ? 'aria-current="true"' : "");
  const rowOf = (value) => {
    return { value, mark: mark(value), ...memory({ ...s, [s.compare]: value }) };
  };
  const rows = values.map(rowOf);
  const now = rows[values.indexOf(set)];
  const name = optionName("compare");
  const model = modelOf(s);
  const { num_layers: L, hidden_size: h, num_heads: a } = model;
  const heads = [name, ...PARTS, "total", "in flight"];
  const legend = PARTS.map((part) => legendEntry(PART_COLOURS[part], part));
  return `<h2>${s.preset} <span class="hint">${L} layers, h ${number(h)}, ${a} heads</span></h2>
    <p class="hint">${model.why}</p>
    ${now.error ? refusal(now.error) : verdict(now.total)}
    <div class="row">${legend.join("")}</div>${bars(rows, name)}
    ${tableOf("GB on the rank that holds most", heads, rows.map(tableRow))}
    ${notes(model)}`;
}

function verdict(total) {
  const fits = GPUS.filter((limit) => total <= limit * GB);
  const list = fits.join(", ").replace(/, (\d+)$/, " and $1");
  const words = fits.length ? `fits into ${list} GB` : `more than ${GPUS.at(-1)} GB`;
  return `<p role="status"><b>${shortly(total)}</b> on the rank that holds most: ${words}.</p>`;
}

function bars(rows, name) {
  const longest = Math.max(...rows.map((row) => row.total ?? 0));
  // longer bars are cut off, so that the lines of the GPUs stay apart
  const most = Math.min(600 * GB, Math.max(160 * GB, 1.02 * longest));
  const share = (bytes) => `${(100 * bytes) / most}%`;
  const colour = (bytes, i) =>
    `<i style="width: ${share(bytes)}; background: ${PART_COLOURS[PARTS[i]]}"></i>`;
  const bar = ({ value, mark, error, parts = [], total }) => {
    const text = error ? "not possible" : `${shortly(total)}${total > most ? ", cut off" : ""}`;
    return `<div class="bar" ${mark}>${name} ${value}<span>${text}</span>
      <div>${parts.map(colour).join("")}</div></div>`;
  };
  const limits = GPUS.map((gb) => `<span style="left: ${share(gb * GB)}">${gb} GB</span>`);
  return `<div class="bars" role="img" aria-label="A bar for each ${name}; its numbers are in the
    table below">${rows.map(bar).join("")}<div class="limits">${limits.join("")}</div></div>`;
}

function tableRow({ value, mark, error, parts, total, inFlight }) {
  const start = `<tr ${mark}><th scope="row">${value}</th>`;
  if (error) return `${start}<td colspan="6" class="words">${error.rule}</td></tr>`;
  const cell = (x, text) => `<td data-value="${x}">${text(x)}</td>`;
  const cells = [...parts, total].map((bytes) => cell(bytes, gigabytes));
  return `${start}${cells.join("")}${cell(inFlight, (n) => number(n))}</tr>`;
}

// Where the formula of the activations is not this model's.
function notes({ attention, sliding_window: window, positions, norm, num_experts: experts }) {
  const bias = window || positions === "alibi";
  const but = bias ? ", but for what is added to the scores, which does not count here" : "";
  const all = [
    [attention === "fused", `Without dropout attention is fused: it keeps no s² matrix${but}.`],
    [norm !== "layernorm", "The activations are those of a GPT's layer. This model's differ."],
    [experts > 0, "The activations have one MLP of 4h for a token. Experts keep more."],
  ];
  return all.map(([is, note]) => (is ? `<p class="hint">${note}</p>` : "")).join("");
}
