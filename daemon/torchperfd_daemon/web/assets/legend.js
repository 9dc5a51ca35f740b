// Names of phases beside their colours.

import { element } from "./elements.js";
import { colourClass, label, ordered } from "./phases.js";

/** Return the name of a phase's colour in page.css. */
export function phaseColour(name) {
  return colourClass(name);
}

/** Return a list of phases with their colours. */
export function legend(names) {
  return element(
    "ul",
    { class: "legend", "aria-label": "Colours of phases" },
    ordered(names).map((name) => element("li", {}, element("i", { class: `swatch ${colourClass(name)}` }), label(name))),
  );
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
