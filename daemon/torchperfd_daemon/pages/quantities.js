// Quantities as text, as `torchperfd analyze` prints them.

import { digits } from "../web/assets/numbers.js";

/** Return a whole number. */
export function integer(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** Return a number with so many decimal places; what rounds to zero has no sign. */
export function decimal(value, digits) {
  const shown = Math.abs(value) < 0.5 / 10 ** digits ? 0 : value;
  return shown.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Return a time in microseconds with three significant digits. */
export function time(us) {
  const size = Math.abs(us);
  if (size >= 1e6) return `${digits(us / 1e6)} s`;
  return size >= 1e3 ? `${digits(us / 1e3)} ms` : `${digits(us)} µs`;
}

/** Return a number of bytes. */
export function bytes(count) {
  const size = Math.abs(count);
  if (size < 1000) return `${integer(count)} B`;
  const [scaled, unit] = size >= 1e9 ? [count / 1e9, "GB"] : size >= 1e6 ? [count / 1e6, "MB"] : [count / 1e3, "kB"];
  return `${decimal(scaled, 1)} ${unit}`;
}

/** Return a share of one as percent. */
export function percent(share) {
  return `${decimal(100 * share, 1)} %`;
}

/** Return a number with its sign; what is rounded to zero has none. */
export function signed(value, shown) {
  if (!/[1-9]/.test(shown)) return shown;
  return value > 0 ? `+${shown}` : `−${shown}`;
}

/** Return the name of a field as words. */
export function words(key) {
  return key.replace(/_(us|bytes|pct|ns)$/, "").replaceAll("_", " ");
}

/** Return the value of a field as text: the name of the field has its unit. */
export function quantity(key, value) {
  if (value === null) return "–";
  if (typeof value !== "number") return String(value);
  if (/_us(_|$)/.test(key)) return time(value);
  if (/bytes_per_second$/.test(key)) return `${bytes(value)}/s`;
  if (/(^|_)bytes$/.test(key)) return bytes(value);
  if (/_pct$/.test(key)) return `${decimal(value, 1)} %`;
  if (/(^|_)share(_|$)/.test(key)) return percent(value);
  return Number.isInteger(value) ? integer(value) : decimal(value, 3);
}
