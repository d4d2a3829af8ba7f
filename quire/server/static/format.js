// Numbers as a person reads them.

const group = new Intl.NumberFormat("en-US");

/** 12,345 */
export const count = (n) => group.format(Math.round(n));

/** 1234 -> 1.2k, for tight places */
export function short(n) {
  if (n < 1000) return n < 10 && n % 1 ? n.toFixed(1) : String(Math.round(n));
  if (n < 1e6) return `${(n / 1e3).toFixed(n < 1e4 ? 1 : 0)}k`;
  return `${(n / 1e6).toFixed(1)}M`;
}

/** Seconds with the unit that fits. */
export function seconds(s) {
  if (s === null || s === undefined || Number.isNaN(s)) return "–";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.1) return `${(s * 1e3).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1e3)} ms`;
  if (s < 100) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
}

/** 0.1234 -> 12.3 % */
export function percent(p) {
  if (p > 0.9995) return "100 %";
  if (p === 0) return "0 %";
  if (p < 0.0001) return "< 0.01 %";
  return `${(p * 100).toFixed(p < 0.01 ? 2 : 1)} %`;
}

/** n things */
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
