// A colour for each request, the same in map and table; and CSS colours as numbers for the canvas.

const GOLDEN = 137.508; // degrees: the first n multiples are spread as evenly as can be
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

const known = new Map();

/** A CSS colour as 0xAABBGGRR, which is how ImageData lies in memory. */
export function packed(css) {
  if (known.size > 5000) known.clear();
  if (!known.has(css)) known.set(css, paint(css));
  return known.get(css);
}

function paint(css) {
  pixel.canvas.width = pixel.canvas.height = 1;
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = css;
  pixel.fillRect(0, 0, 1, 1);
  return new Uint32Array(pixel.getImageData(0, 0, 1, 1).data.buffer)[0];
}

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen === "dark" || (chosen !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
};

export class Colours {
  constructor() {
    this.places = new Map(); // request -> which of the golden hues
  }

  /** CSS colour of a request. */
  of(id) {
    const hue = ((25 + this.#place(id) * GOLDEN) % 360).toFixed(1);
    return isDark() ? `oklch(0.72 0.13 ${hue})` : `oklch(0.6 0.14 ${hue})`;
  }

  /** Forget requests that are gone: their hues are free again. */
  only(ids) {
    for (const id of this.places.keys()) if (!ids.has(id)) this.places.delete(id);
  }

  /** The first place that no other has: few requests at a time get hues far apart. */
  #place(id) {
    if (!this.places.has(id)) {
      const taken = new Set(this.places.values());
      let place = 0;
      while (taken.has(place)) place += 1;
      this.places.set(id, place);
    }
    return this.places.get(id);
  }
}
