// A run's curves, plotted with uPlot and fetched again while the run continues, with other runs drawn over them.

import { meanAndBand } from "./bands.js";
import { addTools } from "./chart_tools.js";
import { drawMarks, fetchMarks } from "./marks.js";
import { changeAddress, chosenStep, follow, scrub } from "./scrub.js";
import { AXIS, TIME } from "./times.js";

const CURVES = [
  { name: "loss", title: "Loss per token" },
  { name: "advantage", title: "Mean advantage" },
  { name: "grad_norm", title: "Gradient norm" },
  { name: "learning_rate", title: "Learning rate", exact: true },
  { name: "tokens_per_s", title: "Tokens per second" },
  { name: "sampler_gap", title: "Trainer-sampler log-prob gap (nats)" },
  { name: "divergence", title: "KL divergence (k3, nats)" },
  { name: "clip_fraction", title: "Clip fraction" },
  { name: "shared_tokens", title: "Tokens saved by shared beginnings" },
];
const HEIGHT = 190, LEAST_PAUSE_MS = 1000, MOST_AT_ONCE = 100, LOG = 3;

const box = document.getElementById("charts");
const important = document.getElementById("metrics");
const more = document.getElementById("more-metrics");
const smoothing = document.getElementById("smoothing");
const axis = document.getElementById("axis");
const log = document.getElementById("log");
const band = document.getElementById("band");
const settings = document.getElementById("settings");
const others = document.getElementById("others");
const charts = new Map();
const from = document.getElementById("range-first"), to = document.getElementById("range-last");
let runs = [], missing = "", range = readRange(), timer = null, isFetching = false, isRequested = false;

// The steps that the address asks for.
function readRange() {
  const query = new URLSearchParams(window.location.search);
  const [first, last] = ["first", "last"].map((name) => Number.parseInt(query.get(name), 10));
  return first >= 0 && last > first ? [first, last] : null;
}

function setRange(wanted) {
  range = wanted;
  changeAddress((query) => ["first", "last"].forEach((name, index) => (wanted ? query.set(name, wanted[index]) : query.delete(name))));
  refresh();
}

async function fetched(run, file, query) {
  const answer = await fetch(`${box.dataset.url}${encodeURIComponent(run)}/${file}?${query}`);
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

async function fetchRun({ run, name }, shown) {
  const query = new URLSearchParams();
  if (range) { query.set("first", Math.floor(range[0])); query.set("last", Math.ceil(range[1])); }
  const of = new URLSearchParams(query);
  for (const metric of shown) of.append("shown", metric);
  const [curves, reported] = await Promise.all([fetched(run, "curves.json", query), fetched(run, "metrics.json", of)]);
  const columns = new Map(CURVES.map((curve) => [curve.name, { step: curves.step, at: curves.at, value: curves[curve.name] }]));
  for (const [metric, values] of Object.entries(reported.metrics)) columns.set(`metric:${metric}`, values);
  return { run, name, columns, reported, last_step: Math.max(curves.last_step, reported.last_step) };
}

function chosen() {
  return [...others?.querySelectorAll("input:checked") ?? []].map((one) => ({ run: one.value, name: one.dataset.name }));
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

function values(run, curve) {
  return run.columns.get(curve.name) ?? { step: [], at: [], value: [] };
}

function isLog(curve) {
  return log.checked && values(runs[0], curve).value.some((value) => value > 0);
}

// Numbers that a log scale cannot show are gaps.
function shown(numbers, curve) {
  return isLog(curve) ? numbers.map((value) => (value > 0 ? value : null)) : numbers;
}

function isBand() {
  return band !== null && band.checked && runs.length > 1;
}

// A line for each run, and the unsmoothed one behind this run's; or the runs' mean and its band.
function tables(curve) {
  const weight = curve.exact ? 0 : Number(smoothing.value);
  const begun = (run) => values(run, curve).at[0] ?? 0;
  const lines = runs.map((run, index) => {
    const { step, at, value } = values(run, curve);
    const shift = index ? begun(runs[0]) - begun(run) : 0;
    const xs = axis.value === "step" ? step : at.map((time) => time + shift);
    const line = shown(smooth(value, weight), curve);
    return index || curve.exact || isBand() ? [xs, line] : [xs, shown(value, curve), line];
  });
  if (!isBand()) return uPlot.join(lines);
  const [xs, ...columns] = meanAndBand(lines);
  return [xs, ...columns.map((column) => shown(column, curve))];
}

// Four digits, and more where a number is large, or where the distance of two ticks needs them.
function text(raw, distance = 1) {
  if (raw === null || raw === undefined) return "–";
  const exponent = (value) => Math.floor(Math.log10(Math.abs(value)));
  const digits = Math.max(4, exponent(raw) - exponent(distance) + 2);
  return Number(raw.toPrecision(Math.min(digits, 15))).toString();
}

function options(curve, place) {
  const isAlone = (plot, index) => plot.data[index].filter((value) => value !== null && value !== undefined).length < 3;
  const line = (name, width) => ({ stroke: () => color(name), width, points: { show: width > 1 ? isAlone : false }, value: (_, raw) => text(raw) });
  const ink = { stroke: () => color("--ink-2"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false } };
  const series = [axis.value === "step" ? { label: "Step" } : { ...TIME }];
  if (isBand()) {
    series.push({ ...line("--curve-0", 2), label: `mean of ${runs.length}` }, ...["− deviation", "+ deviation"].map((label) => ({ ...line("--curve-raw", 1), label })));
  }
  if (!curve.exact && !isBand()) series.push({ ...line("--curve-raw", 1), label: "raw" });
  if (!isBand()) runs.forEach((run, index) => series.push({ ...line(`--curve-${index}`, 2), label: runs.length > 1 ? run.name : curve.exact ? "value" : "smooth" }));
  const ticks = (plot, splits, index, space, distance) => splits.map((tick) => (tick === null ? "" : text(tick, distance)));
  return {
    width: Math.max(240, place.clientWidth), height: HEIGHT, series,
    axes: [{ ...ink, size: axis.value === "step" ? 32 : 44, ...(axis.value === "at" && { values: AXIS }) }, { ...ink, size: 62, values: ticks }],
    scales: { x: { time: axis.value === "at" }, y: isLog(curve) ? { distr: LOG } : {} },
    bands: isBand() ? [{ series: [3, 2], fill: () => `color-mix(in srgb, ${color("--curve-0")} 18%, transparent)` }] : [],
    legend: { live: true },
    cursor: { sync: { key: "run" }, drag: { x: true, y: false, setScale: false }, bind: { mousedown: onlyWithShift } },
    hooks: { setCursor: [showLegend], draw: [(plot) => drawMarks(plot, (mark) => markPlace(curve, mark), color), (plot) => drawChosen(plot, curve)], setSelect: [(plot) => zoomTo(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"), curve, plot)] },
  };
}

// A plain drag chooses a step.
function onlyWithShift(plot, target, handler) {
  return (event) => {
    plot.cursor.drag.x = event.shiftKey;
    handler(event);
  };
}

// The step of this run that is nearest to a place on the x axis.
function stepAt(curve, x) {
  const { step, at } = values(runs[0], curve);
  if (!step.length) return null;
  if (axis.value === "step") return Math.max(0, Math.round(x));
  const distance = (index) => Math.abs(at[index] - x);
  return step[at.reduce((best, _, index) => (distance(index) < distance(best) ? index : best), 0)];
}

function placeOf(curve, wanted) {
  if (axis.value === "step") return wanted;
  const { step, at } = values(runs[0], curve);
  const index = step.findIndex((number) => number >= wanted);
  return index < 0 ? null : at[index];
}

// A restart has no step: it comes before the first step that ended after it.
function markPlace(curve, mark) {
  if (axis.value === "at") return mark.at;
  if (mark.step !== undefined) return mark.step;
  const { step, at } = values(runs[0], curve);
  const index = at.findIndex((time) => time >= mark.at);
  return index < 0 ? null : step[index];
}

// A line across the curve at the chosen step.
function drawChosen(plot, curve) {
  const chosenAt = chosenStep() === null ? null : placeOf(curve, chosenStep());
  if (chosenAt === null || chosenAt < plot.scales.x.min || chosenAt > plot.scales.x.max) return;
  const { ctx, bbox } = plot, left = Math.round(plot.valToPos(chosenAt, "x", true));
  ctx.save();
  ctx.fillStyle = color("--accent");
  ctx.fillRect(left - 1, bbox.top, 2, bbox.height);
  ctx.restore();
}

// At rest a legend has names alone.
function showLegend(plot) {
  plot.root.closest("figure").classList.toggle("pointed", plot.cursor.idx !== null);
}

function zoomTo(from, to, curve, plot) {
  if (plot) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (plot && axis.value === "at") {
    const { step, at } = values(runs[0], curve);
    const inside = step.filter((_, index) => at[index] >= from && at[index] <= to);
    if (inside.length < 2) return;
    [from, to] = [inside[0], inside.at(-1)];
  }
  const end = runs[0].last_step, first = Math.max(0, Math.floor(from)), last = Math.min(end, Math.ceil(to));
  if (last - first < 1) return;
  setRange(first === 0 && last === end ? null : [first, last]);
}

const ZOOMS = {
  in: ([a, b]) => [a + (b - a) / 4, b - (b - a) / 4],
  out: ([a, b]) => [a - (b - a) / 2, b + (b - a) / 2],
  left: ([a, b]) => [Math.max(0, a - (b - a) / 2), Math.max(b - a, b - (b - a) / 2)],
  right: ([a, b], end) => [Math.min(a + (b - a) / 2, end - (b - a)), Math.min(b + (b - a) / 2, end)],
  all: () => null,
};

function removeChart(name) {
  const { figure, plot } = charts.get(name);
  plot.destroy();
  figure.remove();
  charts.delete(name);
}

function drawIn(parent, curves) {
  const wanted = new Set(curves.map((curve) => curve.name));
  for (const [name, { figure }] of charts) if (figure.parentElement === parent && !wanted.has(name)) removeChart(name);
  for (const curve of curves) {
    const has = values(runs[0], curve).value.some((value) => value !== null);
    const drawn = charts.get(curve.name);
    if (drawn && (!has || drawn.isLog !== isLog(curve) || drawn.figure.parentElement !== parent)) {
      removeChart(curve.name);
    } else if (drawn) {
      drawn.plot.setData(tables(curve));
      describe(drawn.figure, curve);
      continue;
    }
    if (!has) continue;
    const figure = document.createElement("figure");
    figure.className = "card chart";
    figure.dataset.curve = curve.name;
    const caption = document.createElement("figcaption");
    caption.textContent = curve.title;
    const place = document.createElement("div");
    place.setAttribute("role", "img");
    figure.append(caption, place);
    const after = curves.slice(curves.indexOf(curve) + 1).map((one) => charts.get(one.name)?.figure).find((one) => one?.parentElement === parent);
    parent.insertBefore(figure, after ?? null);
    const plot = new uPlot(options(curve, place), tables(curve), place);
    scrub(plot, (x) => stepAt(curve, x));
    charts.set(curve.name, { figure, place, plot, isLog: isLog(curve) });
    addTools(figure, curve.title, () => charts.get(curve.name).plot);
    describe(figure, curve);
  }
}

function draw() {
  const { names, important: first } = runs[0].reported;
  const curve = (metric) => ({ name: `metric:${metric}`, title: metric });
  const rest = names.filter((name) => !first.includes(name));
  document.getElementById("no-curves").hidden = values(runs[0], CURVES[0]).step.length + names.length > 0;
  more.hidden = rest.length === 0;
  document.getElementById("num-metrics").textContent = rest.length > MOST_AT_ONCE ? `(the first ${MOST_AT_ONCE} of ${rest.length})` : `(${rest.length})`;
  drawIn(important, first.map(curve));
  if (more.open) drawIn(more.querySelector(".charts"), rest.slice(0, MOST_AT_ONCE).map(curve));
  drawIn(box, CURVES);
  list();
  const [firstStep, lastStep] = range ?? [0, runs[0].last_step];
  if (![from, to].includes(document.activeElement)) [from.value, to.value] = [firstStep, lastStep];
}

// Names of the runs with their colours, where there are several.
function list() {
  const place = document.getElementById("compared");
  place.hidden = runs.length < 2;
  if (band) band.parentElement.hidden = runs.length < 2;
  place.replaceChildren(...runs.map((run, index) => {
    const item = document.createElement("li");
    item.className = `run-${index}`;
    item.textContent = run.name;
    return item;
  }));
}

function describe(figure, curve) {
  const { step, value } = values(runs[0], curve);
  const known = step.map((_, index) => index).filter((index) => value[index] !== null), last = known.at(-1);
  const label = `${curve.title}: ${known.length} points, the last ${text(value[last])} at step ${step[last]}`;
  figure.querySelector("[role=img]").setAttribute("aria-label", label);
  figure.dataset.points = known.length;
  figure.dataset.last = value[last];
}

function redraw() {
  for (const name of charts.keys()) removeChart(name);
  draw();
}

async function refresh() {
  isRequested = isFetching;  // fetch once more, with the options chosen meanwhile
  if (isFetching) return;
  isFetching = true;
  const began = performance.now();
  try {
    const rest = runs.length ? runs[0].reported.names.filter((name) => !runs[0].reported.important.includes(name)) : [];
    const open = more.open ? rest.slice(0, MOST_AT_ONCE) : [];
    const wanted = [{ run: box.dataset.run, name: box.dataset.name }, ...chosen()];
    const before = runs.map((run) => run.run).join();
    const [first] = await Promise.all([fetchRun(wanted[0], open), fetchMarks(`${box.dataset.url}${encodeURIComponent(box.dataset.run)}/marks.json`)]);
    const over = [...first.reported.important, ...open].slice(0, MOST_AT_ONCE);
    const compared = await Promise.allSettled(wanted.slice(1).map((run) => fetchRun(run, over)));
    runs = [first, ...compared.filter((run) => run.status === "fulfilled").map((run) => run.value)];
    if (before === runs.map((run) => run.run).join()) draw(); else redraw();
    follow(runs[0].last_step, charts.size === 0);
    const lost = wanted.slice(1).filter((_, index) => compared[index].status === "rejected").map((run) => run.name).join(", ");
    if (lost && lost !== missing) showProblem(`These runs could not be fetched, and are not drawn: ${lost}.`);
    missing = lost;
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

// The settings in which the runs differ that are drawn.
function showSettings() {
  const query = new URLSearchParams(chosen().map(({ run }) => ["with", run]));
  htmx.ajax("GET", `${settings.dataset.url}?${query}`, { source: settings, target: settings, swap: "morph:innerHTML" });
}

function compare() {
  const boxes = [...others.querySelectorAll("input")], ticked = chosen();
  const isFull = ticked.length >= Number(others.dataset.most);
  for (const one of boxes) one.disabled = isFull && !one.checked;
  document.getElementById("num-compared").textContent = ticked.length || "";
  changeAddress((query) => {
    query.delete("with");
    for (const { run } of ticked) query.append("with", run);
  });
  showSettings();
  refresh();
}

box.addEventListener("sse:changed", refreshSoon);
smoothing.addEventListener("input", () => runs.length && draw());
band?.addEventListener("change", () => {
  changeAddress((query) => (band.checked ? query.set("band", "true") : query.delete("band")));
  if (runs.length) redraw();
});
for (const one of [axis, log]) one.addEventListener("change", () => runs.length && redraw());
others?.addEventListener("change", compare);
if (chosen().length) showSettings();
more.addEventListener("toggle", () => more.open && refresh());
document.addEventListener("theme", () => runs.length && redraw());
document.addEventListener("step", () => { for (const { plot } of charts.values()) plot.redraw(false, false); });
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    if (!runs.length) return;
    const wanted = ZOOMS[button.dataset.zoom](range ?? [0, runs[0].last_step], runs[0].last_step);
    if (wanted === null) setRange(null); else zoomTo(...wanted);
  });
}
for (const input of [from, to]) {
  input.addEventListener("change", () => runs.length && from.value !== "" && to.value !== "" && zoomTo(Number(from.value), Number(to.value)));
}
// In full screen a plot has all of the height below its title and above its legend.
function fit() {
  for (const { figure, place, plot } of charts.values()) {
    const height = document.fullscreenElement === figure ? window.innerHeight - 130 : HEIGHT;
    const width = Math.max(240, place.clientWidth);
    if (Math.abs(plot.width - width) > 1 || plot.height !== height) plot.setSize({ width, height });
  }
}
new ResizeObserver(fit).observe(document.querySelector(".plots"));
document.addEventListener("fullscreenchange", () => window.requestAnimationFrame(fit));
refresh();
