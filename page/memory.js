// The view of memory: a bar of weights, gradients, optimizer state and activations for each value
// of one setting.

const GB = 1e9;
const LIMITS = [24, 80, 141];
const PARTS = Object.keys(PART_COLOURS);
// the values that are compared, and the one that is set
const POWERS = [1, 2, 4, 8, 16];
const COMPARED = {
  zero: [0, 1, 2, 3],
  recompute: ["none", "selective", "full"],
  tp: POWERS,
  pp: [...POWERS, 32, 64],
  vp: [1, 2, 3, 4],
  dp: [...POWERS, 32, 64, 256, 1024],
  b: POWERS,
  ep: POWERS,
};

function gigabytes(bytes, digits) {
  const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return (bytes / GB).toLocaleString("en", format);
}

const total = (bytes) => `${gigabytes(bytes, bytes < 10 * GB ? 2 : 1)} GB`;

// --- by the formulas --------------------------------------------------------------------------

function modelOf(s) {
  const row = PRESETS[s.preset].rows[s.experts > 0 ? 1 : 0];
  const fields = Object.fromEntries(FIELDS.map((field, i) => [field, row[i]]));
  return new routers_MoEConfig({ ...fields, seq_length: s.s, num_experts: s.experts });
}

function memoryOf(s) {
  const v = s.pp > 1 ? s.vp : 1;
  const layout = [s.tp, s.pp, v, s.dp, s.ep, s.zero, s.b, s.sp, s.recompute];
  try {
    const memory = formulas_memory(modelOf(s), ...layout);
    return { memory, total: py.sum(memory) };
  } catch (error) {
    if (!(error instanceof model_config_FieldError)) throw error;
    return { error, text: error.message(fieldName) };
  }
}

// What this page calls a field of Python.
function fieldName(field) {
  const control = controls.find((c) => c.dataset.field === field);
  return control ? control.labels[0].textContent.split(" ")[0] : field.replaceAll("_", " ");
}

// --- what is shown ----------------------------------------------------------------------------

function showMemory(s) {
  byId("vp").disabled = s.pp === 1;
  byId("sp").disabled = s.tp === 1;
  const numbers = controls.filter((c) => c.type === "number");
  const wrong = numbers.filter((c) => Number.isNaN(c.valueAsNumber) || !c.validity.valid);
  for (const control of numbers) control.setAttribute("aria-invalid", wrong.includes(control));
  byId("ranks").textContent = wrong.length ? "" : `t p N = ${number(s.tp * s.pp * s.dp)} ranks`;
  if (wrong.length) {
    const range = (c) => `${number(Number(c.min))} to ${number(Number(c.max))}`;
    const rules = wrong.map((c) => `${c.labels[0].textContent}: a whole number from ${range(c)}`);
    byId("stack").innerHTML = `<p class="error" role="alert">${rules.join("; ")}</p>`;
    return;
  }
  const set = s[s.compare];
  const values = [...new Set([...COMPARED[s.compare], set])];
  if (typeof set === "number") values.sort((a, b) => a - b);
  const rows = values.map((value) => ({ value, ...memoryOf({ ...s, [s.compare]: value }) }));
  const now = rows[values.indexOf(set)];
  const name = optionName("compare", s.compare);
  const model = modelOf(s);
  const { num_layers, hidden_size, num_heads } = model;
  const sizes = `${num_layers} layers, h ${number(hidden_size)}, ${num_heads} heads`;
  const colour = (part) => `<i style="background:${PART_COLOURS[part]}"></i>`;
  const word = (part) => (part === "state" ? "optimizer state" : part);
  const legend = PARTS.map((part) => `<span>${colour(part)}${word(part)}</span>`);
  byId("stack").innerHTML = `<h2>${s.preset} <span class="hint">${sizes}</span></h2>
    ${now.error ? refusal(now) : verdict(now)}
    <div class="legend">${legend.join("")}</div><svg role="img"></svg>
    <div class="tight">${table(rows, now, name)}</div>${notes(model)}`;
  drawStack(byId("stack").querySelector("svg"), rows, now, name);
}

function verdict(row) {
  const fits = LIMITS.filter((limit) => row.total <= limit * GB);
  const which = fits.length > 1 ? `${fits.slice(0, -1).join(", ")} and ${fits.at(-1)}` : fits[0];
  const words = fits.length ? `fits into ${which} GB` : `more than ${LIMITS.at(-1)} GB`;
  return `<p role="status"><b data-fact="total" data-value="${row.total}">${total(row.total)}</b>
    on the rank that holds most: ${words}.</p>`;
}

// The rule that is broken, and a button for each number that would fit.
function refusal(row) {
  const control = controls.find((c) => c.dataset.field === row.error.field);
  const fits = control && Array.isArray(row.error.args[3]) ? row.error.args[3] : [];
  const buttons = fits.map((n) => {
    const name = fieldName(row.error.field);
    return `<button type="button" data-set="${control.id}" data-to="${n}">${name} = ${n}</button>`;
  });
  const rule = escape(row.text);
  return `<div class="error" role="alert"><p>${rule}</p>${buttons.join(" ")}</div>`;
}

function table(rows, now, name) {
  const cell = (part, bytes) =>
    `<td data-part="${part}" data-value="${bytes}">${gigabytes(bytes, 2)}</td>`;
  const cells = (row) => {
    if (row.error) return `<td colspan="5" class="words">${escape(row.text)}</td>`;
    const parts = PARTS.map((part) => cell(part, row.memory[part]));
    return [...parts, cell("total", row.total)].join("");
  };
  const body = rows.map((row) => {
    const kind = row === now ? ' class="set" aria-current="true"' : "";
    return `<tr${kind}><th scope="row">${row.value}</th>${cells(row)}</tr>`;
  });
  const heads = [name, ...PARTS, "total"].map((x) => `<th scope="col">${x}</th>`);
  return `<table><caption>GB on the rank that holds most</caption>
    <thead><tr>${heads.join("")}</tr></thead><tbody>${body.join("")}</tbody></table>`;
}

// Where the formula of the activations is not this model's.
function notes(model) {
  const found = [];
  if (model.attention === "fused") {
    const bias = model.sliding_window || model.positions === "alibi";
    const but = bias ? ", but for what is added to the scores, which does not count here" : "";
    found.push(`Without dropout this model's attention is fused: it keeps no s² matrix${but}.`);
  }
  if (model.norm !== "layernorm") {
    found.push("The activations are those of a GPT's layer of this size. This model's differ.");
  }
  if (model.num_experts) {
    found.push("The activations have one MLP of 4h for a token. A layer with experts keeps more.");
  }
  return found.map((note) => `<p class="hint">${note}</p>`).join("");
}

function drawStack(svg, rows, now, name) {
  const width = Math.max(240, svg.parentElement.clientWidth);
  const longest = py.max([0, ...rows.map((row) => (row.total ?? 0) / GB)]);
  // longer bars are cut off, so that the lines of the GPUs stay apart
  const most = Math.min(600, Math.max(160, 1.02 * longest));
  const x = (gb) => 8 + (Math.min(gb, most) / most) * (width - 16);
  const [top, step] = [22, 46];
  const bottom = top + rows.length * step;
  const [bars, texts] = [[], []];
  rows.forEach((row, i) => {
    const y = top + i * step;
    if (row === now) {
      bars.push(`<rect class="set" x="1" y="${y + 1}" width="${width - 2}" height="44" rx="5"/>`);
    }
    const kind = row === now ? "set" : "";
    const cut = row.total / GB > most ? ", cut off" : "";
    const text = row.error ? "not possible" : `${total(row.total)}${cut}`;
    texts.push(`<text class="${kind}" x="8" y="${y + 16}">${name} ${row.value}</text>`);
    texts.push(`<text class="end ${kind}" x="${width - 8}" y="${y + 16}">${text}</text>`);
    let from = 0;
    for (const part of row.memory ? PARTS : []) {
      const to = from + row.memory[part] / GB;
      const size = `x="${x(from)}" y="${y + 21}" width="${x(to) - x(from)}" height="18"`;
      bars.push(`<rect class="part" ${size} fill="${PART_COLOURS[part]}"/>`);
      from = to;
    }
  });
  for (const limit of LIMITS) {
    const unit = limit === LIMITS.at(-1) ? " GB" : "";
    bars.push(`<path class="limit" d="M${x(limit)} 17V${bottom}"/>`);
    texts.push(`<text x="${x(limit) - 7}" y="13">${limit}${unit}</text>`);
  }
  svg.setAttribute("width", width);
  svg.setAttribute("height", bottom + 4);
  svg.setAttribute("aria-label", `A bar for each ${name}; its numbers are in the table below`);
  svg.innerHTML = [...bars, ...texts].join("");
}

// A button of a refusal.
byId("stack").addEventListener("click", (event) => {
  const { set, to } = event.target.dataset;
  if (!set) return;
  change({ [set]: to });
  byId(set).focus();
});
