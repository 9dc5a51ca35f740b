// Charts over time: the step's p50 and p95, and the phases stacked. A second without a step is a gap.

import { BOTTOM, LEFT, RIGHT, TOP, frame, marks } from "./axes.js";
import { colour } from "./colours.js";
import { clock, duration } from "./numbers.js";
import { colourOf, label, ordered } from "./phases.js";
import { largest, percentile } from "./statistics.js";
import { Surface } from "./surface.js";
import { attachTip } from "./tip.js";

class TimeChart {
  constructor(description, height) {
    this.surface = new Surface(description, (...to) => this._drawn(...to), height);
    this.data = null;
    attachTip(this.surface.canvas, (event) => this._under(event));
  }

  /** `data` is {from, until, marks, …columns by second}; null draws nothing. */
  show(data) {
    this.data = data;
    this.surface.draw();
  }

  _drawn(context, width, height) {
    if (this.data) this.draw(context, width, height, this.data);
  }

  _under(event) {
    if (!this.data) return null;
    const box = this.surface.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    if (share < 0 || share > 1) return null;
    const slot = Math.round(share * (this.data.until - this.data.from));
    const near = this.data.marks.filter((mark) => Math.abs(mark.unix_seconds - this.data.from - slot) <= 2).map(markWords);
    return [clock(this.data.from + slot), ...this.read(this.data, slot), ...near];
  }
}

/** Return a mark in words. */
export function markWords(mark) {
  const where = mark.rank === null || mark.rank === undefined ? "" : ` of rank ${mark.rank}`;
  return `${mark.kind}${where}${mark.text ? `: ${mark.text}` : ""}`;
}

/** The median and the 95th percentile of the ranks' step times, second by second. */
export class StepTimes extends TimeChart {
  constructor() {
    super("Step time over the last ten minutes", 190);
  }

  draw(context, width, height, data) {
    // From zero, so that a change looks as large as it is; far outliers leave by the top.
    const top = Math.min(largest(data.p95, 1), 3 * (percentile(data.p50, 0.5) ?? Infinity)) * 1.12 || 1;
    const { x, y } = frame(context, width, height, data, top);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, width - LEFT - RIGHT, height - BOTTOM - TOP);
    context.clip();
    for (const [column, name, wide] of [[data.p95, "p95", 1.5], [data.p50, "p50", 2]]) {
      context.strokeStyle = colour(name);
      context.lineWidth = wide;
      line(context, column, data.from, x, y);
    }
    context.restore();
    marks(context, height, data, x, data.marks);
    const last = data.p50.findLast(Number.isFinite);
    this.surface.describe(
      `Step time from ${clock(data.from)} to ${clock(data.until)}: newest median ${duration(last)}, median of all seconds ` +
        `${duration(percentile(data.p50, 0.5))}, highest 95th percentile ${duration(largest(data.p95, NaN))}.`,
    );
  }

  read(data, slot) {
    if (!Number.isFinite(data.p50[slot])) return ["no step ended in this second"];
    return [`p50 ${duration(data.p50[slot])}`, `p95 ${duration(data.p95[slot])}`, `of ${data.reporting[slot]} ranks`];
  }
}

/** The mean step by phase, second by second. */
export class PhasesStacked extends TimeChart {
  constructor() {
    super("Phases over the last ten minutes", 190);
  }

  draw(context, width, height, data) {
    const names = ordered(data.phases.keys());
    const sums = data.p50.map((_, slot) => names.reduce((sum, name) => sum + data.phases.get(name)[slot], 0));
    const top = Math.min(largest(sums, 1), 3 * (percentile(sums, 0.5) ?? Infinity)) * 1.12 || 1;
    const { x, y } = frame(context, width, height, data, top);
    const count = data.until - data.from + 1;
    const room = width - LEFT - RIGHT;
    const every = Math.max(1, Math.ceil(count / room));
    for (let first = 0; first < count; first += every) {
      let best = first;
      for (let slot = first; slot < Math.min(count, first + every); slot += 1) if (!(sums[slot] <= sums[best])) best = slot;
      if (!Number.isFinite(sums[best])) continue;
      // Whole pixels: edges between would show the background through.
      const left = Math.floor(LEFT + (first * room) / count);
      const wide = Math.max(1, Math.floor(LEFT + ((first + every) * room) / count) - left);
      let bottom = 0;
      for (const name of names) {
        const value = data.phases.get(name)[best];
        if (!(value > 0)) continue;
        context.fillStyle = colour(colourOf(name));
        const high = Math.max(TOP, y(bottom + value));
        context.fillRect(left, high, wide, Math.max(0, y(bottom) - high));
        bottom += value;
      }
    }
    marks(context, height, data, x, data.marks);
    const means = names.map((name) => `${label(name)} ${duration(percentile([...data.phases.get(name)], 0.5))}`);
    this.surface.describe(`A step by phase, mean of the ranks, medians over the window: ${means.join(", ")}.`);
  }

  read(data, slot) {
    if (!Number.isFinite(data.p50[slot])) return ["no step ended in this second"];
    return ordered(data.phases.keys())
      .filter((name) => data.phases.get(name)[slot] > 0)
      .map((name) => `${label(name)} ${duration(data.phases.get(name)[slot])}`);
  }
}

function line(context, column, from, x, y) {
  context.beginPath();
  let drawing = false;
  column.forEach((value, slot) => {
    if (!Number.isFinite(value)) drawing = false;
    else if (drawing) context.lineTo(x(from + slot), y(value));
    else {
      context.moveTo(x(from + slot), y(value));
      // A second between two gaps is a point.
      if (!Number.isFinite(column[slot + 1])) context.lineTo(x(from + slot) + 1.5, y(value));
      drawing = true;
    }
  });
  context.stroke();
}
