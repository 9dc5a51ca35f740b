// The overview: runs that train now, and those that ended in the last day.

import { card, chip, element, facts, table } from "./elements.js";
import { age, count, duration, percent, ranges, rate } from "./numbers.js";
import { address, keptOptions } from "./address.js";
import { Part } from "./parts.js";
import { coverageOf, newestOf, scopeWords } from "./scope.js";
import { sparkline } from "./sparkline.js";
import { stateKind } from "./states.js";
import { verdictKind, verdictReason, verdictTitle, verdictWords } from "./verdict.js";

export class Overview {
  constructor(feed, place) {
    this._feed = feed;
    this._options = keptOptions(place);
    this._choice = new Part(element("div", {}));
    this._runs = new Part(element("div", { class: "grid" }));
    this._finished = new Part(element("div", {}));
    this.box = element("div", {}, element("div", { class: "title-row" }, element("h1", {}, "Runs"), this._choice.box), this._runs.box, this._finished.box);
  }

  get title() {
    return "Runs";
  }

  scope() {
    const runs = this._feed.documents.runs;
    const newest = (runs?.runs ?? []).map(newestOf).filter((at) => at !== null);
    return {
      scope: scopeWords(runs?.view),
      window: "last 10 min",
      newest: newest.length ? Math.max(...newest) : null,
      at: runs?.view?.at_unix_seconds,
      stepSeconds: Math.max(0, ...(runs?.runs ?? []).map((run) => run.step_seconds ?? 0)),
      runs: runs?.runs ?? [],
      unreachable: runs?.view?.unreachable,
    };
  }

  update() {
    const { runs: known, info } = this._feed.documents;
    const problem = this._feed.failures.runs?.message ?? null;
    this._choice.update([info?.fleet, this._options.fleet, problem], () => this._scopes(info, problem));
    if (!known) return;
    const now = Math.round(this._feed.now());
    const shown = known.runs.map((run) => ({ ...run, ranks: undefined, coverage: coverageOf(run), age: Math.round(now - (newestOf(run) ?? now)) }));
    this._runs.update(shown, () => (shown.length ? shown.map((run) => runCard(run, this._options)) : [nothing()]));
    const finished = known.finished ?? [];
    this._finished.update(finished, () => (finished.length ? [finishedCard(finished, this._options)] : []));
  }

  // Which nodes to show, where the daemon knows of others.
  _scopes(info, problem) {
    const isFleet = this._options.fleet === "1";
    const link = (words, options, current) =>
      element("a", { class: "button", href: address({ view: "overview", options }), "aria-current": current ? "true" : null, "data-key": words }, words);
    return [
      info?.fleet || isFleet ? element("div", { class: "row" }, link("This node", {}, !isFleet), link("All nodes", { fleet: "1" }, isFleet)) : null,
      problem ? element("p", { class: "notice bad" }, `${problem}.`) : null,
    ].filter(Boolean);
  }
}

function nothing() {
  return card(
    "No run",
    { wide: true },
    element("p", {}, "No training runs under torchperfd on this node now. Start one:"),
    element("pre", {}, "torchperfd run train.py"),
  );
}

function runCard(run, options) {
  const kind = verdictKind(run.verdict);
  const { reporting, expected, silent } = run.coverage;
  const rows = [
    ["Step", duration(run.step_seconds)],
    ["Steps", rate(run.steps_per_second)],
    ["Samples", rate(run.samples_per_second)],
    ["Goodput", percent(run.goodput_ratio)],
    ["Ranks", silent.length ? `${reporting} of ${expected}, missing ${ranges(silent)}` : `${reporting} of ${expected}`],
    ["GPUs", run.gpus?.length ? ranges(run.gpus.map(Number).filter(Number.isFinite)) || run.gpus.join(", ") : "–"],
  ];
  return element(
    "section",
    { class: `card run ${kind}`, "aria-label": `run ${run.run}` },
    element(
      "div",
      { class: "card-head" },
      element("h2", {}, element("a", { href: address({ view: "run", run: run.run, options }), "data-key": run.run }, run.run)),
      chip(run.state ?? "unknown", stateKind(run.state)),
    ),
    run.job_name && run.job_name !== run.run ? element("p", { class: "note" }, `job ${run.job_name}`) : null,
    element("p", { class: "verdict-head" }, chip(verdictWords(run.verdict), kind), " ", verdictReason(run.verdict)),
    element("div", { class: "spark-row" }, sparkline(run.sparkline?.step_seconds ?? [], `Step time of ${run.run}, last 10 minutes`, 380, 46)),
    facts(rows, "short"),
    run.captures_in_progress?.length
      ? element(
          "p",
          {},
          `${count(run.captures_in_progress.length, "capture")} in progress: `,
          run.captures_in_progress.map((id) => element("a", { href: address({ view: "capture", capture: id }) }, id)),
        )
      : null,
  );
}

// The verdict on a run that has ended, and what it made of the promise of an earlier one.
function endWords({ verdict, outcome }) {
  const words = verdict ? chip(verdictTitle(verdict), verdictKind(verdict)) : "–";
  return outcome ? element("div", {}, words, element("p", { class: "note" }, outcome)) : words;
}

function finishedCard(finished, options) {
  const columns = [
    { name: "Run", class: "name", cell: (run) => element("a", { href: address({ view: "run", run: run.run, options }), "data-key": `done ${run.run}` }, run.run) },
    { name: "State", cell: (run) => chip(run.state ?? "finished", stateKind(run.state)) },
    { name: "Ran", numeric: true, cell: (run) => age(run.ended_unix_seconds - run.started_unix_seconds) },
    { name: "Steps", numeric: true, cell: (run) => (run.steps ?? 0).toLocaleString("en-US") },
    { name: "Step", numeric: true, cell: (run) => duration(run.step_seconds) },
    { name: "Goodput", numeric: true, cell: (run) => percent(run.goodput_ratio) },
    { name: "Verdict", cell: endWords },
    { name: "Step time", cell: (run) => sparkline(run.sparkline?.step_seconds ?? [], `Step time of ${run.run}`) },
  ];
  return card("Finished in the last day", { wide: true }, table("Runs that ended in the last day", columns, finished));
}
