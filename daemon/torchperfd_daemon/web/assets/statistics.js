// Pure functions over columns of numbers: percentiles, samples of long columns, and the choice of ranks to draw.

/** Return a percentile (0 to 1) of numbers, or null without any. */
export function percentile(values, share) {
  const sorted = Float64Array.from(values.filter(Number.isFinite)).sort();
  if (sorted.length === 0) return null;
  const at = share * (sorted.length - 1);
  const low = Math.floor(at);
  const high = Math.min(sorted.length - 1, low + 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - low);
}

/** Return the largest finite value, or a fallback. */
export function largest(values, fallback = 0) {
  let found = -Infinity;
  for (const value of values) if (Number.isFinite(value) && value > found) found = value;
  return found === -Infinity ? fallback : found;
}

/**
 * Return which steps to draw when there are more steps than bars: of each group of neighbours the longest,
 * so that an outlier stays visible. `every` is the size of a group; 1 means that each step is drawn.
 */
export function sampleLongest(durations, bars) {
  const every = Math.max(1, Math.ceil(durations.length / Math.max(1, bars)));
  const chosen = [];
  for (let first = 0; first < durations.length; first += every) {
    let best = first;
    for (let at = first + 1; at < Math.min(first + every, durations.length); at += 1) {
      if (!(durations[at] <= durations[best])) best = at;
    }
    chosen.push(best);
  }
  return { chosen, every };
}

/**
 * Choose the ranks to draw where there are too many: first those that need attention (missing, stalled, named by the
 * verdict), then those whose own work differs most from the median, then ranks at even percentiles of own work.
 */
export function chooseRanks(ranks, limit, named = []) {
  if (ranks.length <= limit) return { shown: ranks, outliers: 0, spread: 0 };
  const chosen = new Set(ranks.filter((rank) => rank.attention || named.includes(rank.rank)).slice(0, limit));
  const measured = ranks.filter((rank) => Number.isFinite(rank.ownSeconds) && !chosen.has(rank));
  const middle = percentile(measured.map((rank) => rank.ownSeconds), 0.5) ?? 0;
  const far = [...measured].sort((a, b) => Math.abs(b.ownSeconds - middle) - Math.abs(a.ownSeconds - middle));
  const half = Math.ceil((limit - chosen.size) / 2);
  for (const rank of far.slice(0, half)) chosen.add(rank);
  const outliers = chosen.size;
  const rest = measured.filter((rank) => !chosen.has(rank)).sort((a, b) => a.ownSeconds - b.ownSeconds);
  const left = limit - chosen.size;
  for (let at = 0; at < left && rest.length > 0; at += 1) {
    chosen.add(rest[Math.round((at * (rest.length - 1)) / Math.max(1, left - 1))]);
  }
  const shown = ranks.filter((rank) => chosen.has(rank));
  return { shown, outliers, spread: shown.length - outliers };
}

/**
 * Lay seconds of several ranks over one time axis. Returns for each second of [from, until] the p50 and p95 of the
 * ranks' step times, and the mean of each phase; NaN where no rank made a step.
 */
export function acrossRanks(columns, from, until) {
  const width = Math.max(0, until - from + 1);
  const reporting = new Uint16Array(width);
  const slots = columns.map(({ at, seconds }) =>
    Int32Array.from(at, (second, row) => {
      const slot = second - from;
      if (slot < 0 || slot >= width || !Number.isFinite(seconds[row])) return -1;
      reporting[slot] += 1;
      return slot;
    }),
  );
  // The times of one second lie side by side, to be sorted in place.
  const most = columns.length;
  const times = new Float64Array(width * most);
  const filled = new Uint16Array(width);
  const phases = new Map();
  columns.forEach(({ seconds, phases: parts }, column) => {
    const places = slots[column];
    for (let row = 0; row < places.length; row += 1) {
      const slot = places[row];
      if (slot >= 0) times[slot * most + filled[slot]++] = seconds[row];
    }
    for (const [name, part] of Object.entries(parts)) {
      let sums = phases.get(name);
      if (!sums) phases.set(name, (sums = new Float64Array(width)));
      for (let row = 0; row < places.length; row += 1) if (places[row] >= 0) sums[places[row]] += part[row] ?? 0;
    }
  });
  for (const sums of phases.values()) {
    for (let slot = 0; slot < width; slot += 1) sums[slot] = reporting[slot] ? sums[slot] / reporting[slot] : NaN;
  }
  const p50 = Array(width).fill(NaN);
  const p95 = Array(width).fill(NaN);
  for (let slot = 0; slot < width; slot += 1) {
    const number = filled[slot];
    if (number === 0) continue;
    const sorted = times.subarray(slot * most, slot * most + number).sort();
    p50[slot] = sorted[Math.round(0.5 * (number - 1))];
    p95[slot] = sorted[Math.round(0.95 * (number - 1))];
  }
  return { p50, p95, phases, reporting };
}

/** Return the median of each slot over rows of equal length; NaN where no row has a value. */
export function medians(rows, width) {
  const values = new Float64Array(rows.length);
  return Float64Array.from({ length: width }, (_, slot) => {
    let count = 0;
    for (const row of rows) if (row[slot] === row[slot]) values[count++] = row[slot];
    if (count === 0) return NaN;
    const sorted = values.subarray(0, count).sort();
    const half = count >> 1;
    return count % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  });
}
