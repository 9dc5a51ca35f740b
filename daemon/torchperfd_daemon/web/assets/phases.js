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

/** Return whether a name is that of a phase which every job has. */
export function isPhase(name) {
  return ORDER.includes(name);
}

/** Return the class of a phase, which kit.css gives its colour. */
export function colourClass(name) {
  if (isPhase(name)) return `phase-${name}`;
  let hash = 7;
  for (const character of name) hash = (hash * 31 + character.codePointAt(0)) | 0;
  return `phase-own-${Math.abs(hash) % OWN_COLOURS}`;
}

/** Return the class of a part of a step's account: a phase has its colour of all charts. */
export function partClass({ kind, label: name }) {
  return kind === "computing" ? colourClass(name) : `part-${kind}`;
}
