"use strict";

// The page of `torchperfd runs show RUN --html`: one whole run.
(() => {
  const { report, view, remember, integer, decimal, percent, element, section, sortingTable, facts, sentence, show } = shared;
  const SHADES = 8;

  function milli(seconds) {
    return decimal(seconds * 1000, 2);
  }

  // --- the verdict card -------------------------------------------------------------------------------

  function part([name, words]) {
    const text = name === "fix" || name === "next" ? element("code", {}, words) : words;
    return element("div", { class: "part" }, element("span", { class: "soft" }, name), element("span", {}, text));
  }

  function card() {
    const { causes, is_healthy: healthy, failure, remedy, heading, remark, note, account, also, outcome, trace, next_command: next } = report.card;
    const boxes = causes.map((cause, at) => element("div", { class: `cause ${at || failure ? "warn" : "worse"}-edge` },
      element("h3", {}, `${at || failure ? "!" : "✗"} ${cause.head}`), ...cause.parts.map(part)));
    if (failure) {
      boxes.unshift(element("div", { class: "cause worse-edge" }, element("h3", {}, "✗ failed"), element("div", {}, failure),
        ...(remedy ? [part(["fix", remedy])] : []), ...(remark ? [part(["steps", remark])] : [])));
    } else if (!causes.length) {
      boxes.push(element("div", { class: `cause ${healthy ? "better" : "warn"}-edge` },
        element("h3", {}, `${healthy ? "✓" : "?"} ${heading}`), element("div", {}, remark)));
    }
    const last = [["done", outcome], ["trace", trace], ["next", next]].filter(([, words]) => words);
    const more = [...account.map((words, at) => [at ? "" : "step", words]), ...also.map((words) => ["also", words]), ...last];
    return section("Verdict", ...(note ? [part(["note", note])] : []), ...boxes, ...more.map(part));
  }

  // --- phases and ranks -------------------------------------------------------------------------------

  // A bar of the step's parts, and a table of them; the bar leaves out what is beside the step.
  function shares(title, above, name, parts) {
    const shade = (at) => `shade-${at % SHADES}`;
    const bar = element("div", { class: "stack", "aria-hidden": "true" }, ...parts.flatMap((each, at) => {
      if (each.is_hidden) return [];
      const piece = element("div", { class: shade(at), title: `${each.words}: ${percent(each.share)}` });
      piece.style.width = `${100 * each.share}%`;
      return [piece];
    }));
    const rows = parts.map((each, at) => element("tr", {},
      element("th", { scope: "row", class: "text" }, each.is_hidden ? null : element("span", { class: `swatch ${shade(at)}` }), each.words),
      element("td", {}, milli(each.seconds)), element("td", {}, each.is_hidden ? "beside the step, costs nothing" : percent(each.share))));
    const head = [name, "mean ms", "share"].map((label, at) => element("th", { scope: "col", class: at ? "" : "text" }, label));
    return section(title, element("p", { class: "soft" }, above), bar,
      element("div", { class: "scroll" }, element("table", { class: "phases", "aria-label": title },
        element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
  }

  function accountOfStep() {
    if (!report.account.length) return null;
    return shares("Where a step goes", "The parts sum to the step: work by phase, each loss that has a name, and the kinds of waiting.", "part", report.account);
  }

  function stepShares() {
    if (!report.phases.length) return null;
    const phases = report.phases.map((phase) => ({ ...phase, words: phase.name }));
    return shares(report.rank === null ? "Phases of a step" : `Phases of a step of rank ${report.rank}`, report.headline, "phase", phases);
  }

  // Memory of the ranks' processes on the host.
  function memoryColumns() {
    if (!report.ranks.some((row) => row.host_memory)) return [];
    const column = (label, key) => ({ label: `${label} MiB`, of: (row) => row.host_memory?.[key] ?? 0, show: (bytes) => integer(Math.round(bytes / 2 ** 20)) });
    return [column("RSS", "resident_bytes"), column("RSS peak", "peak_bytes")];
  }

  function ranks() {
    if (report.ranks.length < 2) return null;
    const names = [...new Set(report.ranks.flatMap((row) => Object.keys(row.phase_seconds)))].filter((name) => name !== report.wait);
    const total = (name) => report.ranks.reduce((all, row) => all + (row.phase_seconds[name] ?? 0), 0);
    names.sort((one, other) => total(other) - total(one));
    const most = Math.max(...report.ranks.map((row) => row.step_seconds), 1e-12);
    const of = (label, value) => ({ label: `${label} ms`, of: value, show: milli, share: (row) => value(row) / most });
    const columns = [
      { label: "rank", of: (row) => row.rank, show: String, kind: (row) => (row.is_named ? "worse" : "") },
      { label: "steps", of: (row) => row.steps, show: integer }, of("step", (row) => row.step_seconds), of("own work", (row) => row.own_seconds),
      of("wait for ranks", (row) => row.phase_seconds[report.wait] ?? 0), ...names.map((name) => of(name, (row) => row.phase_seconds[name] ?? 0)),
      ...memoryColumns(),
    ];
    return section("Across ranks", element("p", { class: "soft" }, "Milliseconds per step. Own work is the step less the wait for other ranks; the rank with most of it is the one that the others wait for."),
      sortingTable("Across ranks", columns, report.ranks, 3));
  }

  // The table that `client.report()` has, cell by cell.
  function phaseTable(table) {
    const cells = (row, number) => row.cells.map((text, at) => {
      const isWords = at < table.word_columns;
      // The name of a group is at its first row.
      const shown = at || text !== table.rows[number - 1]?.cells[0] ? text : "";
      const cell = element(at ? "td" : "th", at ? { class: isWords ? "text" : "" } : { scope: "row", class: "text" }, shown);
      if (at === row.cells.length - 1) {
        cell.className = "share";
        cell.style.backgroundSize = `${100 * Math.min(1, row.share)}% 100%`;
      }
      return cell;
    });
    const head = table.headings.map((text, at) => element("th", { scope: "col", class: at < table.word_columns ? "text" : "" }, text));
    return element("div", {}, element("p", { class: "soft" }, table.title),
      table.rows.length ? element("div", { class: "scroll" }, element("table", { class: "wide phases", "aria-label": `Phases of rank ${table.rank}` },
        element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...table.rows.map((row, number) => element("tr", {}, ...cells(row, number)))))) : null,
      ...[...table.facts, ...table.notes].map((line) => element("p", { class: "soft" }, line)));
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
    return section("Phases", report.tables.length > 1 ? element("div", { class: "bar" }, element("label", { for: "rank" }, "Rank"), chosen) : null, body,
      out ? element("p", { class: "soft" }, `The tables of ${integer(out)} more ranks are left out; runs show --json has their numbers.`) : null);
  }

  function beside() {
    return report.remarks.length ? section("Validation, checkpoints and more", element("ul", { class: "findings" }, ...report.remarks.map((each) => element("li", {}, each)))) : null;
  }

  function environment() {
    const rows = report.environment.map(([name, value]) => element("tr", {}, element("th", { scope: "row", class: "text" }, name), element("td", { class: "text" }, value)));
    return rows.length ? section("Environment", element("div", { class: "scroll" }, element("table", { "aria-label": "Environment" }, element("tbody", {}, ...rows)))) : null;
  }

  show(
    element("p", { class: `verdict ${report.card.is_healthy ? "better" : report.card.causes.length ? "worse" : "warn"}-edge` }, sentence(report.card.summary)),
    facts(report.facts), card(), accountOfStep(), stepShares(), ranks(), tables(), beside(), environment(),
  );
})();
