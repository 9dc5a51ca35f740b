// Numbers as text: three significant digits, and a unit.

/** Return a number with three significant digits. */
export function digits(value) {
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  const places = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2;
  return value.toFixed(places);
}

/** Return a duration; seconds in. Unknown is a dash, never a zero. */
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size >= 5400) return `${digits(seconds / 3600)} h`;
  if (size >= 90) return `${digits(seconds / 60)} min`;
  if (size >= 1) return `${digits(seconds)} s`;
  if (size >= 1e-3) return `${digits(seconds * 1e3)} ms`;
  return size === 0 ? "0 ms" : `${digits(seconds * 1e6)} µs`;
}

/** Return an age: whole seconds above ten. */
export function age(seconds) {
  if (!isNumber(seconds)) return "–";
  const kept = Math.max(0, seconds);
  if (kept < 9.95) return `${kept.toFixed(1)} s`;
  if (kept < 120) return `${Math.round(kept)} s`;
  if (kept < 7200) return `${Math.round(kept / 60)} min`;
  return kept < 172800 ? `${Math.round(kept / 3600)} h` : `${Math.round(kept / 86400)} days`;
}

/** Return a share of one as percent. */
export function percent(share) {
  if (!isNumber(share)) return "–";
  const value = 100 * share;
  return `${Math.abs(value) < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

const MAX_PERCENT = 5;

/** Return a difference in percent, with its sign; what rounds to zero has none. From six times on it is a factor. */
export function change(share) {
  if (!isNumber(share)) return "–";
  if (share >= MAX_PERCENT) return `${digits(share + 1)}×`;
  const shown = (100 * share).toFixed(1);
  if (Number(shown) === 0) return "0.0 %";
  return `${share > 0 ? "+" : "−"}${shown.replace("-", "")} %`;
}

/** Return a number of bytes. */
export function bytes(count) {
  if (!isNumber(count)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = count;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : digits(value)} ${units[unit]}`;
}

/** Return a rate, or a dash. */
export function rate(perSecond) {
  return isNumber(perSecond) ? `${digits(perSecond)}/s` : "–";
}

/** Return a time of day in this browser's zone; Unix seconds in. */
export function clock(unixSeconds) {
  if (!isNumber(unixSeconds)) return "–";
  const at = new Date(unixSeconds * 1000);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** Return a date with its time of day. */
export function moment(unixSeconds) {
  if (!isNumber(unixSeconds)) return "–";
  const at = new Date(unixSeconds * 1000);
  const day = `${at.getFullYear()}-${String(at.getMonth() + 1).padStart(2, "0")}-${String(at.getDate()).padStart(2, "0")}`;
  return `${day} ${clock(unixSeconds)}`;
}

/** Return ranks as ranges: "0–3, 7". */
export function ranges(ranks) {
  const sorted = [...ranks].sort((a, b) => a - b);
  const parts = [];
  for (let at = 0; at < sorted.length; at += 1) {
    const first = sorted[at];
    while (at + 1 < sorted.length && sorted[at + 1] === sorted[at] + 1) at += 1;
    parts.push(sorted[at] === first ? `${first}` : `${first}–${sorted[at]}`);
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")} …` : parts.join(", ");
}

/** Return "1 rank", "2 ranks". */
export function count(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

/** Return whether a value is a finite number. */
export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}
