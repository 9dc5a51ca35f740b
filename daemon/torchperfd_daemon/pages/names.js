// Colours of names: a phase has its colour of all charts, and any other name one of a few hues.

import { colour } from "../web/assets/colours.js";
import { choose, colourOf, isPhase } from "../web/assets/phases.js";

const HUES = [212, 28, 150, 268, 340, 90, 186, 48, 310, 4, 128, 236];

// Steps and instances of a module differ by their numbers only, and look alike.
function hue(name) {
  return choose(HUES, name.replace(/\d+/g, ""));
}

// Black or white: one of both has enough contrast on any colour.
function wordsOn(box) {
  const [red, green, blue] = [1, 3, 5].map((at) => (Number.parseInt(box.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

/** Return the colours of a name's box and of the words on it. */
export function coloursOf(name) {
  if (isPhase(name)) return { box: colour(colourOf(name)), words: wordsOn(colour(colourOf(name))) };
  return { box: `hsl(${hue(name)} ${colour("hues-saturation")} ${colour("hues-lightness")})`, words: colour("on-hue") };
}
