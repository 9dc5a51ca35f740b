// A small line of values over time; gaps stay gaps.

import { colour, onSchemeChange } from "./colours.js";
import { element } from "./elements.js";
import { duration } from "./numbers.js";
import { largest, percentile } from "./statistics.js";


/** Return a canvas for values from 0 on; null is a gap. They are written with `show`, by default as seconds. */
export function sparkline(values, described, width = 180, height = 30, show = duration) {
  const known = values.filter(Number.isFinite);
  const words = known.length
    ? `${described}: now ${show(known.at(-1))}, median ${show(percentile(known, 0.5))}, highest ${show(largest(known))}`
    : `${described}: no data`;
  const canvas = element("canvas", { class: "sparkline", role: "img", "aria-label": words, title: words });
  const ratio = Math.min(3, devicePixelRatio || 1);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const draw = () => {
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const top = largest(known, 1) * 1.05 || 1;
    context.strokeStyle = colour("p50");
    context.lineWidth = 1.5;
    context.beginPath();
    let drawing = false;
    values.forEach((value, at) => {
      const x = 2 + (at / Math.max(1, values.length - 1)) * (width - 4);
      const y = height - 2 - (value / top) * (height - 4);
      if (!Number.isFinite(value)) drawing = false;
      else if (drawing) context.lineTo(x, y);
      else {
        context.moveTo(x, y);
        if (!Number.isFinite(values[at + 1])) context.lineTo(x + 2, y);
        drawing = true;
      }
    });
    context.stroke();
  };
  draw();
  onSchemeChange(() => canvas.isConnected && draw());
  return canvas;
}
