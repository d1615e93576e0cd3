// What the page computes: formulas of the lessons once more, by hand, in the papers' letters.
// tests/test_explorer.py holds them to Python.

const range = (n) => Array.from({ length: n }, (_, i) => i);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

// A rule that is broken; what would fit, numbers or text; the setting to change.
function refused(rule, fits, setting) {
  const list = setting ? `[${fits.join(", ")}]` : fits;
  return { error: { rule: fits ? `${rule}; ${list} would fit` : rule, fits, setting } };
}

// The multiples next to n.
const multiples = (n, of) => (n < of ? `${of}` : `${n - (n % of)} or ${n - (n % of) + of}`);

// --- schedules (schedules.py) -----------------------------------------------------------------
//
// p ranks, m micro-batches, v chunks on each rank. A schedule has a list of actions for each rank.

const actions = (op, m, chunk = 0, first = 0) =>
  range(m).map((k) => ({ op, chunk, microBatch: first + k }));

// On each rank: warmup, then one forward and one backward in turn, then the other backwards.
// With v chunks, groups of p micro-batches go through chunk 0, then chunk 1, and so on.
function lists(name, p, m, v) {
  const size = v > 1 ? p : m;
  const group = (i) => range(v).flatMap((chunk) => actions("F", size, chunk, i * size));
  const forward = range(m / size).flatMap(group);
  const backward = forward.map((a) => ({ ...a, op: "B", chunk: v - 1 - a.chunk }));
  const schedule = range(p).map((rank) => {
    const later = p - 1 - rank;
    const warmup = v > 1 ? 2 * later + (v - 1) * p : later;
    const n = name === "gpipe" ? m : Math.min(warmup, m * v);
    const steady = forward.slice(n).flatMap((action, i) => [action, backward[i]]);
    return [...forward.slice(0, n), ...steady, ...backward.slice(m * v - n)];
  });
  return name === "zb-h1" ? schedule.map(split) : schedule;
}

// Of ZB-H1: I in the place of B. On rank r the W of micro-batch k comes after the I of k + r.
function split(list, rank) {
  const m = list.length / 2;
  const both = (a) => [{ ...a, op: "I" }, { ...a, op: "W", microBatch: a.microBatch - rank }];
  const parts = list.flatMap((a) => (a.op === "F" ? [a] : both(a)));
  const left = actions("W", m).slice(Math.max(0, m - rank));
  return [...parts.filter((a) => a.microBatch >= 0), ...left];
}

// The results that an action needs: [kind, stage]. F is the activation that leaves a stage, B the
// gradient of its input, from B or I.
const needs = (op, stage) =>
  ({ F: [["F", stage - 1]], W: [["B", stage]] })[op] ?? [["F", stage], ["B", stage + 1]];

// An action starts when the one before it on its rank has ended and what it needs has arrived.
// Returns events by start: actions with their times, and [event, when its result is there] for all
// that they wait for.
function simulate(schedule, cost, transfer, v) {
  const p = schedule.length;
  const events = schedule.map(() => []);
  const made = {};
  // whether a rank could run its next action
  function run(rank) {
    const action = schedule[rank][events[rank].length];
    if (!action) return false;
    const { op, chunk, microBatch: k } = action;
    const stage = chunk * p + rank;
    // the first stage needs no F, the last no B
    const results = needs(op, stage).filter(([, i]) => i >= 0 && i < p * v);
    const needed = results.map(([kind, i]) => made[`${kind} ${i} ${k}`]);
    if (needed.includes(undefined)) return false;
    const before = events[rank].at(-1);
    const delay = (event) => (event.rank === rank ? 0 : transfer);
    const waits = needed.filter((e) => e !== before).map((e) => [e, e.end + delay(e)]);
    if (before) waits.push([before, before.end]);
    const start = Math.max(0, ...waits.map(([, there]) => there));
    const id = `${op === "I" ? "B" : op} ${stage} ${k}`;
    made[id] = { id, rank, ...action, start, end: start + cost[op], waits };
    return events[rank].push(made[id]);
  }
  while (range(p).some(run));
  return events.flat().sort((a, b) => a.start - b.start || a.rank - b.rank);
}

// What an action changes: pairs (chunk, micro-batch) in flight, and those that wait for their W.
const IN_FLIGHT = { F: 1, B: -1, I: -1, W: 0 };
const DEFERRED = { F: 0, B: 0, I: 1, W: -1 };

// How many such pairs are held after some actions; the most at a time; those of a rank at a time.
const held = (list, change) => sum(list.map((a) => change[a.op]));
const peak = (list, change) => Math.max(...list.map((_, i) => held(list.slice(0, i + 1), change)));
const heldAt = (time, events, rank, change) =>
  held(events.filter((e) => e.rank === rank && e.end <= time), change);

// forward, input, weight: times of one micro-batch in all layers of a rank; a chunk takes 1 / v.
// bubble, formula: idle / ideal time; ZB-H1's formula is for m >= p and T_W <= T_F.
function timeLines(name, { p, m, v, forward, input, weight, transfer }) {
  if (name === "interleaved" && m % p) {
    const rule = `interleaving needs micro-batches in groups of p: ${m} must be divisible by ${p}`;
    return refused(rule, multiples(m, p));
  }
  const schedule = lists(name, p, m, v);
  const [F, I, W] = [forward / v, input / v, weight / v];
  const zeroBubble = ((p - 1) * (F + Math.max(0, I - W))) / (m * (F + I + W));
  const events = simulate(schedule, { F, I, W, B: I + W }, transfer, v);
  const end = Math.max(...events.map((e) => e.end));
  const onRank = (rank) => events.filter((e) => e.rank === rank);
  const work = range(p).map((rank) => sum(onRank(rank).map((e) => e.end - e.start)));
  const bubble = end / Math.max(...work) - 1;
  return {
    ...{ events, end, bubble, idleOfTotal: bubble / (1 + bubble) },
    formula: name === "zb-h1" ? zeroBubble : (p - 1) / (v * m),
    idle: work.map((time) => end - time),
    inFlight: schedule.map((list) => peak(list, IN_FLIGHT)),
    deferred: schedule.map((list) => peak(list, DEFERRED)),
  };
}

// The colour of text that can be read on a colour: by its luminance (WCAG 2).
function textOn(rgb) {
  const [red, green, blue] = rgb.map((c) => c ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "black" : "white";
}

// --- memory -----------------------------------------------------------------------------------
//
// t, p, dp, ep ranks; v chunks on each pipeline rank; b micro-batch, s sequence, h hidden, a heads,
// L layers, V vocabulary, e experts. A model has the fields of its configuration in Python.

const modelOf = (s) => ({ ...PRESETS[s.preset], seq_length: s.s, num_experts: s.experts });

// The three common divisors that are nearest to a number (model_config.py).
function divisors(numbers, near) {
  const all = range(4097).filter((d) => numbers.every((n) => n % d === 0));
  const nearest = all.sort((a, b) => Math.abs(a - near) - Math.abs(b - near)).slice(0, 3);
  return nearest.sort((a, b) => a - b);
}

// The first rule that is broken, of routers.py, tensor_parallel.py, sequence_parallel.py,
// pipeline_parallel.py and moe.py; the setting to change, and what would fit.
function brokenRule(model, { t, p, v, dp, ep, sp }) {
  const { num_layers: L, seq_length: s, num_experts: e, router_topk: k } = model;
  const cut = ["num_heads", "num_kv_heads", "ffn_hidden_size"];
  const words = (field) => `${field.replaceAll("_", " ")} ${model[field]}`;
  const tFits = divisors([t * p * dp, ...cut.map((field) => model[field])], t);
  const epFits = divisors([e, dp], ep);
  const sequence = `must be divisible by t ${t} under sequence parallelism`;
  const layers = `must be divisible by p ${p} times v ${v}, unless layer split is given`;
  const none = `this model has no experts; experts ${ep} would give it one for each rank`;
  const even = `must divide experts ${e}, so that all ranks hold equally many`;
  const rules = [
    [e && k > e, `router topk ${k}`, `must be from 1 to experts ${e}`],
    ...cut.map((field) => [model[field] % t, `t ${t}`, `must divide ${words(field)}`, tFits, "tp"]),
    [sp && s % t, `s ${s}`, sequence, multiples(s, t)],
    [L % (p * v), `num layers ${L}`, layers, multiples(L, p * v)],
    [dp % ep, `ep ${ep}`, `must divide the ${dp} data-parallel ranks`, epFits, "ep"],
    [ep > 1 && !e, `ep ${ep}`, none],
    [e % ep, `ep ${ep}`, even, epFits, "ep"],
  ];
  const [, subject, rule, fits, setting] = rules.find(([isBroken]) => isBroken) ?? [];
  return subject && refused(`${subject}: ${rule}`, fits, setting);
}

// Numbers in the matrices of a rank (planning/memory.py): outside the experts, and of the experts.
// The first pipeline rank has the embedding, the last the head, which may be the embedding again.
function matrices(model, rank, { t, p, v, ep }) {
  const { num_layers: L, hidden_size: h, num_experts: e, vocab_size: V } = model;
  const { attention_matrices: attention, mlp_matrices: mlp } = model;
  const layers = range(L).filter((i) => Math.floor((i * p * v) / L) % p === rank);
  const withExperts = layers.filter((i) => e && (i + 1) % model.expert_every === 0).length;
  const vocabularies = (rank === 0) + (rank === p - 1 && (p > 1 || !model.tied));
  const mlps = layers.length - withExperts;
  const outside = (layers.length * attention + mlps * mlp + vocabularies * h * V) / t;
  const positions = rank === 0 && model.positions === "learned" ? h * model.seq_length : 0;
  return [outside + positions, (withExperts * e * mlp) / ep / t];
}

// Bytes of weights, gradients and optimizer state: in mixed precision 2, 4 and 12 for each
// parameter, sharded from ZeRO stage 3, 2 and 1 (fsdp.py).
function stateOf([outside, experts], { dp, ep, zero }) {
  return [[2, 3], [4, 2], [12, 1]].map(([bytes, stage]) => {
    const [n, ofExperts] = zero >= stage ? [dp, dp / ep] : [1, 1];
    return bytes * (outside / n + experts / ofExperts);
  });
}

// Activations of the first stage (recompute.py). A fused core keeps no s² matrix.
function activations(model, { t, p, v, b, sp, recompute }) {
  const { num_layers: L, hidden_size: h, num_heads: a, seq_length: s, vocab_size: V } = model;
  const n = sp ? t : 1;
  const scores = recompute === "none" && model.attention !== "fused" ? (5 * a * s) / (h * t) : 0;
  const layer = s * b * h * (recompute === "full" ? 2 / n : 10 / n + 24 / t + scores);
  const layers = v === 1 ? L : L * (1 + (p - 1) / (p * v));
  const embedding = (s * b * h * p) / n;
  const head = p > 1 ? 0 : 4 * s * b * (h / n + V / t);
  return layer * layers + embedding + head;
}

// Bytes of the rank that holds most: weights, gradients, optimizer state, and activations under
// 1F1B or interleaved with m >= p.
function memory(settings) {
  const { tp: t, pp: p } = settings;
  const v = p > 1 ? settings.vp : 1;
  const model = modelOf(settings);
  const layout = { ...settings, t, p, v };
  const refusal = brokenRule(model, layout);
  if (refusal) return refusal;
  const states = range(p).map((rank) => stateOf(matrices(model, rank, layout), layout));
  const fullest = states.reduce((most, state) => (sum(state) > sum(most) ? state : most));
  const parts = [...fullest, activations(model, layout)];
  return { parts, total: sum(parts) };
}
