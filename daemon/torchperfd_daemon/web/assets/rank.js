// The view of one rank of a run.

import { actionButton, capture, stacks } from "./actions.js";
import { address, keptOptions } from "./address.js";
import { card, chip, element, facts, loading, table, tiles } from "./elements.js";
import { phaseLegend } from "./legend.js";
import { bytes, change, duration, isNumber, percent, rate } from "./numbers.js";
import { Part } from "./parts.js";
import { label, ordered } from "./phases.js";
import { stepBar } from "./rank_table.js";
import { newestOf } from "./scope.js";
import { hasNoStepsLeft, hasViewedRunEnded, isMissing, rankState, stateKind } from "./states.js";
import { percentile } from "./statistics.js";
import { Stream } from "./stream.js";

export class RankView {
  constructor(feed, place) {
    this._feed = feed;
    this._run = place.run;
    this._options = keptOptions(place);
    this._rank = place.rank;
    this._stream = new Stream(() => null);
    const div = () => new Part(element("div", {}));
    this._parts = { head: div(), legend: div(), phases: div(), facts: div() };
    this._stacks = element("div", {});
    const { head, legend: colours, phases, facts: machine } = this._parts;
    this.box = element(
      "div",
      {},
      head.box,
      this._stacks,
      card("Steps of this rank", { wide: true }, this._stream.note, colours.box, this._stream.box),
      element("div", { class: "grid two" }, phases.box, machine.box),
    );
  }

  get title() {
    return `rank ${this._rank} of ${this._run}`;
  }

  _entry() {
    return this._feed.documents.run?.run?.ranks?.find((rank) => rank.rank === this._rank);
  }

  scope() {
    const run = this._feed.documents.run?.run;
    const entry = this._entry();
    const kept = this._feed.history?.ranks.get(this._rank);
    const newest = kept?.steps?.end_unix_seconds?.at(-1) ?? entry?.last_step_unix_seconds;
    const hasEnded = hasViewedRunEnded(this._feed);
    return {
      scope: `rank ${this._rank} of run ${this._run}${entry?.node ? ` on node ${entry.node}` : ""}`,
      window: hasNoStepsLeft(this._feed) ? null : "newest 256 steps",
      newest,
      hasEnded,
      ended: hasEnded ? run.ended_unix_seconds ?? newestOf(run) ?? newest : null,
      stepSeconds: entry?.step_seconds,
      runs: run && !hasEnded ? [{ ...run, world_size: 0, ranks: entry ? [entry] : [{ rank: this._rank, connected: false }] }] : [],
    };
  }

  update() {
    const entry = this._entry();
    const hasEnded = hasViewedRunEnded(this._feed);
    this.box.classList.toggle("empty", hasNoStepsLeft(this._feed));
    const live = this._feed.documents.ranks?.runs?.[0]?.ranks.find((rank) => rank.rank === this._rank);
    const newest = this._feed.documents.captures?.captures?.[0];
    this._parts.head.update([entry && [rankState(entry), rankFacts(entry, live)], hasEnded, live?.slow, newest?.capture_id, this._feed.failures.run?.message, !this._feed.documents.run, !entry && this._feed.connection], () => this._head(entry, live, newest));
    const kept = this._feed.history?.ranks.get(this._rank);
    if (kept) {
      const names = Object.keys(kept.steps?.phase_seconds ?? {});
      this._stream.show([{ ...kept, missing: Boolean(entry) && !hasEnded && isMissing(entry), slow: Boolean(live?.slow) }]);
      this._parts.legend.update(names, () => [phaseLegend(names)]);
      const rows = phaseRows(kept.steps);
      this._parts.phases.update(rows.map((row) => [row.name, duration(row.p50), duration(row.p95)]), () => [phaseCard(rows, live)]);
    }
    const gpu = this._feed.documents.node?.gpus?.find((each) => String(each.gpu) === String(entry?.gpu));
    const rows = entry ? machineFacts(entry, gpu, this._feed.documents.node) : [];
    this._parts.facts.update(rows, () =>
      rows.length ? [card("Machine", {}, facts(rows))] : [],
    );
  }

  _head(entry, live, newest) {
    const back = element("p", { class: "note" }, element("a", { href: address({ view: "run", run: this._run, options: this._options }), "data-key": "back" }, `run ${this._run}`));
    const title = element("h1", {}, `Rank ${this._rank}`);
    const hasEnded = hasViewedRunEnded(this._feed);
    if (!entry && hasEnded) return [back, title, element("p", { class: "note" }, "The daemon no longer has the ranks of this run.")];
    if (!entry) {
      const words = this._feed.failures.run?.message ?? (this._feed.documents.run ? "this node has no such rank now" : this._feed.isSaved ? "not part of this saved page" : null);
      return [back, title, words ? element("p", { class: "notice bad" }, `${words}.`) : loading(this._feed)];
    }
    const actions = hasEnded
      ? []
      : [
          actionButton("Stacks", "stacks", async () => {
            // Of all ranks: which one is odd shows only beside the others.
            const found = await stacks(this._run);
            this._stacks.replaceChildren(...(found ? [card("Stacks", { wide: true }, found)] : []));
          }),
          actionButton("Capture 5 steps of this rank", "capture", () => capture(this._run, { ranks: [this._rank], withStack: true })),
        ];
    const flame = newest
      ? element("a", { class: "button", href: address({ view: "capture", capture: newest.capture_id }), "data-key": "flame" }, "Flame graph of the newest capture")
      : element("span", { class: "soft" }, "No capture, so no flame graph.");
    const buttons = this._feed.isSaved ? null : element("div", { class: "row" }, actions, flame);
    // Once a run has ended, none of its ranks is missing.
    const state = hasEnded && isMissing(entry) ? "gone" : rankState(entry);
    const here = this._feed.documents.run.view?.node;
    return [
      back,
      entry.node && here && entry.node !== here ? element("p", { class: "notice" }, `This rank is on node ${entry.node}. The daemon there has its steps; this page is of ${here}.`) : null,
      element("div", { class: "title-row" }, title, chip(state, state === "missing" ? "bad" : stateKind(state)), live?.slow ? chip("◀ slow", "bad") : null, buttons),
      tiles(rankFacts(entry, live)),
    ].filter(Boolean);
  }
}

function rankFacts(entry, live) {
  const gone = isMissing(entry);
  return [
    ["Step", gone ? "–" : duration(live?.step_seconds ?? entry.step_seconds)],
    ["Step p50", gone ? "–" : duration(entry.step_p50_seconds)],
    ["Step p95", gone ? "–" : duration(entry.step_p95_seconds)],
    ["Own work", gone ? "–" : duration(live?.own_seconds)],
    ["vs. peers", gone ? "–" : change(live?.behind_ratio)],
    ["Samples", gone ? "–" : rate(entry.samples_per_second)],
    ["Steps so far", (entry.steps ?? 0).toLocaleString("en-US")],
  ];
}

function phaseRows(steps) {
  if (!steps) return [];
  // The first step of a run includes all lazy initialisation; no mean or percentile has it.
  const steady = (column) => (steps.first_step === 0 && column.length > 1 ? column.slice(1) : column).filter(isNumber);
  const whole = steady(steps.step_seconds).reduce((sum, value) => sum + value, 0);
  return ordered(Object.keys(steps.phase_seconds)).map((name) => {
    const column = steady(steps.phase_seconds[name]);
    return {
      name,
      share: whole > 0 ? column.reduce((sum, value) => sum + value, 0) / whole : NaN,
      p50: percentile(column, 0.5),
      p95: percentile(column, 0.95),
      longest: percentile(column, 1),
    };
  });
}

function phaseCard(rows, live) {
  const columns = [
    { name: "Phase", cell: (row) => label(row.name) },
    { name: "Share", numeric: true, cell: (row) => percent(row.share) },
    { name: "p50", numeric: true, cell: (row) => duration(row.p50) },
    { name: "p95", numeric: true, cell: (row) => duration(row.p95) },
    { name: "Longest", numeric: true, cell: (row) => duration(row.longest) },
  ];
  return card(
    "Phases",
    { note: "Of the newest steps, at most 256, without the first of the run." },
    live ? stepBar(live, live.step_seconds) : null,
    table("Phases of this rank", columns, rows),
  );
}

function machineFacts(entry, gpu, node) {
  const rows = [
    ["Node", entry.node],
    ["Process", entry.pid ? `pid ${entry.pid}` : "–"],
    ["Place in the job", entry.coordinates || `rank ${entry.rank}`],
    ["Loader", entry.loader ? `${entry.loader.workers ?? "–"} workers, ${entry.loader.ready ?? "–"} batches ready` : "–"],
    ["CUDA memory", entry.cuda ? `${bytes(entry.cuda.allocated_bytes)} allocated, ${bytes(entry.cuda.reserved_bytes)} reserved, peak ${bytes(entry.cuda.peak_bytes)}` : "–"],
    ["GPU", gpu ? `${gpu.gpu}, ${gpu.model}` : entry.gpu ? String(entry.gpu) : "–"],
  ];
  if (gpu) {
    rows.push(
      ["GPU busy", percent(gpu.utilization_ratio)],
      ["GPU memory", `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`],
      ["GPU power", isNumber(gpu.power_watts) ? `${Math.round(gpu.power_watts)} W, ${Math.round(gpu.temperature_celsius)} °C` : "–"],
    );
  }
  if (node?.cpu) rows.push(["CPU of the node", `${percent(node.cpu.utilization_ratio)} of ${node.cpu.count} CPUs`]);
  rows.push(["Steps lost on the way", String(entry.dropped_steps ?? 0)]);
  return rows;
}
