// Chats through the server's own chat endpoint, with streamed answers; each side has its own conversation.

const form = document.getElementById("ask-models");
const [first, second] = [...document.querySelectorAll(".chat")].map((element) => ({
  element, log: element.querySelector(".log"), model: element.querySelector(".model"), messages: [],
}));
const two = document.getElementById("two");
const [send, stop] = [document.getElementById("send"), document.getElementById("stop")];
const image = document.getElementById("image"), message = document.getElementById("message");
let running = null;

two.addEventListener("change", () => { second.element.hidden = !two.checked; });

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
  const request = {
    model: side.model.value.trim(), messages: side.messages, stream: true,
    temperature: Number(document.getElementById("temperature").value),
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
  let text = "";
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
      text += event.choices?.[0]?.delta?.content ?? "";
      answered.textContent = text;
      side.log.scrollTop = side.log.scrollHeight;
    }
    side.messages.push({ role: "assistant", content: text });
  } catch (error) {
    side.messages.pop();
    if (error.name !== "AbortError") { answered.classList.add("wrong"); answered.textContent = error.message; }
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
    await Promise.all(sides.map((side) => chat(side, content, { text, picture }, running.signal)));
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
