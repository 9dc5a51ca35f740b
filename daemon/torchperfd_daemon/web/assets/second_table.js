// The charts over time as a table: one row for ten seconds, the newest first.

import { table } from "./elements.js";
import { clock, duration } from "./numbers.js";
import { label, ordered } from "./phases.js";
import { percentile } from "./statistics.js";

const EVERY_S = 10;

/** Return the table of what the charts of step time and phases draw. */
export function secondTable({ from, until, p50, p95, phases }) {
  const rows = [];
  for (let first = until - from + 1; first > 0; first -= EVERY_S) {
    const [begin, end] = [Math.max(0, first - EVERY_S), first];
    rows.push({ at: from + begin, middle: of(p50, begin, end), high: of(p95, begin, end), slots: [begin, end] });
  }
  const columns = [
    { name: "From", cell: (row) => clock(row.at) },
    { name: "p50", numeric: true, cell: (row) => duration(row.middle) },
    { name: "p95", numeric: true, cell: (row) => duration(row.high) },
    ...ordered(phases.keys()).map((name) => ({
      name: label(name),
      numeric: true,
      cell: (row) => duration(of([...phases.get(name)], ...row.slots)),
    })),
  ];
  return table("Medians of ten seconds each, the newest first", columns, rows);
}

// A median of seconds without a step is unknown: a dash.
function of(column, begin, end) {
  return percentile(column.slice(begin, end), 0.5) ?? NaN;
}
