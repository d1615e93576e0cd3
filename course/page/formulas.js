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

// How many such pairs are held after each action of a rank; the most; those at a time.
const held = (list, change, n = 0) => list.map((a) => (n += change[a.op]));
const peak = (list, change) => Math.max(...held(list, change));
const heldAt = (time, ofRank, change) =>
  sum(ofRank.filter((e) => e.end <= time).map((e) => change[e.op]));

const inGroups = "interleaving needs micro-batches in groups of p";
const notInGroups = (p, m) =>
  m % p && refused(`${inGroups}: ${m} must be divisible by ${p}`, multiples(m, p));

// forward, input, weight: times of one micro-batch in all layers of a rank; a chunk takes 1 / v.
// bubble, formula: idle / ideal time; ZB-H1's formula is for m >= p and T_W <= T_F.
function timeLines(name, { p, m, v, forward, input, weight, transfer }) {
  const refusal = name === "interleaved" && notInGroups(p, m);
  if (refusal) return refusal;
  const schedule = lists(name, p, m, v);
  const [F, I, W] = [forward / v, input / v, weight / v];
  const zeroBubble = ((p - 1) * (F + Math.max(0, I - W))) / (m * (F + I + W));
  const events = simulate(schedule, { F, I, W, B: I + W }, transfer, v);
  const end = Math.max(...events.map((e) => e.end));
  const ranks = range(p).map((rank) => events.filter((e) => e.rank === rank));
  const work = ranks.map((ofRank) => sum(ofRank.map((e) => e.end - e.start)));
  const bubble = end / Math.max(...work) - 1;
  return {
    ...{ events, ranks, end, bubble, idleOfTotal: bubble / (1 + bubble) },
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
// t, p, dp, cp, ep ranks; m micro-batches of a step, v chunks on each pipeline rank; b micro-batch,
// s sequence, h hidden, a heads, L layers, V vocabulary, e experts. A model has the fields of its
// configuration in Python.

const modelOf = (s) => ({ ...PRESETS[s.preset], seq_length: s.s, num_experts: s.experts });

// The three common divisors that fit and are nearest to a number (base/model_config.py).
function divisors(numbers, near, fits = () => true) {
  const all = range(4097).filter((d) => numbers.every((n) => n % d === 0) && fits(d));
  const nearest = all.sort((a, b) => Math.abs(a - near) - Math.abs(b - near)).slice(0, 3);
  return nearest.sort((a, b) => a - b);
}

// The first rule that is broken, of moe.py, tensor_parallel.py, sequence_parallel.py,
// pipeline_parallel.py, context_parallel.py, moe.py and run/rules.py; the setting to change, and
// what would fit.
function brokenRule(model, { t, p, v, dp, cp, ep, sp }) {
  const { num_layers: L, seq_length: s, num_experts: e, router_topk: k } = model;
  const pieces = `must be divisible by twice cp ${cp}: the sequence is cut into so many pieces`;
  const both = `must be divisible by 2 cp t under sequence parallelism, here ${2 * cp * t}`;
  const { num_heads: a, num_kv_heads: keys, head_dim: d, ffn_hidden_size: ffn } = model;
  // Ranks have whole key heads, or neighbours cut one.
  const sharesKeys = (n) => keys % n === 0 || (n % keys === 0 && d % (n / keys) === 0);
  const cutHead = `must divide num kv heads ${keys}, or a multiple cut each head evenly`;
  const replicas = dp * cp;
  const tFits = divisors([t * p * replicas, a, ffn], t, sharesKeys);
  const epFits = divisors([e, replicas], ep);
  const sequence = `must be divisible by t ${t} under sequence parallelism`;
  const layers = `must be divisible by p ${p} times v ${v}, unless layer split is given`;
  const none = `this model has no experts; experts ${ep} would give it one for each rank`;
  const even = `must divide experts ${e}, so that all ranks hold equally many`;
  const rules = [
    [e && k > e, `router topk ${k}`, `must be from 1 to experts ${e}`],
    [a % t, `t ${t}`, `must divide num heads ${a}`, tFits, "tp"],
    [!sharesKeys(t), `t ${t}`, cutHead, tFits, "tp"],
    [ffn % t, `t ${t}`, `must divide ffn hidden size ${ffn}`, tFits, "tp"],
    [sp && s % t, `s ${s}`, sequence, multiples(s, t)],
    [L % (p * v), `num layers ${L}`, layers, multiples(L, p * v)],
    [cp > 1 && s % (2 * cp), `s ${s}`, pieces, multiples(s, 2 * cp)],
    [replicas % ep, `ep ${ep}`, `must divide the ${replicas} data-parallel ranks`, epFits, "ep"],
    [ep > 1 && !e, `ep ${ep}`, none],
    [e % ep, `ep ${ep}`, even, epFits, "ep"],
    [cp > 1 && sp && s % (2 * cp * t), `s ${s}`, both, multiples(s, 2 * cp * t)],
  ];
  const [, subject, rule, fits, setting] = rules.find(([isBroken]) => isBroken) ?? [];
  return subject && refused(`${subject}: ${rule}`, fits, setting);
}

// Numbers in the matrices of a rank (planning/state.py): outside the experts, of the experts, of
// learned positions. The first pipeline rank has the embedding, the last the head, which may be it.
function matrices(model, rank, { t, p, v, ep }) {
  const { num_layers: L, hidden_size: h, num_experts: e, vocab_size: V } = model;
  const { attention_matrices: attention, latent_matrices: latents, mlp_matrices: mlp } = model;
  const { expert_matrices: expert, shared_matrices: shared, first_dense_layers: dense } = model;
  const layers = range(L).filter((i) => Math.floor((i * p * v) / L) % p === rank);
  const withExperts = layers.filter(
    (i) => e && i >= dense && (i + 1) % model.expert_every === 0,
  ).length;
  const vocabularies = (rank === 0) + (rank === p - 1 && (p > 1 || !model.tied));
  const mlps = layers.length - withExperts;
  const ofMlps = mlps * mlp + withExperts * shared;
  const cut = layers.length * (attention - latents) + ofMlps + vocabularies * h * V;
  const outside = cut / t + layers.length * latents;
  const positions = rank === 0 && model.positions === "learned" ? h * model.seq_length : 0;
  return [outside, (withExperts * e * expert) / ep / t, positions];
}

// Bytes of weights, gradients and optimizer state: in mixed precision 2, 4 and 12 for each
// parameter, sharded from ZeRO stage 3, 2 and 1 (fsdp.py).
function stateOf({ num_experts: e }, [outside, experts, positions], { dp, cp, ep, zero }) {
  const replicas = Math.floor((dp * cp) / ep);
  const parts = [[2, 3], [4, 2], [12, 1]].map(([bytes, stage]) => {
    const [n, ofExperts] = zero >= stage ? [dp * cp, (dp * cp) / ep] : [1, 1];
    return bytes * ((outside + positions) / n + experts / ofExperts);
  });
  // a few experts on many ranks: the shard of their weights is a copy (fsdp.py)
  const each = Math.floor(e / ep);
  if ((zero === 1 || zero === 2) && each > 1 && each < replicas) parts[0] += (2 * experts) / replicas;
  return parts;
}

// Activations that a micro-batch keeps in all layers of a rank (recompute.py). A fused core keeps
// no s² matrix, nor does a ring of context-parallel ranks.
function microBatchBytes(model, { t, p, b, cp, sp, recompute }) {
  const { num_layers: L, hidden_size: h, num_heads: a, seq_length: s } = model;
  const n = sp ? t : 1;
  const keepsScores = recompute === "none" && model.attention !== "fused" && cp === 1;
  const scores = keepsScores ? (5 * a * s) / (h * t) : 0;
  const layer = recompute === "full" ? 2 / n : 10 / n + 24 / t + scores;
  return ((s * b * h) / cp) * layer * (L / p);
}

// .. and outside the layers, on the first stage.
function outsideLayers({ hidden_size: h, seq_length: s, vocab_size: V }, { t, p, b, cp, sp }) {
  const n = sp ? t : 1;
  return ((s * b) / cp) * ((h * p) / n + (p > 1 ? 0 : 4 * (h / n + V / t)));
}

// A layout: settings of the view of memory, in the papers' letters.
const layoutOf = (s) => ({ ...s, t: s.tp, p: s.pp, v: s.pp > 1 ? s.vp : 1, m: s.micro });

// Of the rank that holds most: bytes of weights, gradients, optimizer state and activations;
// inFlight: micro-batches that the first stage holds under 1F1B or interleaved.
function memory(settings) {
  const model = modelOf(settings);
  const layout = layoutOf(settings);
  const { p, v, m } = layout;
  const refusal = brokenRule(model, layout) || (v > 1 && notInGroups(p, m));
  if (refusal) return refusal;
  const states = range(p).map((rank) => stateOf(model, matrices(model, rank, layout), layout));
  const fullest = states.reduce((most, state) => (sum(state) > sum(most) ? state : most));
  const inFlight = Math.min(m, p + (v > 1 ? (p - 1) / v : 0));
  const inLayers = microBatchBytes(model, layout) * inFlight;
  const parts = [...fullest, inLayers + outsideLayers(model, layout)];
  return { parts, total: sum(parts), inFlight };
}
