// The page of `torchperfd compare A B --html` for two runs.

import { card, chip, element } from "../web/assets/elements.js";
import { decimal, integer, percent, signed } from "./quantities.js";
import { day, note, report, show, verdict } from "./report.js";
import { direction, pairsTable, sidesTable } from "./sides.js";
import { sortingTable } from "./tables.js";

function milli(seconds) {
  return decimal(seconds * 1000, 3);
}

function share(value) {
  return signed(value, percent(Math.abs(value)));
}

function sides() {
  const both = (name, of) => [name, of(report.before), of(report.after)];
  const of = (key) => (side) => String(side[key] ?? "");
  return card("What is compared", {}, sidesTable([
    both("run", of("run")), both("script", of("script")), both("host", of("host")), both("device", (side) => side.environment.device ?? ""),
    both("torch", (side) => side.environment.torch ?? ""), both("Python", (side) => side.environment.python ?? ""),
    both("torchperfd", (side) => side.environment.torchperfd ?? ""), both("began", (side) => day(side.started_seconds)),
    both("steps", (side) => integer(side.steps)), both("ranks", (side) => integer(side.world_size)), both("ended", of("exit_state")),
    both("slow rank", (side) => (side.slow_rank === null ? "none" : String(side.slow_rank))), both("verdict", of("verdict")),
  ]));
}

// The change with its confidence interval, on one scale for all rows; the line in the middle is no change.
function interval(row, most) {
  const low = row.share - row.margin;
  const high = row.share + row.margin;
  const at = (value) => `${50 + (50 * value) / most}%`;
  const line = element("div", { class: "interval-line" });
  line.style.left = at(low);
  line.style.width = `${(50 * (high - low)) / most}%`;
  const point = element("div", { class: "interval-point" });
  point.style.background = `var(--${direction(row.changed, row.share)})`;
  point.style.left = at(row.share);
  return element("div", { class: "interval", role: "img", "aria-label": `${share(low)} to ${share(high)} of the step` }, element("div", { class: "interval-zero" }), line, point);
}

function phases() {
  const rows = [
    { ...report.step, name: "the whole step", share: report.step.ratio, margin: report.step.ratio_margin, changed: report.changed, is_whole: true },
    ...report.phases.map((phase) => ({ ...phase, name: phase.phase, share: phase.share_of_step, margin: phase.share_margin })),
  ].map((row) => ({ ...row, before: row.before_seconds, after: row.after_seconds }));
  const most = Math.max(...rows.map((row) => Math.abs(row.share) + row.margin), 1e-9);
  // The step may have changed where the run has not.
  const word = (row) => (row.changed ? "changed" : row.is_whole && report.step_changed ? "machine's speed" : "within noise");
  const outcome = (row) => `${word(row)}${row.spikes_clipped ? ", spikes clipped" : ""}`;
  return card("Phases", {}, pairsTable("Phases", "phase", rows, [
    { name: "A ms", numeric: true, cell: (row) => milli(row.before) }, { name: "B ms", numeric: true, cell: (row) => milli(row.after) },
    { name: "of the step", numeric: true, cell: (row) => `${share(row.share)} ± ${percent(row.margin)}`, kind: (row) => direction(row.changed, row.share) },
    { name: "change ms", numeric: true, cell: (row) => signed(row.difference_seconds, milli(Math.abs(row.difference_seconds))) },
    { name: "95 % interval", cell: (row) => interval(row, most) },
    { name: "", numeric: true, cell: (row) => chip(outcome(row), direction(row.changed, row.share)) },
  ]),
  note("Milliseconds per step. The interval is that of the change, as a part of the step.",
    report.machine_factor === null ? "" : ` All phases changed alike: their changes are those beyond that, with A's times taken ${decimal(report.machine_factor, 2)} times.`,
    report.phases.some((phase) => phase.spikes_clipped) ? " Spikes clipped: the change is that of the means without spikes; A and B have all steps." : ""));
}

function parts() {
  if (!report.parts.length) return null;
  const rows = report.parts.map((part) => ({ name: part.part, before: part.before_seconds, after: part.after_seconds }));
  const title = "Where a step goes";
  return card(title, {}, pairsTable(title, "part", rows, [
    { name: "A ms", numeric: true, cell: (row) => milli(row.before) }, { name: "B ms", numeric: true, cell: (row) => milli(row.after) },
    { name: "change ms", numeric: true, cell: (row) => signed(row.after - row.before, milli(Math.abs(row.after - row.before))) },
  ]),
  note("Milliseconds per step, of the verdict of each run. The parts of a run sum to its step; whether a change is beyond noise is known of phases only."));
}

function differences() {
  const rows = report.differing;
  if (!rows.length) return card("Environment", {}, note("Nothing that the reports know differs."));
  const text = (label, key) => ({ label, of: (row) => row[key] || "unknown", text: true });
  return card("Environment", {}, note("What differs besides the times:"),
    sortingTable("Environment", [text("what", "name"), text("A", "before"), text("B", "after")], rows, 0));
}

show(
  verdict(report.headline, direction(report.changed, report.step.ratio)),
  report.findings.length ? element("ul", { class: "findings" }, ...report.findings.map((each) => element("li", {}, each))) : null,
  sides(), phases(), parts(), differences(),
);
