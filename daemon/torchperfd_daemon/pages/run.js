// The page of `torchperfd runs show RUN --html`: one whole run.

import { card, element, scrolling, table } from "../web/assets/elements.js";
import { partsBar, swatch } from "../web/assets/legend.js";
import { colourOf, partColour } from "../web/assets/phases.js";
import { decimal, integer, percent } from "./quantities.js";
import { identity, note, remember, report, show, verdict, view } from "./report.js";
import { shaded, sortingTable } from "./tables.js";

function milli(seconds) {
  return decimal(seconds * 1000, 2);
}

function part([name, words]) {
  const text = name === "fix" || name === "next" ? element("code", {}, words) : words;
  return element("div", { class: "part" }, element("span", { class: "soft" }, name), element("span", {}, text));
}

function verdictCard() {
  const { causes, is_healthy: healthy, failure, remedy, heading, remark, note: remarkOnTop, account, also, outcome, trace, next_command: next } = report.card;
  const boxes = causes.map((cause, at) => element("div", { class: `cause edge-${at || failure ? "warn" : "bad"}` },
    element("h3", {}, `${at || failure ? "!" : "✗"} ${cause.head}`), ...cause.parts.map(part)));
  if (failure) {
    boxes.unshift(element("div", { class: "cause edge-bad" }, element("h3", {}, "✗ failed"), element("div", {}, failure),
      ...(remedy ? [part(["fix", remedy])] : []), ...(remark ? [part(["steps", remark])] : [])));
  } else if (!causes.length) {
    boxes.push(element("div", { class: `cause edge-${healthy ? "good" : "warn"}` },
      element("h3", {}, `${healthy ? "✓" : "?"} ${heading}`), element("div", {}, remark)));
  }
  const last = [["done", outcome], ["trace", trace], ["next", next]].filter(([, words]) => words);
  const more = [...account.map((words, at) => [at ? "" : "step", words]), ...also.map((words) => ["also", words]), ...last];
  return card("Verdict", {}, ...(remarkOnTop ? [part(["note", remarkOnTop])] : []), ...boxes, ...more.map(part));
}

// A bar of the step's parts, and a table of them; the bar leaves out what is beside the step.
function shares(title, above, name, parts) {
  const shown = parts.filter((part) => !part.is_hidden);
  const bar = shown.map((part) => ({ name: `${part.words}: ${percent(part.share)}`, colour: part.colour, value: part.share }));
  return card(title, {}, note(above), partsBar(bar, 1, bar.map((part) => part.name).join(", ")), table(title, [
    { name, cell: (part) => [part.is_hidden ? null : swatch(part.colour), part.words] },
    { name: "mean ms", numeric: true, cell: (part) => milli(part.seconds) },
    { name: "share", numeric: true, cell: (part) => (part.is_hidden ? "beside the step, costs nothing" : percent(part.share)) },
  ], parts));
}

function accountOfStep() {
  if (!report.account.length) return null;
  const parts = report.account.map((row) => ({ ...row, colour: partColour(row) }));
  return shares("Where a step goes", "The parts sum to the step: work by phase, each loss that has a name, and the kinds of waiting.", "part", parts);
}

function stepShares() {
  if (!report.phases.length) return null;
  const phases = report.phases.map((phase) => ({ ...phase, words: phase.name, colour: colourOf(phase.name) }));
  return shares(report.rank === null ? "Phases of a step" : `Phases of a step of rank ${report.rank}`, report.headline, "phase", phases);
}

// Memory of the ranks' processes on the host.
function memoryColumns() {
  if (!report.ranks.some((row) => row.host_memory)) return [];
  const column = (label, key) => ({ label: `${label} MiB`, of: (row) => row.host_memory?.[key] ?? 0, show: (bytes) => integer(Math.round(bytes / 2 ** 20)) });
  const perMinute = { label: "RSS growth MiB/min", of: (row) => row.host_memory?.growth_bytes_per_second ?? 0, show: (bytes) => decimal((60 * bytes) / 2 ** 20, 1) };
  return [column("RSS at first", "first_bytes"), column("RSS", "resident_bytes"), column("RSS peak", "peak_bytes"), perMinute];
}

function ranks() {
  if (report.ranks.length < 2) return null;
  const names = [...new Set(report.ranks.flatMap((row) => Object.keys(row.phase_seconds)))].filter((name) => name !== report.wait);
  const total = (name) => report.ranks.reduce((all, row) => all + (row.phase_seconds[name] ?? 0), 0);
  names.sort((one, other) => total(other) - total(one));
  const most = Math.max(...report.ranks.map((row) => row.step_seconds), 1e-12);
  const of = (label, value) => ({ label: `${label} ms`, of: value, show: milli, share: (row) => value(row) / most });
  const columns = [
    { label: "rank", of: (row) => row.rank, show: String, kind: (row) => (row.is_named ? "bad" : "") },
    { label: "steps", of: (row) => row.steps, show: integer }, of("step", (row) => row.step_seconds), of("own work", (row) => row.own_seconds),
    of("wait for ranks", (row) => row.phase_seconds[report.wait] ?? 0), ...names.map((name) => of(name, (row) => row.phase_seconds[name] ?? 0)),
    ...memoryColumns(),
  ];
  return card("Across ranks", {}, note("Milliseconds per step. Own work is the step less the wait for other ranks; the rank with most of it is the one that the others wait for."),
    sortingTable("Across ranks", columns, report.ranks, 3));
}

// The table that `client.report()` has, cell by cell.
function phaseTable({ title, rank, headings, rows, word_columns: words, facts, notes }) {
  const kind = (at) => ({ class: at < words ? null : "number" });
  const line = (row, number) => row.cells.map((text, at) => {
    // The name of a group is at its first row.
    const shown = at || text !== rows[number - 1]?.cells[0] ? text : "";
    const cell = at ? element("td", kind(at), shown) : element("th", { scope: "row" }, shown);
    return at === row.cells.length - 1 ? shaded(cell, row.share) : cell;
  });
  const heads = headings.map((text, at) => element("th", { scope: "col", ...kind(at) }, text));
  const body = element("tbody", {}, rows.map((row, number) => element("tr", {}, line(row, number))));
  return element("div", {}, note(title), rows.length ? scrolling(`Phases of rank ${rank}`, heads, body) : null,
    [...facts, ...notes].map((each) => note(each)));
}

function tables() {
  if (!report.tables.length) return null;
  const body = element("div", {});
  const fill = (at) => body.replaceChildren(phaseTable(report.tables[at]));
  const chosen = element("select", { id: "rank", onchange: () => {
    remember("rank", String(report.tables[Number(chosen.value)].rank));
    fill(Number(chosen.value));
  } }, ...report.tables.map((table, at) => element("option", { value: String(at) }, `rank ${table.rank}`)));
  const first = Math.max(0, report.tables.findIndex((table) => String(table.rank) === view.get("rank")));
  chosen.value = String(first);
  fill(first);
  const out = report.tables_left_out;
  return card("Phases", {}, report.tables.length > 1 ? element("div", { class: "row" }, element("label", { for: "rank" }, "Rank"), chosen) : null, body,
    out ? note(`The tables of ${integer(out)} more ranks are left out; runs show --json has their numbers.`) : null);
}

function beside() {
  return report.remarks.length ? card("Validation, checkpoints and more", {}, element("ul", { class: "findings" }, ...report.remarks.map((each) => element("li", {}, each)))) : null;
}

function environment() {
  const columns = [{ name: "what", cell: ([name]) => name }, { name: "value", class: "name", cell: ([, value]) => value }];
  return report.environment.length ? card("Environment", {}, table("Environment", columns, report.environment)) : null;
}

show(
  verdict(report.card.summary, report.card.is_healthy ? "good" : report.card.causes.length ? "bad" : "warn"),
  identity(report.facts), verdictCard(), accountOfStep(), stepShares(), ranks(), tables(), beside(), environment(),
);
