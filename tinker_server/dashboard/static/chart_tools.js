// What can be done with a single curve: full screen, and a picture of it as PNG or SVG.

const NS = "http://www.w3.org/2000/svg";

function button(text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}

// Adds the menu to a figure; `plotOf` returns its plot, which is made again from time to time.
export function addTools(figure, title, plotOf) {
  const menu = document.createElement("details"), summary = document.createElement("summary"), buttons = document.createElement("fieldset");
  menu.className = "pick tools";
  summary.textContent = "⋯";
  summary.setAttribute("aria-label", `Tools of ${title}`);
  const name = title.replace(/[^\w.-]+/g, "-");
  const tools = [
    ["Full screen", () => (document.fullscreenElement ? document.exitFullscreen() : figure.requestFullscreen())],
    ["Save as PNG", async () => save(await png(plotOf(), title), `${name}.png`)],
    ["Save as SVG", () => save(new Blob([svg(plotOf(), title)], { type: "image/svg+xml" }), `${name}.svg`)],
  ];
  for (const [text, act] of tools) buttons.append(button(text, () => { menu.open = false; act(); }));
  menu.append(summary, buttons);
  figure.querySelector("figcaption").append(menu);
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function style(element, property) {
  return getComputedStyle(element).getPropertyValue(property).trim();
}

// The plot's canvas on the card's colour, below its title.
function png(plot, title) {
  const from = plot.ctx.canvas, ratio = window.devicePixelRatio, head = Math.round(28 * ratio);
  const canvas = document.createElement("canvas"), ctx = canvas.getContext("2d");
  canvas.width = from.width;
  canvas.height = from.height + head;
  ctx.fillStyle = style(document.documentElement, "--card");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = style(document.documentElement, "--ink");
  ctx.font = `600 ${15 * ratio}px sans-serif`;
  ctx.fillText(title, 10 * ratio, 20 * ratio);
  ctx.drawImage(from, 0, head);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function element(name, attributes, text = "") {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// Parts of a line between its gaps.
function segments(plot, values, place) {
  const parts = [];
  let isOpen = false;
  values.forEach((value, index) => {
    const x = plot.data[0][index];
    const isShown = value !== null && value !== undefined && x >= plot.scales.x.min && x <= plot.scales.x.max;
    if (isShown) {
      if (!isOpen) parts.push([]);
      parts.at(-1).push(place(x, value));
    }
    isOpen = isShown || (isOpen && value === undefined);
  });
  return parts;
}

export function svg(plot, title) {
  const ratio = window.devicePixelRatio, head = 28, { left, top, width, height } = plot.bbox;
  const box = { left: left / ratio, top: top / ratio + head, width: width / ratio, height: height / ratio };
  const made = element("svg", { xmlns: NS, width: plot.width, height: plot.height + head, viewBox: `0 0 ${plot.width} ${plot.height + head}`, "font-family": "sans-serif", "font-size": 12 });
  const ink = style(document.documentElement, "--ink"), line = style(document.documentElement, "--line");
  made.append(element("rect", { width: "100%", height: "100%", fill: style(document.documentElement, "--card") }));
  made.append(element("text", { x: 10, y: 20, fill: ink, "font-size": 15, "font-weight": 600 }, title));
  const x = (value) => box.left + plot.valToPos(value, "x"), y = (value) => box.top + plot.valToPos(value, "y");
  plot.axes.forEach(({ _splits: splits, _values: texts }, number) => (splits ?? []).forEach((split, index) => {
    if (split === null || !texts[index]) return;
    const at = number === 0 ? x(split) : y(split), right = box.left + box.width, bottom = box.top + box.height;
    made.append(element("line", number === 0 ? { x1: at, x2: at, y1: box.top, y2: bottom, stroke: line } : { x1: box.left, x2: right, y1: at, y2: at, stroke: line }));
    const place = number === 0 ? { x: at, y: bottom + 16, "text-anchor": "middle" } : { x: box.left - 6, y: at + 4, "text-anchor": "end" };
    made.append(element("text", { ...place, fill: ink }, String(texts[index]).replace("\n", " ")));
  }));
  plot.series.slice(1).forEach((series, index) => {
    const stroke = typeof series.stroke === "function" ? series.stroke(plot, index + 1) : series.stroke;
    for (const points of segments(plot, plot.data[index + 1], (at, value) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`)) {
      made.append(element("polyline", { points: points.join(" "), fill: "none", stroke, "stroke-width": series.width ?? 1 }));
    }
  });
  return new XMLSerializer().serializeToString(made);
}
