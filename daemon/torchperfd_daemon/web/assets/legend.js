// Names beside their colours, and bars of coloured parts.

import { element } from "./elements.js";
import { colourClass, label, ordered } from "./phases.js";

/** Return a list of [name, class of its colour]. */
export function legend(entries, description) {
  const swatch = (kind) => element("i", { class: `swatch ${kind}` });
  return element("ul", { class: "legend", "aria-label": description }, entries.map(([name, kind]) => element("li", {}, swatch(kind), name)));
}

/** Return a list of phases with their colours. */
export function phaseLegend(names) {
  return legend(ordered(names).map((name) => [label(name), colourClass(name)]), "Colours of phases");
}

/** Return a bar of parts, [{name, className, value}], as wide as their share of `whole`. */
export function partsBar(parts, whole, description) {
  const bar = element("div", { class: "bar", role: "img", "aria-label": description });
  for (const { className, value, name } of parts) {
    if (!(value > 0) || !(whole > 0)) continue;
    const piece = element("i", { class: className, title: name });
    piece.style.width = `${Math.min(100, (100 * value) / whole)}%`;
    bar.append(piece);
  }
  return bar;
}
