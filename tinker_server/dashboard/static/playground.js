// Chats through the server's own chat endpoint, with streamed answers; each side has its own conversation.

const form = document.getElementById("ask-models");
const [first, second] = [...document.querySelectorAll(".chat")].map((element) => ({
  element, log: element.querySelector(".log"), model: element.querySelector(".model"),
  path: element.querySelector(".path"), messages: [],
}));
const two = document.getElementById("two"), logprobs = document.getElementById("logprobs");
const [send, stop] = [document.getElementById("send"), document.getElementById("stop")];
const image = document.getElementById("image"), message = document.getElementById("message");
let running = null;

function arrange() {
  second.element.hidden = !two.checked;
  document.getElementById("legend").hidden = !logprobs.checked;
  for (const side of [first, second]) side.path.hidden = side.model.value !== "";
}
for (const control of [two, logprobs, first.model, second.model]) control.addEventListener("change", arrange);
arrange(); // a reloaded page has the controls as they were

function bubble(side, role, text) {
  const element = document.createElement("div");
  element.className = `bubble ${role}`;
  element.textContent = text;
  side.log.append(element);
  side.log.scrollTop = side.log.scrollHeight;
  return element;
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function body(side) {
  const system = document.getElementById("system").value;
  const request = {
    model: side.model.value || side.path.value.trim(), stream: true, logprobs: logprobs.checked,
    messages: system ? [{ role: "system", content: system }, ...side.messages] : side.messages,
    temperature: Number(document.getElementById("temperature").value),
    top_p: Number(document.getElementById("top-p").value),
    max_tokens: Number(document.getElementById("max-tokens").value),
  };
  const seed = document.getElementById("seed").value;
  if (seed !== "") request.seed = Number(seed);
  return JSON.stringify(request);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// A part of an answer with its tokens' log probabilities. A character of several tokens comes with the last of them,
// so tokens without a text of their own are shown as one with it.
function likely(text, tokens, bounds) {
  const pieces = tokens.map((one) => one.token).join("") === text ? tokens : [];
  return (pieces.length ? pieces.map((one) => [one.token, [one]]) : [[text, tokens]]).map(([shown, of]) => {
    const piece = document.createElement("span");
    const lowest = Math.min(...of.map((one) => one.logprob));
    piece.textContent = shown;
    piece.className = `p${bounds.filter((bound) => lowest < bound).length}`;
    piece.title = of.map((one) => `${one.logprob.toFixed(3)} nats`).join(", ");
    return piece;
  });
}

// Returns false if there was an error, after which the conversation is as it was before.
async function chat(side, content, shown, signal) {
  side.messages.push({ role: "user", content });
  const question = bubble(side, "user", shown.text);
  if (shown.picture) {
    const picture = document.createElement("img");
    picture.src = shown.picture;
    picture.alt = "The image that was sent";
    question.append(picture);
  }
  const answered = bubble(side, "assistant", "");
  answered.classList.add("busy");
  const bounds = side.log.dataset.likely.split(" ").map(Number);
  let text = "", unseen = [];
  try {
    const answer = await fetch(`${document.body.dataset.base}/oai/api/v1/chat/completions`, {
      method: "POST", body: body(side), signal,
      headers: { "Content-Type": "application/json", "X-CSRF-Token": document.body.dataset.token },
    });
    if (!answer.ok) {
      const problem = await answer.json().catch(() => ({}));
      throw new Error(problem.error?.message ?? problem.detail ?? `the server answered ${answer.status}`);
    }
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      const part = event.choices?.[0]?.delta?.content ?? "";
      text += part;
      unseen.push(...(event.choices?.[0]?.logprobs?.content ?? []));
      if (part && unseen.length) {
        answered.classList.add("tokens");
        answered.append(...likely(part, unseen.splice(0), bounds));
      } else {
        answered.append(part);
      }
      side.log.scrollTop = side.log.scrollHeight;
    }
    side.messages.push({ role: "assistant", content: text });
    return true;
  } catch (error) {
    side.messages.pop();
    if (error.name === "AbortError") return true;
    question.remove();
    answered.classList.add("wrong");
    answered.textContent = `Not sent: ${error.message}`;
    return false;
  } finally {
    answered.classList.remove("busy");
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  send.disabled = true;
  stop.disabled = false;
  try {
    const text = message.value;
    const picture = image.files[0] ? await read(image.files[0]) : null;
    const content = picture ? [{ type: "image_url", image_url: { url: picture } }, { type: "text", text }] : text;
    const sides = two.checked ? [first, second] : [first];
    const answered = await Promise.all(sides.map((side) => chat(side, content, { text, picture }, running.signal)));
    if (!answered.some(Boolean)) return; // the message stays, to be changed and sent again
    message.value = "";
    image.value = "";
  } finally {
    running = null;
    send.disabled = false;
    stop.disabled = true;
    message.focus();
  }
});

message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("clear").addEventListener("click", () => {
  for (const side of [first, second]) { side.messages = []; side.log.replaceChildren(); }
});
