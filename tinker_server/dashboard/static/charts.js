// A run's curves, plotted with uPlot and fetched again while the run continues.

const CURVES = [
  { name: "loss", title: "Loss per token" },
  { name: "advantage", title: "Mean advantage" },
  { name: "grad_norm", title: "Gradient norm" },
  { name: "learning_rate", title: "Learning rate" },
  { name: "tokens_per_s", title: "Tokens per second" },
  { name: "sampler_gap", title: "Gap of trainer and sampler, nats" },
  { name: "divergence", title: "KL divergence (k3), nats" },
  { name: "clip_fraction", title: "Clipped part" },
];
const HEIGHT = 190, LEAST_PAUSE_MS = 1000;

const box = document.getElementById("charts");
const smoothing = document.getElementById("smoothing");
const axis = document.getElementById("axis");
const other = document.getElementById("other");
const charts = new Map();
let own = null, compared = null, range = null, timer = null, isFetching = false, isRequested = false;

async function fetchCurves(run, bounds) {
  const query = bounds ? `?first=${Math.floor(bounds[0])}&last=${Math.ceil(bounds[1])}` : "";
  const answer = await fetch(`${box.dataset.url}${encodeURIComponent(run)}/curves.json${query}`);
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

// Exponential moving average with bias correction; gaps stay gaps.
function smooth(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function xs(run) {
  return axis.value === "step" ? run.step : run.at;
}

function tables(name) {
  const weight = Number(smoothing.value);
  const found = [[xs(own), own[name], smooth(own[name], weight)]];
  if (compared) {
    const shift = axis.value === "at" && compared.at.length && own.at.length ? own.at[0] - compared.at[0] : 0;
    found.push([xs(compared).map((x) => x + shift), compared[name], smooth(compared[name], weight)]);
  }
  return uPlot.join(found);
}

function options(curve) {
  const isAlone = (plot, index) => plot.data[index].filter((value) => value !== null && value !== undefined).length < 3;
  const line = (name, width) => ({ stroke: () => color(name), width, points: { show: width > 1 ? isAlone : false } });
  const ink = { stroke: () => color("--ink-2"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false } };
  const value = (_, raw) => (raw === null || raw === undefined ? "–" : Number(raw.toPrecision(4)).toString());
  const series = [
    { label: axis.value === "step" ? "Step" : "Time" },
    { ...line("--curve-raw", 1), label: "raw", value },
    { ...line("--curve", 2), label: "smooth", value },
  ];
  if (compared) {
    series.push({ ...line("--other-raw", 1), label: "other, raw", value }, { ...line("--other", 2), label: "other", value });
  }
  return {
    width: Math.max(240, curve.box.clientWidth), height: HEIGHT, series,
    axes: [{ ...ink, size: 32 }, { ...ink, size: 62, values: (_, ticks) => ticks.map((tick) => Number(tick.toPrecision(4)).toString()) }],
    scales: { x: { time: axis.value === "at" } },
    legend: { live: true },
    cursor: { sync: { key: "run" }, drag: { x: true, y: false, setScale: false } },
    hooks: { setSelect: [(plot) => zoomTo(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"), plot)] },
  };
}

function zoomTo(from, to, plot) {
  if (plot) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (axis.value === "at") {
    const inside = own.step.filter((_, index) => own.at[index] >= from && own.at[index] <= to);
    if (inside.length < 2) return;
    [from, to] = [inside[0], inside.at(-1)];
  }
  const first = Math.max(0, Math.floor(from)), last = Math.min(own.last_step, Math.ceil(to));
  if (last - first < 1) return;
  range = first === 0 && last === own.last_step ? null : [first, last];
  refresh();
}

const ZOOMS = {
  in: ([a, b]) => [a + (b - a) / 4, b - (b - a) / 4],
  out: ([a, b]) => [a - (b - a) / 2, b + (b - a) / 2],
  left: ([a, b]) => [Math.max(0, a - (b - a) / 2), Math.max(b - a, b - (b - a) / 2)],
  right: ([a, b]) => [Math.min(a + (b - a) / 2, own.last_step - (b - a)), Math.min(b + (b - a) / 2, own.last_step)],
  all: () => null,
};

function draw() {
  document.getElementById("no-curves").hidden = own.step.length > 0;
  for (const curve of CURVES) {
    const has = own[curve.name].some((value) => value !== null);
    const drawn = charts.get(curve.name);
    if (!has) { drawn?.figure.remove(); charts.delete(curve.name); continue; }
    if (drawn) { drawn.plot.setData(tables(curve.name)); describe(drawn.figure, curve); continue; }
    const figure = document.createElement("figure");
    figure.className = "card chart";
    figure.dataset.curve = curve.name;
    const caption = document.createElement("figcaption");
    caption.textContent = curve.title;
    const place = document.createElement("div");
    place.setAttribute("role", "img");
    figure.append(caption, place);
    const after = CURVES.slice(CURVES.indexOf(curve) + 1).map((one) => charts.get(one.name)?.figure).find(Boolean);
    box.insertBefore(figure, after ?? null);
    const plot = new uPlot(options({ box: place }), tables(curve.name), place);
    charts.set(curve.name, { figure, place, plot });
    describe(figure, curve);
  }
}

function describe(figure, curve) {
  const values = own[curve.name].filter((value) => value !== null);
  const text = `${curve.title}: ${values.length} points, the last ${Number(values.at(-1).toPrecision(4))} at step ${own.step.at(-1)}`;
  figure.querySelector("[role=img]").setAttribute("aria-label", text);
  figure.dataset.points = values.length;
  figure.dataset.last = values.at(-1);
}

function redraw() {
  for (const { figure, plot } of charts.values()) { plot.destroy(); figure.remove(); }
  charts.clear();
  draw();
}

async function refresh() {
  isRequested = isFetching;  // fetch once more, with the options chosen meanwhile
  if (isFetching) return;
  isFetching = true;
  const began = performance.now();
  try {
    const had = Boolean(compared);
    [own, compared] = await Promise.all([
      fetchCurves(box.dataset.run, range),
      other.value ? fetchCurves(other.value, range) : Promise.resolve(null),
    ]);
    if (had === Boolean(compared)) draw(); else redraw();
  } catch (error) {
    console.warn("curves:", error.message);
  } finally {
    isFetching = false;
  }
  // Curves of a long run take the server longer, so they are fetched less often.
  refresh.pause = Math.max(LEAST_PAUSE_MS, 10 * (performance.now() - began));
  if (isRequested) await refresh();
}

function refreshSoon() {
  if (timer !== null) return;
  timer = window.setTimeout(() => { timer = null; refresh(); }, refresh.pause ?? LEAST_PAUSE_MS);
}

box.addEventListener("sse:changed", refreshSoon);
smoothing.addEventListener("input", () => own && draw());
axis.addEventListener("change", () => own && redraw());
other.addEventListener("change", refresh);
document.addEventListener("theme", () => own && redraw());
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    if (!own) return;
    const wanted = ZOOMS[button.dataset.zoom](range ?? [0, own.last_step]);
    if (wanted === null) { range = null; refresh(); } else zoomTo(...wanted, null);
  });
}
new ResizeObserver(() => {
  for (const { place, plot } of charts.values()) {
    if (Math.abs(plot.width - place.clientWidth) > 1) plot.setSize({ width: Math.max(240, place.clientWidth), height: HEIGHT });
  }
}).observe(box);
refresh();
