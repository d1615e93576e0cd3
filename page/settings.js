// Settings: controls of the page, to and from its address; and the small things that all share.

const byId = (id) => document.getElementById(id);
const controls = [...document.querySelectorAll("[data-setting]")];

const number = (x, digits = 2) => x.toLocaleString("en", { maximumFractionDigits: digits });
const percent = (x) => `${number(100 * x, 1)}%`;
const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const optionName = (id, value) => [...byId(id).options].find((o) => o.value === value).text;

// --- a control --------------------------------------------------------------------------------

const isNumber = (control) => control.type === "range" || control.type === "number";
const valueOf = (control) => String(control.type === "checkbox" ? control.checked : control.value);
// control: its value as the page was written
const written = new Map();

// A control's value where no address gives one. Sequence and experts are those of the model.
function standard(control) {
  const preset = PRESETS[byId("preset").value];
  if (control.id === "s") return String(preset.rows[0][FIELDS.indexOf("seq_length")]);
  return control.id === "experts" ? String(preset.experts) : written.get(control);
}

function put(control, text) {
  if (control.type === "checkbox") control.checked = text === "true";
  else control.value = text;
}

// Whether a control can have this value.
function canBe(control, text) {
  if (control.type === "checkbox") return text === "true" || text === "false";
  if (!isNumber(control)) return [...control.options].some((o) => o.value === text);
  if (text.trim() === "" || !Number.isFinite(Number(text))) return false;
  const before = control.value;
  put(control, text);
  const same = Number(control.value) === Number(text) && control.validity.valid;
  control.value = before;
  return same;
}

// {id: value} of all controls
function settings() {
  const found = {};
  for (const c of controls) found[c.id] = isNumber(c) ? c.valueAsNumber : c.value;
  return { ...found, zero: Number(found.zero), sp: byId("sp").checked };
}

// --- the address ------------------------------------------------------------------------------

function readAddress() {
  const known = new Map();
  const ignored = [];
  byId("time").max = 1e9;
  for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
    const control = controls.find((c) => c.id === key);
    if (control && canBe(control, text)) known.set(control, text);
    else ignored.push(`${key}=${text}`.slice(0, 40));
  }
  // the model first: what is standard depends on it
  for (const control of [byId("preset"), ...controls]) {
    put(control, known.get(control) ?? standard(control));
  }
  const some = ignored.length > 5 ? [...ignored.slice(0, 5), "…"] : ignored;
  byId("ignored").textContent = ignored.length
    ? `The address has settings that this page does not know: ${some.join(", ")}`
    : "";
}

let timer = 0;
function writeAddress() {
  const changed = controls.filter((c) => valueOf(c) !== standard(c));
  const hash = new URLSearchParams(changed.map((c) => [c.id, valueOf(c)]));
  // later: browsers limit how often
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", `#${hash}`), 150);
}

// --- events -----------------------------------------------------------------------------------

const views = { schedules: (s) => showSchedules(s), memory: (s) => showMemory(s) };

function show() {
  const s = settings();
  for (const name of Object.keys(views)) {
    byId(name).hidden = name !== s.view;
    byId(`tab-${name}`).setAttribute("aria-selected", name === s.view);
    byId(`tab-${name}`).tabIndex = name === s.view ? 0 : -1;
  }
  for (const output of document.querySelectorAll("output")) {
    output.textContent = number(byId(output.htmlFor[0]).valueAsNumber);
  }
  views[s.view](s);
}

// Settings by name, {id: text}, and what follows from them.
function change(values) {
  for (const [id, text] of Object.entries(values)) put(byId(id), text);
  const ofModel = "preset" in values ? ["s", "experts", "ep"] : [];
  for (const id of ofModel) put(byId(id), standard(byId(id)));
  show();
  writeAddress();
}

function pressedOnTab(event) {
  const others = { ArrowLeft: "previous", ArrowRight: "next" }[event.key];
  const tab = event.target[`${others}ElementSibling`];
  if (!tab) return;
  change({ view: tab.dataset.view });
  tab.focus();
}

function start() {
  for (const name of Object.keys(PRESETS)) byId("preset").add(new Option(name));
  byId("preset").value = "megatron-7.5b";
  for (const control of controls) {
    written.set(control, valueOf(control));
    control.addEventListener("input", () => change({ [control.id]: valueOf(control) }));
  }
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.addEventListener("click", () => change({ view: tab.dataset.view }));
    tab.addEventListener("keydown", pressedOnTab);
  }
  for (const button of document.querySelectorAll("[data-reset]")) {
    const own = controls.filter((c) => c.form === button.form);
    const values = () => Object.fromEntries(own.map((c) => [c.id, written.get(c)]));
    button.addEventListener("click", () => change(values()));
  }
  const reread = () => {
    readAddress();
    show();
  };
  addEventListener("hashchange", reread);
  addEventListener("resize", show);
  reread();
}
