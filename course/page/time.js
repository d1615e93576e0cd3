// The view of schedules at one moment: what ranks hold, the memory of one rank, and playing.

const GRAPH = 44;
// without motion, playing goes from one end of an action to the next
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let playing = 0;

// All that depends on the time and on the rank; the time lines stay as they are drawn.
function showTime(s) {
  const at = byId("time").valueAsNumber;
  const rank = Math.min(s.rank, s.p - 1);
  const peaks = charts.flatMap((c) => [c.inFlight, c.deferred].flat().map((n) => n / c.v));
  const most = Math.max(...peaks.filter((n) => n > 0));
  charts.forEach((chart, i) => {
    if (chart.error) return;
    const part = (name) => byId(`chart-${i}`).querySelector(name);
    const now = chart.x(at);
    part(".gauges").innerHTML = gauges(chart, at, rank);
    part(".curve").innerHTML = curve(chart, rank, most);
    part(".holds").innerHTML = rankHolds(chart, at, rank, s);
    part("details div").innerHTML = tableAt(chart, at);
    part(".now").setAttribute("d", `M${now} 0V${chart.idle.length * ROW + GRAPH + 9}`);
    if (s.zoom > 1) keepInSight(part(".lines div"), now);
  });
}

function keepInSight(box, x) {
  const { scrollLeft: left, clientWidth: width } = box;
  if (x < left || x > left + width) box.scrollLeft = x - width / 8;
}

// Micro-batches in flight on a rank over time, on one scale in both charts. Dashed: for their W.
function curve({ ranks, v, x, end }, rank, most) {
  const own = ranks[rank];
  const y = (n) => ranks.length * ROW + 4 + GRAPH * (1 - n / v / most);
  const line = (change) => held(own, change).map((n, i) => `H${x(own[i].end)}V${y(n)}`).join("");
  const deferred = own.some((e) => e.op === "W");
  return `<path class="gauge" d="M0 ${y(0)}${line(IN_FLIGHT)}Z"/>
    ${deferred ? `<path class="wait early" d="M0 ${y(0)}${line(DEFERRED)}"/>` : ""}
    <path class="axis" d="M0 ${y(0)}H${x(end)}"/>`;
}

// A layout of the other view, with the ranks and chunks of this one, gives bytes to micro-batches.
function rankHolds({ ranks, inFlight, v }, time, rank, s) {
  const now = heldAt(time, ranks[rank], IN_FLIGHT) / v;
  const most = inFlight[rank] / v;
  const layout = layoutOf({ ...s, pp: s.p, vp: v });
  const model = modelOf(s);
  const bytes = microBatchBytes(model, layout);
  const value = (x, text) => `<b data-value="${x}">${text(x)}</b>`;
  const both = (each, text, unit) =>
    `${value(now * each, text)} ${unit}(at most ${value(most * each, text)})`;
  const rule = brokenRule(model, layout)?.error.rule;
  const inBytes = rule ? `no bytes, for ${rule}` : both(bytes, shortly, "");
  return `<b>Rank ${rank}</b> holds ${both(1, (n) => number(n), "micro-batches ")} of its layers. In
    ${s.preset}: ${bytes > 0 ? inBytes : "no bytes, see Memory"}.`;
}

function gauges({ ranks, inFlight }, time, rank) {
  const width = (chunks) => (46 * chunks) / Math.max(...inFlight);
  const rows = inFlight.map((most, r) => {
    const [now, y] = [heldAt(time, ranks[r], IN_FLIGHT), r * ROW + 16];
    const both = `${now}/${most}`;
    return `<text x="0" y="${y}" ${r === rank ? 'font-weight="700"' : ""}>rank ${r}</text>
      ${box("idle", r, 50, width(most))}${box("gauge", r, 50, width(now))}
      <text x="54" y="${y}">${both.length > 5 ? now : both}</text>`;
  });
  const below = rows.length * ROW + 18;
  return `${rows.join("")}<text class="quiet" x="0" y="${below}">rank ${rank}: micro-</text>
    <text class="quiet" x="0" y="${below + 15}">batches held</text>`;
}

function tableAt({ ranks, idle, inFlight, deferred, v }, time) {
  const rows = idle.map((unused, rank) => {
    const [now, later] = [IN_FLIGHT, DEFERRED].map((change) => heldAt(time, ranks[rank], change));
    const most = inFlight[rank];
    const numbers = [now, most, most / v, later, deferred[rank], unused].map((n) => number(n));
    return `<tr>${[rank, ...numbers].map((cell) => `<td>${cell}</td>`).join("")}</tr>`;
  });
  const caption = `At time ${number(time)}: chunks in flight, and those whose W is still to do`;
  const heads = ["rank", "in flight", "most", "in micro-batches", "W to do", "most", "idle in all"];
  return tableOf(caption, heads, rows);
}

// The next moment at which an action ends, or the one before.
function momentFrom(direction) {
  const time = byId("time").valueAsNumber;
  const ends = [0, ...charts.flatMap((c) => c.events.map((e) => e.end))];
  const beyond = ends.map((end) => (end - time) * direction).filter((d) => d > 1e-9);
  return beyond.length ? time + direction * Math.min(...beyond) : time;
}

const step = (direction) => change({ time: momentFrom(direction) });

// Play from here, from the beginning if this is the end; or pause. The whole takes 20 seconds.
function play() {
  const { max, valueAsNumber: time } = byId("time");
  if (!playing && time >= max) change({ time: 0 });
  let before = performance.now();
  const tick = (now) => {
    const seconds = ((now - before) / 1000) * Number(byId("speed").value);
    const on = byId("time").valueAsNumber + (seconds * byId("time").max) / 20;
    if (!calm.matches || seconds >= 1) {
      change({ time: calm.matches ? momentFrom(1) : on });
      before = now;
    }
    const isOver = byId("time").valueAsNumber >= byId("time").max || byId("schedules").hidden;
    setPlaying(isOver ? 0 : requestAnimationFrame(tick));
  };
  cancelAnimationFrame(playing);
  setPlaying(playing ? 0 : requestAnimationFrame(tick));
}

function setPlaying(frame) {
  playing = frame;
  byId("play").textContent = playing ? "Pause" : "Play";
}

// Keys of the scrubber: arrows step, the space bar plays.
byId("time").addEventListener("keydown", (key) => {
  const direction = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[key.key];
  if (!direction && key.key !== " ") return;
  key.preventDefault();
  if (direction) step(direction);
  else play();
});
