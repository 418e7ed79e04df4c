// What all pages share: questions before changes, refusals told, the theme.
"use strict";

const ask = document.getElementById("ask");

function confirmed(question) {
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
  if (await confirmed(event.detail.question)) {
    event.detail.issueRequest(true);
  } else if (element.tagName === "SELECT") {
    element.selectedIndex = 0;
  }
});

document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-confirm]");
  if (!link) return;
  event.preventDefault();
  if (await confirmed(link.dataset.confirm)) window.location.assign(link.href);
});

document.addEventListener("change", (event) => {
  if (event.target.matches("select[data-submit]")) event.target.form.submit();
});

// A part of a page is not replaced under the hands of somebody who is in it: it is not asked for anew, and what was asked
// for before they came is left out. (base.html sets htmx's settle delay to 0: until a new part is settled, it is deaf.)
function isUnderHands(request, part) {
  const isOwn = request.triggeringEvent?.type?.startsWith("sse:");
  return isOwn && (ask.open || part.contains(document.activeElement?.closest("select, input")));
}

document.addEventListener("htmx:beforeRequest", (event) => {
  if (isUnderHands(event.detail.requestConfig, event.detail.elt)) event.preventDefault();
});

document.addEventListener("htmx:beforeSwap", (event) => {
  if (isUnderHands(event.detail.requestConfig, event.detail.target)) event.detail.shouldSwap = false;
});

function tell(text) {
  const box = document.getElementById("problem");
  box.textContent = text;
  box.hidden = false;
  window.clearTimeout(tell.timer);
  tell.timer = window.setTimeout(() => { box.hidden = true; }, 8000);
}

document.addEventListener("htmx:responseError", (event) => {
  const answer = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
  tell(answer.querySelector("main p")?.textContent ?? `The server answered ${event.detail.xhr.status}.`);
});
document.addEventListener("htmx:sendError", () => tell("The server cannot be reached."));

document.getElementById("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  const theme = isDark ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  document.dispatchEvent(new Event("theme"));
});
