// The verdict card: the lines that the daemon's document has of it, and the next action as a button.

import { actionButton, capture, stacks } from "./actions.js";
import { card, chip, element, facts, withCode } from "./elements.js";

const MARKS = { good: "✓", bad: "✗", unknown: "?" };

/** Return the kind of a verdict's colour: "good", "bad" or "unknown". */
export function verdictKind(verdict) {
  return verdict?.card?.state ?? "unknown";
}

/** Return a verdict in one line. */
export function verdictWords(verdict) {
  return verdict?.card?.heading ?? "no verdict yet";
}

/** Return a verdict in the few words that a cell of a table has room for. */
export function verdictTitle(verdict) {
  return verdict?.card?.title ?? "no verdict yet";
}

/** Return the measurements of a verdict, or why there is no cause. */
export function verdictReason(verdict) {
  return verdict?.card?.causes[0]?.parts.find((part) => part.name === "why")?.words ?? verdict?.card?.remark ?? "";
}

/** Return the verdict of a run as a card. `onStacks` is for stacks that the next action may show. */
export function verdictCard(verdict, { run, canAct, hasEnded, onStacks }) {
  if (!verdict) {
    const words = hasEnded ? "There was no verdict when the run ended." : "No verdict yet: it takes a few seconds of steps.";
    return card("Verdict", { wide: true }, element("p", { class: "soft" }, words));
  }
  const { state, heading, remark, failure, causes, note, account, also, next_command: next } = verdict.card;
  const alone = { heading, parts: [{ name: "why", words: failure || remark }] };
  const heads = failure || !causes.length ? [alone, ...causes] : causes;
  const action = !canAct ? null : nextAction(verdict, run, onStacks);
  return card(
    "Verdict",
    { wide: true },
    note ? element("p", { class: "note" }, note) : null,
    heads.flatMap(({ heading: words, parts }, at) => [
      element("p", { class: "verdict-head" }, chip(at ? `! ${words}` : `${MARKS[state]} ${words}`, at ? "warn" : state)),
      facts(parts.map((part) => [part.name, withCode(part.words)])),
    ]),
    [...account, ...also].map((words) => element("p", { class: "note" }, withCode(words))),
    action ? element("div", { class: "row" }, action) : null,
    next ? element("p", { class: "note" }, "In a terminal: ", element("code", {}, next)) : null,
  );
}

// The verdict's next command as a button, where the page can do it.
function nextAction({ rank, card: { state, next_command: next } }, run, onStacks) {
  if (/^torchperfd stacks\b/.test(next)) {
    return actionButton("Show the stacks of all ranks", "next", async () => onStacks(await stacks(run)), { primary: true });
  }
  if (/^torchperfd doctor\b/.test(next)) return element("a", { class: "button primary", href: "#/node", "data-key": "next" }, "See what is wrong with the node");
  if (/--kind memory/.test(next)) {
    return actionButton("Capture CUDA memory", "next", () => capture(run, { kind: "memory" }), { primary: true });
  }
  if (!/^torchperfd capture\b/.test(next)) return null;
  const ranks = state !== "bad" || rank === null ? null : [rank];
  return actionButton("Capture 5 steps", "next", () => capture(run, { steps: 5, withStack: ranks !== null }), { primary: state === "bad" });
}
