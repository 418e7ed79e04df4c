// Code of all pages: confirmation of changes, copied texts, error messages, and the theme.
"use strict";

const ask = document.getElementById("ask");

// The button of the question names the act, in the colour of the control that asks.
function confirmed(question, control) {
  const act = document.getElementById("ask-act");
  act.textContent = control.dataset.act ?? control.textContent.trim();
  act.classList.toggle("danger", control.classList.contains("danger"));
  document.getElementById("ask-text").textContent = question;
  ask.returnValue = "no";
  ask.showModal();
  return new Promise((resolve) => {
    ask.addEventListener("close", () => resolve(ask.returnValue === "yes"), { once: true });
  });
}

document.addEventListener("htmx:confirm", async (event) => {
  if (!event.detail.question) return;
  event.preventDefault();
  const element = event.detail.elt;
  if (await confirmed(event.detail.question, element)) {
    event.detail.issueRequest(true);
  } else if (element.tagName === "SELECT") {
    element.selectedIndex = 0;
  }
});

document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-confirm]");
  if (!link) return;
  event.preventDefault();
  if (await confirmed(link.dataset.confirm, link)) window.location.assign(link.href);
});

// Browsers offer their clipboard over HTTPS and on the own machine alone; elsewhere a selected text is copied.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = document.createElement("textarea");
  box.value = text;
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  if (!isCopied) throw new Error("the browser copies nothing here");
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  try {
    await copy(button.dataset.copy);
    if (button.textContent === "Copied") return;
    const before = [...button.childNodes];
    window.setTimeout(() => button.replaceChildren(...before), 2000);
    button.textContent = "Copied";
  } catch (error) {
    showProblem(`Not copied: ${error.message}`);
  }
});

document.addEventListener("change", (event) => {
  if (event.target.matches("select[data-submit]")) event.target.form.submit();
  if (event.target.form?.id === "comparing") allowComparing();
  if (event.target.matches("#columns input")) chooseColumns();
});

// Runs are compared once two are ticked, and changed once a run is; a refreshed list has the same runs ticked.
function allowComparing() {
  const count = document.querySelectorAll("input[form=comparing]:checked").length;
  for (const button of document.querySelectorAll("#comparing button")) button.disabled = count < Number(button.dataset.least);
}
document.addEventListener("htmx:afterSwap", allowComparing);

// Until columns are chosen, the server chooses them; the empty name says that they are chosen.
function chooseColumns() {
  document.querySelector("#columns input[type=hidden]").disabled = false;
  for (const choice of document.querySelectorAll("#columns [data-usual]")) delete choice.dataset.usual;
  htmx.ajax("GET", `${document.body.dataset.base}/runs`, { source: "#runs", target: "#runs" });
}
document.addEventListener("htmx:configRequest", (event) => {
  if (document.querySelector("#columns [data-usual]")) event.detail.parameters.delete("col");
});

// A refresh changes a part in place, so that focus and scroll position stay (base.html sets this swap style; rows have ids, by
// which they are recognised). Only what the viewer types or chooses would be lost, and a list whose new items come first would
// move under the mouse: then the part is not refreshed, and an answer that arrives meanwhile is ignored. (The settle delay is
// 0, since a new row ignores events until it is settled.)
function isInUse(request, part) {
  const isOwn = request.triggeringEvent?.type?.startsWith("sse:");
  const isTyped = part.contains(document.activeElement?.closest("select, input")) || part.querySelector("details.pick[open]");
  return isOwn && (ask.open || part.matches("[data-steady]:hover") || isTyped);
}

document.addEventListener("htmx:beforeRequest", (event) => {
  if (isInUse(event.detail.requestConfig, event.detail.elt)) event.preventDefault();
});

document.addEventListener("htmx:beforeSwap", (event) => {
  if (isInUse(event.detail.requestConfig, event.detail.target)) event.detail.shouldSwap = false;
});

// Browsers open six connections to a server for all of their tabs. So a page without parts that follow the viewer's data has
// no stream of changes, and a page that is hidden gives it back until it is shown again.
const FOLLOWING = "[hx-trigger*='sse:changed']", AGAIN_MS = 5000;
let stream = null, since = document.body.dataset.since;

function followChanges() {
  stream?.close();
  stream = null;
  if (document.hidden || !document.querySelector(FOLLOWING)) return;
  stream = new EventSource(`${document.body.dataset.base}/live?since=${since}`);
  stream.addEventListener("changed", (event) => {
    since = event.lastEventId;
    for (const part of document.querySelectorAll(FOLLOWING)) htmx.trigger(part, "sse:changed");
  });
  // After an answer that is not a stream, browsers do not connect again by themselves. Nor does a page whose viewer has signed
  // out, until it is shown again.
  stream.addEventListener("error", async ({ target }) => {
    if (target.readyState !== EventSource.CLOSED || await isSignedOut()) return;
    window.setTimeout(() => target === stream && followChanges(), AGAIN_MS);
  });
}
async function isSignedOut() {
  const asked = new AbortController();
  const how = { redirect: "manual", signal: asked.signal };
  const answer = await fetch(`${document.body.dataset.base}/live`, how).catch(() => null);
  asked.abort(); // where it is a stream
  return answer?.type === "opaqueredirect"; // to the sign-in
}
document.addEventListener("visibilitychange", followChanges);
followChanges();

function showProblem(text) {
  const box = document.getElementById("problem");
  box.textContent = text;
  box.hidden = false;
  window.clearTimeout(showProblem.timer);
  showProblem.timer = window.setTimeout(() => { box.hidden = true; }, 8000);
}

document.addEventListener("htmx:responseError", (event) => {
  const answer = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
  showProblem(answer.querySelector("main p")?.textContent ?? `The server answered ${event.detail.xhr.status}.`);
});
document.addEventListener("htmx:sendError", () => showProblem("The server cannot be reached."));

document.getElementById("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  const theme = isDark ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  document.dispatchEvent(new Event("theme"));
});
