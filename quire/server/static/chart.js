// A small line chart in SVG: a few series over the last minute. Pointer or arrow keys read values.

import { el, say, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 64;
export const WINDOW_S = 60;

export class Chart {
  /** series: [{name, of(frame)}], the first one is filled; format(value) -> text. */
  constructor({ title, series, format, note = "" }) {
    Object.assign(this, { title, series, format });
    this.points = series.map(() => []);
    this.at = null; // seconds before now that are pointed at
    this.now = el("span", { class: "aside" });
    this.top = el("span", { class: "top-value", "aria-hidden": "true" });
    this.plot = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: "0", class: "plot",
    });
    this.fill = svg("path", { class: "area" });
    this.lines = series.map((_, i) => svg("path", { class: `line s${i}`, "vector-effect": "non-scaling-stroke" }));
    this.hair = svg("line", { class: "hair", y1: 0, y2: HEIGHT, "vector-effect": "non-scaling-stroke" });
    this.plot.append(this.fill, ...this.lines, this.hair);
    const names = series.length > 1 ? series.map((one, i) => el("span", { class: `key s${i}`, text: one.name })) : [];
    this.node = el("section", { class: "chart", title: note || null },
      el("div", { class: "section-head" }, el("h3", { text: title }), this.now),
      el("div", { class: "plot-box" }, this.top, this.plot),
      el("div", { class: "keys", "aria-hidden": "true" }, ...names));
    this.#wire();
  }

  update(history) {
    this.end = history.last?.at ?? 0;
    this.points = this.series.map((one) => history.series(one.of, WINDOW_S));
    const values = this.points.flat().map(([, value]) => value ?? 0);
    const most = nice(Math.max(...values, 0));
    say(this.top, most ? this.format(most) : "");
    this.lines.forEach((line, i) => line.setAttribute("d", this.#path(this.points[i], most)));
    this.fill.setAttribute("d", area(this.lines[0].getAttribute("d")));
    this.#read();
  }

  #path(points, most) {
    let d = "";
    let pen = "M";
    for (const [at, value] of points) {
      if (value === null) {
        pen = "M";
        continue;
      }
      const x = WIDTH - ((this.end - at) / WINDOW_S) * WIDTH;
      const y = HEIGHT - 1 - (most ? value / most : 0) * (HEIGHT - 4);
      d += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
    }
    return d;
  }

  /** Say the values at the point in question: the last ones, unless somebody points elsewhere. */
  #read() {
    const texts = this.points.map((points, i) => {
      const value = valueAt(points, this.end - (this.at ?? 0));
      const text = value === null ? "–" : this.format(value);
      return this.series.length > 1 ? `${this.series[i].name} ${text}` : text;
    });
    const when = this.at === null ? "" : `${Math.round(this.at)} s ago: `;
    say(this.now, when + texts.join(" · "));
    this.plot.setAttribute("aria-label", `${this.title}, last minute. ${when}${texts.join(", ")}`);
    const x = WIDTH - ((this.at ?? 0) / WINDOW_S) * WIDTH;
    this.hair.setAttribute("x1", x);
    this.hair.setAttribute("x2", x);
    this.hair.classList.toggle("shown", this.at !== null);
  }

  #wire() {
    const point = (at) => {
      this.at = at;
      this.#read();
    };
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      point(Math.max(0, (1 - (event.clientX - box.left) / box.width) * WINDOW_S));
    });
    this.plot.addEventListener("pointerleave", () => point(null));
    this.plot.addEventListener("blur", () => point(null));
    this.plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: 2, ArrowRight: -2 }[event.key];
      if (!step) return;
      event.preventDefault();
      point(Math.min(WINDOW_S, Math.max(0, (this.at ?? 0) + step)));
    });
  }
}

/** The value of the last point not after `at`. */
function valueAt(points, at) {
  let found = null;
  for (const [when, value] of points) {
    if (when > at + 0.2) break;
    found = value;
  }
  return found;
}

/** The area under the last unbroken piece of a line, and all pieces before it. */
function area(d) {
  return d.split("M").filter(Boolean).map((piece) => {
    const points = piece.split("L");
    const [first, last] = [points[0].split(" ")[0], points.at(-1).split(" ")[0]];
    return `M${first} ${HEIGHT}L${points.join("L")}L${last} ${HEIGHT}Z`;
  }).join("");
}

/** A round number not below x, so that the scale does not twitch. */
function nice(x) {
  if (x <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].find((n) => n * power >= x) * power;
}
