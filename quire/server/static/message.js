// One message of the conversation, on the page: its text, reasoning, tool calls, tokens, buttons.

import { preview } from "./attach.js";
import { copy, el, say } from "./dom.js";
import { plural, seconds } from "./format.js";
import { render } from "./markdown.js";
import { partsOf } from "./split.js";
import { TokenView, hideTip } from "./tokens.js";
import { watch, weave } from "./weave.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool result", system: "System" };
const ENDS = {
  length: "It was cut off at the token limit.",
  abort: "The server ended it.",
  stopped: "You stopped it.",
};

const AFTER_THOUGHT = "</think>";

export class MessageView {
  /** acts: {edit(text), regenerate(), curl(), answerCalls(results)}; asTokens: begin with the tokens. */
  constructor(message, acts, asTokens = false) {
    this.message = message;
    this.acts = acts;
    this.text = el("div", { class: "text", dir: "auto" });
    this.reasoning = null;
    this.calls = el("div", { class: "calls" });
    this.error = el("p", { class: "bad", role: "alert", hidden: true });
    this.foot = el("p", { class: "facts" });
    this.tokens = null;
    this.bar = el("div", { class: "actions", role: "group", "aria-label": `${WHO[message.role]}: actions` });
    const media = message.media?.length ? el("div", { class: "media" }, ...message.media.map(preview)) : null;
    this.body = el("div", { class: "body" }, media, this.text, this.calls, this.error);
    this.node = el("li", { class: `message ${message.role}` },
      el("span", { class: "who", text: WHO[message.role] ?? message.role }), this.body, this.foot, this.bar);
    watch(this.text, () => this.message.tokens ?? []);
    this.#buttons();
    if (asTokens && message.streaming) this.#showTokens(true);
    this.update();
  }

  /** Show the message as it is now. */
  update() {
    const { message } = this;
    const parts = message.role === "assistant" ? partsOf(message) : { text: message.content, reasoning: "", calls: [] };
    this.#reason(parts);
    if (message.role === "assistant") render(this.text, parts.text);
    else say(this.text, parts.text);
    if (message.tokens?.length && !message.streaming) this.#weave();
    this.node.classList.toggle("waiting", Boolean(message.streaming) && !parts.text && !parts.reasoning);
    this.node.classList.toggle("streaming", Boolean(message.streaming));
    this.#call(parts.calls);
    this.error.hidden = !message.error;
    say(this.error, message.error ?? "");
    say(this.foot, factsOf(message));
    this.#tokenView();
    for (const button of this.bar.children) button.hidden = Boolean(message.streaming) || !button.fits();
  }

  #reason({ reasoning, thinking }) {
    if (!reasoning && !thinking) return;
    if (!this.reasoning) {
      this.reasoning = el("details", { class: "reasoning" }, el("summary"), el("div", { class: "thoughts", dir: "auto" }));
      watch(this.reasoning.lastChild, () => this.message.tokens ?? []);
      this.body.prepend(this.reasoning);
    }
    const [summary, thoughts] = this.reasoning.children;
    const { message } = this;
    const took = message.thoughtAt && message.firstAt ? ` for ${seconds((message.thoughtAt - message.firstAt) / 1e3)}` : "";
    say(summary, thinking && message.streaming ? "Thinking…" : `Thought${took}`);
    this.reasoning.classList.toggle("active", Boolean(thinking && message.streaming));
    render(thoughts, reasoning);
  }

  /** Let a pointer over the text find its tokens. */
  #weave() {
    const { reasoning, content, tokens } = this.message;
    const source = (reasoning ?? "") + content;
    const end = source.indexOf(AFTER_THOUGHT);
    weave(this.text, source, end < 0 ? reasoning?.length ?? 0 : end + AFTER_THOUGHT.length, tokens);
    if (this.reasoning) weave(this.reasoning.lastChild, source, 0, tokens);
  }

  #call(calls) {
    calls.forEach((call, i) => {
      const card = this.calls.children[i] ?? this.calls.appendChild(callCard());
      say(card.querySelector(".name"), call.name || "…");
      say(card.querySelector("pre"), pretty(call.arguments));
    });
    while (this.calls.children.length > calls.length) this.calls.lastChild.remove();
    if (calls.length && !this.message.streaming && !this.message.answered) this.calls.append(this.#resultForm(calls));
  }

  #resultForm(calls) {
    const areas = calls.map((call) => el("textarea", {
      rows: 1, dir: "auto", placeholder: `Result of ${call.name || "the call"}`, "aria-label": `Result of ${call.name || "the call"}`,
    }));
    const form = el("form", { class: "results" }, ...areas, el("button", { class: "quiet", text: "Send the result" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.acts.answerCalls(areas.map((area) => area.value));
    });
    return form;
  }

  #tokenView() {
    if (!this.tokens) return;
    this.tokens.update(this.message.tokens);
  }

  #buttons() {
    const { message, acts } = this;
    const isAnswer = message.role === "assistant";
    this.#button("Copy", () => copy(isAnswer ? partsOf(message).text : message.content), { told: "Copied" });
    if (isAnswer) {
      const fits = () => message.tokens.length > 0;
      this.toggle = this.#button("Tokens", () => this.#showTokens(this.tokens === null), { fits });
      this.toggle.setAttribute("aria-pressed", "false");
      this.#button("Regenerate", () => acts.regenerate());
      this.#button("Copy as curl", () => copy(acts.curl()), { told: "Copied" });
    }
    this.#button("Edit", () => this.#edit());
  }

  #button(text, act, { told = null, fits = () => true } = {}) {
    const made = el("button", { type: "button", class: "quiet", text });
    made.fits = fits;
    made.addEventListener("click", async () => {
      const done = await act();
      if (told === null) return;
      made.textContent = done ? told : "No clipboard";
      setTimeout(() => {
        made.textContent = text;
      }, 1500);
    });
    this.bar.append(made);
    return made;
  }

  #showTokens(shown) {
    hideTip();
    this.tokens?.node.remove();
    this.tokens = shown ? new TokenView() : null;
    this.toggle.setAttribute("aria-pressed", String(shown));
    this.node.classList.toggle("shows-tokens", shown);
    this.acts.tokensShown(shown);
    if (!shown) return;
    this.#tokenView();
    this.body.append(this.tokens.node);
  }

  #edit() {
    const area = el("textarea", { dir: "auto", "aria-label": "Edit the message", rows: 2 });
    area.value = this.message.content;
    const isUser = this.message.role === "user";
    const form = el("form", { class: "edit" }, area, el("div", { class: "buttons" },
      el("button", { class: "primary", text: isUser ? "Send again" : "Save" }),
      el("button", { type: "button", class: "quiet", text: "Cancel", on: { click: () => this.#endEdit(form) } })));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#endEdit(form);
      this.acts.edit(area.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#endEdit(form);
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      if (event.key === "Escape") event.stopPropagation();
    });
    this.node.classList.add("editing");
    this.body.after(form);
    area.focus();
  }

  #endEdit(form) {
    form.remove();
    this.node.classList.remove("editing");
    this.bar.lastElementChild.focus();
  }
}

function callCard() {
  return el("div", { class: "call" },
    el("p", {}, el("span", { class: "hint", text: "calls " }), el("code", { class: "name", dir: "ltr" })),
    el("pre", { dir: "ltr", tabindex: "0" }));
}

function pretty(source) {
  try {
    return JSON.stringify(JSON.parse(source), null, 2);
  } catch {
    return source ?? "";
  }
}

/** "41 tokens, 0.31 s to the first, 96 tokens/s" */
function factsOf(message) {
  if (message.role !== "assistant" || message.streaming || !message.endedAt) return "";
  const facts = [];
  const made = message.usage?.completion_tokens ?? message.tokens.length;
  if (made) facts.push(plural(made, "token"));
  if (message.firstAt) {
    facts.push(`first after ${seconds((message.firstAt - message.askedAt) / 1e3)}`);
    const rest = (message.endedAt - message.firstAt) / 1e3;
    if (made > 1 && rest > 0) facts.push(`${Math.round((made - 1) / rest)} tokens/s`);
  }
  const cached = message.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) facts.push(`${plural(cached, "prompt token")} from the cache`);
  const end = ENDS[message.finish];
  return facts.join(" · ") + (end ? `${facts.length ? ". " : ""}${end}` : "");
}
