// The conversation: what was said, asking for more, stopping, editing. The only writer of `messages`.

import { ask, events } from "./api.js";
import { Attachments } from "./attach.js";
import { $, eachFrame, el } from "./dom.js";
import { MessageView } from "./message.js";
import { curlOf, newAnswer, requestFor, take } from "./request.js";
import { partsOf } from "./split.js";

const KEPT = "quire-chat";
const IDEAS = [
  "What is the capital of France?",
  "Tom has 12 apples and buys 7 more. How many apples does he have?",
  "Extract the name and the city as JSON: Anna Berg lives in Oslo.",
  "What can you do?",
];

export class Chat extends EventTarget {
  /** settings: Settings; about: what the server told. Fires "answered" with each answer. */
  constructor(settings, about) {
    super();
    this.settings = settings;
    this.about = about;
    this.messages = [];
    this.views = [];
    this.asTokens = false; // as the person last chose; new answers follow
    this.attachments = new Attachments(about);
    this.running = null; // the AbortController of the answer under way
    this.#wire();
    this.#restore();
    this.#shown();
  }

  get busy() {
    return this.running !== null;
  }

  /** Say something and get an answer. media: items of Attachments. */
  async send(text, media = []) {
    if (this.busy || !this.#complete(text, media) || !this.#ready()) return false;
    this.#add({ role: "user", content: text, media });
    await this.#answer();
    return true;
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.#cut(0);
    this.#keep();
    $("say").focus();
  }

  /** Keep the conversation on this device, or stop doing so and forget what was kept. */
  keep() {
    this.#keep();
  }

  // -- asking ---------------------------------------------------------------------------------

  async #answer() {
    const read = this.settings.read();
    if (read === null) return this.#complain();
    const request = requestFor(this.messages, read, this.about);
    const answer = newAnswer();
    answer.request = request;
    const view = this.#add(answer);
    const update = eachFrame(() => this.#grow(view));
    this.running = new AbortController();
    this.#busy("The model answers.");
    try {
      const response = await ask(request.path, { body: request.body, signal: this.running.signal });
      if (request.body instanceof FormData) take(answer, transcript(await response.json()));
      else {
        for await (const data of events(response)) {
          if (data === "[DONE]") break;
          take(answer, JSON.parse(data));
          update();
        }
      }
      answer.finish ??= "broken";
      if (answer.finish === "broken") answer.error = "The stream ended before the answer did.";
    } catch (error) {
      if (this.running.signal.aborted) answer.finish = "stopped";
      else answer.error = error.message;
    }
    this.#finish(answer, view);
    return true;
  }

  #finish(answer, view) {
    answer.streaming = false;
    answer.endedAt = performance.now();
    this.running = null;
    this.#grow(view);
    this.#busy(answer.error ?? `The answer is complete. ${partsOf(answer).text}`.slice(0, 2000));
    this.#keep();
    this.dispatchEvent(new CustomEvent("answered", { detail: answer }));
  }

  /** There is something to send; for a model of speech, a recording. */
  #complete(text, media) {
    return this.about.transcribes ? media.length === 1 : Boolean(text.trim()) || media.length > 0;
  }

  #ready() {
    if (this.settings.read() !== null) return true;
    this.#complain();
    return false;
  }

  #complain() {
    this.dispatchEvent(new Event("bad-settings"));
    return false;
  }

  // -- what buttons of messages do --------------------------------------------------------------

  async #regenerate(message) {
    if (this.busy || !this.#ready()) return;
    this.#cut(this.messages.indexOf(message));
    await this.#answer();
  }

  async #edit(message, text) {
    if (this.busy) return;
    const at = this.messages.indexOf(message);
    if (message.role === "user") {
      if (!this.#ready()) return;
      this.#cut(at);
      await this.send(text, message.media);
      return;
    }
    Object.assign(message, { content: text, tokens: [], reasoning: message.role === "assistant" ? "" : undefined });
    this.views[at].update();
    this.#keep();
  }

  async #answerCalls(message, results) {
    if (this.busy || !this.#ready()) return;
    message.answered = true;
    this.views[this.messages.indexOf(message)].update();
    results.forEach((content, i) => this.#add({ role: "tool", content, toolCallId: message.toolCalls?.[i]?.id || `call_${i}` }));
    await this.#answer();
  }

  #curl(message) {
    const before = this.messages.slice(0, this.messages.indexOf(message));
    const read = this.settings.read();
    return curlOf(message.request ?? requestFor(before, read ?? this.settings.fallback, this.about));
  }

  // -- showing --------------------------------------------------------------------------------

  #add(message) {
    const view = new MessageView(message, {
      edit: (text) => this.#edit(message, text),
      regenerate: () => this.#regenerate(message),
      curl: () => this.#curl(message),
      answerCalls: (results) => this.#answerCalls(message, results),
      tokensShown: (shown) => {
        this.asTokens = shown;
      },
    }, this.asTokens);
    this.messages.push(message);
    this.views.push(view);
    $("messages").append(view.node);
    this.#shown();
    this.#toEnd();
    return view;
  }

  #cut(at) {
    this.messages.length = at;
    for (const view of this.views.splice(at)) view.node.remove();
    this.#shown();
  }

  #shown() {
    $("welcome").hidden = this.messages.length > 0;
    $("new-chat").disabled = this.messages.length === 0;
  }

  /** Show what is new; stay at the end if that is where the reader was. */
  #grow(view) {
    const follows = this.#atEnd();
    view.update();
    if (follows) this.#toEnd();
    else $("to-end").hidden = false;
  }

  #atEnd() {
    const box = $("scroll");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 48;
  }

  #toEnd() {
    $("scroll").scrollTop = $("scroll").scrollHeight;
    $("to-end").hidden = true;
  }

  #busy(said) {
    const had = document.activeElement === $("stop-answer") || document.activeElement === $("send");
    $("send").hidden = this.busy;
    $("stop-answer").hidden = !this.busy;
    $("messages").setAttribute("aria-busy", String(this.busy));
    $("status").textContent = said;
    if (had) (this.busy ? $("stop-answer") : $("say")).focus();
  }

  // -- events -----------------------------------------------------------------------------------

  #wire() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    $("say").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    $("stop-answer").addEventListener("click", () => this.stop());
    $("to-end").addEventListener("click", () => {
      this.#toEnd();
      $("say").focus();
    });
    $("scroll").addEventListener("scroll", () => {
      if (this.#atEnd()) $("to-end").hidden = true;
    }, { passive: true });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.busy && !event.defaultPrevented) this.stop();
    });
    for (const idea of IDEAS) {
      $("ideas").append(el("button", { type: "button", text: idea, on: { click: () => this.send(idea) } }));
    }
  }

  #submit() {
    const text = $("say").value;
    if (this.busy || !this.#complete(text, this.attachments.items) || !this.#ready()) return;
    $("say").value = "";
    $("say").dispatchEvent(new Event("input", { bubbles: true }));
    this.send(text, this.attachments.take());
  }

  // -- keeping ----------------------------------------------------------------------------------

  #keep() {
    try {
      if (!$("keep").checked) {
        localStorage.removeItem(KEPT);
        return;
      }
      const messages = this.messages.filter((one) => !one.streaming).map(plain);
      localStorage.setItem(KEPT, JSON.stringify({ messages, settings: this.settings.values }));
    } catch {
      $("keep").checked = false;
      $("status").textContent = "This browser has no room to keep the conversation.";
    }
  }

  #restore() {
    let kept = null;
    try {
      kept = JSON.parse(localStorage.getItem(KEPT) ?? "null");
    } catch {
      return; // not ours, or a browser that keeps nothing
    }
    if (kept === null) return;
    $("keep").checked = true;
    this.settings.values = kept.settings ?? {};
    for (const message of kept.messages ?? []) this.#add(message);
  }
}

/** A transcript in the form of a chunk. */
const transcript = ({ text }) => ({ choices: [{ delta: { content: text }, finish_reason: "stop" }] });

/** What is kept of a message: neither its media and tokens nor the request that made it. */
function plain({ role, content, reasoning, toolCalls, toolCallId, finish, answered }) {
  return { role, content, reasoning, toolCalls, toolCallId, finish, answered, tokens: [] };
}
