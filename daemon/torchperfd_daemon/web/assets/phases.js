// The order and the colour of phases, the same in every chart.

const ORDER = [
  "data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "validate", "checkpoint", "other",
  "collective_wait",
];
export const WAIT = "collective_wait";
const OWN_COLOURS = [0, 1, 2, 3, 4, 5].map((number) => `phase-own-${number}`);
// Of the parts of a step's account that are no phases.
const PART_COLOURS = {
  loss: "bad", data: "phase-data", late_rank: "phase-own-3", uneven_work: "phase-own-0", exchange: "phase-collective_wait",
  lock: "phase-own-2", unnamed: "phase-checkpoint", rest: "soft",
};

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

/** Return the name of a phase's colour in kit.css. */
export function colourOf(name) {
  if (isPhase(name)) return `phase-${name}`;
  return choose(OWN_COLOURS, name);
}

/** Return one of several by a name, the same each time. */
export function choose(several, name) {
  let hash = 7;
  for (const character of name) hash = (hash * 31 + character.codePointAt(0)) | 0;
  return several[Math.abs(hash) % several.length];
}

/** Return the name of the colour of a part of a step's account: a phase has its colour of all charts. */
export function partColour({ kind, label: name }) {
  return kind === "computing" ? colourOf(name) : PART_COLOURS[kind];
}
