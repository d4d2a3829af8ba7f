// The settings form: built from what the server says it allows, read when a message is sent.

import { $, el } from "./dom.js";

const FIELDS = ["system", "stop", "thinking", "alternatives", "functions"];

export class Settings {
  /** about: what GET /quire/about told. onChange: called after each change. */
  constructor(about, onChange) {
    this.form = $("settings-form");
    this.about = about;
    for (const one of about.controls) $("controls").append(control(one));
    $("thinking-field").hidden = !about.thinking;
    $("alternatives").max = Math.min(about.max_logprobs, 20);
    if (Number($("alternatives").value) > about.max_logprobs) $("alternatives").value = about.max_logprobs;
    this.form.addEventListener("input", onChange);
    this.form.addEventListener("submit", (event) => event.preventDefault());
    $("functions").addEventListener("change", () => this.#tools());
  }

  /** What the form says, or null where it says what cannot be: then it has told so. */
  read() {
    const tools = this.#tools();
    if (tools === undefined || !this.form.checkValidity()) return null;
    const thinking = $("thinking").value;
    return {
      system: $("system").value.trim(),
      sampling: this.#sampling(),
      stop: $("stop").value.split("\n").filter((line) => line !== ""),
      thinking: thinking === "" ? null : thinking === "on",
      alternatives: $("probabilities").checked ? Number($("alternatives").value || 0) : null,
      tools,
    };
  }

  /** Show what is wrong, where it is. */
  complain() {
    if (this.form.reportValidity()) $("functions").focus();
  }

  /** All fields as plain values, to be kept. */
  get values() {
    const controls = this.about.controls.map((one) => [one.name, $(`c-${one.name}`).value]);
    return {
      ...Object.fromEntries(FIELDS.map((name) => [name, $(name).value])),
      probabilities: $("probabilities").checked,
      controls: Object.fromEntries(controls),
    };
  }

  set values(kept) {
    for (const name of FIELDS) if (typeof kept[name] === "string") $(name).value = kept[name];
    if (typeof kept.probabilities === "boolean") $("probabilities").checked = kept.probabilities;
    for (const one of this.about.controls) {
      const input = $(`c-${one.name}`);
      input.value = kept.controls?.[one.name] ?? "";
      input.dispatchEvent(new Event("input"));
    }
  }

  reset() {
    const kept = $("keep").checked;
    this.form.reset();
    $("keep").checked = kept;
    this.values = {};
  }

  #sampling() {
    const said = {};
    for (const one of this.about.controls) {
      const { value } = $(`c-${one.name}`);
      if (value !== "") said[one.name] = Number(value);
    }
    return said;
  }

  /** The tools, null for none, undefined (and a message) for what is not a list in JSON. */
  #tools() {
    const source = $("functions").value.trim();
    let tools = null;
    let wrong = "";
    try {
      tools = source ? JSON.parse(source) : null;
      if (tools !== null && !(Array.isArray(tools) && tools.length)) wrong = "This must be a list with at least one tool.";
    } catch (error) {
      wrong = `This is not JSON: ${error.message}`;
    }
    $("functions-error").textContent = wrong;
    $("functions").setAttribute("aria-invalid", String(wrong !== ""));
    return wrong ? undefined : tools;
  }
}

/** A number, and a slider beside it where both ends are known and near. */
function control({ name, label, low, high, step, whole, standard, about }) {
  const id = `c-${name}`;
  const number = el("input", {
    id, name, type: "number", min: low, max: high, step: whole ? 1 : "any", title: about,
    inputmode: whole ? "numeric" : "decimal", placeholder: standard ?? "none",
  });
  const parts = [el("label", { for: id, text: label, title: about })];
  if (high !== null && high - low <= 4) parts.push(slider(number, { label, low, high, step, standard }));
  return el("div", { class: `control${parts.length > 1 ? " slides" : ""}` }, ...parts, number);
}

function slider(number, { label, low, high, step, standard }) {
  const made = el("input", { type: "range", min: low, max: high, step, "aria-label": `${label}, slider` });
  const follow = () => {
    made.value = number.value === "" ? standard ?? low : number.value;
    made.classList.toggle("unset", number.value === "");
  };
  made.addEventListener("input", () => {
    number.value = made.value;
    made.classList.remove("unset");
  });
  number.addEventListener("input", follow);
  follow();
  return made;
}
