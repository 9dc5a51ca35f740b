// What the daemon knows, kept current: documents by their path, the history of the run in view, the connection.

import { RequestError, events, read } from "./requests.js";
import { RunHistory } from "./run_history.js";
import { chooseRanks } from "./statistics.js";

const SILENCE_MS = 25_000;
const RETRY_MS = 1500;
/** After a refusal, such as of a run that the daemon does not know. */
const REFUSED_RETRY_MS = 6000;
/** While a stream of events is open, the ranks report more often: not for a tab that is hidden for longer. */
const HIDDEN_MS = 30_000;
export const MAX_RANKS = 64;

/** How often a document is read again, in milliseconds; events bring what has to be there sooner. */
const EVERY_MS = { runs: 3000, run: 6000, ranks: 5000, captures: 15_000, capture: 2000, a: 15_000, b: 15_000, node: 4000, info: 60_000 };

/** Return the paths that a place shows, by the names under which views find them. */
function pathsOf({ view, run, capture, options }) {
  const fleet = options.fleet === "1" ? "?fleet=1" : "";
  const name = run === null ? "" : encodeURIComponent(run);
  switch (view) {
    case "overview":
      return { runs: `runs${fleet}`, captures: "captures?limit=20", info: "info" };
    case "run":
    case "rank": {
      const paths = {
        run: `runs/${name}${fleet}`,
        ranks: `runs/${name}/ranks${fleet}`,
        captures: `captures?run=${name}&limit=20`,
      };
      return view === "rank" ? { ...paths, node: "node" } : paths;
    }
    case "captures":
      return { captures: "captures?limit=100", ...chosenPaths(options) };
    case "capture":
      return { capture: `captures/${encodeURIComponent(capture)}` };
    default:
      return { node: "node", runs: "runs" };
  }
}

/** Return the paths of the captures to compare, "a" and "b" of an address: they may be too old for the list. */
function chosenPaths(options) {
  const given = ["a", "b"].filter((name) => options[name]);
  return Object.fromEntries(given.map((name) => [name, `captures/${encodeURIComponent(options[name])}`]));
}

export class Feed extends EventTarget {
  constructor() {
    super();
    this.documents = {};
    this.failures = {};
    this.history = null;
    this.connection = "connecting";
    this.isSaved = false;
    this._offset = 0;
    this._place = null;
    this._read = new Map();
    this._stream = null;
    this._hiddenTimer = null;
    this._instance = null;
    this._busy = new Set();
    setInterval(() => this._poll(), 500);
    document.addEventListener("visibilitychange", () => this._turned());
    // A browser keeps pages that were left for its back button; their streams would keep its few connections.
    addEventListener("pagehide", () => this._leave());
    addEventListener("pageshow", ({ persisted }) => persisted && this._turned());
  }

  /** The daemon's time now, in Unix seconds. */
  now() {
    return Date.now() / 1000 + this._offset;
  }

  /** Load what a place shows, and keep it current from now on. */
  watch(place) {
    const before = this._place;
    this._place = place;
    const paths = pathsOf(place);
    for (const name of Object.keys(EVERY_MS)) {
      if (!(name in paths) || (before && pathsOf(before)[name] !== paths[name])) this._forget(name);
    }
    const sameRun = before !== null && before.run === place.run;
    if (!sameRun) {
      this.history = null;
      delete this.failures.history;
      delete this.failures.events;
    }
    this._read.clear();
    this._poll();
    if (!sameRun || !this._stream) this._listen();
  }

  /** Read everything again, for example with a new token. */
  reload() {
    this._read.clear();
    this._poll();
    this._listen();
  }

  // The tab was hidden, or is seen again.
  _turned() {
    clearTimeout(this._hiddenTimer);
    if (document.hidden) this._hiddenTimer = setTimeout(() => this._leave(), HIDDEN_MS);
    else if (this._place !== null && this._stream === null) this._listen();
    this._poll();
  }

  _leave() {
    const stream = this._stream;
    // Without this a new one would be opened soon.
    this._stream = null;
    stream?.abort();
  }

  _forget(name) {
    delete this.documents[name];
    delete this.failures[name];
  }

  _poll() {
    if (this._place === null || document.hidden) return;
    const at = Date.now();
    for (const [name, path] of Object.entries(pathsOf(this._place))) {
      if (at - (this._read.get(name) ?? 0) >= EVERY_MS[name] && !this._busy.has(path)) this._load(name, path);
    }
  }

  async _load(name, path) {
    this._busy.add(path);
    this._read.set(name, Date.now());
    try {
      const answer = await read(path);
      if (pathsOf(this._place)[name] !== path) return;
      this.documents[name] = answer;
      delete this.failures[name];
      if (answer.view) this._offset = answer.view.at_unix_seconds - Date.now() / 1000;
      this._connected();
    } catch (error) {
      this._failed(name, path, error);
    } finally {
      this._busy.delete(path);
    }
    this._changed();
  }

  _failed(name, path, error) {
    if (!(error instanceof RequestError)) throw error;
    if (pathsOf(this._place)[name] !== path) return;
    if (error.status === 0) this._lost();
    else {
      this.failures[name] = error;
      delete this.documents[name];
      // Who refuses, answers.
      this._connected();
    }
  }

  async _listen() {
    this._stream?.abort();
    const control = new AbortController();
    this._stream = control;
    const { run } = this._place;
    let last = Date.now();
    const watchdog = setInterval(() => {
      if (Date.now() - last > SILENCE_MS) control.abort();
    }, 1000);
    try {
      let query = "";
      if (run !== null) {
        await this._loadHistory(run);
        const ranks = [...(this.history?.ranks.keys() ?? [])].join(",");
        query = `?run=${encodeURIComponent(run)}${ranks ? `&ranks=${ranks}` : ""}`;
      }
      if (control.signal.aborted) return;
      await events(
        `events${query}`,
        (name, data) => this._event(name, data),
        () => {
          last = Date.now();
          delete this.failures.events;
          this._connected();
        },
        control.signal,
      );
    } catch (error) {
      // An aborted stream ends with an error of the browser's own.
      if (!control.signal.aborted && error instanceof RequestError && error.status !== 0) this.failures.events = error;
    } finally {
      clearInterval(watchdog);
      if (this._stream === control) {
        this._stream = null;
        if (!this.failures.events) this._lost();
        setTimeout(() => this._stream === null && !document.hidden && this._listen(), this.failures.events ? REFUSED_RETRY_MS : RETRY_MS);
      }
    }
  }

  async _loadHistory(run) {
    const path = `runs/${encodeURIComponent(run)}/history`;
    let answer;
    try {
      answer = await read(path);
      if ((answer.ranks_here?.length ?? 0) > MAX_RANKS) answer = await read(`${path}?ranks=${await this._pick(run, answer)}`);
    } catch (error) {
      if (error instanceof RequestError && error.status !== 0) this.failures.history = error;
      throw error;
    }
    if (this._place.run !== run) return;
    delete this.failures.history;
    delete this.failures.events;
    this.history = new RunHistory(answer);
    this._changed();
  }

  // More ranks than can be drawn: those that stand out by all their seconds, and ranks at even percentiles.
  async _pick(run, { across }) {
    const { runs } = await read(`runs/${encodeURIComponent(run)}/ranks`);
    const ranks = (runs[0]?.ranks ?? []).map((rank) => ({
      rank: rank.rank,
      ownSeconds: rank.own_seconds,
      attention: rank.slow !== null || rank.state !== "training",
    }));
    const named = (across?.outliers ?? []).map((outlier) => outlier.rank);
    return chooseRanks(ranks, MAX_RANKS, named).shown.map((rank) => rank.rank).join(",");
  }

  _event(name, data) {
    const ours = this._place.run !== null;
    switch (name) {
      case "hello":
        if (this._instance !== null && this._instance !== data.instance) this._read.clear();
        this._instance = data.instance;
        break;
      case "steps":
        if (ours) this.history?.addSteps(data);
        break;
      case "seconds":
        if (ours) this.history?.addSeconds(data);
        break;
      case "mark":
        if (ours) this.history?.addMark(data.mark);
        break;
      case "dropped":
        this.reload();
        break;
      case "runs":
      case "run":
      case "verdict":
        this._read.delete("runs");
        this._read.delete("run");
        break;
      case "capture":
        this.dispatchEvent(new CustomEvent("capture", { detail: data.capture }));
        for (const each of ["captures", "capture", "a", "b"]) this._read.delete(each);
        break;
      default:
    }
    this._changed();
  }

  _connected() {
    if (this.connection === "live") return;
    // What was read before may be of a daemon that is gone.
    if (this.connection === "lost") this._read.clear();
    this.connection = "live";
    this._changed();
  }

  _lost() {
    if (this.connection === "lost") return;
    this.connection = "lost";
    this._changed();
  }

  _changed() {
    this.dispatchEvent(new Event("change"));
  }
}

/** The same interface over what a saved page carries. It changes no more. */
export class SavedFeed extends EventTarget {
  constructor(saved) {
    super();
    this.documents = saved.documents;
    this.failures = {};
    this.history = saved.history ? new RunHistory(saved.history) : null;
    this.connection = "saved";
    this.isSaved = true;
    this.savedAt = saved.saved_unix_seconds;
    this.place = saved.place;
  }

  /** The time at which the page was saved. */
  now() {
    return this.savedAt;
  }

  /** Show another view; what was not loaded when the page was saved stays unknown. */
  watch() {
    this.dispatchEvent(new Event("change"));
  }

  /** Nothing to read again. */
  reload() {}
}
