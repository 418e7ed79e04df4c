// Marks on the curves of a run: saves (triangles), evaluations (diamonds), restarts of the server (dashed lines) and of the trainer (dotted lines).

const SIZE = 5, EVERY_MS = 5000;
const legend = document.getElementById("marks");
const NAMES = { saves: "save", evaluations: "evaluation", server_restarts: "restart", trainer_restarts: "restart" };
const DASHES = { server_restarts: [4, 4], trainer_restarts: [1, 3] };
let found = {}, fetchedAt = -EVERY_MS;

// Fetches the marks again if they are older than a few seconds.
export async function fetchMarks(url) {
  if (performance.now() - fetchedAt < EVERY_MS) return;
  fetchedAt = performance.now();
  const answer = await fetch(url);
  if (!answer.ok) return;
  found = await answer.json();
  for (const [kind, { length: count }] of Object.entries(found)) {
    const part = legend.querySelector(`[data-mark=${kind}]`);
    part.hidden = count === 0;
    part.querySelector("span").textContent = `${count} ${NAMES[kind]}${count === 1 ? "" : "s"}`;
  }
  legend.hidden = Object.values(found).every((marks) => marks.length === 0);
}

const SHAPES = {
  saves: (ctx, x, y) => { ctx.moveTo(x, y - 2 * SIZE); ctx.lineTo(x + SIZE, y); ctx.lineTo(x - SIZE, y); },
  evaluations: (ctx, x, y) => { ctx.moveTo(x, y - 2 * SIZE); ctx.lineTo(x + SIZE, y - SIZE); ctx.lineTo(x, y); ctx.lineTo(x - SIZE, y - SIZE); },
};

// Places on the x axis; `xOf` turns a mark into a number there, or null.
export function placesOf(xOf) {
  return Object.entries(found).flatMap(([kind, marks]) => marks.map((mark) => ({ kind, x: xOf(mark) })).filter(({ x }) => x !== null));
}

export function drawMarks(plot, xOf, color) {
  const { ctx, bbox } = plot, ratio = window.devicePixelRatio, bottom = bbox.top + bbox.height;
  ctx.save();
  for (const { kind, x } of placesOf(xOf)) {
    if (x < plot.scales.x.min || x > plot.scales.x.max) continue;
    const left = plot.valToPos(x, "x", true);
    ctx.beginPath();
    if (kind in DASHES) {
      ctx.setLineDash(DASHES[kind].map((length) => length * ratio));
      ctx.strokeStyle = color("--warn");
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bottom);
      ctx.stroke();
    } else {
      ctx.fillStyle = color(kind === "saves" ? "--good" : "--curve-2");
      ctx.translate(left, bottom);
      ctx.scale(ratio, ratio);
      SHAPES[kind](ctx, 0, 0);
      ctx.fill();
      ctx.setTransform(1, 0, 0, 1, 0, 0);
    }
  }
  ctx.restore();
}
