// Asks the server's own chat endpoint, with a streamed answer.

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

// Calls `tell` with each part of the answer, as [text, its tokens with their log probabilities]. Throws what went wrong.
export async function ask(request, signal, tell) {
  const answer = await fetch(`${document.body.dataset.base}/oai/api/v1/chat/completions`, {
    method: "POST", body: JSON.stringify({ ...request, stream: true }), signal,
    headers: { "Content-Type": "application/json", "X-CSRF-Token": document.body.dataset.token },
  });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    throw new Error(problem.error?.message ?? problem.detail ?? `the server answered ${answer.status}`);
  }
  let unseen = [];
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    const text = event.choices?.[0]?.delta?.content ?? "";
    unseen.push(...(event.choices?.[0]?.logprobs?.content ?? []));
    if (text) tell([text, unseen.splice(0)]);
  }
}

// A part of an answer with its tokens' log probabilities. A character of several tokens comes with the last of them,
// so tokens without a text of their own are shown as one with it.
export function likely([text, tokens], bounds) {
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
