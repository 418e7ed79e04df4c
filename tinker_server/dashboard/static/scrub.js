// The chosen step of a run: by the slider, or by dragging along a curve. Its part of the page follows, and the address keeps it.

const panel = document.getElementById("step");
const slider = document.getElementById("step-slider");
const shown = document.getElementById("step-shown");
const datums = document.getElementById("step-datums");
const latest = document.getElementById("step-latest");
let chosen = readAddress(), end = 0, wanted = null, isLoading = false;

function readAddress() {
  const text = new URLSearchParams(window.location.search).get("step") ?? "";
  return /^\d+$/.test(text) ? Number(text) : null;
}

// Changes the parameters of the page's address.
export function changeAddress(change) {
  const url = new URL(window.location.href);
  change(url.searchParams);
  window.history.replaceState(null, "", url);
}

// The chosen step; null while the latest is shown.
export function chosenStep() {
  return chosen === null ? null : Math.min(chosen, end);
}

// While the pointer moves, answers of steps that it has left are not asked for.
async function load() {
  if (isLoading) return;
  isLoading = true;
  try {
    while (wanted !== null) {
      const query = wanted;
      wanted = null;
      await Promise.all([[panel, shown], [datums, datums]].map(([source, target]) =>
        htmx.ajax("GET", `${source.dataset.url}${query}`, { source, target, swap: "morph:innerHTML" })));
    }
  } finally {
    isLoading = false;
  }
}

function show() {
  const step = chosenStep();
  slider.value = step ?? end;
  slider.setAttribute("aria-valuetext", `step ${slider.value} of ${end}`);
  latest.disabled = step === null;
  wanted = step === null ? "" : `?step=${step}`;
  load();
}

export function choose(step) {
  const before = chosen;
  chosen = step === null ? null : Math.max(0, Math.min(end, step));
  if (chosen === before) return;
  changeAddress((query) => (chosen === null ? query.delete("step") : query.set("step", chosen)));
  document.dispatchEvent(new Event("step"));
  show();
}

// The curves have been fetched: the run has got so far.
export function follow(lastStep, isEmpty) {
  panel.hidden = isEmpty;
  const isFirst = slider.max === "" || wanted === null && shown.childElementCount === 0;
  end = lastStep;
  slider.max = end;
  if (!isEmpty && (isFirst || (chosen === null && ![shown, datums].some((part) => part.matches(":hover, :focus-within"))))) show();
}

// Dragging along a plot chooses the step there; with Shift it selects a range, as uPlot does it.
export function scrub(plot, stepAt) {
  let pointer = null;
  const move = (event) => {
    const left = event.clientX - plot.over.getBoundingClientRect().left;
    const step = stepAt(plot.posToVal(left, "x"));
    if (step !== null) choose(step);
  };
  plot.over.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.shiftKey) return;
    pointer = event.pointerId;
    plot.over.setPointerCapture(pointer);
    move(event);
  });
  plot.over.addEventListener("pointermove", (event) => { if (event.pointerId === pointer) move(event); });
  for (const ended of ["pointerup", "pointercancel"]) plot.over.addEventListener(ended, () => { pointer = null; });
}

slider.addEventListener("input", () => choose(Number(slider.value)));
latest.addEventListener("click", () => choose(null));
panel.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-step]");
  const step = Number(button?.dataset.step);
  if (button) choose(step > end ? null : step);  // samples of the weights after the last step are with the latest
});
