// The page of one `torchperfd analyze --html`.

import { card, element, scrolling, tiles } from "../web/assets/elements.js";
import { partsBar, swatch } from "../web/assets/legend.js";
import { percentile } from "../web/assets/statistics.js";
import { hideTip } from "../web/assets/tip.js";
import { flameSection } from "./flame_graph.js";
import { bytes, decimal, integer, percent, time } from "./quantities.js";
import { day, identity, note, remember, report, show, verdict, view, warning } from "./report.js";
import { DEVICE, stepsSection } from "./step_charts.js";
import { anything, milliseconds, sortingTable } from "./tables.js";
import { timelineSection } from "./timeline.js";

// What was recorded, where, with what and when: as much of it as is known.
function recorded() {
  const capture = report.capture ?? {};
  const devices = [...new Set(report.ranks.flatMap((entry) => entry.trace.device_names ?? []))];
  const versions = (name, key) => (capture[key]?.length ? `${name} ${capture[key].join(", ")}` : "");
  return identity([
    ["run", capture.run], ["script or job", capture.job], ["nodes", (capture.nodes ?? []).join(", ")],
    ["device", devices.join(", ")],
    ["versions", [versions("torch", "torch_versions"), versions("Python", "python_versions"),
      versions("torchperfd", "torchperfd_versions")].filter(Boolean).join(", ")],
    ["recorded", day(capture.requested_at)],
    ["asked for by", capture.trigger],
    ["ranks", capture.world_size ? `${report.ranks.length} of ${capture.world_size}` : ""],
  ]);
}

function advice(items) {
  return card("What to change", {}, element("ol", { class: "advice" }, ...items.map((item) => {
    const ranks = item.ranks?.length && report.ranks.length > 1 ? `rank ${item.ranks.join(", ")}` : null;
    const saves = item.saves_us_per_step > 0 ? `saves about ${time(item.saves_us_per_step)} ${item.per === "recording" ? "of the recording" : "a step"}` : null;
    const share = saves && item.share_of_step ? `${percent(item.share_of_step)} of it` : null;
    return element("li", {},
      element("strong", {}, item.change.charAt(0).toUpperCase() + item.change.slice(1)), " ",
      element("span", { class: "soft" }, [saves, share, ranks].filter(Boolean).join(", ")),
      element("div", {}, item.evidence),
      item.setting ? element("code", {}, item.setting) : null);
  })));
}

function acrossSection(across) {
  const ranks = anything("Ranks", across.ranks ?? []);
  const collectives = anything("Collectives", across.collectives ?? []);
  return card("Across ranks", {},
    ...(across.caveats ?? []).map((each) => note(each)),
    note(across.found ?? ""),
    ranks && element("h3", {}, "ranks"), ranks, collectives && element("h3", {}, "collectives"), collectives);
}

function headline(entry) {
  const whole = entry.steps.filter((step) => !step.is_stub);
  const durations = whole.map((step) => step.duration_us);
  const device = entry.breakdown.all;
  const part = (us) => [time(us), device.window_us ? percent(us / device.window_us) : ""];
  const figures = [["events", integer(entry.trace.events), bytes(entry.trace.bytes)], ["recorded", time(entry.trace.duration_us)]];
  if (durations.length) {
    const longest = whole.reduce((a, b) => (b.duration_us > a.duration_us ? b : a));
    figures.push(["steps", integer(entry.steps.length), `${entry.steps[0].index} to ${entry.steps.at(-1).index}`],
      ["median step", time(percentile(durations, 0.5))],
      ["longest step", time(longest.duration_us), `step ${longest.index}`]);
  }
  if (device.n_gpu_events) {
    figures.push(["device busy", ...part(device.busy_us)], ["device idle", ...part(device.idle_us)],
      ["exposed communication", ...part(device.exposed_comm_us)], ["exposed copies", ...part(device.exposed_memcpy_us)]);
  }
  const notes = entry.quality.notes.map((words) => `Data quality: ${words}.`);
  if (!durations.length) notes.push("There are no steps: the loop did not call profiler.step().");
  const onHost = device.n_gpu_events ? null : note("Nothing ran on a device.");
  return card("In short", {},
    tiles(figures), ...notes.map(warning), onHost);
}

function deviceTime(entry) {
  const scopes = [["all device events", entry.breakdown.all], ["launched in this trace", entry.breakdown.linked]]
    .filter(([, breakdown]) => breakdown.n_gpu_events && breakdown.window_us);
  if (!scopes.length) return null;
  const title = "Where device time goes";
  const rows = [...DEVICE, ["overlap_us", "communication behind compute"], ["window_us", "first start to last end"]];
  const share = (breakdown, key) => percent(breakdown[key] / breakdown.window_us);
  const heads = scopes.map(([scope]) => element("th", { scope: "col", class: "number", colspan: "2" }, scope));
  const cells = (key) => scopes.flatMap(([, breakdown]) =>
    [time(breakdown[key]), share(breakdown, key)].map((words) => element("td", { class: "number" }, words)));
  const lines = rows.map(([key, label, colour]) => element("tr", {},
    element("th", { scope: "row" }, colour ? swatch(colour) : null, label), cells(key)));
  return card(title, {},
    scopes.flatMap(([scope, breakdown]) => [
      element("h3", {}, `${scope}, ${integer(breakdown.n_gpu_events)}`),
      partsBar(DEVICE.map(([key, label, colour]) => (
        { name: `${label}: ${time(breakdown[key])}, ${share(breakdown, key)}`, colour, value: breakdown[key] })), breakdown.window_us, scope)]),
    scrolling(title, [element("td", {}), ...heads], element("tbody", {}, lines)));
}

function cut(shown, all) {
  return shown < all ? note(`The ${integer(shown)} largest of ${integer(all)}; --json has all.`) : null;
}

function operatorsSection(entry) {
  const rows = entry.operators;
  if (!rows.length) return null;
  const device = rows.some((row) => row.total_device_us);
  const memory = (key) => rows.some((row) => row[key]);
  const columns = [{ label: "operator", of: (row) => row.name, text: true }];
  for (const [key, label] of [["input_shapes", "input shapes"], ["module", "module"], ["stack", "stack"]]) {
    if (!rows.some((row) => row[key] !== undefined)) continue;
    columns.push({ label, of: (row) => (Array.isArray(row[key]) ? row[key].join(" < ") : row[key] ?? ""), text: true });
  }
  const selfCpu = columns.length + 1;
  columns.push({ label: "calls", of: (row) => row.calls, show: integer },
    milliseconds("self CPU", "self_cpu_us", Math.max(...rows.map((row) => row.self_cpu_us))),
    { label: "self %", of: (row) => row.self_cpu_share, show: percent }, milliseconds("total CPU", "total_cpu_us"));
  if (device) columns.push(milliseconds("self GPU", "self_device_us", Math.max(...rows.map((row) => row.self_device_us))), milliseconds("total GPU", "total_device_us"));
  for (const [key, label] of [["self_cpu_memory_bytes", "self CPU MB"], ["self_device_memory_bytes", "self GPU MB"]]) {
    if (memory(key)) columns.push({ label, of: (row) => row[key], show: (count) => decimal(count / 1e6, 3) });
  }
  return card("Operators", {}, sortingTable("Operators", columns, rows, selfCpu), cut(rows.length, entry.n_operators));
}

function kernelsSection(entry) {
  if (!entry.kernels.length) return null;
  const columns = [{ label: "kernel", of: (row) => row.name, text: true }, { label: "calls", of: (row) => row.calls, show: integer },
    milliseconds("sum", "sum_us", entry.kernels[0].sum_us), milliseconds("mean", "mean_us")];
  return card("Kernels", {}, sortingTable("Kernels", columns, entry.kernels, 2), cut(entry.kernels.length, entry.n_kernels));
}

let redraws = [];

function rankSections(entry) {
  redraws = [];
  const idle = entry.idle ? anything("Why the device is idle", entry.idle) : null;
  return [
    headline(entry), deviceTime(entry), idle && card("Why the device is idle", {}, idle), stepsSection(entry),
    entry.picture && timelineSection(entry, redraws), entry.picture?.step && timelineSection(entry, redraws, entry.picture.step), entry.picture && flameSection(entry, redraws),
    operatorsSection(entry), kernelsSection(entry),
  ].filter(Boolean);
}

function page() {
  const rankName = (entry) => (entry.process !== null ? `process ${entry.process}` : entry.rank === null ? "the trace" : `rank ${entry.rank}`);
  const nameOf = (entry) => String(entry.process ?? entry.rank ?? "");
  // The rank of the address, else the one that the others wait for, else the first.
  const wanted = [view.get("rank"), report.across?.slowest].filter((each) => each !== null && each !== undefined).map(String);
  const first = Math.max(0, wanted.map((each) => report.ranks.findIndex((entry) => nameOf(entry) === each)).find((at) => at >= 0) ?? 0);
  const path = element("p", { class: "soft" });
  const body = element("div", {});
  const showRank = (entry) => {
    path.textContent = entry.trace.path;
    hideTip();
    body.replaceChildren(...rankSections(entry));
    redraws.forEach((each) => each());
  };
  const switcher = element("select", { id: "rank", onchange: () => {
    remember("rank", nameOf(report.ranks[Number(switcher.value)]));
    showRank(report.ranks[Number(switcher.value)]);
  } },
    ...report.ranks.map((entry, at) => element("option", { value: String(at) }, rankName(entry))));
  show(
    report.across?.verdict ? verdict(report.across.verdict, "warn") : null,
    recorded(),
    ...report.failed.map((each) => warning(`Rank ${each.rank ?? "?"} is missing: ${each.error}`)),
    report.advice?.length ? advice(report.advice) : null,
    report.across ? acrossSection(report.across) : null,
    report.ranks.length > 1 ? element("div", { class: "row" }, element("label", { for: "rank" }, "Rank"), switcher) : null,
    path, body,
  );
  switcher.value = String(first);
  showRank(report.ranks[first]);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) redraws.forEach((each) => each());
    width = innerWidth;
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => redraws.forEach((each) => each()));
  }
}

page();
