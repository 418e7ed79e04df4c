// The Playground: each side has its own conversation, and a strip asks every saved step of a run the same.

import { ask, likely } from "./chat.js";
import { CODE, Conversation, asMarkdown } from "./conversation.js";
import { markdown } from "./markdown.js";

const form = document.getElementById("ask-models");
const sides = [...document.querySelectorAll(".chat")].map((element) => ({
  element, log: element.querySelector(".log"), model: element.querySelector(".model"),
  path: element.querySelector(".path"), talk: new Conversation(), busy: null,
}));
const [first, second] = sides;
const get = (id) => document.getElementById(id);
const two = get("two"), logprobs = get("logprobs"), image = get("image"), message = get("message"), strip = get("strip");
const bounds = first.log.dataset.likely.split(" ").map(Number);
let running = null;

function arrange() {
  second.element.hidden = !two.checked;
  get("legend").hidden = !logprobs.checked;
  for (const side of sides) side.path.hidden = side.model.value !== "";
}
for (const control of [two, logprobs, first.model, second.model]) control.addEventListener("change", arrange);
get("markdown").addEventListener("change", () => sides.forEach(draw));
arrange(); // a reloaded page has the controls as they were

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function requestOf(model, messages) {
  const system = get("system").value, seed = get("seed").value;
  return {
    model, messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number(get("temperature").value), top_p: Number(get("top-p").value),
    max_tokens: Number(get("max-tokens").value),
    ...(logprobs.checked ? { logprobs: true } : {}), ...(seed === "" ? {} : { seed: Number(seed) }),
  };
}
const modelOf = (side) => side.model.value || side.path.value.trim();

function button(name, about, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = name;
  if (about) made.setAttribute("aria-label", about);
  made.addEventListener("click", act);
  return made;
}

// An answer with the colours of its tokens where it has them, or as Markdown, or as it was drawn.
function showAnswer(bubble, pieces, isWhole) {
  const text = pieces.map(([part]) => part).join("");
  const isColoured = pieces.some(([, tokens]) => tokens.length);
  const isMarkdown = !isColoured && isWhole && get("markdown").checked;
  bubble.classList.toggle("tokens", isColoured);
  bubble.classList.toggle("prose", isMarkdown);
  bubble.replaceChildren(...(isColoured ? pieces.flatMap((piece) => likely(piece, bounds)) : isMarkdown ? markdown(text) : [text]));
}

function bubbleOf(side, node) {
  const bubble = document.createElement("div");
  bubble.className = `bubble ${node.role}`;
  if (node.pieces) showAnswer(bubble, node.pieces, side.busy !== node);
  else bubble.textContent = node.text;
  if (node.problem) { bubble.classList.add("wrong"); bubble.textContent = `Not sent: ${node.problem}`; }
  if (side.busy === node) bubble.classList.add("busy");
  if (node.picture) {
    const picture = document.createElement("img");
    picture.src = node.picture;
    picture.alt = "The image that was sent";
    bubble.append(picture);
  }
  return bubble;
}

function actsOf(side, node, turn, number) {
  const acts = document.createElement("div");
  acts.className = "acts";
  const beside = node.parent.children;
  const go = (by) => { node.parent.chosen = (node.parent.chosen + by + beside.length) % beside.length; draw(side); };
  if (beside.length > 1) {
    const place = document.createElement("span");
    place.textContent = `${node.parent.chosen + 1}/${beside.length}`;
    acts.append(button("‹", `Earlier branch of message ${number}`, () => go(-1)), place, button("›", `Later branch of message ${number}`, () => go(1)));
  }
  if (node.role === "user") acts.append(button("Edit", `Edit message ${number}`, () => edit(side, node, turn)));
  else acts.append(button("Regenerate", `Regenerate message ${number}`, () => run([() => answer(side, node.parent)])));
  if (node.pieces) {
    const copied = button("Copy", `Copy message ${number}`, () => {});
    copied.dataset.copy = node.content;
    acts.append(copied);
  }
  return acts;
}

// A message that could not be sent stays in the box, and not in the conversation.
const isShown = (node) => node.role !== "user" || node.children.length !== 1 || !node.children[0].problem;

function draw(side) {
  side.log.replaceChildren(...side.talk.path().filter(isShown).map((node, at) => {
    const turn = document.createElement("div");
    turn.className = `turn of-${node.role}`;
    turn.append(bubbleOf(side, node));
    if (!running && !node.problem) turn.append(actsOf(side, node, turn, at + 1));
    return turn;
  }));
  side.log.scrollTop = side.log.scrollHeight;
}

// The text of a message in a box: sent, it is a branch beside the message as it was.
function edit(side, node, turn) {
  const box = document.createElement("textarea"), acts = document.createElement("div");
  box.value = node.text;
  box.setAttribute("aria-label", "Edited message");
  acts.className = "acts";
  acts.append(button("Send the edited message", "", () => {
    const changed = side.talk.add(node.parent, userMessage(box.value, node.picture));
    run([() => answer(side, changed)]);
  }), button("Cancel", "", () => draw(side)));
  turn.replaceChildren(box, acts);
  box.focus();
}

function userMessage(text, picture) {
  const content = picture ? [{ type: "image_url", image_url: { url: picture } }, { type: "text", text }] : text;
  return { role: "user", content, text, picture };
}

// Answers a message, in a branch of its own. Returns false if there was an error.
async function answer(side, node) {
  for (const one of node.children.filter((child) => child.problem)) side.talk.remove(one);
  const answered = side.talk.add(node, { role: "assistant", content: "", pieces: [] });
  side.busy = answered;
  draw(side);
  const bubble = side.log.querySelector(".busy");
  const isNew = !node.children.some((child) => child !== answered);
  try {
    await ask(requestOf(modelOf(side), side.talk.until(node)), running.signal, (piece) => {
      answered.pieces.push(piece);
      bubble.append(...(piece[1].length ? likely(piece, bounds) : [piece[0]]));
      bubble.classList.toggle("tokens", piece[1].length > 0);
      side.log.scrollTop = side.log.scrollHeight;
    });
    return true;
  } catch (error) {
    const isStopped = error.name === "AbortError";
    if (isStopped && answered.pieces.length) return true;
    answered.problem = isStopped ? "stopped" : error.message;
    return !isNew;
  } finally {
    answered.content = answered.pieces.map(([part]) => part).join("");
    side.busy = null;
  }
}

// Runs works at the same time; meanwhile nothing else is sent. Returns whether one of them went well.
async function run(works) {
  if (running) return false;
  running = new AbortController();
  get("send").disabled = get("ask-steps").disabled = true;
  get("stop").disabled = false;
  try {
    return (await Promise.all(works.map((work) => work()))).some(Boolean);
  } finally {
    running = null;
    get("send").disabled = get("ask-steps").disabled = false;
    get("stop").disabled = true;
    sides.forEach(draw);
  }
}

// A problem is shown until the next message, and its question is not part of the conversation.
function forgetProblems(side) {
  const last = side.talk.path().at(-1);
  if (last?.problem) {
    side.talk.remove(last);
    if (!last.parent.children.length) side.talk.remove(last.parent);
  }
}

async function written() {
  return userMessage(message.value, image.files[0] ? await read(image.files[0]) : null);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  const said = await written(), asked = two.checked ? [first, second] : [first];
  const went = await run(asked.map((side) => () => {
    forgetProblems(side);
    return answer(side, side.talk.add(side.talk.path().at(-1) ?? side.talk.root, said));
  }));
  if (went) { message.value = ""; image.value = ""; } // otherwise the message stays, to be changed and sent again
  message.focus();
});

function cardOf(step) {
  const card = document.createElement("section"), title = document.createElement("h3"), bubble = document.createElement("div");
  card.className = "card";
  card.setAttribute("aria-label", step.title);
  title.textContent = step.title;
  bubble.className = "bubble assistant";
  card.append(title, bubble);
  return { card, bubble, pieces: [], step };
}

async function askSteps(cards, messages, num_at_once = 4) {
  const waiting = [...cards];
  const next = async () => {
    for (let one = waiting.shift(); one && !running.signal.aborted; one = waiting.shift()) {
      try {
        await ask(requestOf(one.step.path, messages), running.signal, (piece) => {
          one.pieces.push(piece);
          showAnswer(one.bubble, one.pieces, false);
        });
        showAnswer(one.bubble, one.pieces, true);
      } catch (error) {
        if (error.name !== "AbortError") { one.bubble.classList.add("wrong"); one.bubble.textContent = error.message; }
      }
    }
    return true;
  };
  await Promise.all(Array.from({ length: num_at_once }, next));
  return true;
}

get("ask-steps").addEventListener("click", async () => {
  if (!message.reportValidity()) return;
  const chosen = get("steps-of").value;
  await run([async () => {
    const found = await fetch(`${document.body.dataset.base}/playground/steps.json?run=${encodeURIComponent(chosen)}`);
    const cards = (await found.json()).map(cardOf), { role, content } = await written();
    strip.replaceChildren(...cards.map((one) => one.card));
    strip.hidden = false;
    return askSteps(cards, [{ role, content }]);
  }]);
});

function lastRequest() {
  const path = first.talk.path();
  const asked = path.filter((node) => node.role === "user").at(-1);
  return requestOf(modelOf(first), asked ? first.talk.until(asked) : [{ role: "user", content: message.value || "Hello" }]);
}

document.querySelector("[data-code]")?.parentElement.addEventListener("click", (event) => {
  const kind = event.target.closest("[data-code]")?.dataset.code;
  if (!kind) return;
  const { address, needsKey } = form.dataset;
  try {
    event.target.dataset.copy = CODE[kind](lastRequest(), { address, needsKey: needsKey === "yes" });
  } catch (error) {
    event.stopPropagation();
    showProblem(`No code: ${error.message}`);
  }
});

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
function chatOf(side) {
  return { ...requestOf(modelOf(side), side.talk.path().filter((node) => !node.problem).map(({ role, content }) => ({ role, content }))) };
}
const chats = () => (two.checked ? [first, second] : [first]).map(chatOf);
get("export-json").addEventListener("click", () => save("chat.json", "application/json", JSON.stringify(two.checked ? chats() : chats()[0], null, 2)));
get("export-markdown").addEventListener("click", () => save("chat.md", "text/markdown", chats().map(asMarkdown).join("\n")));

message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
get("stop").addEventListener("click", () => running?.abort());
get("clear").addEventListener("click", () => {
  for (const side of sides) { side.talk = new Conversation(); draw(side); }
  strip.replaceChildren();
  strip.hidden = true;
});
