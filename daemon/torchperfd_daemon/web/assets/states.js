// States of ranks and runs: the colour of the word.

const KINDS = {
  training: "good", validating: "good", checkpointing: "good", finished: "quiet", starting: "quiet",
  stalled: "bad", stopped: "bad", gone: "bad", disconnected: "bad",
};

/** Return the kind of a state's colour. */
export function stateKind(state) {
  return KINDS[state] ?? "unknown";
}

/** Return whether a run has ended, so that its ranks take no commands. */
export function hasRunEnded(run) {
  return ["finished", "gone"].includes(run.state);
}

/** Return whether the run in view has ended; null until the daemon has answered. */
export function hasViewedRunEnded({ documents, failures }) {
  if (documents.run) return hasRunEnded(documents.run.run);
  return failures.run ? false : null;
}

/** Return whether the run in view ended so long ago that the daemon has its row and its verdict only. */
export function hasNoStepsLeft(feed) {
  return hasViewedRunEnded(feed) === true && feed.history === null && (feed.failures.history !== undefined || feed.isSaved);
}

/** Return whether a rank should report and does not; one that has finished need not. */
export function isMissing(rank) {
  return rank.connected === false && rank.state !== "finished";
}

/** Return a rank's state in words: one that is not connected is missing, whatever it last reported. */
export function rankState(rank) {
  if (isMissing(rank)) return "missing";
  return rank.stalled_seconds ? "stalled" : rank.state ?? "unknown";
}
