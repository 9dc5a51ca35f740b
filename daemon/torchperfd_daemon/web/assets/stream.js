// The stream of steps: one row per rank, one bar a step, its height the step's time, in the colours of its phases.

import { pixel } from "./colours.js";
import { element } from "./elements.js";
import { duration } from "./numbers.js";
import { colourOf, label, ordered } from "./phases.js";
import { rove } from "./parts.js";
import { largest, percentile, sampleLongest } from "./statistics.js";
import { Pixels, Surface } from "./surface.js";
import { attachTip } from "./tip.js";

const MIN_BAR = 2;
const GAP = 2;

export class Stream {
  /** @param link Returns the address of a rank's view, or null for rows without a link. */
  constructor(link) {
    this._link = link;
    this._rows = [];
    this._names = [];
    this._first = 0;
    this._last = 0;
    this._top = 1;
    this._surface = new Surface("Stream of steps", (...to) => this._draw(...to), () => this._rowHeight() * Math.max(1, this._rows.length));
    this._labels = element("ul", { class: "rank-labels", "aria-label": "Ranks of the stream; arrow keys move" });
    this._settle = rove(this._labels, "a");
    this.note = element("p", { class: "note" });
    this.box = element("div", { class: "stream" }, this._labels, this._surface.box);
    this._labelled = "";
    attachTip(this._surface.canvas, (event) => this._under(event));
  }

  /**
   * Show rows of {rank, steps, missing, state, slow}. A missing rank is hatched.
   */
  show(rows) {
    this._rows = rows;
    const starts = rows.filter((row) => row.steps?.step_seconds.length).map((row) => row.steps.first_step);
    const ends = rows.filter((row) => row.steps?.step_seconds.length).map((row) => row.steps.first_step + row.steps.step_seconds.length);
    this._last = ends.length ? Math.max(...ends) : 0;
    this._first = ends.length ? Math.max(Math.min(...starts), this._last - 256) : 0;
    const all = rows.flatMap((row) => row.steps?.step_seconds ?? []);
    // A single long step must not make all others flat; it is cut off and marked.
    this._top = Math.min(largest(all, 1), 2 * (percentile(all, 0.95) ?? 1)) || 1;
    this._names = ordered(new Set(rows.flatMap((row) => Object.keys(row.steps?.phase_seconds ?? {}))));
    this._label();
    this._surface.describe(this._words());
    this._surface.draw();
  }

  _rowHeight() {
    const { length } = this._rows;
    return length <= 1 ? 120 : length <= 8 ? 44 : length <= 16 ? 30 : length <= 32 ? 20 : 15;
  }

  _words() {
    const silent = this._rows.filter((row) => row.missing).map((row) => row.rank);
    return (
      `Steps ${this._first} to ${this._last - 1} of ${this._rows.length} ranks, one bar a step, coloured by phase; the height ` +
      `of a row is ${duration(this._top)}.${silent.length ? ` No data of ranks ${silent.join(", ")}.` : ""} The table below has the numbers.`
    );
  }

  _label() {
    const key = JSON.stringify([this._rows.map((row) => [row.rank, row.slow, row.missing, row.state]), this._rowHeight()]);
    if (key === this._labelled) return;
    this._labelled = key;
    const focused = this._labels.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this._labels.replaceChildren(
      ...this._rows.map((row) => {
        const words = `${row.rank}${row.slow ? " ◀" : row.missing ? " ∅" : ""}`;
        const meaning = `rank ${row.rank}${row.slow ? ", slow" : ""}${row.missing ? ", no data" : ""}`;
        const href = this._link(row.rank);
        const content = href
          ? element("a", { href, "aria-label": meaning, "data-key": row.rank, class: row.slow ? "bad" : null }, words)
          : element("span", { "aria-label": meaning, role: "img" }, words);
        const item = element("li", {}, content);
        item.style.height = `${this._rowHeight()}px`;
        return item;
      }),
    );
    this._settle();
    if (focused !== null) this._labels.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  _draw(context, width, height) {
    if (this._rows.length === 0) return;
    const ratio = this._surface.ratio;
    const pixels = new Pixels(context, width, height, ratio);
    const count = Math.max(1, this._last - this._first);
    const bars = Math.min(count, Math.floor(pixels.width / MIN_BAR));
    const colours = this._names.map((name) => pixel(colourOf(name)));
    const empty = pixel("hatch");
    const over = pixel("bad");
    const rowHeight = this._rowHeight() * ratio;
    let every = 1;
    this._drawn = [];
    this._rows.forEach((row, index) => {
      const top = Math.round(index * rowHeight);
      const bottom = Math.round((index + 1) * rowHeight) - Math.round(GAP * ratio);
      if (row.missing || !row.steps?.step_seconds.length) {
        pixels.hatch(0, pixels.width, top, bottom, empty);
        this._drawn.push([]);
        return;
      }
      const { steps } = row;
      const lead = this._first - steps.first_step;
      const durations = Array.from({ length: count }, (_, at) => steps.step_seconds[at + lead] ?? NaN);
      const sampled = sampleLongest(durations, bars);
      every = sampled.every;
      const places = [];
      sampled.chosen.forEach((at, bar) => {
        const x = Math.round((bar * pixels.width) / sampled.chosen.length);
        const next = Math.round(((bar + 1) * pixels.width) / sampled.chosen.length);
        const until = next - x >= 4 ? next - 1 : next;
        places.push(at + lead);
        if (!Number.isFinite(durations[at])) {
          pixels.hatch(x, until, top, bottom, empty);
          return;
        }
        let y = bottom;
        let sum = 0;
        for (let part = 0; part < this._names.length; part += 1) {
          sum += steps.phase_seconds[this._names[part]]?.[at + lead] ?? 0;
          const edge = Math.max(top, bottom - Math.round((sum / this._top) * (bottom - top)));
          pixels.fill(x, until, edge, y, colours[part]);
          y = edge;
        }
        if (durations[at] > this._top * 1.001) pixels.fill(x, until, top, top + Math.max(2, ratio), over);
      });
      this._drawn.push(places);
    });
    pixels.show(0, 0, ratio);
    const words =
      `Steps ${this._first}–${this._last - 1}, the newest at the right. A row is ${duration(this._top)} high` +
      `${every > 1 ? `; there is room for ${bars} bars, so each bar is the longest of ${every} steps` : ""}. ` +
      "A red cap marks a step that is higher than its row; hatching marks missing data.";
    if (this.note.textContent !== words) this.note.textContent = words;
  }

  _under(event) {
    const box = this._surface.canvas.getBoundingClientRect();
    const index = Math.floor((event.clientY - box.top) / this._rowHeight());
    const row = this._rows[index];
    const places = this._drawn?.[index] ?? [];
    if (!row) return null;
    if (places.length === 0) return [`rank ${row.rank}: no data`];
    const at = places[Math.min(places.length - 1, Math.floor(((event.clientX - box.left) / box.width) * places.length))];
    const seconds = row.steps.step_seconds[at];
    if (!Number.isFinite(seconds)) return [`rank ${row.rank}: no data of this step`];
    const named = this._names
      .map((name) => [name, row.steps.phase_seconds[name]?.[at] ?? 0])
      .filter(([, value]) => value >= 0.005 * seconds)
      .map(([name, value]) => `${label(name)} ${duration(value)}`);
    return [`rank ${row.rank}, step ${row.steps.first_step + at}: ${duration(seconds)}`, ...named];
  }
}
