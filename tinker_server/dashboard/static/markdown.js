// Markdown of an answer as elements. Everything is made by createElement and textContent, so that markup in an answer stays
// text. Known: headings, lists, quotes, code, tables, rules, emphasis, and links to other pages, which are not followed.

const DEEPEST = 12, LONGEST = 100_000; // beyond, text is shown as it is
const LINK = /^https?:\/\//;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\*([^*\s](?:[^*]*[^*\s])?)\*|(?<![\w_])_([^_\s](?:[^_]*[^_\s])?)_(?![\w_])|!?\[([^[\]]*)\]\(([^()\s]+)\)/s;

function make(name, children = [], className = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function link(text, address) {
  if (!LINK.test(address)) return make("span", [`${text} (${address})`]);
  const element = make("a", [text || address]);
  element.href = address;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  return element;
}

function inline(text, depth = 0) {
  const parts = [];
  if (depth > DEEPEST) return [text];
  for (let rest = text; rest;) {
    const found = INLINE.exec(rest);
    if (!found) return [...parts, rest];
    const [whole, , code, strong, star, underscore, label, address] = found;
    if (found.index) parts.push(rest.slice(0, found.index));
    if (code !== undefined) parts.push(make("code", [code.trim()]));
    else if (strong !== undefined) parts.push(make("strong", inline(strong, depth + 1)));
    else if (address !== undefined) parts.push(link(label, address));
    else parts.push(make("em", inline(star ?? underscore, depth + 1)));
    rest = rest.slice(found.index + whole.length);
  }
  return parts;
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;

// The lines of a list from `at`; lines that are indented further belong to the item before them.
function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (found && found[1].length <= indent.length && /\d/.test(found[2]) === isOrdered) {
      if (found[1].length < indent.length) break;
      items.push([found[3]]);
    } else if (items.length && /^\s+\S/.test(lines[at]) && lines[at].search(/\S/) > indent.length) {
      items.at(-1).push(lines[at].slice(Math.min(lines[at].search(/\S/), indent.length + 2)));
    } else break;
    at += 1;
  }
  const element = make(isOrdered ? "ol" : "ul", items.map((item) => make("li", item.length > 1 ? blocks(item, depth + 1) : inline(item[0]))));
  if (isOrdered && mark.slice(0, -1) !== "1") element.start = Number(mark.slice(0, -1));
  return [element, at];
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const isRule = (line) => /^[\s:|-]+$/.test(line) && line.includes("-") && line.includes("|");
const isTable = (lines, at) => lines[at].includes("|") && isRule(lines[at + 1] ?? "");

function table(lines, at) {
  const row = (line, name) => make("tr", cells(line).map((cell) => make(name, inline(cell))));
  const head = make("thead", [row(lines[at], "th")]), body = make("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) body.append(row(lines[at], "td"));
  return [make("table", [head, body]), at];
}

function code(lines, at) {
  const fence = /^\s*(`{3,}|~{3,})/.exec(lines[at])[1];
  const end = lines.findIndex((line, number) => number > at && line.trim().startsWith(fence));
  const inside = lines.slice(at + 1, end < 0 ? lines.length : end);
  const pre = make("pre", [make("code", [inside.join("\n")])]);
  pre.tabIndex = 0;
  return [pre, end < 0 ? lines.length : end + 1];
}

const STARTS = /^(\s*(`{3,}|~{3,}|>|#{1,6}\s|[-*+]\s|\d{1,9}[.)]\s)|\s*([-*_])(\s*\3){2,}\s*$)/;

function blocks(lines, depth = 0) {
  const made = [];
  if (depth > DEEPEST) return [lines.join("\n")];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const heading = /^#{1,6}(?=\s)/.exec(line);
    let element;
    if (!line.trim()) { at += 1; continue; }
    if (/^\s*(`{3,}|~{3,})/.test(line)) [element, at] = code(lines, at);
    else if (heading) [element, at] = [make("p", [make("strong", inline(line.slice(heading[0].length).trim()))], "heading"), at + 1];
    else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) [element, at] = [make("hr"), at + 1];
    else if (ITEM.test(line)) [element, at] = list(lines, at, depth);
    else if (isTable(lines, at)) [element, at] = table(lines, at);
    else if (/^\s*>/.test(line)) {
      let end = at;
      while (end < lines.length && /^\s*>/.test(lines[end])) end += 1;
      [element, at] = [make("blockquote", blocks(lines.slice(at, end).map((one) => one.replace(/^\s*> ?/, "")), depth + 1)), end];
    } else {
      let end = at + 1;
      while (end < lines.length && lines[end].trim() && !STARTS.test(lines[end]) && !isTable(lines, end)) end += 1;
      [element, at] = [make("p", inline(lines.slice(at, end).join("\n"))), end];
    }
    made.push(element);
  }
  return made;
}

export function markdown(text) {
  return text.length > LONGEST ? [text] : blocks(text.split("\n"));
}
