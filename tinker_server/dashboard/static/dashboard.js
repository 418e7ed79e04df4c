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

// A part of a page is not replaced under the hands of somebody who is in it.
document.addEventListener("htmx:beforeRequest", (event) => {
  const part = event.detail.elt;
  const isOwn = event.detail.requestConfig.triggeringEvent?.type?.startsWith("sse:");
  if (isOwn && (ask.open || part.contains(document.activeElement?.closest("select, input")))) event.preventDefault();
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
