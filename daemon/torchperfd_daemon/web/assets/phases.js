// The order and the colour of phases, the same in every chart.

const ORDER = [
  "data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "validate", "checkpoint", "other",
  "collective_wait",
];
export const WAIT = "collective_wait";
const OWN_COLOURS = 6;

/** Return names of phases in the order of a step: phases of the job's own before "other", waiting last. */
export function ordered(names) {
  const place = (name) => {
    const at = ORDER.indexOf(name);
    return at < 0 ? ORDER.indexOf("other") - 0.5 : at;
  };
  return [...names].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}

/** Return the name as people read it. */
export function label(name) {
  return name === WAIT ? "wait for others" : name;
}

/** Return the class of a phase, which page.css gives its colour. */
export function colourClass(name) {
  if (ORDER.includes(name)) return `phase-${name}`;
  let hash = 7;
  for (const character of name) hash = (hash * 31 + character.codePointAt(0)) | 0;
  return `phase-own-${Math.abs(hash) % OWN_COLOURS}`;
}
