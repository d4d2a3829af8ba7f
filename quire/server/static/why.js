// Where the time of an answer went: one bar, cut as the server cut it.

import { $, el } from "./dom.js";
import { seconds } from "./format.js";

const KEEP = 4;
const PARTS = {
  prepare: "reading and tokenizing",
  transport: "between the processes",
  queue: "waiting for a place",
  prefill: "its own prompt",
  others: "prompts of others in the same steps",
  preempted: "preempted",
  decode: "generating",
  engine_other: "engine, between steps",
  detokenize: "turning tokens into text",
  client: "waiting for the reader",
};

/** Put an answer's timing on top. */
export function showWhy(answer) {
  const cuts = cutsOf(answer.timing);
  if (!cuts.length) return;
  const box = $("why");
  if (box.querySelector(".hint")) box.replaceChildren();
  const total = cuts.reduce((sum, [, s]) => sum + s, 0);
  box.prepend(bar(cuts, total));
  while (box.children.length > KEEP) box.lastChild.remove();
}

/** [[name, seconds]] of what took any time, in the order of PARTS. */
export function cutsOf(timing) {
  if (!timing) return [];
  const cuts = timing.cuts ?? timing;
  return Object.keys(PARTS)
    .map((name) => [name, cuts[name] ?? cuts[`${name}_s`] ?? 0])
    .filter(([, s]) => s > 0);
}

function bar(cuts, total) {
  const line = el("div", { class: "cuts", role: "img", "aria-label": cuts.map(([n, s]) => `${PARTS[n]} ${seconds(s)}`).join(", ") });
  for (const [name, s] of cuts) {
    const piece = el("span", { class: `cut ${name}`, title: `${PARTS[name]}: ${seconds(s)}` });
    piece.style.flexGrow = String(s / total);
    line.append(piece);
  }
  const most = [...cuts].sort((a, b) => b[1] - a[1]).filter(([, s]) => s / total > 0.004);
  const words = most.map(([name, s]) => el("li", {},
    el("span", { class: `swatch cut ${name}` }), `${PARTS[name]} `, el("b", { text: seconds(s) })));
  return el("div", { class: "why-one" }, el("p", { class: "aside", text: seconds(total) }), line, el("ul", { class: "legend" }, ...words));
}
