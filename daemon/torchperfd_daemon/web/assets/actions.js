// What the page can have the daemon do: capture, stacks, cancel. Each needs the token.

import { element } from "./elements.js";
import { count, ranges } from "./numbers.js";
import { RequestError, command } from "./requests.js";
import { askForToken, token } from "./token.js";

/** Return a button that runs an action; without a token it asks for it first, and says why. */
export function actionButton(words, key, act, { primary = false, disabled = false, title = null } = {}) {
  const button = element(
    "button",
    { type: "button", class: primary ? "primary" : null, "data-key": key, disabled, title },
    words,
  );
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await act();
    } finally {
      button.disabled = disabled;
    }
  });
  return button;
}

const outcome = element("div", { class: "outcome", role: "status", "aria-live": "polite" });

/** The place where the outcome of the last action is shown. */
export function outcomeBox() {
  return outcome;
}

/** Show words, and perhaps a link, as the outcome of an action. */
export function showOutcome(kind, ...content) {
  delete outcome.dataset.capture;
  outcome.className = `outcome ${kind}`;
  outcome.replaceChildren(
    element("p", {}, ...content),
    element("button", { type: "button", class: "plain", "aria-label": "Dismiss", onclick: clearOutcome }, "×"),
  );
}

/** Take the outcome away: another view is opened. */
export function clearOutcome() {
  outcome.replaceChildren();
  delete outcome.dataset.capture;
}

/** Say how a capture ended where its start is what is shown. */
export function captureChanged({ capture_id: id, state, reason }) {
  if (outcome.dataset.capture !== id || !["complete", "partial", "failed"].includes(state)) return;
  const kind = { complete: "good", partial: "warn", failed: "bad" }[state];
  showOutcome(kind, `Capture ${state}${reason ? `: ${reason}` : ""}: `, element("a", { href: captureAddress(id) }, `open ${id}`));
}

function captureAddress(id) {
  return `#/capture/${encodeURIComponent(id)}`;
}

/** Send a command with the token; asks for one where there is none. Returns null where it was not done. */
export async function commanded(path, body, doing) {
  if (token() === null && !(await askForToken(`To ${doing}, this page needs the daemon's token.`))) {
    showOutcome("warn", `Not done: to ${doing} needs the token. Run “torchperfd open” on the node.`);
    return null;
  }
  try {
    return await command(path, body);
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    showOutcome("bad", `Could not ${doing}: ${error.message}.`);
    return null;
  }
}

/** Capture some steps of a run, of all ranks or of some. */
export async function capture(run, { steps = 5, ranks = null, kind = "trace", withStack = false } = {}) {
  const body = { steps, kind, ...(ranks ? { ranks } : {}), ...(withStack ? { with_stack: true } : {}) };
  const answer = await commanded(`runs/${encodeURIComponent(run)}/capture`, body, "start a capture");
  if (answer === null) return null;
  showOutcome(
    "good",
    `Capture of ${count(steps, "step")} ${answer.reason || "started"}: `,
    element("a", { href: captureAddress(answer.capture_id) }, answer.capture_id),
  );
  outcome.dataset.capture = answer.capture_id;
  return answer.capture_id;
}

/** Cancel a capture. */
export async function cancel(id) {
  const answer = await commanded(`captures/${encodeURIComponent(id)}/cancel`, {}, "cancel the capture");
  if (answer !== null) showOutcome("good", `Capture ${id} is being cancelled.`);
}

/** Return the stacks of a run as elements; null where they could not be had. */
export async function stacks(run, ranks = null) {
  const body = ranks ? { ranks } : {};
  const answer = await commanded(`runs/${encodeURIComponent(run)}/stacks`, body, "read the stacks");
  return answer === null ? null : stackReport(answer);
}

// The document of `torchperfd stacks --json`: one sentence, then each place once with its ranks, the odd ones first.
function stackReport(answer) {
  const odd = new Set(answer.odd ?? []);
  const groups = [...(answer.groups ?? [])].sort(
    (a, b) => Number(b.ranks.some((rank) => odd.has(rank))) - Number(a.ranks.some((rank) => odd.has(rank))),
  );
  const parts = [element("p", {}, answer.finding ?? "")];
  if (answer.goes_on) parts.push(element("p", { class: "note" }, "Training goes on; this is one moment of it."));
  for (const group of groups) {
    const isOdd = group.ranks.some((rank) => odd.has(rank));
    const title = `${isOdd ? "◀ " : ""}rank ${ranges(group.ranks)}: ${doing(group)}`;
    parts.push(element("h3", { class: isOdd ? "bad" : null }, title));
    parts.push(element("pre", { tabindex: "0", "aria-label": `Stack of rank ${ranges(group.ranks)}` }, framesOf(answer, group).map(frameWords).join("\n")));
  }
  const silent = (answer.ranks ?? []).filter((rank) => rank.reason && !(rank.threads ?? []).length);
  for (const rank of silent) parts.push(element("p", { class: "warn" }, `rank ${rank.rank}: ${rank.outcome}: ${rank.reason}`));
  return element("div", { class: "stacks" }, parts);
}

// The stack of the group's first rank, of the thread that trains.
function framesOf(answer, group) {
  const threads = (answer.ranks ?? []).find((rank) => rank.rank === group.ranks[0])?.threads ?? [];
  return (threads.find((thread) => thread.training) ?? threads[0])?.frames ?? [];
}

function doing({ doing: kind, call, place }) {
  const where = place ? `${place.file?.split("/").at(-1) ?? ""}:${place.line ?? "?"} in ${place.function ?? "?"}` : "";
  return call ? `waits in ${call} (${where})` : kind && kind !== "code" ? `${kind} (${where})` : where;
}

function frameWords(frame) {
  return `${frame.function ?? "?"}  ${frame.file ?? ""}:${frame.line ?? "?"}`;
}
