// The map of KV blocks, on a canvas: a cell for each block of the pool, from 60 to 100,000; or, where
// those would be too small to see, larger cells for all held blocks and, as far as there is room, for
// cached ones (the last held first) and free ones.
// Held blocks have their request's colour. Pointer or arrow keys choose a block; what it is stands
// below in words, and the other blocks of its request stay while the rest fades.

import { count, plural } from "./format.js";
import { $, eachFrame, el } from "./dom.js";
import { packed } from "./colours.js";

const FREE = 0;
const CACHED = 1;
const HELD = 2;
const SHARED = 3;
const NAMES = ["free", "cached", "held", "shared"];
const LARGEST = 18; // CSS pixels of a cell
const TALLEST = 300; // of the map of all blocks
const CLOSE_HEIGHT = 198; // of the map of those in use
const CLOSE_CELLS = [18, 14, 11, 9, 7, 6, 5, 4, 3, 2, 1];
const GAP_FROM = 5; // cells this large have a gap between them

export class BlockMap {
  /** colourOf(id) -> CSS colour; onChoose(id or null): a request is pointed at.
   * said: where the block pointed at is told; note: what is not drawn.
   */
  constructor(parent, said, note, colourOf, onChoose) {
    this.said = said;
    this.note = note;
    this.colourOf = colourOf;
    this.onChoose = onChoose;
    this.states = new Uint8Array(0);
    this.owners = new Uint16Array(0);
    this.rows = [];
    this.size = 16;
    this.at = -1; // the block that is pointed at
    this.request = null; // the one that stands out
    this.all = true;
    this.heldAt = new Uint32Array(0); // number of the update in which a block was last held
    this.updates = 0;
    this.canvas = el("canvas", {
      tabindex: "0", role: "img", "aria-roledescription": "map of KV blocks", "aria-describedby": said.id,
    });
    parent.append(this.canvas);
    this.cells = document.createElement("canvas"); // a pixel a block
    this.draw = eachFrame(() => this.#draw());
    new ResizeObserver(this.draw).observe(parent);
    this.#wire();
  }

  /** states: a byte a block; owners: k + 1 is rows[k]. Null: as before. */
  update(states, owners, rows, size) {
    if (states) [this.states, this.owners] = [states, owners];
    this.#remember();
    [this.rows, this.size] = [rows, size];
    if (this.at >= this.states.length) this.at = -1;
    if (this.at >= 0) this.#choose(); // the block may have another owner by now
    this.#tell();
    this.draw();
  }

  /** Note when each block was last held: a close look keeps those that were cached just now. */
  #remember() {
    if (this.heldAt.length !== this.states.length) this.heldAt = new Uint32Array(this.states.length);
    this.updates += 1;
    for (let i = 0; i < this.states.length; i += 1) if (this.states[i] >= HELD) this.heldAt[i] = this.updates;
  }

  /** Show all blocks, or a close look at those held. */
  showAll(all) {
    this.all = all;
    this.draw();
  }

  /** Let the blocks of a request stand out; null: none. */
  highlight(request) {
    this.request = request;
    this.draw();
  }

  /** Colours changed (dark, light). */
  recolour() {
    this.palette = null;
    this.draw();
  }

  // -- drawing ------------------------------------------------------------------------------------

  /** {cell, columns, lines, order}: size of a cell, and which block stands where (null: as numbered). */
  #layout() {
    const width = Math.max(this.canvas.parentElement.clientWidth, 20);
    return this.all ? this.#layoutAll(width) : this.#layoutClose(width);
  }

  #layoutAll(width) {
    const n = Math.max(this.states.length, 1);
    const fits = (cell) => Math.ceil(n / Math.floor(width / cell)) * cell <= TALLEST;
    let cell = LARGEST;
    while (cell > 1 && !fits(cell)) cell -= 1;
    const columns = Math.floor(width / cell);
    return { cell, columns, lines: Math.ceil(n / columns), order: null };
  }

  #layoutClose(width) {
    const { states } = this;
    const [held, cached, free] = [[], [], []];
    for (let block = 0; block < states.length; block += 1) {
      (states[block] >= HELD ? held : states[block] === CACHED ? cached : free).push(block);
    }
    const room = (cell) => Math.floor(width / cell) * Math.floor(CLOSE_HEIGHT / cell);
    const cell = CLOSE_CELLS.find((one) => room(one) >= held.length * 1.5) ?? 1;
    const columns = Math.floor(width / cell);
    const left = Math.max(room(cell) - held.length, 0);
    if (cached.length > left) cached.sort((a, b) => this.heldAt[b] - this.heldAt[a] || a - b);
    const used = [...held, ...cached.slice(0, left)].sort((a, b) => a - b);
    const order = Uint32Array.from([...used, ...free.slice(0, Math.max(left - cached.length, 0))]);
    return { cell, columns, lines: Math.ceil(order.length / columns), order };
  }

  #draw() {
    const { cell, columns, lines, order } = (this.shape = this.#layout());
    const dpr = window.devicePixelRatio || 1;
    const { canvas } = this;
    const [width, height] = [columns * cell, lines * cell];
    if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) {
      [canvas.width, canvas.height] = [Math.round(width * dpr), Math.round(height * dpr)];
      [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
    }
    this.note.textContent = this.at >= 0 || !order ? "" : this.#missing(order.length);
    this.#fillCells(columns, lines, order);
    const paint = canvas.getContext("2d");
    paint.imageSmoothingEnabled = false;
    paint.clearRect(0, 0, canvas.width, canvas.height);
    paint.drawImage(this.cells, 0, 0, canvas.width, canvas.height);
    paint.setTransform(dpr, 0, 0, dpr, 0, 0);
    if (cell >= GAP_FROM) this.#gaps(paint, cell, columns, lines);
    if (cell >= GAP_FROM) this.#marks(paint, this.shape);
    if (this.at >= 0) this.#cursor(paint, this.shape);
    paint.setTransform(1, 0, 0, 1, 0, 0);
  }

  #fillCells(columns, lines, order) {
    this.palette ??= paletteOf();
    const { cells, states, owners, palette } = this;
    [cells.width, cells.height] = [columns, lines];
    const context = cells.getContext("2d");
    const image = context.createImageData(columns, lines);
    const pixels = new Uint32Array(image.data.buffer);
    const byRow = this.rows.map((row) => packed(this.colourOf(row.id)));
    const faded = (colour) => ((colour & 0xffffff) | (0x38 << 24)) >>> 0;
    const n = order ? order.length : states.length;
    for (let i = 0; i < n; i += 1) {
      const block = order ? order[i] : i;
      const owner = owners[block];
      let colour = palette[states[block]];
      if (states[block] === HELD && owner) colour = byRow[owner - 1] ?? colour;
      if (this.request !== null && this.rows[owner - 1]?.id !== this.request) colour = faded(colour);
      pixels[i] = colour;
    }
    context.putImageData(image, 0, 0);
  }

  #gaps(paint, cell, columns, lines) {
    const gap = cell >= 10 ? 2 : 1;
    for (let x = 1; x <= columns; x += 1) paint.clearRect(x * cell - gap, 0, gap, lines * cell);
    for (let y = 1; y <= lines; y += 1) paint.clearRect(0, y * cell - gap, columns * cell, gap);
  }

  /** Where there is room the states differ by more than colour: cached are hollow, shared dotted. */
  #marks(paint, { cell, columns, order }) {
    const gap = cell >= 10 ? 2 : 1;
    const inset = cell >= 10 ? 2 : 1;
    const side = cell - gap;
    const dot = Math.max(2, Math.round(side / 3));
    const n = order ? order.length : this.states.length;
    paint.fillStyle = getComputedStyle(this.canvas).backgroundColor;
    for (let i = 0; i < n; i += 1) {
      const state = this.states[order ? order[i] : i];
      if (state !== CACHED && state !== SHARED) continue;
      const [x, y] = [(i % columns) * cell, Math.floor(i / columns) * cell];
      if (state === CACHED) paint.fillRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
      else paint.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
    }
  }

  #cursor(paint, { cell, columns }) {
    const place = this.#placeOf(this.at);
    if (place < 0) return;
    const [x, y] = [(place % columns) * cell, Math.floor(place / columns) * cell];
    const side = Math.max(cell, 5);
    const shift = (side - cell) / 2;
    paint.lineWidth = 2;
    paint.strokeStyle = getComputedStyle(this.canvas).color;
    paint.strokeRect(x - shift, y - shift, side, side);
  }

  // -- pointing -----------------------------------------------------------------------------------

  #wire() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.#point(this.#under(event)));
    canvas.addEventListener("pointerdown", (event) => this.#point(this.#under(event)));
    canvas.addEventListener("pointerleave", () => this.#point(-1));
    canvas.addEventListener("blur", () => this.#point(-1));
    canvas.addEventListener("focus", () => {
      if (canvas.matches(":focus-visible") && this.at < 0) this.#point(this.#blockAt(0));
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  #placeOf(block) {
    const order = this.shape?.order;
    return order ? order.indexOf(block) : block;
  }

  #blockAt(place) {
    const order = this.shape?.order;
    const n = order ? order.length : this.states.length;
    if (place < 0 || place >= n) return -1;
    return order ? order[place] : place;
  }

  #under(event) {
    const { cell, columns } = this.shape ?? this.#layout();
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / cell);
    if (x < 0 || x >= columns) return -1;
    return this.#blockAt(Math.floor((event.clientY - box.top) / cell) * columns + x);
  }

  #key(event) {
    const { columns, order } = this.shape ?? this.#layout();
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    const last = (order ? order.length : this.states.length) - 1;
    const to = event.key === "Home" ? 0 : event.key === "End" ? last : Math.max(this.#placeOf(this.at), 0) + step;
    if (Number.isNaN(to) || last < 0) return;
    event.preventDefault();
    this.#point(this.#blockAt(Math.min(Math.max(to, 0), last)));
  }

  #point(block) {
    if (block === this.at) return;
    this.at = block;
    this.#choose();
    this.#tell();
    this.draw();
  }

  #choose() {
    this.request = this.rows[this.owners[this.at] - 1]?.id ?? null;
    this.onChoose(this.request);
  }

  #tell() {
    const total = this.states.length;
    this.canvas.setAttribute("aria-label", `Map of ${plural(total, "KV block")} of ${this.size} tokens. Arrow keys go from block to block.`);
    const text = this.at < 0 ? "" : this.#words(this.at);
    if (this.said.textContent !== text) this.said.textContent = text;
  }

  #missing(shown) {
    const hidden = this.states.length - shown;
    return hidden ? `A close look: ${plural(hidden, "cached or free block is", "cached or free blocks are")} not drawn.` : "";
  }

  #words(block) {
    const state = this.states[block];
    const row = this.rows[this.owners[block] - 1];
    if (state === FREE || state === CACHED || !row) return `Block ${count(block)}: ${NAMES[state]}`;
    const first = state === SHARED ? "shared, first by" : "held by";
    return `Block ${count(block)}: ${first} ${row.id} (${plural(row.blocks, "block")}, ${plural(row.prompt + row.generated, "token")})`;
  }
}

/** The colours of the legend's swatches, by state. They follow the theme by themselves. */
function paletteOf() {
  const of = (name) => {
    const swatch = $("legend").querySelector(`[data-colour="${name}"]`);
    return packed(getComputedStyle(swatch).getPropertyValue("outline-color"));
  };
  return NAMES.map(of);
}
