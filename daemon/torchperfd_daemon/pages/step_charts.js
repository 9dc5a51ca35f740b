// The steps of a rank: a chart of each kind of time, and their table.

import { card, element } from "../web/assets/elements.js";
import { legend } from "../web/assets/legend.js";
import { colourOf } from "../web/assets/phases.js";
import { hideTip, showTip } from "../web/assets/tip.js";
import { decimal, integer, time, words } from "./quantities.js";
import { note } from "./report.js";
import { milliseconds, sortingTable } from "./tables.js";

/** The parts of device time: field, label, and colour in kit.css. */
export const DEVICE = [
  ["compute_us", "compute", "phase-forward"],
  ["exposed_comm_us", "exposed communication", "phase-own-1"],
  ["exposed_memcpy_us", "exposed copies", "phase-h2d"],
  ["idle_us", "idle", "phase-collective_wait"],
];

export const CHARTED = 1000;

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Each part is {label, colour: its name in kit.css, of: step => µs}.
function stepChart(title, steps, parts) {
  const drawn = steps.slice(0, CHARTED);
  const highest = Math.max(...drawn.map((step) => Math.max(step.duration_us, parts.reduce((all, part) => all + part.of(step), 0))), 1e-3);
  const chart = svg("svg", { class: "steps", viewBox: `0 0 ${drawn.length} 100`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}: the table of steps below has its numbers` });
  drawn.forEach((step, at) => {
    let top = 100;
    const group = svg("g", {});
    for (const part of parts) {
      const height = (100 * part.of(step)) / highest;
      top -= height;
      const box = svg("rect", { x: at + 0.06, width: 0.88, y: top, height });
      box.style.fill = `var(--${part.colour})`;
      group.append(box);
    }
    group.append(svg("rect", { x: at, width: 1, y: 0, height: 100, "fill-opacity": 0 }));
    group.addEventListener("mousemove", (event) => showTip(event, [`step ${step.index}: ${time(step.duration_us)}`,
      ...parts.filter((part) => part.of(step)).map((part) => `${part.label}: ${time(part.of(step))}`)].join("\n")));
    group.addEventListener("mouseleave", hideTip);
    chart.append(group);
  });
  chart.style.maxWidth = `${Math.max(240, drawn.length * 70)}px`;
  const range = `step ${drawn[0].index} to ${drawn.at(-1).index}, full height ${time(highest)}`;
  const cut = steps.length > drawn.length ? `; the first ${integer(CHARTED)} of ${integer(steps.length)}` : "";
  return [element("h3", {}, title), chart, note(range + cut), legend(parts.map(({ label, colour }) => [label, colour]), `Colours of ${title}`)];
}

/** Return the charts and the table of a rank's steps, null without any. */
export function stepsSection(entry) {
  const steps = entry.steps;
  if (!steps.length) return null;
  const charts = [];
  const columns = [{ label: "step", of: (step) => step.index, show: String }, milliseconds("duration", "duration_us")];
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.phases ?? {})))];
  if (names.length) {
    const parts = names.map((key) => (
      { label: words(key), colour: colourOf(key.replace(/_us$/, "")), of: (step) => step.phases?.[key] ?? 0 }));
    charts.push(...stepChart("Host, by phase", steps, parts));
    columns.push(...parts.map((part) => ({ label: `${part.label} ms`, of: part.of, show: (us) => decimal(us / 1000, 3) })));
  }
  if (entry.breakdown.all.n_gpu_events) {
    const parts = DEVICE.map(([key, label, colour]) => ({ label, colour, of: (step) => step.breakdown[key] }));
    charts.push(...stepChart(entry.steps_from?.timed_by === "device" ? "Device, in its own steps" : "Device, during the host's step", steps, parts));
    columns.push(...parts.map((part) => ({ label: `${part.label} ms`, of: part.of, show: (us) => decimal(us / 1000, 3) })));
  }
  if (!charts.length) {
    const whole = { label: "host time", colour: "phase-forward", of: (step) => step.host_duration_us ?? step.duration_us };
    charts.push(...stepChart("Host time", steps, [whole]));
  }
  return card("Steps", {}, ...charts,
    element("details", {}, element("summary", {}, "Table of steps"), sortingTable("Steps", columns, steps, 1)));
}
