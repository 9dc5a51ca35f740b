// Captures: the list, and the view of one with its ranks, its report and its files.

import { actionButton, cancel, commanded } from "./actions.js";
import { address } from "./address.js";
import { card, chip, element, loading, table, tiles } from "./elements.js";
import { swatch } from "./legend.js";
import { openMadePage } from "./made_pages.js";
import { bytes, count, duration, isNumber, moment, ranges } from "./numbers.js";
import { Part } from "./parts.js";

const KINDS = { complete: "good", partial: "warn", failed: "bad", preparing: "busy", armed: "busy", queued: "quiet" };
const CELLS = { good: "phase-backward", warn: "p95", bad: "bad", busy: "p50" };
const ENDED = ["complete", "partial", "failed"];

/** Return whether a capture has ended. */
export function hasEnded(capture) {
  return ENDED.includes(capture.state);
}

export class CapturesView {
  constructor(feed, place) {
    this._feed = feed;
    this._options = place.options;
    this._problems = new Part(element("div", { "aria-live": "polite" }));
    this._list = new Part(element("div", {}));
    this._offer = new Part(element("div", { "aria-live": "polite" }));
    this._progress = element("p", { "aria-live": "polite" });
    this.box = element("div", {}, element("h1", {}, "Captures"), this._problems.box, this._list.box, this._offer.box, this._progress);
  }

  /** The address of this view has changed, and with it what is chosen. */
  moved(place) {
    this._options = place.options;
  }

  get title() {
    return "Captures";
  }

  scope() {
    const known = this._feed.documents.captures;
    return {
      scope: known ? `captures directory of node ${known.view?.node ?? ""}` : null,
      window: known ? `${count(known.captures.length, "capture")} of ${known.total}` : null,
      at: known?.view?.at_unix_seconds,
    };
  }

  update() {
    const known = this._feed.documents.captures;
    if (!known) return;
    const { chosen, problems } = this._chosen(known.captures);
    const ids = chosen.map((one) => one.capture_id);
    this._problems.update(problems, () => problems.map((words) => element("p", { class: "notice warn" }, words)));
    this._offer.update([ids, problems.length], () => (ids.length || problems.length ? [this._comparison(ids)] : []));
    this._list.update([known.captures, ids], () => [
      known.captures.length
        ? card("List", { wide: true, note: "Choose two to compare them." }, table("Captures of this node", this._columns(chosen, known.captures), known.captures))
        : card("No capture", { wide: true }, element("p", {}, "Capture some steps with the button of a run, or with"), element("pre", {}, "torchperfd capture --steps 5")),
    ]);
  }

  // The captures that the address names, A before B, and what is wrong with those that are not there.
  _chosen(listed) {
    const { documents, failures, isSaved } = this._feed;
    const chosen = new Map();
    const problems = [];
    for (const name of ["a", "b"].filter((each) => this._options[each])) {
      const id = this._options[name];
      const read = documents[name];
      const found = listed.find((one) => one.capture_id === id) ?? (read?.capture_id ? read : null);
      if (found) chosen.set(found.capture_id, found);
      else if (failures[name] || read || isSaved) problems.push(`Cannot compare ${id.slice(0, 80)}: ${failures[name]?.message ?? "it is no capture that is known here"}.`);
    }
    return { chosen: [...chosen.values()], problems: [...new Set(problems)] };
  }

  _columns(chosen, captures) {
    return [
      { name: "Capture", class: "id", cell: (one) => element("a", { href: address({ view: "capture", capture: one.capture_id }), "data-key": one.capture_id }, one.capture_id) },
      { name: "Run", class: "name", cell: (one) => one.run },
      { name: "State", cell: (one) => chip(one.state, KINDS[one.state] ?? "unknown") },
      ...(captures.every(hasEnded) ? [] : [{ name: "Progress", class: "bar-cell", cell: (one) => progress(one) }]),
      { name: "Steps", numeric: true, cell: (one) => stepWords(one) },
      { name: "Size", numeric: true, cell: (one) => bytes(one.disk_bytes ?? null) },
      { name: "Asked for", cell: (one) => moment(one.requested_at) },
      { name: "Compare", cell: (one) => choiceBox(one, chosen) },
    ];
  }

  // What can be done with the captures that are chosen.
  _comparison(ids) {
    const clear = element("a", { class: "button", href: address({ view: "captures" }), "data-key": "clear" }, "Clear the choice");
    if (ids.length < 2) {
      const words = ids.length ? `Chosen: ${ids[0]}. Choose another one.` : "Choose two captures of the list.";
      return card("Compare", { wide: true }, element("p", {}, words), element("div", { class: "row" }, clear));
    }
    const [before, after] = ids.map(encodeURIComponent);
    const open = () => openMadePage(`${before}/comparison/${after}`, this._progress, "comparison");
    return card(
      "Compare",
      { wide: true },
      element("p", {}, `A: ${ids[0]}, B: ${ids[1]}`),
      element("div", { class: "row" }, this._feed.isSaved ? null : actionButton("Compare the two", "compare", open, { primary: true }), clear),
      element("p", { class: "note" }, "On the node: ", element("code", {}, `torchperfd compare ${ids[0]} ${ids[1]}`)),
    );
  }
}

export class CaptureView {
  constructor(feed, place) {
    this._feed = feed;
    this._id = place.capture;
    this._content = new Part(element("div", {}));
    this._report = element("p", { "aria-live": "polite" });
    this.box = element("div", {}, this._content.box, this._report);
  }

  get title() {
    return `capture ${this._id}`;
  }

  _capture() {
    const known = this._feed.documents.capture;
    return known?.capture ?? known;
  }

  scope() {
    const one = this._capture();
    return {
      scope: `capture ${this._id}${one ? ` of run ${one.run}` : ""}`,
      window: one?.step_range ? `steps ${stepWords(one)}` : null,
      at: this._feed.documents.capture?.view?.at_unix_seconds,
    };
  }

  update() {
    const one = this._capture();
    const problem = this._feed.failures.capture?.message;
    this._content.update([one ?? this._feed.connection, problem], () => {
      if (one) return this._built(one);
      return [element("h1", {}, this._id), problem ? element("p", { class: "notice bad" }, `${problem}.`) : loading(this._feed)];
    });
  }

  _built(one) {
    const done = one.ranks?.filter((rank) => ENDED.includes(rank.state)).length ?? 0;
    const buttons = this._feed.isSaved
      ? []
      : [
          hasEnded(one) && one.state !== "failed" ? actionButton("Open the report", "report", () => this._open(), { primary: true }) : null,
          hasEnded(one) ? null : actionButton("Cancel", "cancel", () => cancel(one.capture_id)),
        ];
    const files = { name: "File", cell: (rank) => (rank.file && hasEnded(one) && !this._feed.isSaved ? actionButton("Download", `file ${rank.rank}`, () => this._download(rank.file)) : rank.file || "–") };
    const columns = [
      { name: "Rank", cell: (rank) => String(rank.rank) },
      { name: "State", cell: (rank) => chip(rank.state, KINDS[rank.state] ?? "unknown") },
      { name: "Steps made", numeric: true, cell: (rank) => String(rank.steps_made ?? 0) },
      { name: "Size", numeric: true, cell: (rank) => (rank.bytes ? bytes(rank.bytes) : "–") },
      { name: "Reason", class: "name", cell: (rank) => rank.reason || "–" },
      files,
    ];
    return [
      element("div", { class: "title-row" }, element("h1", {}, one.capture_id), chip(one.state, KINDS[one.state] ?? "unknown"), element("div", { class: "row" }, buttons)),
      one.reason ? element("p", { class: "notice warn" }, one.reason) : null,
      tiles([
        ["Run", element("a", { href: address({ view: "run", run: one.run }) }, one.run)],
        ["Steps", stepWords(one)],
        ["Ranks", `${done} of ${one.ranks?.length ?? 0} ended`],
        ["Asked for by", one.trigger ?? "–"],
        ["At", moment(one.requested_at)],
        ["Took", one.ended_at > 0 ? duration(one.ended_at - one.requested_at) : "–"],
      ]),
      card("Ranks", { wide: true }, progress(one), table("Ranks of the capture", columns, one.ranks ?? [])),
    ].filter(Boolean);
  }

  _open() {
    return openMadePage(`${encodeURIComponent(this._id)}/report`, this._report, "report");
  }

  async _download(file) {
    const answer = await commanded(`captures/${encodeURIComponent(this._id)}/link`, { file }, "download the file");
    if (answer === null) return;
    const link = element("a", { href: answer.url, download: file });
    document.body.append(link);
    link.click();
    link.remove();
  }
}

// Choosing changes the address. The older one of two is A.
function choiceBox(one, chosen) {
  const isChosen = chosen.some((each) => each.capture_id === one.capture_id);
  const box = element("input", {
    type: "checkbox",
    "aria-label": `compare ${one.capture_id}`,
    "data-key": `choice ${one.capture_id}`,
    disabled: !isChosen && chosen.length > 1,
    title: !isChosen && chosen.length > 1 ? "Two are chosen" : null,
  });
  box.checked = isChosen;
  box.addEventListener("change", () => {
    const others = chosen.filter((each) => each.capture_id !== one.capture_id);
    const [a, b] = [...others, ...(box.checked ? [one] : [])].sort((x, y) => x.requested_at - y.requested_at);
    location.hash = address({ view: "captures", options: { a: a?.capture_id, b: b?.capture_id } });
  });
  return box;
}

function stepWords({ step_range: range, options }) {
  return isNumber(range?.[0]) ? `${range[0]}–${range[1] - 1}` : options?.steps ? `next ${options.steps}` : "–";
}

function progress(one) {
  const ranks = one.ranks ?? [];
  const states = new Map();
  for (const rank of ranks) states.set(rank.state, [...(states.get(rank.state) ?? []), rank.rank]);
  const words = [...states].map(([state, of]) => `${state}: rank ${ranges(of)}`).join("; ") || one.state;
  return element(
    "div",
    { class: "cells", role: "img", "aria-label": words, title: words },
    ranks.slice(0, 64).map((rank) => swatch(CELLS[KINDS[rank.state]] ?? "hatch")),
    ranks.length > 64 ? element("small", {}, ` of ${ranks.length}`) : null,
  );
}
