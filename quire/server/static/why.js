// Where time went: a bar for each of the last answers given here, cut as the server cut it, and one
// for all requests that ended in the last minute.

import { $, el, say } from "./dom.js";
import { plural, seconds } from "./format.js";

const KEEP = 4;
const PARTS = {
  prepare: "reading and tokenizing",
  transport: "between the processes",
  grammar: "compiling its grammar",
  queue: "waiting for a place",
  prefill: "its own prompt",
  others: "prompts of others in the same steps",
  preempted: "preempted",
  decode: "generating",
  engine_other: "engine, between steps",
  compile: "preparing kernels that the start had not",
  detokenize: "turning tokens into text",
  client: "waiting for the reader",
};

/** Put an answer's timing on top. */
export function showWhy(answer) {
  const cuts = cutsOf(answer.timing);
  if (!cuts.length) return;
  const box = $("why");
  if (box.querySelector(".hint")) box.replaceChildren();
  box.prepend(bar(cuts));
  while (box.children.length > KEEP) box.lastChild.remove();
}

/** Show what the requests spent that ended between two frames. */
export function showAllWhy(then, now) {
  const ended = now.totals.finished - then.totals.finished;
  const spent = Object.entries(now.totals.cuts).map(([name, s]) => [name, s - (then.totals.cuts[name] ?? 0)]);
  const cuts = cutsOf(Object.fromEntries(spent));
  say($("why-all-sum"), ended ? plural(ended, "sequence") : "");
  const shown = JSON.stringify(cuts.map(([name, s]) => [name, s.toPrecision(3)]));
  if ($("why-all").dataset.shown === shown) return;
  $("why-all").dataset.shown = shown;
  $("why-all").replaceChildren(cuts.length ? bar(cuts) : el("p", { class: "hint", text: "None ended." }));
}

/** [[name, seconds]] of what took any time, in the order of PARTS. */
export function cutsOf(timing) {
  if (!timing) return [];
  const cuts = timing.cuts ?? timing;
  return Object.keys(PARTS)
    .map((name) => [name, cuts[name] ?? cuts[`${name}_s`] ?? 0])
    .filter(([, s]) => s > 0);
}

function bar(cuts) {
  const total = cuts.reduce((sum, [, s]) => sum + s, 0);
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
