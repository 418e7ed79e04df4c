// A conversation as a tree: an edited message and a regenerated answer are branches beside the earlier ones.

export class Conversation {
  constructor() { this.root = { children: [], chosen: 0 }; }

  // The messages of the chosen branches, from the first to the last.
  path() {
    const found = [];
    for (let node = this.root; node.children.length; found.push(node)) node = node.children[node.chosen];
    return found;
  }

  add(parent, message) {
    const node = { ...message, parent, children: [], chosen: 0 };
    parent.chosen = parent.children.push(node) - 1;
    return node;
  }

  remove(node) {
    const beside = node.parent.children;
    beside.splice(beside.indexOf(node), 1);
    node.parent.chosen = Math.max(0, beside.length - 1);
  }

  // The messages up to and with a node, as the chat endpoint takes them.
  until(node) {
    const found = [];
    for (let at = node; at.parent; at = at.parent) found.unshift({ role: at.role, content: at.content });
    return found;
  }
}

const textOf = (content) => typeof content === "string" ? content : content.map((part) => part.text ?? "*(an image)*").join("\n\n");

export function asMarkdown(request) {
  const messages = request.messages.map((one) => `## ${one.role[0].toUpperCase()}${one.role.slice(1)}\n\n${textOf(one.content)}\n`);
  return [`# Chat with ${request.model}\n`, ...messages].join("\n");
}

const python = (value) => typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value, null, 4);
const KEY = { needed: 'os.environ["TINKER_API_KEY"]', free: '"tml-local"' };

// The request as code that sends it: `{ address, needsKey }` is the server.
export const CODE = {
  openai(request, { address, needsKey }) {
    const { model, messages, ...rest } = request;
    const settings = Object.entries(rest).map(([name, value]) => `, ${name}=${python(value)}`).join("");
    return `${needsKey ? "import os\n\n" : ""}import openai

client = openai.OpenAI(base_url="${address}/oai/api/v1", api_key=${needsKey ? KEY.needed : KEY.free})
messages = ${python(messages)}
answer = client.chat.completions.create(model=${python(model)}, messages=messages${settings})
print(answer.choices[0].message.content)
`;
  },
  curl(request, { address, needsKey }) {
    const body = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
    return `curl -s ${address}/oai/api/v1/chat/completions \\
  -H "Authorization: Bearer ${needsKey ? "$TINKER_API_KEY" : "tml-local"}" -d '${body}'
`;
  },
  sdk(request, { address, needsKey }) {
    const { model, messages, max_tokens, temperature, top_p, seed } = request;
    if (messages.some((one) => typeof one.content !== "string")) throw new Error("with an image, copy as openai or as curl");
    const weights = model.startsWith("tinker://") ? "model_path" : "base_model";
    const settings = Object.entries({ max_tokens, temperature, top_p, seed }).filter(([, value]) => value !== undefined);
    return `import tinker
from tinker import types

service = tinker.ServiceClient(base_url="${address}"${needsKey ? "" : `, api_key=${KEY.free}`})
sampler = service.create_sampling_client(${weights}=${python(model)}).result()
tokenizer = sampler.get_tokenizer()
messages = ${python(messages)}
tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
params = types.SamplingParams(${settings.map(([name, value]) => `${name}=${value}`).join(", ")})
answer = sampler.sample(types.ModelInput.from_ints(tokens), num_samples=1, sampling_params=params).result()
print(tokenizer.decode(answer.sequences[0].tokens))
`;
  },
};
