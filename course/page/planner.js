// Seconds of a step of train.py, by part: planner.py and planning/layer_time.py once more, by hand,
// in 16 bits, with an even split, a ring of context-parallel ranks; without FP8, LoRA, --head-chunk
// and zb-h1. PLANNER has their counts of bytes, MACHINES the GPUs.

// What one rank computes in a micro-batch, and how long it takes for operations and messages.
function rankOf(model, layout, machine) {
  const { num_layers: L, hidden_size: h, num_heads: a, num_kv_heads: kv, head_dim: d } = model;
  const { t, p, dp, cp, ep, b, sp } = layout;
  const { constants: share, ranks_per_node: perNode, peak, memory_bandwidth: memory } = machine;
  const inNode = machine.node_bandwidth * share.node;
  const network = machine.network_bandwidth * share.network;
  const link = (size, stride) => {
    const membersOnNode = Math.max(1, Math.floor(perNode / stride));
    return size * stride <= perNode ? inNode : network * Math.min(size, membersOnNode);
  };
  const replicas = dp * cp;
  // [ranks of a group, how far apart they are numbered]
  const groups = { tp: [t, 1], ep: [ep, t], cp: [cp, t], replicas: [replicas, t] };
  groups.expertReplicas = [Math.floor(replicas / ep), t * ep];
  const collective = (group, bytes, passes = 1) => {
    const [n, stride] = groups[group];
    return n === 1 ? 0 : passes * (share.wait + (bytes * (n - 1)) / n / link(n, stride));
  };
  const tokens = (b * model.seq_length) / cp;
  const withExperts = model.num_experts ? Math.floor(L / model.expert_every) / L : 0;
  // MLPs that a token goes through, of one layer
  const mlps = 1 - withExperts + withExperts * model.router_topk;
  return {
    ...{ tokens, withExperts, mlps, collective, replicas, heads: a * d, hidden: share.hidden },
    met: model.attention_matrices + mlps * model.mlp_matrices,
    activation: 2 * tokens * h,
    sequenceRanks: sp ? t : 1,
    fused: model.attention === "fused",
    matmul: (flops) => flops / (peak * share.matmul),
    readWrite: (bytes) => bytes / (memory * share.memory),
    send: (bytes) => share.wait + bytes / (p * t * replicas <= perNode ? inNode : network),
    // keys and values, or their gradients, to the next rank of the ring
    toNeighbour: (bytes) => share.wait + (2 * bytes * tokens * kv * d) / t / link(cp, t),
  };
}

// [forward, backward] of one micro-batch in one layer, each [matmul, elementwise, tensor, expert,
// context].
function layerTime(model, layout, rank) {
  const { t, cp, zero, recompute } = layout;
  const { matmul, readWrite, tokens, withExperts: share } = rank;
  const linear = matmul((2 * tokens * rank.met) / t);
  const core = matmul((4 * tokens * model.seq_length * rank.heads) / t);
  const [outside, scores, bias] = readAndWritten(model, t, rank).map(readWrite);
  const allReduce = rank.collective("tp", rank.activation, 2);
  const toExperts = (rank.activation * model.router_topk) / rank.sequenceRanks;
  const exchange = 2 * share * rank.collective("ep", toExperts);
  const scoresAgain = cp > 1 || rank.fused;
  const coreBackward = (scoresAgain ? 3 : 2) * core;
  const waits = ringWaits(cp, rank, core, coreBackward);
  const forward = [linear + core, outside + scores + bias, 2 * allReduce, exchange, waits[0]];
  // numbers whose gradients are added to a sum in an operation of their own
  const experts = (model.num_experts * model.mlp_matrices) / layout.ep;
  const inMLPs = (1 - share) * model.mlp_matrices + share * experts;
  const added = zero === 1 ? (model.attention_matrices + inMLPs) / t : 0;
  const accumulation = readWrite((2 + PLANNER.ACCUMULATION) * added);
  const elementwise = PLANNER.BACKWARD * (outside + scores) + accumulation;
  const tensor = tensorBackward(model, layout, rank, allReduce, linear);
  const backward = [2 * linear + coreBackward, elementwise, tensor, exchange, waits[1]];
  const selective = scoresAgain ? [] : [core, scores + bias];
  const again = { none: [], selective, full: forward }[recompute];
  return [forward, backward.map((seconds, i) => seconds + (again[i] ?? 0))];
}

// Bytes of forward: [outside core attention, inside, what is added to its scores].
function readAndWritten(model, t, { tokens, mlps, heads, fused, sequenceRanks }) {
  const { hidden_size: h, num_heads: a, num_kv_heads: kv, seq_length: s } = model;
  const inner = (model.gated ? PLANNER.GATED : PLANNER.GELU) * model.ffn_hidden_size * mlps;
  const norms = (PLANNER.NORMS_AND_RESIDUALS * h) / sequenceRanks;
  const headNorms = model.qk_norm ? PLANNER.HEAD_NORMS * (a + kv) * model.head_dim : 0;
  const scores = fused ? 0 : (PLANNER.SCORES * a * s) / t;
  const biases = model.positions === "alibi" ? a / t : model.sliding_window > 0;
  const outside = norms + (PLANNER.CONTEXT * heads + headNorms + inner) / t;
  return [tokens * outside, tokens * scores, PLANNER.LOCAL_BIAS * biases * s ** 2];
}

// Seconds that backward waits for tensor-parallel ranks, beside the weight gradients of q, k, v and
// of the MLP's first matrix.
function tensorBackward(model, { sp }, { collective, met }, allReduce, weightGradient) {
  const { num_heads: a, num_kv_heads: kv, head_dim: d, hidden_size: h } = model;
  const [whole, half] = [allReduce, allReduce / 2];
  const beyond = (seconds, share) => Math.max(0, seconds - share * weightGradient);
  const wait = (share) => (sp ? half + 2 * beyond(half, share) : beyond(whole, share));
  const waits = wait(Math.min(1 / 4, ((a + 2 * kv) * d * h) / met)) + wait(1 / 4);
  if (sp) return waits + collective("tp", PLANNER.NORM_GRADIENTS * h, 2);
  return waits + (model.qk_norm ? collective("tp", 4 * d, 2) : 0);
}

// [forward, backward]: seconds that attention waits for keys and values, and for their gradients.
function ringWaits(n, { toNeighbour }, forward, backward) {
  if (n === 1) return [0, 0];
  const [keys, gradients] = [2, 4].map(toNeighbour);
  const beside = (seconds) => (seconds * (n - 1)) / n;
  const moved = (n - 1) * keys + (n - 2) * gradients;
  const last = Math.max(0, moved - beside(backward)) + gradients;
  return [Math.max(0, (n - 1) * keys - beside(forward)), last];
}

// Logits and loss of one micro-batch.
function headTime({ vocab_size: V, hidden_size: h }, { t, p }, { tokens, activation, ...rank }) {
  const logits = (tokens * V) / t;
  const inLoss = [4, 8].map((bytes) => rank.collective("tp", bytes * tokens, 2));
  const waits = sum(inLoss) + rank.collective("tp", activation, p === 1 ? 4 : 2);
  return rank.matmul(6 * logits * h) + rank.readWrite(PLANNER.LOSS * logits) + waits;
}

// Seconds that collectives of parameters and gradients add to a step. forward, backward: of one
// micro-batch, beside which they run. outside, experts: numbers of this rank.
function dataTime(model, { p, m, zero }, rank, [outside, experts], forward, backward) {
  const units = model.num_layers / p + 2;
  const one = (group, bytes) => (bytes ? units * rank.collective(group, bytes / units) : 0);
  const all = (bytes) => one("replicas", bytes * outside) + one("expertReplicas", bytes * experts);
  const [gather, reduce] = [all(2), all(4)];
  const beside = (seconds, computation) =>
    rank.hidden * seconds + (1 - rank.hidden) * Math.max(0, seconds - computation);
  if (zero === 0) return beside(2 * reduce, backward);
  if (zero === 3) return m * (beside(gather, forward) + beside(gather + reduce, backward));
  return (zero === 2 ? m : 1) * beside(reduce, backward) + gather;
}

// {part: seconds} of a step with m micro-batches; their sum is the step.
function stepTime(settings) {
  const model = modelOf(settings);
  const layout = layoutOf(settings);
  const { t, p, v, m, zero } = layout;
  const rank = rankOf(model, layout, MACHINES[settings.gpu]);
  const layers = model.num_layers / p;
  const passes = layerTime(model, layout, rank);
  const [forward, backward] = passes.map((parts) => layers * sum(parts));
  const [outside, experts] = matrices(model, 0, layout);
  const names = ["matmul", "elementwise", "tensor", "expert", "context"];
  const inLayers = names.map((name, i) => [name, m * layers * (passes[0][i] + passes[1][i])]);
  const messages = 2 * (m * v + p - 1) * rank.send(rank.activation / rank.sequenceRanks);
  const tied = model.tied ? (model.vocab_size * model.hidden_size) / t : 0;
  const update = (PLANNER.UPDATE + 2 * 12 + PLANNER.TO_16_BITS) * (outside + experts);
  return {
    ...Object.fromEntries(inLayers),
    head: m * headTime(model, layout, rank),
    bubble: ((p - 1) * (forward + backward)) / v,
    pipeline: p > 1 ? messages + rank.send(4 * tied) : 0,
    data: dataTime(model, layout, rank, [outside, experts], forward, backward),
    optimizer: rank.readWrite(zero ? update / rank.replicas : update),
  };
}
