// A safe part of Markdown -> DOM nodes: headings, lists, quotes, tables, code, bold, italic, struck.
// What a model writes becomes text nodes and elements named here, nothing else: no HTML, no images,
// no links. Blocks that did not change since the last call keep their nodes, so a long answer that
// grows costs only its last block.

import { copy, el } from "./dom.js";

const DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)+\|?\s*$|^ {0,3}\|\s*:?-+:?\s*\|\s*$/;

/** Show `text` in `parent`, which nobody else writes to. */
export function render(parent, text) {
  const blocks = blocksOf(text);
  const known = parent.blocks ?? [];
  let same = 0;
  while (same < known.length && same < blocks.length && known[same] === blocks[same].source) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const block of blocks.slice(same)) parent.append(nodeOf(block, 0));
  parent.blocks = blocks.map((block) => block.source);
}

// -- blocks ---------------------------------------------------------------------------------

/** [{kind, source, ...}], one for each node. */
export function blocksOf(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const start = at;
    const block = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at)
      ?? list(lines, at) ?? table(lines, at) ?? paragraph(lines, at);
    at = block.end;
    blocks.push({ ...block, source: `${block.kind}\n${lines.slice(start, at).join("\n")}` });
  }
  return blocks;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const mark = open[1];
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  return { kind: "code", language: open[2], code, end: Math.min(end + 1, lines.length) };
}

function closes(line, mark) {
  const said = line.trim();
  return said.length >= mark.length && said === mark[0].repeat(said.length);
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  return found && { kind: "heading", level: found[1].length, text: found[2], end: at + 1 };
}

const rule = (lines, at) => (RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null);

function quote(lines, at) {
  if (!QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return { kind: "quote", text: lines.slice(at, end).map((l) => l.replace(QUOTE, "")).join("\n"), end };
}

function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first || first[1].length > 3) return null;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > 3 || /\d/.test(item[2]) !== ordered || RULE.test(lines[end])) break;
    const taken = itemLines(lines, end, item);
    items.push(taken.text);
    end = taken.end;
  }
  return { kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items, end };
}

/** An item's own lines, without its indentation. A blank line ends it unless the next is indented. */
function itemLines(lines, at, item) {
  const indent = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
  const own = [item[4]];
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      if (end + 1 >= lines.length || leading(lines[end + 1]) < 2) break;
    } else if (leading(line) < 2 && (ITEM.test(line) || !own.at(-1).trim() || startsBlock(lines, end))) {
      break;
    }
    own.push(line.slice(Math.min(indent, leading(line))));
    end += 1;
  }
  while (end < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1] ?? "")) end += 1;
  return { text: own.join("\n"), end };
}

const leading = (line) => line.length - line.trimStart().length;

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line);
}

function table(lines, at) {
  if (!lines[at].includes("|") || !TABLE_RULE.test(lines[at + 1] ?? "")) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return { kind: "table", head: cells(lines[at]), rows: lines.slice(at + 2, end).map(cells), end };
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((one) => one.trim());

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end) && !list(lines, end)
    && !table(lines, end)) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

// -- nodes ----------------------------------------------------------------------------------

function nodeOf(block, depth) {
  if (block.kind === "code") return codeNode(block);
  if (block.kind === "heading") return inline(el(`h${Math.min(block.level + 2, 6)}`, { dir: "auto" }), block.text);
  if (block.kind === "rule") return el("hr");
  if (block.kind === "quote") return within(el("blockquote", { dir: "auto" }), block.text, depth);
  if (block.kind === "list") return listNode(block, depth);
  if (block.kind === "table") return tableNode(block);
  return inline(el("p", { dir: "auto" }), block.text);
}

function within(parent, text, depth) {
  if (depth >= DEPTH) return inline(parent, text);
  for (const block of blocksOf(text)) parent.append(nodeOf(block, depth + 1));
  return parent;
}

function listNode(block, depth) {
  const made = el(block.ordered ? "ol" : "ul", { dir: "auto" });
  if (block.ordered && block.start !== 1) made.start = block.start;
  for (const item of block.items) {
    const line = el("li", { dir: "auto" });
    made.append(item.includes("\n") ? within(line, item, depth) : inline(line, item));
  }
  return made;
}

function tableNode(block) {
  const row = (tag, texts) => el("tr", {}, ...texts.map((t) => inline(el(tag, { dir: "auto" }), t)));
  const body = el("tbody", {}, ...block.rows.map((texts) => row("td", texts)));
  const made = el("table", {}, el("thead", {}, row("th", block.head)), body);
  return el("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Table" }, made);
}

function codeNode(block) {
  const button = el("button", { type: "button", class: "quiet copy", text: "Copy", "aria-label": "Copy this code" });
  button.addEventListener("click", async () => {
    button.textContent = (await copy(block.code)) ? "Copied" : "No clipboard";
    setTimeout(() => {
      button.textContent = "Copy";
    }, 1500);
  });
  const head = el("div", { class: "code-head" }, el("span", { text: block.language || "text" }), button);
  const pre = el("pre", { tabindex: "0", dir: "ltr" }, el("code", { text: block.code }));
  return el("div", { class: "code" }, head, pre);
}

// -- inside a block -------------------------------------------------------------------------

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~]/g;
const WORD = /[\p{L}\p{N}]/u;

/** Append `text` to `parent`, with code, bold, italic and struck parts as elements. */
export function inline(parent, text, depth = 0) {
  const missing = new Set(); // marks without an end further on: looked for once, not at each
  let at = 0;
  let plain = "";
  const flush = () => {
    if (plain) parent.append(plain);
    plain = "";
  };
  for (;;) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index;
    if (next === undefined) break;
    plain += text.slice(at, next);
    at = next;
    const found = text[at] === "\\" ? escaped(text, at) : text[at] === "`"
      ? code(text, at, missing) : marked(text, at, missing, depth);
    if (found.node) {
      flush();
      parent.append(found.node);
    } else {
      plain += found.text;
    }
    at = found.end;
  }
  plain += text.slice(at);
  flush();
  return parent;
}

function escaped(text, at) {
  const next = text[at + 1] ?? "";
  if (/[!-/:-@[-`{-~]/.test(next)) return { text: next, end: at + 2 };
  return { text: "\\", end: at + 1 };
}

function code(text, at, missing) {
  const ticks = ticksAt(text, at);
  const start = at + ticks.length;
  let end = missing.has(ticks) ? -1 : text.indexOf(ticks, start);
  while (end >= 0 && ticksAt(text, end).length !== ticks.length) {
    end = text.indexOf(ticks, end + ticksAt(text, end).length);
  }
  if (end < 0) {
    missing.add(ticks);
    return { text: ticks, end: start };
  }
  const inner = text.slice(start, end);
  const shown = /^ .*[^ ].* $/s.test(inner) ? inner.slice(1, -1) : inner;
  return { node: el("code", { text: shown, dir: "ltr" }), end: end + ticks.length };
}

function ticksAt(text, at) {
  let end = at;
  while (text[end] === "`") end += 1;
  return text.slice(at, end);
}

function marked(text, at, missing, depth) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const end = depth < DEPTH ? endOf(text, at, mark, missing) : -1;
    if (end >= 0) {
      const node = inline(el(tag), text.slice(at + mark.length, end), depth + 1);
      return { node, end: end + mark.length };
    }
    if (mark.length === 2) return { text: mark, end: at + 2 };
  }
  return { text: text[at], end: at + 1 };
}

/** Where the part that begins at `at` ends, or -1. Marks hug their text; _ not within words. */
function endOf(text, at, mark, missing) {
  const start = at + mark.length;
  if (missing.has(mark) || !text[start] || /\s/.test(text[start])) return -1;
  if (mark[0] === "_" && WORD.test(text[at - 1] ?? "")) return -1;
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const double = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const inWord = mark[0] === "_" && WORD.test(text[end + mark.length] ?? "");
    if (!double && !inWord && !/\s/.test(text[end - 1])) return end;
    if (double && text[end + 1] === mark) end += 1;
  }
  missing.add(mark);
  return -1;
}
