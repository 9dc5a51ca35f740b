// The table of ranks of a run: own work, wait and state, as text and as bars on one scale.

import { address } from "./address.js";
import { chip, element, table } from "./elements.js";
import { partsBar } from "./legend.js";
import { change, duration } from "./numbers.js";
import { WAIT, colourOf, label, ordered } from "./phases.js";
import { isMissing, rankState, stateKind } from "./states.js";
import { largest } from "./statistics.js";

/** Return the table. `ranks` are rows of /ranks; `known` maps a rank to its row of the run's document. */
export function rankTable(run, ranks, known, options = {}) {
  const top = largest(ranks.map((rank) => rank.step_seconds), 1);
  const columns = [
    {
      name: "Rank",
      cell: (rank) => element("a", { href: address({ view: "rank", run, rank: rank.rank, options }), "data-key": `row ${rank.rank}` }, String(rank.rank)),
    },
    { name: "State", cell: (rank) => stateChip(known.get(rank.rank) ?? rank) },
    { name: "Step", numeric: true, cell: (rank) => (isSilent(rank, known) ? "–" : duration(rank.step_seconds)) },
    { name: "p50", numeric: true, cell: (rank) => (isSilent(rank, known) ? "–" : duration(known.get(rank.rank)?.step_p50_seconds)) },
    { name: "p95", numeric: true, cell: (rank) => (isSilent(rank, known) ? "–" : duration(known.get(rank.rank)?.step_p95_seconds)) },
    { name: "Own work", numeric: true, cell: (rank) => (isSilent(rank, known) ? "–" : duration(rank.own_seconds)) },
    { name: "Wait", numeric: true, cell: (rank) => (isSilent(rank, known) ? "–" : duration(rank.phase_seconds?.[WAIT])) },
    { name: "vs. peers", numeric: true, cell: (rank) => (isSilent(rank, known) ? "–" : change(rank.behind_ratio)) },
    { name: "What a step is spent on", class: "bar-cell", cell: (rank) => (isSilent(rank, known) ? element("span", { class: "soft" }, "no data") : stepBar(rank, top)) },
  ];
  const places = ranks.some((rank) => rank.coordinates);
  if (places) columns.splice(1, 0, { name: "Place", cell: (rank) => rank.coordinates ?? "" });
  if (new Set(ranks.map((rank) => rank.node)).size > 1) columns.splice(1, 0, { name: "Node", cell: (rank) => rank.node });
  return table(`Ranks of ${run}`, columns, ranks, (rank) => ({ class: rank.slow ? "slow" : isSilent(rank, known) ? "missing" : null }));
}

/** Return the bar of a rank's mean step by phase; `top` is the time of the whole width. */
export function stepBar({ rank, step_seconds: seconds, phase_seconds: phases }, top) {
  const names = ordered(Object.keys(phases ?? {}));
  const words = names
    .filter((name) => phases[name] >= 0.01 * seconds)
    .map((name) => `${label(name)} ${duration(phases[name])}`)
    .join(", ");
  const parts = names.map((name) => ({ name: `${label(name)} ${duration(phases[name])}`, colour: colourOf(name), value: phases[name] }));
  return partsBar(parts, top, `rank ${rank}: ${words}`);
}

function isSilent(rank, known) {
  return isMissing(known.get(rank.rank) ?? rank);
}

function stateChip(rank) {
  const state = rankState(rank);
  return chip(rank.stalled_seconds ? `${state} for ${duration(rank.stalled_seconds)}` : state, state === "missing" ? "bad" : stateKind(state));
}
