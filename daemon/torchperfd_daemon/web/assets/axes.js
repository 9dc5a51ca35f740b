// Axes and marks that all charts over time share.

import { colour } from "./colours.js";
import { clock, duration } from "./numbers.js";

export const LEFT = 52;
export const BOTTOM = 20;
export const TOP = 14;
export const RIGHT = 8;

const MARKS = { checkpoint: "C", validation: "V", capture: "P", verdict: "!", state: "S", change: "Δ" };

/** Return steps of 1, 2 or 5 that divide a range into at most `most` parts. */
export function niceStep(range, most) {
  const raw = range / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw) ?? 10 * power;
}

/** Draw the grid of a chart of seconds over time; returns functions from values to places. */
export function frame(context, width, height, { from, until }, top, format = duration) {
  const x = (at) => LEFT + ((at - from) / Math.max(1, until - from)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - (value / (top || 1)) * (height - BOTTOM - TOP);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("soft");
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const step = niceStep(top || 1, 4);
  for (let value = 0; value <= (top || 1) * 1.0001; value += step) {
    const at = Math.round(y(value)) + 0.5;
    context.beginPath();
    context.moveTo(LEFT, at);
    context.lineTo(width - RIGHT, at);
    context.stroke();
    context.fillText(format(value), LEFT - 6, at);
  }
  times(context, width, height, from, until, x);
  return { x, y };
}

/** Write times of day below a chart. */
export function times(context, width, height, from, until, x) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("soft");
  context.textBaseline = "alphabetic";
  context.textAlign = "center";
  const spans = [5, 10, 15, 30, 60, 120, 300];
  const room = Math.max(2, Math.floor((width - LEFT) / 90));
  const step = spans.find((span) => (until - from) / span <= room) ?? 600;
  for (let at = Math.ceil(from / step) * step; at <= until; at += step) {
    const place = x(at);
    if (place > LEFT + 20 && place < width - 26) context.fillText(clock(at), place, height - 5);
  }
}

/** Draw checkpoints, validations, captures and changes of verdict as lines with a letter. */
export function marks(context, height, { from, until }, x, list) {
  context.font = "bold 10px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "top";
  let free = -Infinity;
  for (const mark of [...list].sort((one, other) => one.unix_seconds - other.unix_seconds)) {
    if (mark.unix_seconds < from || mark.unix_seconds > until) continue;
    const at = Math.round(x(mark.unix_seconds)) + 0.5;
    context.strokeStyle = colour("mark");
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(at, TOP);
    context.lineTo(at, height - BOTTOM);
    context.stroke();
    context.setLineDash([]);
    if (at - free < 10) continue;
    free = at;
    context.fillStyle = colour("ink");
    context.fillText(MARKS[mark.kind] ?? "•", at, 1);
  }
}

export const MARK_WORDS = "Marks: C checkpoint, V validation, P capture, ! change of verdict, S change of state, Δ onset of the slowdown.";
