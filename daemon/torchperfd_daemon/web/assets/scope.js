// The line below the header: what a view covers, over which time, how fresh it is, and which ranks are missing.

import { element } from "./elements.js";
import { age, clock, count, moment, ranges } from "./numbers.js";
import { Part } from "./parts.js";
import { isMissing } from "./states.js";

const LATE_S = 5;
const LATE_STEPS = 5;

/**
 * Return the coverage of a run: which ranks report, which are known and silent, which are not on this node.
 * A rank that a world size promises and that no document has is missing too.
 */
export function coverageOf(run) {
  const here = run.ranks ?? [];
  const silent = here.filter(isMissing).map((rank) => rank.rank);
  const known = new Set(here.map((rank) => rank.rank));
  const elsewhere = [];
  for (let rank = 0; rank < Math.min(run.world_size ?? 0, 100_000); rank += 1) if (!known.has(rank)) elsewhere.push(rank);
  return { reporting: here.length - silent.length, expected: Math.max(run.world_size ?? 0, here.length), silent, elsewhere };
}

/** Return what a document's view covers: a node, or the fleet as a node sees it. */
export function scopeWords(view) {
  if (!view) return null;
  return view.scope === "fleet" ? `all nodes, as ${view.node} sees them` : `node ${view.node}`;
}

/** Return when the newest step of a run ended, in Unix seconds, or null. */
export function newestOf(run) {
  const ends = (run.ranks ?? []).map((rank) => rank.last_step_unix_seconds).filter((at) => at > 0);
  return ends.length ? Math.max(...ends) : null;
}

export class ScopeLine {
  constructor(box) {
    this._part = new Part(box);
  }

  /**
   * @param shown {scope, window, newest, stepSeconds, ended, runs}: the runs whose ranks the view covers, and when
   *   its run ended.
   * @param now The daemon's time in Unix seconds.
   */
  update(shown, now, savedAt) {
    const items = [["Scope", shown.scope ?? "…", ""]];
    if (shown.window) items.push(["Window", shown.window, ""]);
    items.push(freshness(shown, now, savedAt));
    for (const item of coverage(shown)) items.push(item);
    this._part.update(items, () =>
      items.map(([name, words, kind]) => element("span", { class: kind ? `item ${kind}` : "item" }, element("b", {}, name), ` ${words}`)),
    );
  }
}

function freshness({ newest, stepSeconds, ended, at }, now, savedAt) {
  if (savedAt) return ["Saved", moment(savedAt), "warn"];
  if (ended) return ["Ended", moment(ended), ""];
  const of = newest ?? at;
  if (of === null || of === undefined) return ["Freshness", "no data yet", "warn"];
  const old = Math.max(0, now - of);
  const allowed = Math.max(LATE_S, LATE_STEPS * (stepSeconds ?? 0));
  return old > allowed
    ? ["Freshness", `⚠ newest data ${age(old)} old, of ${clock(of)}`, "warn"]
    : ["Freshness", `newest data ${age(old)} old`, ""];
}

function coverage({ runs, unreachable }) {
  const items = [];
  for (const run of runs ?? []) {
    const { reporting, expected, silent, elsewhere } = coverageOf(run);
    const named = (runs.length > 1 && `${run.run}: `) || "";
    let words = `${named}${reporting} of ${count(expected, "rank")} report${reporting === 1 ? "s" : ""}`;
    if (silent.length) words += `; missing: ${ranges(silent)}`;
    if (elsewhere.length) words += `; not known here: ${ranges(elsewhere)}`;
    items.push(["Coverage", words, silent.length ? "warn" : ""]);
  }
  for (const peer of unreachable ?? []) items.push(["No answer", `${peer.address}: ${peer.reason}`, "warn"]);
  if (items.length > 4) return [["Coverage", `${items.length} runs, ${items.filter(([, , kind]) => kind).length} with missing ranks`, items.some(([, , kind]) => kind) ? "warn" : ""]];
  return items;
}

/** Return the words for a window of seconds. */
export function windowWords(span) {
  return span ? `last ${age(span.until - span.from + 1)}` : "last 10 min";
}
