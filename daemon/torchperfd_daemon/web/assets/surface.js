// A canvas as wide as its box, sharp on every screen, with a description for those who cannot see it.

import { element } from "./elements.js";
import { onSchemeChange } from "./colours.js";

export class Surface {
  /**
   * @param draw Called with (context, width, height) in CSS pixels whenever the canvas has to be drawn again.
   * @param height Height in CSS pixels, or a function that returns it.
   */
  constructor(description, draw, height) {
    this.canvas = element("canvas", { role: "img", "aria-label": description });
    this.box = element("div", { class: "surface" }, this.canvas);
    this._draw = draw;
    this._height = height;
    this.width = 0;
    new ResizeObserver(() => this._resized()).observe(this.box);
    onSchemeChange(() => this.draw());
  }

  /** Say in words what the canvas shows. */
  describe(text) {
    if (this.canvas.getAttribute("aria-label") !== text) this.canvas.setAttribute("aria-label", text);
  }

  /** Draw now; without a size yet, the first resize draws. */
  draw() {
    const width = this.box.clientWidth;
    if (width === 0 || !this.box.isConnected) return;
    const height = typeof this._height === "function" ? this._height() : this._height;
    const ratio = Math.min(3, devicePixelRatio || 1);
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
      this.canvas.style.height = `${height}px`;
    }
    this.width = width;
    this.ratio = ratio;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this._draw(context, width, height);
  }

  _resized() {
    if (this.box.clientWidth !== this.width) this.draw();
  }
}

/** Pixels that are written directly: faster than thousands of rectangles. Coordinates are device pixels. */
export class Pixels {
  constructor(context, width, height, ratio) {
    this.width = Math.max(1, Math.round(width * ratio));
    this.height = Math.max(1, Math.round(height * ratio));
    this._image = new ImageData(this.width, this.height);
    this.data = new Uint32Array(this._image.data.buffer);
    this._context = context;
  }

  /** Fill columns [x, until) of rows [y, bottom). */
  fill(x, until, y, bottom, value) {
    const { data, width } = this;
    const [left, right] = [Math.max(0, x), Math.min(width, until)];
    const last = Math.min(this.height, bottom);
    for (let row = Math.max(0, y); row < last; row += 1) {
      const end = row * width + right;
      // A call of fill() costs more than a few pixels.
      if (right - left > 24) data.fill(value, row * width + left, end);
      else for (let at = row * width + left; at < end; at += 1) data[at] = value;
    }
  }

  /** Fill with diagonal lines: there is no data here. */
  hatch(x, until, y, bottom, value) {
    for (let row = Math.max(0, y); row < Math.min(this.height, bottom); row += 1) {
      for (let at = Math.max(0, x); at < Math.min(this.width, until); at += 1) {
        if ((at + row) % 6 === 0) this.data[row * this.width + at] = value;
      }
    }
  }

  /** Put the pixels at a place in CSS pixels. */
  show(x, y, ratio) {
    this._context.putImageData(this._image, Math.round(x * ratio), Math.round(y * ratio));
  }
}
