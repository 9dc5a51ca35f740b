// Puts the page together: the address decides the view, the feed what it shows.

import { captureChanged, clearOutcome, outcomeBox, showOutcome } from "./actions.js";
import { address, parse } from "./address.js";
import { CaptureView, CapturesView } from "./captures.js";
import { element } from "./elements.js";
import { Feed, SavedFeed } from "./feed.js";
import { moment } from "./numbers.js";
import { NodeView } from "./node.js";
import { Overview } from "./overview.js";
import { Part } from "./parts.js";
import { RankView } from "./rank.js";
import { RunView } from "./run.js";
import { download, savedPage, snapshot } from "./save.js";
import { ScopeLine } from "./scope.js";
import { askForToken, keep, takeFromAddress, token } from "./token.js";

const VIEWS = { overview: Overview, run: RunView, rank: RankView, captures: CapturesView, capture: CaptureView, node: NodeView };
const TABS = [["overview", "Runs", ["overview", "run", "rank"]], ["captures", "Captures", ["captures", "capture"]], ["node", "Node", ["node"]]];
const MIN_MS_BETWEEN_DRAWS = 250;

class Page {
  constructor() {
    const saved = document.getElementById("saved");
    this._feed = saved ? new SavedFeed(JSON.parse(saved.textContent)) : new Feed();
    if (saved && !location.hash) location.replace(this._feed.place || "#/");
    this._main = document.getElementById("view");
    this._banner = new Part(document.getElementById("banner"));
    this._tabs = new Part(document.getElementById("tabs"));
    this._tools = new Part(document.getElementById("tools"));
    this._scope = new ScopeLine(document.getElementById("scope"));
    this._drawnAt = -Infinity;
    this._waiting = false;
    this._key = null;
    this._lostAt = null;
    this._main.before(outcomeBox());
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault();
      this._main.focus();
    });
    addEventListener("hashchange", () => this._go());
    addEventListener("token-refused", () =>
      showOutcome("warn", "The daemon refused the token: it makes a new one each time it starts. Run “torchperfd open” again."),
    );
    this._feed.addEventListener("capture", ({ detail }) => captureChanged(detail));
    this._feed.addEventListener("change", () => this._soon());
    setInterval(() => this._frame(), 1000);
    this._go();
  }

  _go() {
    if (!this._feed.isSaved && location.hash.startsWith("#token=")) {
      takeFromAddress();
      this._feed.reload();
    }
    this._place = parse(location.hash);
    const key = address({ ...this._place, options: { fleet: this._place.options.fleet } });
    if (key !== this._key) {
      const first = this._key === null;
      this._key = key;
      if (!first) clearOutcome();
      this._view = new VIEWS[this._place.view](this._feed, this._place);
      this._main.replaceChildren(this._view.box);
      if (!first) {
        this._main.focus({ preventScroll: true });
        scrollTo(0, 0);
      }
    } else this._view.moved?.(this._place);
    this._feed.watch(this._place);
    this._draw();
  }

  _soon() {
    if (this._waiting) return;
    this._waiting = true;
    setTimeout(
      () => {
        this._waiting = false;
        this._draw();
      },
      Math.max(0, this._drawnAt + MIN_MS_BETWEEN_DRAWS - performance.now()),
    );
  }

  _draw() {
    if (document.hidden) return;
    this._drawnAt = performance.now();
    performance.mark("draw-begin");
    this._view.update();
    performance.measure("draw", "draw-begin");
    performance.clearMarks("draw-begin");
    this._frame();
  }

  // What is around a view: tabs, banner, and the line of its scope, whose ages grow without news.
  _frame() {
    const title = `${this._view.title} · torchperfd`;
    if (document.title !== title) document.title = title;
    this._tabs.update(this._place.view, () =>
      TABS.map(([view, words, of]) =>
        element("a", { href: address({ view }), "aria-current": of.includes(this._place.view) ? "page" : null, "data-key": view }, words),
      ),
    );
    const canAct = token() !== null;
    this._tools.update([this._feed.isSaved, canAct], () => (this._feed.isSaved ? [] : tools(this)));
    const { connection } = this._feed;
    this._lostAt = connection === "lost" ? (this._lostAt ?? Date.now()) : null;
    const isEmpty = !Object.keys(this._feed.documents).length;
    const scope = this._view.scope();
    this._banner.update([connection, isEmpty, this._feed.failures.events?.message, this._feed.failures.run?.message, scope.hasEnded, scope.ended], () => banner(this._feed, scope));
    document.body.classList.toggle("stale", connection === "lost");
    this._scope.update(scope, this._feed.now(), this._feed.isSaved ? this._feed.savedAt : null);
  }

  /** Save what is shown now. */
  async save() {
    const saved = snapshot(this._feed, this._place);
    const stamp = moment(saved.saved_unix_seconds).replaceAll(/[ :]/g, "-");
    try {
      download(`torchperfd-${this._place.view}-${stamp}.html`, await savedPage(saved));
    } catch (error) {
      showOutcome("bad", `Not saved: ${error.message}.`);
    }
  }

  /** Ask for the token, or forget it. */
  async unlock() {
    if (token() !== null) keep(null);
    else await askForToken("With the token this page can start captures, read stacks and open reports.");
    this._feed.reload();
    this._frame();
  }
}

function tools(page) {
  return [
    element("button", { type: "button", "data-key": "save", onclick: () => page.save() }, "Save this page"),
    element("button", { type: "button", "data-key": "token", onclick: () => page.unlock() }, token() === null ? "Enter token" : "Forget token"),
  ];
}

// `hasEnded` is of the view's run: null as long as that is not known, undefined in a view of no run.
function banner(feed, { hasEnded, ended }) {
  if (feed.connection === "lost") {
    const known = Object.keys(feed.documents).length ? "What you see is the last that was known" : "The daemon of “torchperfd run” ends with its run";
    return [element("p", { class: "notice bad" }, `⚠ The daemon does not answer. ${known}; this page goes on by itself when it is back.`)];
  }
  const notices = [];
  if (feed.isSaved) notices.push(element("p", { class: "notice" }, `Saved ${moment(feed.savedAt)}. This page does not change any more.`));
  if (hasEnded) notices.push(element("p", { class: "notice" }, `This run ${ended ? `ended ${moment(ended)}` : "has ended"}. No more steps or stacks of it can be captured.`));
  else if (hasEnded !== null && feed.failures.events && !feed.failures.run) {
    notices.push(element("p", { class: "notice warn" }, `No live updates: ${feed.failures.events.message}. The page reads again every few seconds.`));
  }
  return notices;
}

// An address without a hash, as a person or `torchperfd open --run` gives it: /runs/NAME and /captures/ID.
if (!document.getElementById("saved")) takeFromAddress();
const typed = /^\/(runs|captures|node)(?:\/([^/]+))?\/?$/.exec(location.pathname);
if (typed && !document.getElementById("saved")) {
  const [, kind, name] = typed;
  const rest = name ? `${kind === "runs" ? "run" : "capture"}/${name}` : kind === "runs" ? "" : kind;
  history.replaceState(null, "", `/#/${rest}`);
}
new Page();
