// Puts the page together: key, theme, views, settings, chat, engine.

import { ask, askAgain, key, onUnauthorized } from "./api.js";
import { Chat } from "./chat.js";
import { $, say } from "./dom.js";
import { EngineView } from "./engine.js";
import { Settings } from "./settings.js";
import { hideTip } from "./tokens.js";
import { showWhy } from "./why.js";

onUnauthorized(askForKey);
views();
const engine = new EngineView();
theme();
start();

async function start() {
  const about = await known();
  document.title = `${about.model} · quire`;
  say($("model"), about.model);
  const { quantization, dtype, bits_per_weight: bits } = about.weights;
  const held = quantization ? `${quantization} weights, ${bits} bits each` : `${dtype} weights`;
  $("model").title = `${about.model}: up to ${about.max_model_len} tokens, ${held}, quire ${about.version}`;
  if (!about.text) say($("welcome-text"), "This server has no tokenizer: it takes token ids only, so there is no chat here.");
  else if (!about.generates) say($("welcome-text"), `This model does not write: it is for ${about.tasks.join(" and ")}. See /docs.`);
  else if (about.transcribes) say($("welcome-text"), "This model writes what is spoken: record something, or attach a recording.");
  else if (!about.chat) say($("welcome-text"), "This model has no chat template: it goes on from what you write.");
  $("open-settings").disabled = false; // till now there was nothing behind these
  $("say").disabled = $("send").disabled = !(about.text && about.generates);
  const settings = new Settings(about, () => $("keep").checked && chat.keep());
  const chat = new Chat(settings, about);
  panel(settings, chat);
  chat.addEventListener("answered", (event) => showWhy(event.detail));
  $("new-chat").addEventListener("click", () => chat.clear());
  document.documentElement.dataset.ready = "true";
}

/** What the server says about itself; asks again until there is a server, and a key it takes. */
async function known() {
  for (;;) {
    try {
      const about = await (await ask("quire/about")).json();
      $("enter-key").hidden = true;
      say($("welcome-text"), "Nothing you write here is kept unless you ask for it.");
      return about;
    } catch (error) {
      const locked = error.status === 401;
      say($("welcome-text"), locked ? "This server asks for an API key." : "The server cannot be reached; trying again.");
      $("enter-key").hidden = !locked;
      await (locked ? clicked($("enter-key")) : new Promise((done) => setTimeout(done, 2000)));
      askAgain();
    }
  }
}

const clicked = (button) => new Promise((done) => button.addEventListener("click", done, { once: true }));

// -- settings ---------------------------------------------------------------------------------------

function panel(settings, chat) {
  const show = (open) => {
    $("settings").hidden = !open;
    $("open-settings").setAttribute("aria-expanded", String(open));
    (open ? $("settings") : $("open-settings")).focus({ preventScroll: true });
  };
  $("open-settings").addEventListener("click", () => show($("settings").hidden));
  $("close-settings").addEventListener("click", () => show(false));
  $("settings").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    show(false);
  });
  chat.addEventListener("bad-settings", () => {
    show(true);
    settings.complain();
  });
  $("keep").addEventListener("change", () => chat.keep());
  $("reset-settings").addEventListener("click", () => {
    settings.reset();
    if ($("keep").checked) chat.keep();
  });
  $("change-key").addEventListener("click", async () => {
    await askForKey(false, "Requests are sent with this key. Empty: with none.");
  });
}

// -- the key ------------------------------------------------------------------------------------------

/** Ask the person. True if there is another key to try. */
function askForKey(refused, text = null) {
  const dialog = $("key-dialog");
  const input = $("key");
  say($("key-title"), text ? "API key" : "This server asks for an API key");
  say($("key-text"), text ?? "It is kept in this tab only, and sent to this server only.");
  say($("key-error"), refused ? "The server did not take that key." : "");
  input.required = text === null;
  input.value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => {
    $("key-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => {
      const used = dialog.returnValue === "use";
      if (used) key.set(input.value.trim());
      dialog.returnValue = "";
      done(used);
    };
  });
}

// -- views and theme ------------------------------------------------------------------------------------

function views() {
  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      for (const one of document.querySelectorAll("[data-show]")) {
        one.setAttribute("aria-pressed", String(one === button));
      }
      hideTip();
    });
  }
}

function theme() {
  const root = document.documentElement;
  $("theme").value = root.dataset.theme;
  $("theme").addEventListener("change", () => {
    root.dataset.theme = $("theme").value;
    try {
      localStorage.setItem("quire-theme", $("theme").value);
    } catch {
      // a browser that keeps nothing: until the page is closed
    }
    engine.recolour();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.recolour());
}
