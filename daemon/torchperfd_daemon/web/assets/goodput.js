// How the rank-seconds of a run were used, as one bar and its numbers.

import { card, element, table } from "./elements.js";
import { partsBar, swatch } from "./legend.js";
import { digits, duration, percent } from "./numbers.js";

const NAMES = {
  start_up: "start-up", productive: "productive", data_wait: "waiting for data", communication_wait: "waiting for others",
  validation: "validation", checkpoint: "checkpoints", stall: "stalled", restart_gap: "between restarts", shutdown: "shutdown",
};
const COLOURS = {
  start_up: "phase-loss", productive: "phase-backward", data_wait: "phase-data", communication_wait: "phase-collective_wait",
  validation: "phase-validate", checkpoint: "phase-checkpoint", stall: "bad", restart_gap: "phase-h2d", shutdown: "phase-other",
};

/** Return a card for one run of a goodput document. */
export function goodputCard(entry) {
  const buckets = Object.entries(entry.bucket_seconds ?? {}).filter(([, seconds]) => seconds > 0);
  const whole = buckets.reduce((sum, [, seconds]) => sum + seconds, 0);
  const parts = buckets.map(([name, seconds]) => ({ name: `${NAMES[name] ?? name} ${percent(seconds / whole)}`, colour: COLOURS[name], value: seconds }));
  const columns = [
    { name: "Used for", cell: ([name]) => [swatch(COLOURS[name]), NAMES[name] ?? name] },
    { name: "Share", numeric: true, cell: ([, seconds]) => percent(seconds / whole) },
    { name: "Rank time", numeric: true, cell: ([, seconds]) => duration(seconds) },
    { name: "GPU hours lost", numeric: true, cell: ([name]) => hours(entry.lost_gpu_hours?.[name]) },
  ];
  const restarts = entry.restarts ? `, ${entry.restarts} restarts` : "";
  return card(
    "Goodput",
    { note: `Share of rank-seconds in which training made progress, since the run began${restarts}.` },
    element("p", { class: "figure" }, percent(entry.goodput_ratio)),
    partsBar(parts, whole, `Goodput ${percent(entry.goodput_ratio)}: ${parts.map((part) => part.name).join(", ")}`),
    table("Use of rank-seconds", columns, buckets.sort((a, b) => b[1] - a[1])),
  );
}

function hours(lost) {
  return !(lost > 0) ? "–" : lost < 0.005 ? "< 0.01" : digits(lost);
}
