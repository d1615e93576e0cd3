// Settings: the page's controls, to and from its address; and the small things that all share.

const byId = (id) => document.getElementById(id);
const controls = [...document.querySelectorAll("input, select")];
const tabs = [...document.querySelectorAll("[role=tab]")];
const number = (x, most = 2, least = 0) =>
  x.toLocaleString("en", { maximumFractionDigits: most, minimumFractionDigits: least });
const optionName = (id) => byId(id).selectedOptions[0].text;
const legendEntry = (colour, name) => `<span><i style="background: ${colour}"></i>${name}</span>`;

function tableOf(caption, heads, rows) {
  const head = heads.map((name) => `<th scope="col">${name}</th>`).join("");
  return `<div class="tight"><table><caption>${caption}</caption><thead><tr>${head}</tr></thead>
    <tbody>${rows.join("")}</tbody></table></div>`;
}

// A rule that is broken, and a button for each number that would fit.
function refusal({ rule, fits, setting }) {
  const press = (n) => `change({ ${setting}: ${n} }); byId('${setting}').focus()`;
  const button = (n) => `<button onclick="${press(n)}">${rule.split(" ")[0]} = ${n}</button>`;
  const buttons = setting ? fits.map(button) : [];
  return `<div class="error" role="alert"><p>${rule}</p>${buttons.join(" ")}</div>`;
}

// A boolean, a number or text.
function valueOf(control) {
  if (control.type === "checkbox") return control.checked;
  return control.value === "" || isNaN(control.value) ? control.value : Number(control.value);
}

function put(control, value) {
  if (control.type === "checkbox") control.checked = String(value) === "true";
  else control.value = value;
}

// values as the page was written, {id: value}
const written = {};

// A control's value where no address gives one. Sequence and experts are those of the model.
function standard(control) {
  const { seq_length: s, num_experts: experts } = PRESETS[byId("preset").value];
  return { ...written, s, experts }[control.id];
}

// Whether a control has taken a text.
const holds = (c, text) =>
  c.validity.valid && (String(valueOf(c)) === text || valueOf(c) === Number(text));

function readAddress() {
  byId("time").max = 1e9;
  const given = new Map(new URLSearchParams(location.hash.slice(1)));
  // the model comes before what depends on it
  for (const control of controls) {
    const usual = standard(control);
    put(control, given.get(control.id) ?? usual);
    if (holds(control, given.get(control.id))) given.delete(control.id);
    else put(control, usual);
  }
  const ignored = [...given].map((pair) => pair.join("=").slice(0, 40));
  if (ignored.length > 5) ignored.splice(5, Infinity, "…");
  const words = `The address has settings that this page does not know: ${ignored.join(", ")}`;
  byId("ignored").textContent = ignored.length ? words : "";
  const example = EXAMPLES.find(({ address }) => `#${address}` === location.hash);
  byId("shows").innerHTML = example ? `<b>${example.name}.</b> ${example.why}` : "";
  show();
}

let timer = 0;
// Later: browsers limit how often.
function writeAddress() {
  const changed = controls.filter((c) => valueOf(c) !== standard(c));
  const hash = new URLSearchParams(changed.map((c) => [c.id, valueOf(c)]));
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", `#${hash}`), 150);
}

function show() {
  const s = Object.fromEntries(controls.map((c) => [c.id, valueOf(c)]));
  for (const tab of tabs) {
    const view = tab.getAttribute("aria-controls");
    byId(view).hidden = view !== s.view;
    tab.setAttribute("aria-selected", view === s.view);
    tab.tabIndex = view === s.view ? 0 : -1;
  }
  if (s.view === "memory") showMemory(s);
  else showSchedules(s);
  for (const output of document.querySelectorAll(".value")) {
    output.textContent = number(output.nextElementSibling.valueAsNumber);
  }
}

// Settings by name, {id: value}, and what follows from them.
function change(values) {
  for (const [id, value] of Object.entries(values)) put(byId(id), value);
  const ofModel = ["s", "experts", "ep"].map(byId);
  if ("preset" in values) for (const control of ofModel) put(control, standard(control));
  show();
  writeAddress();
}

function start() {
  const isFirst = (name) => (name === "megatron-7.5b" ? "selected" : "");
  const options = Object.keys(PRESETS).map((name) => `<option ${isFirst(name)}>${name}`);
  byId("preset").innerHTML = options.join("");
  const example = ({ name, address, why }) => `<li><a href="#${address}">${name}</a>: ${why}</li>`;
  byId("examples").innerHTML = EXAMPLES.map(example).join("");
  for (const control of controls) {
    written[control.id] = valueOf(control);
    control.required = control.type !== "checkbox";
    control.min ||= 1;
    control.addEventListener("input", () => change({ [control.id]: valueOf(control) }));
    const value = control.type === "range" ? `<span class="value"></span>` : "";
    control.insertAdjacentHTML("beforebegin", value);
  }
  for (const tab of tabs) {
    tab.onclick = () => tab.focus();
    tab.onfocus = () => change({ view: tab.getAttribute("aria-controls") });
    tab.onkeydown = ({ key }) => ({ ArrowLeft: tabs[0], ArrowRight: tabs[1] })[key]?.focus();
  }
  addEventListener("reset", () => setTimeout(change, 0, {}));
  addEventListener("resize", show);
  addEventListener("hashchange", readAddress);
  readAddress();
}
