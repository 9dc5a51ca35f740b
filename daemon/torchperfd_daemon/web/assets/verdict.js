// The verdict card: the cause first, then where, the evidence, the cost, the fix, and the next action as a button.

import { actionButton, capture, stacks } from "./actions.js";
import { card, chip, element, withCode } from "./elements.js";
import { age, duration, percent } from "./numbers.js";

const HEALTHY = "none";

/** Return the kind of a verdict's colour: "good", "bad" or "unknown". */
export function verdictKind(verdict) {
  if (!verdict || verdict.cause === "unknown") return "unknown";
  return verdict.cause === HEALTHY ? "good" : "bad";
}

/** Return a verdict as a few words. */
export function verdictWords(verdict) {
  if (!verdict) return "no verdict yet";
  if (verdict.cause === HEALTHY) return "healthy";
  return verdict.rank === null || verdict.rank === undefined ? verdict.cause : `${verdict.cause}, rank ${verdict.rank}`;
}

/** Return the verdict of a run as a card. `place` is for stacks that the next action may show. */
export function verdictCard(verdict, { run, stepSeconds, isSaved, onStacks }) {
  if (!verdict) return card("Verdict", { wide: true }, element("p", { class: "soft" }, "No verdict yet: it takes a few seconds of steps."));
  const kind = verdictKind(verdict);
  const head = element(
    "p",
    { class: "verdict-head" },
    chip(kind === "good" ? "✓ healthy" : kind === "bad" ? `✗ ${verdict.cause}` : "? unknown", kind),
    " ",
    verdict.evidence ?? "",
  );
  const facts = [
    ["Where", whereWords(verdict)],
    ["Cost", costWords(verdict, stepSeconds)],
    ["Since", verdict.onset_step !== null && verdict.onset_step !== undefined ? `step ${verdict.onset_step}` : null],
    ["Evidence of", verdict.window_seconds ? `the last ${age(verdict.window_seconds)}` : null],
    ["Line", lineWords(verdict.line)],
    ["Fix", verdict.fix],
    ["Expected gain", verdict.saves_seconds > 0 ? `${duration(verdict.saves_seconds)} of each step` : null],
  ].filter(([, words]) => typeof words === "string" && words !== "");
  return card(
    "Verdict",
    { wide: true },
    head,
    facts.length ? element("dl", { class: "facts" }, facts.flatMap(([name, words]) => [element("dt", {}, name), element("dd", {}, withCode(words))])) : null,
    others(verdict, stepSeconds),
    isSaved ? null : element("div", { class: "row" }, nextAction(verdict, run, onStacks)),
    verdict.next_command ? element("p", { class: "note" }, "In a terminal: ", element("code", {}, verdict.next_command)) : null,
  );
}

function whereWords({ rank, node, phase, cause }) {
  if (cause === HEALTHY) return null;
  const parts = [
    rank === null || rank === undefined ? null : `rank ${rank}`,
    node ? `on ${node}` : null,
    phase ? `in ${phase}` : null,
  ];
  return parts.filter(Boolean).join(" ");
}

function lineWords(line) {
  if (!line) return null;
  const whole = line.of_step ? "the host's work" : line.in_workers ? "the workers' loading" : "loading";
  if (!line.file) return `${line.stage} is ${percent(line.stage_share)} of ${whole}; no line of it stands out`;
  const calls = line.call ? `, calls ${line.call}` : "";
  return `${line.file.split("/").at(-1)}:${line.line} in ${line.function}${calls}: ${percent(line.share)} of ${whole} (${line.stage} ${percent(line.stage_share)})`;
}

function costWords({ cost_seconds_per_step: cost, stalled_seconds: stalled }, stepSeconds) {
  if (stalled) return `no step for ${duration(stalled)}`;
  if (!(cost > 0)) return null;
  return `${duration(cost)} of each step${stepSeconds > 0 ? `, ${percent(cost / stepSeconds)}` : ""}`;
}

function others({ others: more }, stepSeconds) {
  if (!more?.length) return null;
  return element(
    "div",
    {},
    element("h3", {}, "Also"),
    element(
      "ul",
      {},
      more.map((verdict) => element("li", {}, [verdictWords(verdict), verdict.evidence, costWords(verdict, stepSeconds)].filter(Boolean).join(" · "))),
    ),
  );
}

// The verdict's next command as a button, where the page can do it.
function nextAction({ cause, next_command: next = "", rank }, run, onStacks) {
  if (cause === "hang" || /^torchperfd stacks\b/.test(next ?? "")) {
    return actionButton("Show the stacks of all ranks", "next", async () => onStacks(await stacks(run)), { primary: true });
  }
  if (/^torchperfd doctor\b/.test(next ?? "")) return element("a", { class: "button primary", href: "#/node", "data-key": "next" }, "See what is wrong with the node");
  if (/--kind memory/.test(next ?? "")) {
    return actionButton("Capture CUDA memory", "next", () => capture(run, { kind: "memory" }), { primary: true });
  }
  const ranks = cause === HEALTHY || rank === null || rank === undefined ? null : [rank];
  return actionButton("Capture 5 steps", "next", () => capture(run, { steps: 5, withStack: ranks !== null }), { primary: cause !== HEALTHY });
}
