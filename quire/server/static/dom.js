// Making elements. Text goes in as text nodes only: no string here ever becomes HTML.

export const $ = (id) => document.getElementById(id);

/** An element. `class`, `text`, `data`, `on` are special; the rest are attributes. */
export function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "on") for (const [kind, f] of Object.entries(value)) made.addEventListener(kind, f);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

/** An SVG element with attributes. */
export function svg(tag, given = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  return made;
}

/** Set text only if it differs: an equal write would still disturb a selection. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Copy text; true if the browser did it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // no clipboard outside https and localhost
  }
}

function copyBySelection(text) {
  const area = el("textarea", { class: "sr", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  const before = document.activeElement;
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}

/** f at most once a frame. */
export function eachFrame(f) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      f();
    });
  };
}
