// The newest seconds and steps of each rank of one run: what the daemon has, kept up by its events.

const MAX_SECONDS = 600;
const MAX_STEPS = 256;

export class RunHistory {
  /** @param saved A document of /history; null for an empty history. */
  constructor(saved) {
    this.marks = [];
    /** Grows with every change. */
    this.version = 0;
    this.ranks = new Map();
    this.here = [];
    this.across = null;
    if (saved) this.load(saved);
  }

  /** Replace everything by a document of /history. */
  load(saved) {
    this.version += 1;
    this.marks = [...(saved.marks ?? [])];
    this.here = saved.ranks_here ?? saved.ranks.map((rank) => rank.rank);
    this.across = saved.across ?? null;
    this.ranks = new Map(saved.ranks.map((rank) => [rank.rank, { ...rank, offset: rank.steps?.first_step ?? 0 }]));
  }

  /** Add a "steps" event; steps that are known already are left out. */
  addSteps(event) {
    this.version += 1;
    for (const news of event.ranks) {
      const kept = this.ranks.get(news.rank);
      if (!kept) continue;
      const next = kept.steps ? kept.steps.first_step + kept.steps.step_seconds.length : null;
      const missing = next === null ? 0 : news.first_step - next;
      if (missing > MAX_STEPS || news.first_step + news.step_seconds.length < (kept.steps?.first_step ?? 0)) kept.steps = null;
      else if (missing > 0) for (const column of columns(kept.steps)) column.push(...Array(missing).fill(null));
      const skipped = kept.steps ? Math.max(0, next - news.first_step) : 0;
      kept.steps ??= { first_step: news.first_step, end_unix_seconds: [], step_seconds: [], phase_seconds: {} };
      const cut = append(kept.steps, news, news.step_seconds.length, skipped, "step_seconds", MAX_STEPS);
      kept.steps.first_step += cut;
    }
  }

  /** Add a "seconds" event. */
  addSeconds(event) {
    this.version += 1;
    for (const news of event.ranks) {
      const kept = this.ranks.get(news.rank);
      if (!kept || !news.unix_seconds?.length) continue;
      kept.seconds ??= { unix_seconds: [], phase_seconds: {} };
      const newest = kept.seconds.unix_seconds.at(-1) ?? -Infinity;
      const skipped = news.unix_seconds.filter((at) => at <= newest).length;
      append(kept.seconds, news, news.unix_seconds.length, skipped, "unix_seconds", MAX_SECONDS);
      const oldest = kept.seconds.unix_seconds.at(-1) - MAX_SECONDS;
      drop(kept.seconds, kept.seconds.unix_seconds.findIndex((at) => at > oldest));
    }
  }

  /** Add a mark; the end of a mark replaces its beginning. */
  addMark(mark) {
    this.version += 1;
    const same = (other) =>
      other.kind === mark.kind && other.unix_seconds === mark.unix_seconds && other.rank === mark.rank;
    this.marks = [...this.marks.filter((other) => !same(other)), mark].slice(-256);
  }

  /** Return the newest second of any rank, and ten minutes before it. */
  span() {
    let newest = -Infinity;
    let oldest = Infinity;
    for (const rank of this.ranks.values()) {
      const at = rank.seconds?.unix_seconds ?? [];
      if (at.length === 0) continue;
      newest = Math.max(newest, at.at(-1));
      oldest = Math.min(oldest, at[0]);
    }
    if (newest === -Infinity) return null;
    return { from: Math.max(oldest, newest - MAX_SECONDS + 1), until: newest };
  }

  /** Return when a step began, in Unix seconds; null where no rank's steps reach back to it. */
  beginOf(step) {
    for (const { steps } of this.ranks.values()) {
      const row = step - (steps?.first_step ?? Infinity);
      if (steps?.step_seconds[row] != null) return steps.end_unix_seconds[row] - steps.step_seconds[row];
    }
    return null;
  }

  /** Return what a saved page needs to show the same. */
  toDocument() {
    return { ranks: [...this.ranks.values()], marks: this.marks, ranks_here: this.here, across: this.across };
  }
}

// Append the columns of `news` from row `skipped` on, and return how many old rows went.
function append(kept, news, length, skipped, ruler, most) {
  const before = kept[ruler].length;
  for (const [name, column] of Object.entries(news)) {
    if (Array.isArray(column) && column.length === length) extend(kept, name, before, column.slice(skipped));
  }
  for (const [name, column] of Object.entries(news.phase_seconds ?? {})) {
    extend(kept.phase_seconds, name, before, column.slice(skipped));
  }
  const after = kept[ruler].length;
  for (const column of columns(kept)) while (column.length < after) column.push(null);
  const excess = Math.max(0, after - most);
  drop(kept, excess);
  return excess;
}

function extend(kept, name, before, values) {
  if (!Array.isArray(kept[name])) kept[name] = Array(before).fill(null);
  kept[name].push(...values);
}

function drop(kept, rows) {
  if (rows > 0) for (const column of columns(kept)) column.splice(0, rows);
}

function columns(kept) {
  return [
    ...Object.values(kept).filter(Array.isArray),
    ...Object.values(kept.phase_seconds ?? {}).filter(Array.isArray),
  ];
}
