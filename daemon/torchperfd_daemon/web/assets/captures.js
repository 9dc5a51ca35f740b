// Captures: the list, and the view of one with its ranks, its report and its files.

import { actionButton, cancel, commanded, showOutcome } from "./actions.js";
import { address } from "./address.js";
import { card, chip, element, table, tile } from "./elements.js";
import { bytes, count, duration, isNumber, moment, ranges } from "./numbers.js";
import { Part } from "./parts.js";

const KINDS = { complete: "good", partial: "warn", failed: "bad", preparing: "busy", armed: "busy", queued: "quiet" };
const ENDED = ["complete", "partial", "failed"];
const REPORT_EVERY_MS = 1000;

/** Return whether a capture has ended. */
export function hasEnded(capture) {
  return ENDED.includes(capture.state);
}

export class CapturesView {
  constructor(feed) {
    this._feed = feed;
    this._chosen = new Set();
    this._list = new Part(element("div", {}));
    this._compare = element("p", { class: "note", "aria-live": "polite" });
    this.box = element("div", {}, element("h1", {}, "Captures"), this._list.box, this._compare);
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
    this._list.update(known.captures, () => [
      known.captures.length
        ? card("List", { wide: true, note: "Choose two to compare them." }, table("Captures of this node", this._columns(), known.captures))
        : card("No capture", { wide: true }, element("p", {}, "Capture some steps with the button of a run, or with"), element("pre", {}, "torchperfd capture --steps 5")),
    ]);
  }

  _columns() {
    return [
      { name: "Capture", class: "name", cell: (one) => element("a", { href: address({ view: "capture", capture: one.capture_id }), "data-key": one.capture_id }, one.capture_id) },
      { name: "Run", class: "name", cell: (one) => one.run },
      { name: "State", cell: (one) => chip(one.state, KINDS[one.state] ?? "unknown") },
      { name: "Progress", class: "bar-cell", cell: (one) => progress(one) },
      { name: "Steps", numeric: true, cell: (one) => stepWords(one) },
      { name: "Size", numeric: true, cell: (one) => bytes(one.disk_bytes ?? null) },
      { name: "Asked for", cell: (one) => moment(one.requested_at) },
      { name: "Compare", cell: (one) => this._choice(one) },
    ];
  }

  _choice(one) {
    const box = element("input", { type: "checkbox", "aria-label": `compare ${one.capture_id}`, "data-key": `choice ${one.capture_id}` });
    box.checked = this._chosen.has(one.capture_id);
    box.addEventListener("change", () => {
      if (box.checked) this._chosen.add(one.capture_id);
      else this._chosen.delete(one.capture_id);
      const ids = [...this._chosen];
      this._compare.replaceChildren(
        ...(ids.length === 2 ? ["On the node: ", element("code", {}, `torchperfd compare ${ids[0]} ${ids[1]}`)] : ids.length > 2 ? ["Choose two, not more."] : []),
      );
    });
    return box;
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
    this._content.update([one ?? null, problem], () => {
      if (one) return this._built(one);
      return [element("h1", {}, this._id), element("p", { class: problem ? "notice bad" : "soft" }, problem ? `${problem}.` : "Loading …")];
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
      element(
        "dl",
        { class: "tiles" },
        tile("Run", element("a", { href: address({ view: "run", run: one.run }) }, one.run)),
        tile("Steps", stepWords(one)),
        tile("Ranks", `${done} of ${one.ranks?.length ?? 0} ended`),
        tile("Asked for by", one.trigger ?? "–"),
        tile("At", moment(one.requested_at)),
        tile("Took", one.ended_at > 0 ? duration(one.ended_at - one.requested_at) : "–"),
      ),
      card("Ranks", { wide: true }, progress(one), table("Ranks of the capture", columns, one.ranks ?? [])),
    ].filter(Boolean);
  }

  async _open() {
    this._report.textContent = "The daemon is making the report …";
    for (;;) {
      const answer = await commanded(`captures/${encodeURIComponent(this._id)}/report`, {}, "make the report");
      if (answer === null) {
        this._report.textContent = "";
        return;
      }
      if (answer.state === "ready") {
        this._report.textContent = "";
        const link = element("a", { href: answer.url, target: "_blank", rel: "noopener", id: "report-link" }, "open it in a new tab");
        showOutcome("good", "The report is ready: ", link, ". The link works for a minute.");
        return;
      }
      if (answer.state === "failed") {
        this._report.textContent = "";
        showOutcome("bad", `No report: ${answer.reason}.`);
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, REPORT_EVERY_MS));
      if (!this.box.isConnected) return;
    }
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
    ranks.slice(0, 64).map((rank) => element("i", { class: `cell ${KINDS[rank.state] ?? "unknown"}` })),
    ranks.length > 64 ? element("small", {}, ` of ${ranks.length}`) : null,
  );
}
