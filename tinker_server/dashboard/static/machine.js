// The machine's load over the last day: a chart for each measure, with a line for each base model or GPU.

import { AXIS, TIME } from "./times.js";

const MEASURES = [
  { name: "operations", title: "Operations waiting and running" },
  { name: "trained_tokens_per_s", title: "Tokens trained per second" },
  { name: "sampled_tokens_per_s", title: "Tokens sampled per second" },
  { name: "sequences", title: "Sequences in the engines" },
  { name: "kv_cache_used", title: "KV cache in use, %", factor: 100 },
  { name: "gpu_utilization", title: "GPUs busy, %", factor: 100 },
];
const HEIGHT = 150, EVERY_MS = 60000, GAP_S = 150, COLORS = 8, LEAST_S = 60;
const box = document.getElementById("history");
let plots = [];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Minutes in which the server did not run are a gap in the line.
function withGaps({ at, value }, factor) {
  const times = [], values = [];
  at.forEach((time, index) => {
    if (index && time - at[index - 1] > GAP_S) { times.push(at[index - 1] + 1); values.push(null); }
    times.push(time);
    values.push(value[index] * factor);
  });
  return [times, values];
}

function options(lines, times, width) {
  const ink = { stroke: () => color("--ink-2"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false } };
  const last = times.at(-1), shown = [Math.min(times[0], last - LEAST_S), last];
  const text = (_, raw) => (raw === null || raw === undefined ? "–" : Number(raw.toPrecision(3)).toString());
  const series = lines.map(({ of }, index) => ({ label: of || "all", stroke: () => color(`--curve-${index % COLORS}`), width: 2, value: text }));
  return {
    width, height: HEIGHT, series: [{ ...TIME }, ...series],
    axes: [{ ...ink, size: 44, values: AXIS }, { ...ink, size: 62 }],
    scales: { x: { time: true, range: () => shown }, y: { range: (_, least, most) => [Math.min(0, least), most > 0 ? 1.05 * most : 1] } },
    cursor: { sync: { key: "machine" }, drag: { x: false, y: false } },
    hooks: { setCursor: [showLegend], draw: [({ root, scales: { x } }) => { root.closest("figure").dataset.seconds = Math.round(x.max - x.min); }] },
  };
}

// At rest a legend has names alone.
function showLegend(plot) {
  plot.root.closest("figure").classList.toggle("pointed", plot.cursor.idx !== null);
}

function draw(lines) {
  for (const plot of plots) plot.destroy();
  plots = [];
  box.replaceChildren();
  document.getElementById("no-history").hidden = lines.length > 0;
  for (const { name, title, factor = 1 } of MEASURES) {
    const found = lines.filter((line) => line.measure === name);
    if (!found.length) continue;
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), place = document.createElement("div");
    figure.className = "card chart";
    figure.dataset.measure = name;
    caption.textContent = title;
    place.setAttribute("role", "img");
    const last = found.map((line) => `${line.of || "all"} ${Number((line.value.at(-1) * factor).toPrecision(3))}`).join(", ");
    place.setAttribute("aria-label", `${title}, at last: ${last}`);
    figure.append(caption, place);
    box.append(figure);
    const columns = uPlot.join(found.map((line) => withGaps(line, factor)));
    plots.push(new uPlot(options(found, columns[0], Math.max(240, place.clientWidth)), columns, place));
  }
}

let lines = [];
async function refresh() {
  try {
    const answer = await fetch(box.dataset.url);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    lines = (await answer.json()).lines;
    draw(lines);
  } catch (error) {
    console.warn("history:", error.message);
  }
}

document.addEventListener("theme", () => draw(lines));
new ResizeObserver(() => {
  for (const plot of plots) {
    const width = Math.max(240, plot.root.parentElement.clientWidth);
    if (Math.abs(plot.width - width) > 1) plot.setSize({ width, height: HEIGHT });
  }
}).observe(box);
window.setInterval(refresh, EVERY_MS);
refresh();
