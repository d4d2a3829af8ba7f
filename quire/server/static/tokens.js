// The tokens of an answer, tinted by probability. Pointer or focus on one shows its alternatives;
// arrow keys go from one to the next, so the whole view is one stop of the Tab key.

import { $, el } from "./dom.js";
import { percent } from "./format.js";

const TINTS = [0.9, 0.6, 0.3, 0.1]; // below each the tint is one stronger
const SEEN = { "\n": "↵\n", "\t": "⇥\t", "\r": "␍" };

const visible = (token) => token.replace(/[\n\t\r]/g, (c) => SEEN[c]);
const quoted = (token) => JSON.stringify(token);
const tint = (p) => TINTS.filter((bound) => p < bound).length;

export class TokenView {
  constructor() {
    this.node = el("div", {
      class: "tokens",
      role: "group",
      dir: "auto",
      "aria-label": "Tokens of this answer. Arrow keys go from token to token.",
    });
    this.tokens = [];
    const show = (event) => this.#show(event.target.closest(".token"));
    this.node.addEventListener("pointerover", show);
    this.node.addEventListener("focusin", show);
    this.node.addEventListener("pointerleave", hideTip);
    this.node.addEventListener("focusout", hideTip);
    this.node.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Show these; the first ones are those it has already. */
  update(tokens) {
    for (let i = this.tokens.length; i < tokens.length; i += 1) {
      const p = Math.exp(tokens[i].logprob);
      this.node.append(el("span", {
        class: `token t${tint(p)}`,
        role: "img",
        "aria-label": `${quoted(tokens[i].token)}, ${percent(p)}`,
        tabindex: i === 0 ? "0" : "-1",
        data: { i },
        text: visible(tokens[i].token),
      }));
    }
    this.tokens = tokens.slice();
  }

  #show(node) {
    if (!node) return;
    showTip(node, this.tokens[Number(node.dataset.i)]);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const now = this.node.contains(document.activeElement) ? document.activeElement : null;
    if (event.key === "Escape" && !$("token-tip").hidden) {
      event.stopPropagation(); // it ends the look, not the answer
      hideTip();
    }
    if (!now || (!step && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const back = getComputedStyle(this.node).direction === "rtl" && event.key.match(/Left|Right/);
    const to = event.key === "Home" ? this.node.firstChild : event.key === "End" ? this.node.lastChild
      : (step > 0) !== Boolean(back) ? now.nextSibling : now.previousSibling;
    if (!to) return;
    now.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}

/** Show what was likely where `token` was chosen, beside `node`. */
export function showTip(node, token) {
  const tip = $("token-tip");
  tip.replaceChildren(...tipOf(token));
  tip.hidden = false;
  for (const one of document.querySelectorAll('[aria-describedby="token-tip"]')) one.removeAttribute("aria-describedby");
  node.setAttribute("aria-describedby", "token-tip");
  place(tip, node.getClientRects()[0] ?? node.getBoundingClientRect());
}

export function hideTip() {
  $("token-tip").hidden = true;
  for (const one of document.querySelectorAll('[aria-describedby="token-tip"]')) {
    one.removeAttribute("aria-describedby");
  }
}

function tipOf(token) {
  const p = Math.exp(token.logprob);
  const head = el("p", { class: "tip-head" }, el("bdi", { class: "mono", text: quoted(token.token) }),
    el("strong", { text: percent(p) }));
  const others = token.top_logprobs ?? [];
  if (!others.length) return [head];
  const lines = others.map((one) => line(one, one.token === token.token && one.logprob === token.logprob));
  return [head, el("p", { class: "hint", text: "Likeliest here" }), el("ol", { class: "tip-list" }, ...lines)];
}

function line(one, chosen) {
  const p = Math.exp(one.logprob);
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  bar.style.inlineSize = `${Math.max(p * 100, 0.5)}%`;
  return el("li", { class: chosen ? "chosen" : "" }, bar, el("bdi", { class: "mono", text: quoted(one.token) }),
    el("span", { text: percent(p) }));
}

/** Under the token, or above it where there is no room; never outside the window. */
function place(tip, at) {
  const { offsetWidth: width, offsetHeight: height } = tip;
  const x = Math.min(Math.max(8, at.left + at.width / 2 - width / 2), innerWidth - width - 8);
  const below = at.bottom + 6 + height < innerHeight;
  tip.style.left = `${x}px`;
  tip.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - height - 6)}px`;
}
