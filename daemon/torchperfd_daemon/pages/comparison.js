// The page of `torchperfd compare A B --html` for two captures, or for two ranks of one.

import { card, chip, element, tiles } from "../web/assets/elements.js";
import { decimal, integer, percent, signed, time } from "./quantities.js";
import { day, note, remember, report, sentence, show, verdict, view, warning } from "./report.js";
import { direction, pairsTable, sidesTable } from "./sides.js";
import { sortingTable } from "./tables.js";

const SMALL = ["ranks", "phases", "device", "memory"];
const LARGE = ["operators", "launched", "kernels"];
const TITLES = {
  ranks: "Ranks", phases: "Phases", device: "Device", memory: "Memory", operators: "Operators",
  launched: "Operators by their kernels", kernels: "Kernels",
};

function milli(us) {
  return decimal(us / 1000, 3);
}

function mega(count) {
  return decimal(count / 1e6, 3);
}

function difference(row) {
  return row.difference_us ?? row.difference_bytes;
}

function differs(row) {
  return row.status !== "same";
}

function percentOf(row) {
  const value = row.difference_pct;
  return value === null ? "" : signed(value, `${decimal(Math.abs(value), Math.abs(value) >= 10 ? 0 : 1)} %`);
}

// The chance of such a difference by noise alone, for this row by itself.
function significance(row) {
  if (row.p_value === null) return ["new", "gone"].includes(row.status) ? "on one side only" : "noise unknown";
  return row.p_value < 0.001 ? "p < 0.001" : `p = ${decimal(row.p_value, 3)}`;
}

function status(row) {
  return chip(row.status === "same" ? "within noise" : row.status, direction(differs(row), difference(row)));
}

function sides() {
  const [one, other] = [report.before, report.after];
  const both = (name, of) => [name, of(one), of(other)];
  const of = (key) => (side) => String(side.capture?.[key] ?? "");
  const list = (key) => (side) => (side.capture?.[key] ?? []).join(", ");
  const many = (side) => `${side.paths[0]}${side.paths.length > 1 ? ` and ${integer(side.paths.length - 1)} more` : ""}`;
  return card("What is compared", {}, sidesTable([
    both("run", of("run")), both("script or job", of("job")), both("nodes", list("nodes")),
    both("device", (side) => side.device_names.join(", ")), both("torch", list("torch_versions")),
    both("Python", list("python_versions")), both("torchperfd", list("torchperfd_versions")),
    both("recorded", (side) => day(side.capture?.requested_at)), both("asked for by", of("trigger")),
    both("capture", of("capture_id")), both("trace", many), both("steps", (side) => (side.steps ? integer(side.steps) : "the whole recording")),
    both("ranks", (side) => (side.capture?.world_size ? `${side.paths.length} of ${side.capture.world_size}` : integer(side.paths.length))),
  ]));
}

function step() {
  const row = report.step;
  return card(report.per === "step" ? "The step" : "The recording", {}, tiles([
    ["A", time(row.before_us)], ["B", time(row.after_us)],
    ["B − A", signed(row.difference_us, time(Math.abs(row.difference_us))), percentOf(row), direction(differs(row), row.difference_us)],
    ["significance", differs(row) ? "beyond noise" : "within noise", significance(row)],
  ]));
}

function small(name) {
  const rows = report[name];
  if (!rows.length) return null;
  const inBytes = name === "memory";
  const shown = inBytes ? mega : milli;
  const unit = inBytes ? "MB" : "ms";
  const paired = rows.map((row) => ({
    row, before: row.before_us ?? row.before_bytes, after: row.after_us ?? row.after_bytes,
    name: name === "ranks" ? `rank ${row.rank ?? "?"}` : report.words[row.name] ?? row.name,
  }));
  return card(TITLES[name], {}, pairsTable(TITLES[name], report.heads[name] ?? "rank", paired, [
    { name: `A ${unit}`, numeric: true, cell: ({ before }) => shown(before) }, { name: `B ${unit}`, numeric: true, cell: ({ after }) => shown(after) },
    {
      name: "B − A", numeric: true, cell: ({ row }) => signed(difference(row), shown(Math.abs(difference(row)))),
      kind: ({ row }) => direction(differs(row), difference(row)),
    },
    { name: "%", numeric: true, cell: ({ row }) => percentOf(row) }, { name: "", numeric: true, cell: ({ row }) => status(row) },
    { name: "significance", numeric: true, cell: ({ row }) => significance(row) },
  ]));
}

function large(name) {
  const rows = report[name];
  if (!rows.length) return null;
  const key = `all ${name}`;
  const differing = rows.filter(differs);
  const whole = Math.max(...rows.map((row) => Math.abs(row.difference_us)), 1e-9);
  const columns = [
    { label: report.heads[name], of: (row) => row.name, text: true },
    { label: "A ms", of: (row) => row.before_us, show: milli }, { label: "B ms", of: (row) => row.after_us, show: milli },
    {
      label: "B − A ms", of: (row) => row.difference_us, show: (us) => signed(us, milli(Math.abs(us))),
      key: (row) => Math.abs(row.difference_us), share: (row) => Math.abs(row.difference_us) / whole,
      kind: (row) => direction(differs(row), row.difference_us),
    },
    { label: "%", of: (row) => row.difference_pct ?? Infinity, show: (value) => (value === Infinity ? "" : percentOf({ difference_pct: value })) },
    { label: "A calls", of: (row) => row.calls_before ?? 0, show: (count) => decimal(count, count % 1 ? 1 : 0) },
    { label: "B calls", of: (row) => row.calls_after ?? 0, show: (count) => decimal(count, count % 1 ? 1 : 0) },
    { label: "status", of: (row) => (differs(row) ? row.status : "within noise"), show: String, kind: (row) => direction(differs(row), row.difference_us) },
    { label: "p", of: (row) => row.p_value ?? -1, show: (value) => (value < 0 ? "–" : value < 0.001 ? "< 0.001" : decimal(value, 3)) },
  ];
  const body = element("div", {});
  const all = element("input", { type: "checkbox", id: key, onchange: () => {
    remember(key, all.checked ? "shown" : "");
    fill();
  } });
  all.checked = view.get(key) === "shown";
  function fill() {
    const shown = all.checked ? rows : differing;
    body.replaceChildren(shown.length ? sortingTable(TITLES[name], columns, shown, 3) : note("No row differs beyond noise."));
  }
  fill();
  const same = rows.length - differing.length;
  const cut = report.rows[name] - rows.length;
  return card(TITLES[name], {},
    same ? element("label", { for: key }, all, ` also the ${integer(same)} within noise`) : null, body,
    cut ? note(`${integer(cut)} rows that differ least are left out; --json has all.`) : null);
}

const notes = [
  ...report.failed.map((each) => `Rank ${each.rank ?? "?"} is missing: ${each.error}.`),
  ...report.notes.map(sentence),
];
const level = `Values are means per ${report.per}. A row is changed, new or gone if it differs beyond noise: of tables without a real `
  + `difference, at most ${percent(report.level)} name any row. p is the chance of such a difference by noise, for the row alone. `
  + "Differences between two runs of one script count as well, so that a change is not always yours.";
show(
  verdict(report.headline, direction(differs(report.step), report.step.difference_us)),
  ...notes.map(warning),
  sides(), step(), ...SMALL.map(small), ...LARGE.map(large),
  note(level),
);
