// The view of one run.

import { accountCard } from "./account.js";
import { actionButton, capture, stacks } from "./actions.js";
import { address, keptOptions } from "./address.js";
import { MARK_WORDS } from "./axes.js";
import { card, chip, disclosure, element, loading, table, tiles } from "./elements.js";
import { MAX_RANKS } from "./feed.js";
import { goodputCard } from "./goodput.js";
import { HeatMap } from "./heat_map.js";
import { legend, phaseLegend } from "./legend.js";
import { bytes, clock, count, duration, isNumber, percent, rate } from "./numbers.js";
import { Part } from "./parts.js";
import { rankTable } from "./rank_table.js";
import { secondTable } from "./second_table.js";
import { newestOf, scopeWords, windowWords } from "./scope.js";
import { hasNoStepsLeft, hasRunEnded, hasViewedRunEnded, isMissing, rankState, stateKind } from "./states.js";
import { acrossRanks, percentile } from "./statistics.js";
import { sparkline } from "./sparkline.js";
import { Stream } from "./stream.js";
import { PhasesStacked, StepTimes, markWords } from "./time_charts.js";
import { verdictCard } from "./verdict.js";

// The window that tiles, table and verdict have in common.
const LIVE_WINDOW = "Times, verdict and table are of the last 10 s of each rank, and of at least twelve steps.";
const ENDED_WINDOW = "The run has ended: times and table are of the last steps of each rank, at most 256.";
/** The slowest rank is named where its percentile differs from that of all ranks by a larger part. */
const SAME_RATIO = 0.01;

export class RunView {
  constructor(feed, place) {
    this._feed = feed;
    this._run = place.run;
    this._options = keptOptions(place);
    this._stream = new Stream((rank) => address({ view: "rank", run: this._run, rank, options: this._options }));
    this._times = new StepTimes();
    this._phases = new PhasesStacked();
    this._heat = new HeatMap();
    const div = () => new Part(element("div", {}));
    this._parts = { head: div(), verdict: div(), account: div(), legend: div(), chosen: div(), ranks: div(), goodput: div(), memory: div(), marks: div() };
    this._shown = null;
    this._series = null;
    this._stacks = element("div", {});
    const { head, verdict, account, legend: colours, chosen, ranks, goodput, memory, marks } = this._parts;
    const ranksCard = card("Own work and wait per rank", { wide: true, note: "Own work is the step without the wait for other ranks." }, ranks.box);
    this.box = element(
      "div",
      {},
      head.box,
      verdict.box,
      this._stacks,
      account.box,
      card("Stream of steps", { wide: true, id: "stream" }, this._stream.note, chosen.box, colours.box, this._stream.box),
      element(
        "div",
        { class: "grid two" },
        card("Step time", { note: `Of the ranks, second by second. ${MARK_WORDS}`, extra: lineLegend() }, this._times.surface.box),
        card("Phases", { note: "Mean step of the ranks, second by second; from the bottom in the order of the colours above." }, this._phases.surface.box),
      ),
      disclosure("Step time and phases as a table", () => (this._series ? secondTable(this._series) : element("p", {}, "No data yet."))),
      card(
        "Excess own work",
        { wide: true, note: "Own work above the median of the ranks, second by second: the strongest colour is 50 % or more. Hatched: no step ended.", extra: scaleLegend() },
        this._heat.box,
      ),
      ranksCard,
      element("div", { class: "grid two" }, goodput.box, memory.box),
      marks.box,
    );
  }

  get title() {
    return this._run;
  }

  scope() {
    const { run, ranks } = this._feed.documents;
    const entry = run?.run;
    const hasEnded = hasViewedRunEnded(this._feed);
    return {
      scope: run?.view ? `run ${entry.run}, ${scopeWords(run.view)}` : `run ${this._run}`,
      window: hasNoStepsLeft(this._feed) ? null : windowWords(this._feed.history?.span()),
      newest: entry ? this._newest(entry) : null,
      hasEnded,
      ended: hasEnded ? entry.ended_unix_seconds ?? this._newest(entry) : null,
      stepSeconds: entry?.step_seconds ?? ranks?.runs?.[0]?.step_seconds,
      runs: entry && !hasEnded ? [entry] : [],
      unreachable: run?.view?.unreachable,
    };
  }

  _newest(entry) {
    let newest = newestOf(entry);
    for (const rank of this._feed.history?.ranks.values() ?? []) newest = Math.max(newest ?? 0, rank.steps?.end_unix_seconds?.at(-1) ?? 0) || newest;
    return newest;
  }

  update() {
    const { documents, failures, history } = this._feed;
    const entry = documents.run?.run;
    const shown = [entry ? [entry.state, headFacts(entry)] : this._feed.connection, failures.run?.message, failures.history?.message, this._feed.isSaved];
    this._parts.head.update(shown, () => this._head(entry));
    const hasFailed = failures.run !== undefined || this._feed.connection === "lost";
    this.box.classList.toggle("empty", !entry && hasFailed && this._shown === null);
    this.box.classList.toggle("stepless", hasNoStepsLeft(this._feed));
    if (!entry) return;
    const verdict = documents.run.verdict ?? entry.verdict ?? null;
    const hasEnded = hasRunEnded(entry);
    this._parts.verdict.update([verdict, hasEnded], () => [
      verdictCard(verdict, {
        run: this._run,
        canAct: !this._feed.isSaved && !hasEnded,
        hasEnded,
        onStacks: (found) => this._stacks.replaceChildren(...(found ? [card("Stacks", { wide: true }, found)] : [])),
      }),
    ]);
    const hasAccount = verdict?.account && verdict.card.account_rows.length > 0;
    this._parts.account.update(hasAccount ? verdict.card.account_rows : null, () => (hasAccount ? [accountCard(verdict)] : []));
    const known = new Map((entry.ranks ?? []).map((rank) => [rank.rank, rank]));
    const live = documents.ranks?.runs?.find((each) => each.run === entry.run) ?? documents.ranks?.runs?.[0];
    if (live) this._updateRanks(live, known);
    if (history) this._updateHistory(history, known, live, verdict);
    const { goodput } = documents.run;
    this._parts.goodput.update(goodput ?? null, () => (goodput ? [goodputCard(goodput)] : []));
    this._parts.memory.update((entry.ranks ?? []).map((rank) => [rank.rank, rank.cuda, rank.host_memory]), () => (entry.ranks ?? []).some((rank) => rank.cuda || rank.host_memory) ? [memoryCard(entry.ranks)] : []);
  }

  _head(entry) {
    const title = element("h1", {}, this._run);
    if (!entry) {
      const failed = this._feed.failures.run?.message;
      const left = failed && this._shown !== null ? `${failed}. Below is what was last known of it` : failed;
      const problem = left ?? (this._feed.isSaved ? "Not part of this saved page" : null);
      const back = element("p", {}, element("a", { href: address({ view: "overview" }) }, "All runs"));
      return [title, ...(problem ? [element("p", { class: "notice bad" }, `${problem}.`), back] : [loading(this._feed)])];
    }
    const facts = headFacts(entry);
    const hasEnded = hasRunEnded(entry);
    const noHistory = this._feed.failures.history;
    const actions = hasEnded
      ? []
      : [
          actionButton("Capture 5 steps", "capture", () => capture(this._run)),
          actionButton("Stacks", "stacks", async () => {
            const found = await stacks(this._run);
            this._stacks.replaceChildren(...(found ? [card("Stacks", { wide: true }, found)] : []));
          }),
        ];
    const captures = element("a", { class: "button", href: address({ view: "captures" }), "data-key": "captures" }, "Captures");
    const buttons = this._feed.isSaved ? null : element("div", { class: "row" }, actions, captures);
    return [
      element("div", { class: "title-row" }, title, chip(entry.state ?? "unknown", stateKind(entry.state)), buttons),
      entry.job_name && entry.job_name !== entry.run ? element("p", { class: "note" }, `job ${entry.job_name}`) : null,
      hasNoStepsLeft(this._feed) ? element("p", { class: "note" }, "The daemon no longer has the steps of this run.") : null,
      tiles(facts),
      entry.outcome ? element("p", { class: "note" }, entry.outcome) : null,
      hasNoStepsLeft(this._feed) ? null : element("p", { class: "note" }, hasEnded ? ENDED_WINDOW : LIVE_WINDOW),
      noHistory && !hasEnded ? element("p", { class: "notice bad" }, `No history: ${noHistory.message}.`) : null,
    ].filter(Boolean);
  }

  _updateRanks(live, known) {
    // Rows in a table of a thousand ranks change each second; three digits are what it shows.
    const shown = live.ranks.map((rank) => {
      const entry = known.get(rank.rank);
      return [rank.rank, entry?.connected, rankState(entry ?? rank), ...[rank.step_seconds, entry?.step_p50_seconds, entry?.step_p95_seconds, rank.own_seconds].map(duration), rank.slow];
    });
    const far = [...live.ranks].sort((a, b) => (b.own_seconds ?? 0) - (a.own_seconds ?? 0));
    const listed = live.ranks.length > 200 ? far.slice(0, 200) : live.ranks;
    this._parts.ranks.update(shown, () => [
      rankTable(this._run, listed, known, this._options),
      listed.length < live.ranks.length ? element("p", { class: "note" }, `The ${listed.length} ranks with the most own work of ${live.ranks.length}.`) : null,
    ].filter(Boolean));
  }

  // The onset stays where it was once its step is too old for the history.
  _onset(history, verdict) {
    const step = verdict?.onset_step;
    if (step === null || step === undefined) return [];
    if (this._onsetOf?.step !== step) this._onsetOf = { step, at: history.beginOf(step) };
    return this._onsetOf.at === null ? [] : [{ kind: "change", unix_seconds: this._onsetOf.at, rank: verdict.rank, text: `slower since step ${step}` }];
  }

  _updateHistory(history, known, live, verdict) {
    const { node } = this._feed.documents.run.view;
    // Of a run that has ended, the last steps are shown.
    const missing = hasViewedRunEnded(this._feed) ? [] : [...known.values()].filter(isMissing).map((rank) => rank.rank);
    const marked = (live?.ranks ?? []).filter((rank) => rank.slow || rank.rank === verdict?.rank).map((rank) => rank.rank);
    const shown = JSON.stringify([history.version, known.size, missing, marked]);
    if (shown === this._shown) return;
    this._shown = shown;
    const slow = new Set(marked);
    const rows = [...history.ranks.values()]
      .map((rank) => ({ ...rank, missing: missing.includes(rank.rank), slow: slow.has(rank.rank) }))
      .sort((a, b) => a.rank - b.rank);
    // Steps are known of this node's ranks only; those of other nodes are in the table.
    for (const rank of known.values()) {
      if (!history.ranks.has(rank.rank) && rank.node === node && rows.length < MAX_RANKS) rows.push({ rank: rank.rank, missing: true });
    }
    this._stream.show(rows);
    const names = new Set(rows.flatMap((row) => Object.keys(row.steps?.phase_seconds ?? row.seconds?.phase_seconds ?? {})));
    this._parts.legend.update([...names], () => [phaseLegend(names)]);
    const all = Math.max(history.here.length, rows.length);
    this._parts.chosen.update([rows.length, all], () =>
      rows.length < all
        ? [element("p", { class: "note" }, `${rows.length} of ${all} ranks: those that stand out from the others by all their seconds, and ranks at even percentiles of own work.`)]
        : [],
    );
    const span = history.span();
    if (span) {
      const columns = rows.filter((row) => row.seconds).map(({ seconds }) => ({ at: seconds.unix_seconds, seconds: seconds.step_seconds, phases: seconds.phase_seconds ?? {} }));
      const onset = this._onset(history, verdict);
      const data = { ...acrossRanks(columns, span.from, span.until), ...span, marks: [...history.marks, ...onset] };
      this._series = data;
      this._times.show(data);
      this._phases.show(data);
      this._heat.show(rows, span.from, span.until);
    }
    this._parts.marks.update(history.marks, () => (history.marks.length ? [marksCard(history.marks)] : []));
  }
}

function headFacts(entry) {
  const steps = (entry.ranks ?? []).map((rank) => rank.steps ?? 0);
  const times = (entry.ranks ?? []).filter((rank) => rank.connected !== false).map((rank) => rank.step_seconds);
  return [
    ["Step", duration(entry.step_seconds ?? percentile(times, 0.5)), wholeWords(entry)],
    ["Step p50", duration(entry.step_percentiles?.p50_seconds), slowestWords(entry, "p50_seconds")],
    ["Step p95", duration(entry.step_percentiles?.p95_seconds), slowestWords(entry, "p95_seconds")],
    ["Steps", rate(entry.steps_per_second), steps.length ? `${Math.max(...steps).toLocaleString("en-US")} so far` : null],
    ["Samples", rate(entry.samples_per_second), null],
    ["Goodput", percent(entry.goodput_ratio), null],
    ...(entry.gpus?.length ? [["GPUs", String(entry.gpus.length), null]] : []),
  ];
}

// The mean of the whole run is beside the mean of the window.
function wholeWords({ whole_step_seconds: whole }) {
  return isNumber(whole) ? `slowest rank; ${duration(whole)} over the whole run` : "slowest rank";
}

// The slowest rank's percentile; null where it is nearly that of all ranks.
function slowestWords({ step_percentiles: found }, name) {
  if (!found || Math.abs(found.slowest[name] - found[name]) <= SAME_RATIO * found[name]) return null;
  return `${duration(found.slowest[name])} on rank ${found.slowest.rank}, the slowest`;
}

function memoryCard(ranks) {
  const known = ranks.filter((rank) => rank.cuda || rank.host_memory);
  const columnsOf = (key, names) => (known.some((rank) => rank[key]) ? names.map(([name, field]) => (
    { name, numeric: true, cell: (rank) => (rank[key]?.[field] ? bytes(rank[key][field]) : "–") })) : []);
  const columns = [
    { name: "Rank", cell: (rank) => String(rank.rank) },
    ...columnsOf("host_memory", [["RSS at first", "first_bytes"], ["RSS", "resident_bytes"], ["RSS peak", "peak_bytes"]]),
    ...courseColumns(known),
    ...columnsOf("cuda", [["CUDA allocated", "allocated_bytes"], ["CUDA reserved", "reserved_bytes"], ["CUDA peak", "peak_bytes"]]),
  ];
  const note = "RSS is the process's memory on the host, without its workers. CUDA memory is of torch's allocator.";
  return card("Memory", { note }, table("Memory per rank", columns, known));
}

// The memory of each process over time, and by how much it grows.
function courseColumns(ranks) {
  if (!ranks.some((rank) => rank.host_memory?.course_bytes?.length > 1)) return [];
  return [
    { name: "RSS over time", cell: ({ rank, host_memory: memory }) => (memory ? sparkline(memory.course_bytes, `RSS of rank ${rank} over ${duration(memory.course_seconds)}`, 180, 30, bytes) : "–") },
    { name: "Growth per minute", numeric: true, cell: ({ host_memory: memory }) => (memory ? bytes(60 * memory.growth_bytes_per_second) : "–") },
  ];
}

function marksCard(marks) {
  const newest = [...marks].reverse().slice(0, 100);
  const columns = [
    { name: "Time", cell: (mark) => clock(mark.unix_seconds) },
    { name: "Event", class: "name", cell: (mark) => (mark.capture_id ? element("a", { href: address({ view: "capture", capture: mark.capture_id }) }, markWords(mark)) : markWords(mark)) },
    { name: "Took", numeric: true, cell: (mark) => (mark.end_unix_seconds ? duration(mark.end_unix_seconds - mark.unix_seconds) : "–") },
  ];
  return card(
    "Checkpoints, validations, captures and changes",
    { wide: true },
    disclosure(`${count(marks.length, "event")}`, () => table("Events of the run", columns, newest)),
  );
}

function lineLegend() {
  return legend([["p50", "p50"], ["p95", "p95"]], "Lines", "lines");
}

function scaleLegend() {
  return element("span", { class: "heat-scale", role: "img", "aria-label": "Scale from no excess to 50 percent or more" }, element("i", {}), "0 … 50 %");
}
