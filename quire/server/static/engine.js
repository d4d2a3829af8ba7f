// The live view: follows /quire/live while somebody can see it, and shows each frame.

import { ask, events } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { Chart, WINDOW_S } from "./chart.js";
import { Colours } from "./colours.js";
import { $, el, say } from "./dom.js";
import { count, percent, plural, seconds, short } from "./format.js";
import { History } from "./history.js";
import { showAllWhy } from "./why.js";

const SHOWN_ROWS = 40;
const MANY_BLOCKS = 1500;
const PATIENCE_MS = [500, 1000, 2000, 5000, 10000];

const SHARES = (name) => [
  { name: "p50", of: (frame) => frame[name]?.[0] ?? null },
  { name: "p90", of: (frame) => frame[name]?.[1] ?? null },
  { name: "p99", of: (frame) => frame[name]?.[2] ?? null },
];

export class EngineView {
  constructor() {
    this.history = new History();
    this.colours = new Colours();
    this.map = new BlockMap($("map"), $("map-said"), $("map-note"), (id) => this.colours.of(id), (id) => this.#mark(id));
    this.charts = [
      new Chart({ title: "Tokens per second", format: short, series: [
        { name: "out", of: (frame) => frame.rates.out }, { name: "in", of: (frame) => frame.rates.in }] }),
      new Chart({ title: "Time to first token", format: seconds, series: SHARES("first"), note: "Of the last 10 seconds, as the engine sees it" }),
      new Chart({ title: "Time between tokens", format: seconds, series: SHARES("gap"), note: "Of the last 10 seconds, as the engine sees it" }),
    ];
    this.drafts = new Chart({
      title: "Tokens per step with drafts", format: (tokens) => tokens.toFixed(2),
      series: [{ name: "tokens", of: (frame) => frame.rates.draftSteps }],
      note: "Of a sequence: one, and the drafts that were accepted",
    });
    this.charts.push(this.drafts);
    $("charts").append(...this.charts.map((one) => one.node));
    this.lines = new Map(); // id -> row of the table
    this.paused = false;
    this.visible = false;
    this.following = null;
    this.failures = 0;
    this.#wire();
  }

  /** Colours of the page changed. */
  recolour() {
    this.map.recolour();
    if (this.history.last) this.#table(this.history.last);
  }

  // -- following ------------------------------------------------------------------------------------

  #wire() {
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      this.#decide();
    }).observe($("engine"));
    document.addEventListener("visibilitychange", () => this.#decide());
    $("map-all").addEventListener("click", () => this.#showAll(!this.map.all));
    $("live-engine").addEventListener("change", () => {
      this.following?.abort(); // one event stream shows one engine
      this.following = null;
      this.history.frames = [];
      this.#decide();
    });
    $("pause").addEventListener("click", () => {
      this.paused = !this.paused;
      $("pause").setAttribute("aria-pressed", String(this.paused));
      say($("pause"), this.paused ? "Go on" : "Pause");
      this.#decide();
    });
  }

  /** Follow exactly while someone can see it. */
  #decide() {
    const wanted = this.visible && !this.paused && document.visibilityState === "visible";
    if (wanted && !this.following) this.#follow();
    if (!wanted && this.following) {
      this.following.abort();
      this.following = null;
      this.#state(this.paused ? "paused" : "not followed", "off");
    }
  }

  async #follow() {
    const control = new AbortController();
    this.following = control;
    while (!control.signal.aborted) {
      try {
        const response = await ask(`quire/live?engine=${$("live-engine").value || 0}`, { signal: control.signal });
        for await (const data of events(response)) {
          if (data === "[DONE]") break;
          await this.#take(JSON.parse(data));
          if (control.signal.aborted) return;
        }
        throw new Error("ended");
      } catch (error) {
        if (control.signal.aborted) return;
        this.#state(error.status === 401 ? "needs a key" : "not connected", "bad");
        await patience(PATIENCE_MS[Math.min(this.failures, PATIENCE_MS.length - 1)], control.signal);
        this.failures += 1;
      }
    }
  }

  async #take(frame) {
    if (frame.error) throw new Error(frame.error.message);
    this.failures = 0;
    this.#offer(frame.engines);
    const map = frame.map === undefined ? null : await unpack(frame.map);
    this.history.add(frame);
    this.show(frame, map);
    this.#state("live", "good");
  }

  /** Offer a choice among several engines. */
  #offer(count) {
    const choice = $("live-engine");
    if (choice.length === count) return;
    choice.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(`Engine ${i}`, i)));
    choice.hidden = count < 2;
  }

  // -- showing --------------------------------------------------------------------------------------

  /** Show one frame. map: bytes of states and owners, or null if they are as before. */
  show(frame, map) {
    this.colours.only(new Set(frame.rows.map((row) => row.id)));
    this.#tiles(frame);
    this.#blocks(frame, map);
    this.#table(frame);
    this.drafts.node.hidden = $("drafts").hidden = !frame.totals.drafted;
    for (const chart of this.charts) chart.update(this.history);
    showAllWhy(this.history.since(WINDOW_S), frame);
  }

  #tiles(frame) {
    const { rates, totals } = frame;
    say($("n-running"), count(frame.running));
    say($("n-waiting"), count(Math.max(frame.waiting - frame.preempted, 0)));
    say($("n-preempted"), count(frame.preempted));
    say($("n-out"), short(rates.out));
    say($("n-in"), short(rates.in));
    say($("n-hits"), totals.queried ? percent(totals.hit / totals.queried) : "–");
    say($("n-drafts"), totals.drafted ? percent(totals.accepted / totals.drafted) : "–");
    const busy = frame.running + frame.waiting > 0;
    $("engine-dot").classList.toggle("busy", busy);
  }

  #blocks(frame, map) {
    const { total, held, shared, cached, free, size } = frame.blocks;
    say($("map-sum"), `${count(total)} × ${size} tokens, ${percent(held / total)} held`);
    say($("l-held"), count(held - shared));
    say($("l-shared"), count(shared));
    say($("l-cached"), count(cached));
    say($("l-free"), count(free));
    this.#shares([held - shared, shared, cached], total);
    this.#choose(total);
    const states = map?.subarray(0, total);
    const owners = map && new Uint16Array(map.slice(total).buffer);
    this.map.update(states, owners, frame.rows, size);
  }

  #shares(counts, total) {
    [...$("shares").children].forEach((part, i) => {
      part.style.inlineSize = `${(counts[i] / total) * 100}%`;
    });
  }

  /** A large pool begins with a close look: a cell for each block would be too small to see. */
  #choose(total) {
    if (this.total === total) return;
    this.total = total;
    $("map-all").hidden = total <= MANY_BLOCKS;
    this.#showAll(total <= MANY_BLOCKS);
  }

  #showAll(all) {
    $("map-all").setAttribute("aria-pressed", String(all));
    this.map.showAll(all);
  }

  #table(frame) {
    const rows = frame.rows.slice(0, SHOWN_ROWS);
    const alive = new Set(rows.map(nameOf));
    for (const [name, line] of this.lines) {
      if (alive.has(name)) continue;
      line.remove();
      this.lines.delete(name);
    }
    for (const row of rows) this.#line(row);
    const more = frame.running + frame.waiting - rows.length;
    say($("requests-more"), more > 0 ? `and ${plural(more, "more sequence")}` : "");
    $("no-rows").hidden = rows.length > 0;
  }

  #line(row) {
    const name = nameOf(row);
    let line = this.lines.get(name);
    if (!line) {
      line = this.#newLine(row);
      this.lines.set(name, line);
      $("rows").append(line);
    }
    const [id, state, prompt, cached, generated, blocks, time] = line.children;
    id.firstChild.style.backgroundColor = this.colours.of(row.id);
    say(state, row.state);
    state.className = `state ${row.state}`;
    say(prompt, count(row.prompt));
    say(cached, count(row.cached));
    say(generated, count(row.generated));
    say(blocks, count(row.blocks));
    say(time, row.seconds.toFixed(1));
    return line;
  }

  #newLine(row) {
    const shown = row.index ? `${row.id} #${row.index}` : row.id;
    const line = el("tr", { data: { id: row.id } },
      el("th", { scope: "row", title: shown }, el("span", { class: "swatch" }), el("bdi", { text: shorten(shown) })),
      ...Array.from({ length: 6 }, () => el("td")));
    line.addEventListener("pointerenter", () => {
      this.#mark(row.id);
      this.map.highlight(row.id);
    });
    line.addEventListener("pointerleave", () => {
      this.#mark(null);
      this.map.highlight(null);
    });
    return line;
  }

  /** Mark the lines of a request in the table. */
  #mark(id) {
    for (const line of this.lines.values()) line.classList.toggle("marked", line.dataset.id === id);
  }

  #state(text, kind) {
    say($("live-state"), text);
    $("live-state").className = `live-state ${kind}`;
    $("engine-dot").classList.toggle("lost", kind === "bad");
  }
}

const nameOf = (row) => `${row.id} ${row.index}`;

/** Without the dialect's prefix, and only the two ends of what is long. */
function shorten(id) {
  const own = id.replace(/^(chatcmpl|cmpl|resp|msg|gen)[-_]/, "");
  return own.length > 11 ? `${own.slice(0, 4)}…${own.slice(-4)}` : own;
}

/** Base64 of deflate -> bytes. */
export async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function patience(ms, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      done();
    }, { once: true });
  });
}
