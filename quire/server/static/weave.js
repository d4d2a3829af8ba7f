// The rendered text of an answer, cut where its tokens end, so that pointing at a word shows how
// likely it was. Rendering drops marks (**, list numbers, fences) and keeps the rest in order: each
// line of a text node is looked for in what the model wrote, from where the one before it ended.
// What is not found there (an escape, half a character) stays as it is and shows nothing.

import { el } from "./dom.js";
import { hideTip, showTip } from "./tokens.js";

const NEAR = 48; // characters within which a token must be found again after one that is not in the text

/** Cut the text in `box`, which was rendered from `source` at or after `from`. */
export function weave(box, source, from, tokens) {
  const places = placesOf(tokens, source);
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest(".code-head, .piece")) nodes.push(walker.currentNode);
  let at = from;
  for (const node of nodes) at = cut(node, source, at, places);
}

/** Show the token under the pointer. tokens(): those that the text was cut by. */
export function watch(box, tokens) {
  box.addEventListener("pointerover", (event) => {
    const piece = event.target.closest(".piece");
    const token = piece && tokens()[Number(piece.dataset.i)];
    if (token) showTip(piece, token);
    else hideTip();
  });
  box.addEventListener("pointerleave", hideTip);
}

/** [{i, start, end}] of the tokens that stand in `source`, in order. */
function placesOf(tokens, source) {
  const places = [];
  let at = 0;
  tokens.forEach(({ token }, i) => {
    if (!token) return;
    const start = source.startsWith(token, at) ? at : source.slice(at, at + NEAR).indexOf(token) + at;
    if (start < at) return;
    places.push({ i, start, end: start + token.length });
    at = start + token.length;
  });
  return places;
}

function cut(node, source, from, places) {
  const parts = [];
  let at = from;
  for (const [n, line] of node.data.split("\n").entries()) {
    if (n) parts.push("\n");
    const start = line.trim() ? source.indexOf(line, at) : -1;
    if (start < 0) {
      parts.push(line);
      continue;
    }
    parts.push(...pieces(source, start, start + line.length, places));
    at = start + line.length;
  }
  if (parts.some((part) => typeof part !== "string")) node.replaceWith(...parts);
  return at;
}

function pieces(source, start, end, places) {
  const made = [];
  let at = start;
  for (let k = firstAfter(places, start); k < places.length && places[k].start < end; k += 1) {
    const [from, to] = [Math.max(places[k].start, at), Math.min(places[k].end, end)];
    if (from > at) made.push(source.slice(at, from));
    made.push(el("span", { class: "piece", data: { i: places[k].i }, text: source.slice(from, to) }));
    at = to;
  }
  if (at < end) made.push(source.slice(at, end));
  return made;
}

/** Index of the first place that ends after `at`. */
function firstAfter(places, at) {
  let [low, high] = [0, places.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle].end > at) high = middle;
    else low = middle + 1;
  }
  return low;
}
