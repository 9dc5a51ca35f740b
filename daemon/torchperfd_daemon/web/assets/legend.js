// Names beside their colours, and bars of coloured parts. A colour is given by its name in kit.css.

import { element } from "./elements.js";
import { colourOf, label, ordered } from "./phases.js";

/** Return a small square of a colour. */
export function swatch(colour) {
  return filled(element("i", { class: "swatch" }), colour);
}

/** Return a list of [name, colour]. */
export function legend(entries, description, kind = "") {
  return element("ul", { class: `legend ${kind}`, "aria-label": description }, entries.map(([name, colour]) => element("li", {}, swatch(colour), name)));
}

/** Return a list of phases with their colours. */
export function phaseLegend(names) {
  return legend(ordered(names).map((name) => [label(name), colourOf(name)]), "Colours of phases");
}

/** Return a bar of parts, [{name, colour, value}], as wide as their share of `whole`. */
export function partsBar(parts, whole, description) {
  const bar = element("div", { class: "bar", role: "img", "aria-label": description });
  for (const { colour, value, name } of parts) {
    if (!(value > 0) || !(whole > 0)) continue;
    const piece = filled(element("i", { title: name }), colour);
    piece.style.width = `${Math.min(100, (100 * value) / whole)}%`;
    bar.append(piece);
  }
  return bar;
}

function filled(made, colour) {
  made.style.background = `var(--${colour})`;
  return made;
}
