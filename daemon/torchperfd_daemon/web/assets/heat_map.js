// The heat map: how much more own work a rank has than the median of the ranks, second by second.

import { LEFT, RIGHT, times } from "./axes.js";
import { colour, pixel, scale } from "./colours.js";
import { element } from "./elements.js";
import { change, clock, duration } from "./numbers.js";
import { medians } from "./statistics.js";
import { Pixels, Surface } from "./surface.js";
import { attachTip } from "./tip.js";

const SHADES = 32;
/** An excess of this share of the median has the darkest colour. */
const DARKEST = 0.5;
const BELOW = 20;

export class HeatMap {
  constructor() {
    this._surface = new Surface("Excess own work", (...to) => this._draw(...to), () => this._height());
    this.box = element("div", {}, this._surface.box);
    this._data = null;
    attachTip(this._surface.canvas, (event) => this._under(event));
  }

  /**
   * Show rows of {rank, seconds} over the seconds [from, until]. A second without data is hatched, never pale.
   */
  show(rows, from, until) {
    const width = until - from + 1;
    const grid = rows.map(({ seconds }) => {
      const own = new Float64Array(width).fill(NaN);
      const work = seconds?.own_seconds ?? seconds?.step_seconds ?? [];
      const at = seconds?.unix_seconds ?? [];
      for (let row = 0; row < at.length; row += 1) {
        const slot = at[row] - from;
        if (slot >= 0 && slot < width && Number.isFinite(work[row])) own[slot] = work[row];
      }
      return own;
    });
    const middle = medians(grid, width);
    this._data = { rows, grid, middle, from, until };
    this._surface.describe(this._words());
    this._surface.draw();
  }

  _height() {
    return this._rowHeight() * Math.max(1, this._data?.rows.length ?? 1) + BELOW;
  }

  _rowHeight() {
    const rows = this._data?.rows.length ?? 1;
    return rows <= 8 ? 18 : rows <= 16 ? 12 : rows <= 32 ? 8 : 5;
  }

  _words() {
    const { rows, grid, middle } = this._data;
    const means = grid.map((own, index) => {
      let sum = 0;
      let seconds = 0;
      for (let slot = 0; slot < own.length; slot += 1) {
        if (!(middle[slot] > 0) || own[slot] !== own[slot]) continue;
        sum += own[slot] / middle[slot] - 1;
        seconds += 1;
      }
      return { rank: rows[index].rank, mean: seconds ? sum / seconds : NaN };
    });
    const known = means.filter((entry) => Number.isFinite(entry.mean)).sort((a, b) => b.mean - a.mean);
    if (known.length === 0) return "Own work of ranks over time: no data yet.";
    return `Own work of ${rows.length} ranks over time. Most above the median: rank ${known[0].rank}, ${change(known[0].mean)} on average.`;
  }

  _draw(context, width) {
    if (!this._data) return;
    const { rows, grid, middle, from, until } = this._data;
    const ratio = this._surface.ratio;
    const rowHeight = this._rowHeight();
    const inner = width - LEFT - RIGHT;
    const pixels = new Pixels(context, inner, rowHeight * rows.length, ratio);
    const shades = scale(["heat-low", "heat-middle", "heat-high"], SHADES);
    const empty = pixel("hatch");
    const count = until - from + 1;
    const gap = rowHeight > 6 ? Math.round(ratio) : 0;
    grid.forEach((own, index) => {
      const top = Math.round(index * rowHeight * ratio);
      const bottom = Math.round((index + 1) * rowHeight * ratio) - gap;
      for (let slot = 0; slot < count; slot += 1) {
        const x = Math.round((slot * pixels.width) / count);
        const next = Math.round(((slot + 1) * pixels.width) / count);
        if (next === x) continue;
        if (!Number.isFinite(own[slot]) || !(middle[slot] > 0)) {
          pixels.hatch(x, next, top, bottom, empty);
          continue;
        }
        const excess = Math.max(0, own[slot] / middle[slot] - 1) / DARKEST;
        pixels.fill(x, next, top, bottom, shades[Math.min(SHADES - 1, Math.round(excess * (SHADES - 1)))]);
      }
    });
    pixels.show(LEFT, 0, ratio);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("soft");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(12 / rowHeight);
    rows.forEach((row, index) => {
      if (index % every === 0) context.fillText(String(row.rank), LEFT - 6, (index + 0.5) * rowHeight);
    });
    const x = (at) => LEFT + ((at - from) / Math.max(1, until - from)) * inner;
    times(context, width, rowHeight * rows.length + BELOW, from, until, x);
  }

  _under(event) {
    if (!this._data) return null;
    const { rows, grid, middle, from, until } = this._data;
    const box = this._surface.canvas.getBoundingClientRect();
    const index = Math.floor((event.clientY - box.top) / this._rowHeight());
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    if (!rows[index] || share < 0 || share >= 1) return null;
    const slot = Math.floor(share * (until - from + 1));
    const own = grid[index][slot];
    const head = `rank ${rows[index].rank}, ${clock(from + slot)}`;
    if (!Number.isFinite(own)) return [head, "no step ended in this second"];
    return [head, `own work ${duration(own)}`, `median of the ranks ${duration(middle[slot])}`, change(own / middle[slot] - 1)];
  }
}
