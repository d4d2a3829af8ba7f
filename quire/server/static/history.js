// The last minutes of frames as series for the charts: rates from counters, percentiles as they came.

const KEEP_S = 120;
const RATE_S = 1.2; // a rate is over at least so much time, so that it does not jitter

export class History {
  constructor() {
    this.frames = [];
  }

  /** Put a frame in; an engine that began anew begins a new history. */
  add(frame) {
    const last = this.frames.at(-1);
    if (last && (frame.at < last.at || frame.totals.steps < last.totals.steps)) this.frames = [];
    this.frames.push(frame);
    const from = this.frames.findIndex((one) => frame.at - one.at <= KEEP_S);
    if (from > 0) this.frames.splice(0, from);
    frame.rates = this.#rates(this.frames.length - 1);
  }

  /** The oldest frame of the last `window` seconds. */
  since(window) {
    return this.frames.find((frame) => this.last.at - frame.at <= window);
  }

  get last() {
    return this.frames.at(-1);
  }

  /** [[at, value or null]] of the last `window` seconds. A gap in time is a gap in the line. */
  series(valueOf, window) {
    const end = this.last?.at ?? 0;
    const points = [];
    let before = null;
    for (const frame of this.frames) {
      if (end - frame.at > window) continue;
      if (before !== null && frame.at - before > 3) points.push([before, null]);
      points.push([frame.at, valueOf(frame)]);
      before = frame.at;
    }
    return points;
  }

  #rates(i) {
    const now = this.frames[i];
    let j = i;
    while (j > 0 && now.at - this.frames[j].at < RATE_S) j -= 1;
    const then = this.frames[j];
    const span = now.at - then.at;
    if (span <= 0) return { out: 0, in: 0, steps: 0, draftSteps: null };
    const rate = (name) => (now.totals[name] - then.totals[name]) / span;
    const drafts = rate("draft_rows");
    return {
      out: rate("generated"), in: rate("prompt"), steps: rate("steps"),
      draftSteps: drafts ? 1 + rate("accepted") / drafts : null,
    };
  }
}
