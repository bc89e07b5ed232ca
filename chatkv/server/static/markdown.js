// Markdown as it grows. What a model writes is parsed, cleaned, and only then shown; HTML in it is
// text. Of an answer that streams, only the blocks that have changed are rendered again.

import DOMPurify from "./vendor/dompurify.js";
import hljs from "./vendor/highlight.js";
import MarkdownIt from "./vendor/markdown-it.js";
import { copyFrom, el, icon } from "./dom.js";

const MAX_HIGHLIGHTED = 20_000; // characters of one block of code
const MAX_RENDERED = 300_000; // of a whole message; beyond it is shown as it is

const CLEAN = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS:
    "p br hr em strong s code pre blockquote ul ol li h1 h2 h3 h4 h5 h6 table thead tbody tr th td a span".split(" "),
  ALLOWED_ATTR: ["href", "title", "class", "start"],
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
};

const markdown = new MarkdownIt({ linkify: true, breaks: true, highlight });

function highlight(code, language) {
  if (!hljs.getLanguage(language) || code.length > MAX_HIGHLIGHTED) return "";
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

// A picture would be a request to somewhere else: its address is shown as a link.
markdown.renderer.rules.image = (tokens, index) => {
  const { content, attrs } = tokens[index];
  const address = Object.fromEntries(attrs ?? []).src ?? "";
  const { escapeHtml } = markdown.utils;
  return `<a href="${escapeHtml(address)}">${escapeHtml(content || address)}</a>`;
};
// Inline styles are forbidden here: a column's side is a class.
for (const cell of ["th_open", "td_open"]) {
  markdown.renderer.rules[cell] = (tokens, index, options, environment, self) => {
    const side = /text-align:(\w+)/.exec(tokens[index].attrGet("style") ?? "");
    tokens[index].attrs = side ? [["class", `side-${side[1]}`]] : null;
    return self.renderToken(tokens, index, options);
  };
}

export class Markdown {
  constructor(element) {
    this.element = element;
    this.sources = []; // of the blocks that are shown
  }

  /** Show `text`; the longer it gets, the more of it stands already. */
  update(text) {
    if (text.length > MAX_RENDERED) return this.plain(text);
    const environment = {};
    const blocks = topBlocks(markdown.parse(text, environment), text);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.sources[same]) same += 1;
    while (this.element.children.length > same) this.element.lastChild.remove();
    for (const { tokens } of blocks.slice(same)) {
      const html = markdown.renderer.render(tokens, markdown.options, environment);
      this.element.append(el("div", { class: "block" }, finished(DOMPurify.sanitize(html, CLEAN))));
    }
    this.sources = blocks.map((block) => block.source);
  }

  /** The whole text is there: what its end has changed further up (links' addresses) changes too. */
  finish(text) {
    if (/^\[[^\]]+\]:/m.test(text)) this.sources = [];
    this.update(text);
  }

  plain(text) {
    this.element.replaceChildren(el("pre", { class: "plain" }, text));
    this.sources = [];
  }
}

/** Tokens grouped by the block at the top that they belong to, with its source. */
function topBlocks(tokens, text) {
  const lines = text.split("\n");
  const blocks = [];
  let open = [];
  for (const token of tokens) {
    open.push(token);
    if (token.level === 0 && token.nesting <= 0) {
      const [first, last] = open[0].map ?? [0, lines.length];
      blocks.push({ tokens: open, source: open[0].type + lines.slice(first, last).join("\n") });
      open = [];
    }
  }
  return blocks;
}

function finished(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.textContent;
    const language = /language-([\w+#.-]+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "";
    const copy = el("button", { type: "button", class: "icon", "aria-label": "Copy this code", title: "Copy" }, icon("copy"));
    copy.addEventListener("click", () => copyFrom(copy, code));
    pre.tabIndex = 0;
    const frame = el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, language), copy));
    pre.replaceWith(frame);
    frame.append(pre);
  }
  return fragment;
}

/** What a model thought aloud before its answer, and the answer. */
export function thoughtsIn(text) {
  const end = text.indexOf("</think>");
  const start = /^\s*<think>/.exec(text)?.[0].length ?? 0;
  if (end >= 0) return { thoughts: text.slice(start, end).trim(), answer: text.slice(end + 8).trimStart() };
  if (start) return { thoughts: text.slice(start).trim(), answer: "" };
  return { thoughts: "", answer: text };
}
