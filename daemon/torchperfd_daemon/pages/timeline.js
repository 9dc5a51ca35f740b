// The timeline of a recording, or of one step in full.

import { niceStep } from "../web/assets/axes.js";
import { colour } from "../web/assets/colours.js";
import { card, element } from "../web/assets/elements.js";
import { hideTip, showTip } from "../web/assets/tip.js";
import { coloursOf } from "./names.js";
import { integer, time } from "./quantities.js";
import { note, remember, view } from "./report.js";
import { CHARTED } from "./step_charts.js";

const ROW = 17;
const HEAD = 20;
const AXIS = 24;
const CHARACTER = 6.7;
const NARROWEST_NS = 200;

function unpack(lane) {
  const starts = new Float64Array(lane.start.length);
  lane.start.reduce((at, distance, index) => (starts[index] = at + distance), 0);
  const ends = starts.map((start, index) => start + lane.length[index]);
  const levels = [];
  lane.level.forEach((level, index) => {
    levels[level] ??= [index, index];
    levels[level][1] = index + 1;
  });
  return { ...lane, starts, ends, levels };
}

// The last of the sorted values from `first` to before `stop` that is at most `wanted`, or `first`.
function lastAtMost(values, wanted, first, stop) {
  let [low, high] = [first, stop - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Return the whole recording, or one step in full: with what its events were called with, and their launches. */
export function timelineSection(entry, redraws, step = null) {
  const picture = step ?? entry.picture;
  const lanes = picture.lanes.map(unpack);
  if (!lanes.length) return null;
  const [low, high] = step ? [step.start_ns, step.end_ns] : [0, Math.max(1, entry.trace.duration_us * 1000)];
  const whole = high - low;
  const part = step ? "step part" : "part";
  let [from, to] = [low, high];
  const kept = (view.get(part) ?? "").split("-").map(Number);
  if (kept.length === 2 && kept[0] >= low && kept[0] + NARROWEST_NS <= kept[1] && kept[1] <= high) [from, to] = kept;
  let wanted = step ? (view.get("step find") ?? "").toLowerCase() : "";
  let chosen = null;
  let pending = false;
  const tops = [];
  const height = lanes.reduce((top, lane) => {
    tops.push(top);
    return top + HEAD + lane.levels.length * ROW + 6;
  }, AXIS);
  const canvas = element("canvas", { tabindex: "0", role: "application",
    "aria-label": "Timeline. Arrow keys move, plus and minus zoom, zero shows all, Enter describes the middle." });
  const said = element("p", { class: "said soft", "aria-live": "polite" }, "Click a rectangle to have it described here.");

  function draw() {
    pending = false;
    const width = canvas.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const colours = picture.names.map(coloursOf);
    const [ink, soft, line, merged, focus, mark] = ["ink", "soft", "line", "hatch", "focus", "found"].map(colour);
    const found = picture.names.map((name) => name.toLowerCase().includes(wanted));
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    const scale = width / (to - from);
    drawAxis(pen, width, scale, soft, line);
    lanes.forEach((lane, number) => {
      pen.font = "600 12px system-ui, sans-serif";
      pen.fillStyle = ink;
      pen.fillText(lane.label, 6, tops[number] + HEAD / 2);
      pen.fillStyle = line;
      pen.fillRect(0, tops[number] - 3, width, 1);
      pen.font = "11px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace";
      lane.levels.forEach(([first, stop], level) => {
        const y = tops[number] + HEAD + level * ROW;
        let painted = -1;
        for (let at = lastAtMost(lane.starts, from, first, stop); at < stop && lane.starts[at] < to; at++) {
          const left = Math.max(-1, (lane.starts[at] - from) * scale);
          const right = Math.min(width + 1, Math.max((lane.ends[at] - from) * scale, left + 1));
          if (right <= painted || right < 0) continue;
          painted = Math.ceil(right);
          const name = lane.name[at];
          pen.fillStyle = wanted && name >= 0 && found[name] ? mark : name < 0 || wanted ? merged : colours[name].box;
          pen.fillRect(left, y, right - left > 3 ? right - left - 0.6 : right - left, ROW - 2);
          if (right - left > 34) {
            pen.fillStyle = name < 0 || wanted ? ink : colours[name].words;
            const text = name < 0 ? `${integer(lane.count[at])} events` : picture.names[name];
            pen.fillText(text.slice(0, Math.floor((right - left - 8) / CHARACTER)), left + 4, y + ROW / 2 - 0.5);
          }
        }
      });
    });
    if (chosen) {
      const { number, level, at } = chosen;
      pen.strokeStyle = focus;
      pen.lineWidth = 2;
      const left = (lanes[number].starts[at] - from) * scale;
      pen.strokeRect(left, tops[number] + HEAD + level * ROW, Math.max(2, (lanes[number].ends[at] - from) * scale - left), ROW - 2);
      for (const other of linked(chosen)) {
        const middle = (each) => tops[each.number] + HEAD + each.level * ROW + ROW / 2 - 1;
        pen.beginPath();
        pen.moveTo(Math.max(left, 0), middle(chosen));
        pen.lineTo((lanes[other.number].starts[other.at] - from) * scale, middle(other));
        pen.stroke();
      }
    }
  }

  // A launch's kernels, or a kernel's launch.
  function linked({ number, at }) {
    const wantedOne = step ? lanes[number].correlation[at] : -1;
    if (wantedOne < 0) return [];
    const onDevice = lanes[number].kind === "stream";
    return lanes.flatMap((lane, other) => {
      if ((lane.kind === "stream") === onDevice) return [];
      return lane.correlation.flatMap((each, index) =>
        (each === wantedOne ? [{ number: other, at: index, level: lane.level[index] }] : []));
    });
  }

  function drawAxis(pen, width, scale, soft, line) {
    pen.font = "11px system-ui, sans-serif";
    const step = niceStep(to - from, Math.max(2, width / 110));
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const x = (tick - from) * scale;
      pen.fillStyle = line;
      pen.fillRect(x, 0, 1, height);
      pen.fillStyle = soft;
      pen.fillText(`${parseFloat((tick / (step >= 1e6 ? 1e6 : step >= 1e3 ? 1e3 : 1)).toFixed(3)).toLocaleString("en-US")} ${step >= 1e6 ? "ms" : step >= 1e3 ? "µs" : "ns"}`, x + 4, AXIS / 2);
    }
  }

  function redraw() {
    if (!pending) requestAnimationFrame(draw);
    pending = true;
  }

  function show(start, end) {
    const span = Math.min(whole, Math.max(NARROWEST_NS, end - start));
    from = Math.min(Math.max(low, (start + end - span) / 2), high - span);
    to = from + span;
    remember(part, span < whole ? `${Math.round(from)}-${Math.round(to)}` : "");
    redraw();
  }

  function zoom(factor, centre) {
    show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  }

  function pan(part) {
    const shift = (to - from) * part;
    show(from + shift, to + shift);
  }

  function hit(x, y) {
    const number = tops.findLastIndex((top) => top <= y);
    if (number < 0) return null;
    const lane = lanes[number];
    const level = Math.floor((y - tops[number] - HEAD) / ROW);
    if (level < 0 || !lane.levels[level]) return null;
    const scale = canvas.clientWidth / (to - from);
    const moment = from + x / scale;
    const [first, stop] = lane.levels[level];
    const nearest = lastAtMost(lane.starts, moment + 2 / scale, first, stop);
    const found = lane.starts[nearest] <= moment + 2 / scale && lane.ends[nearest] >= moment - 2 / scale;
    return found ? { number, level, at: nearest } : null;
  }

  function describe({ number, at }) {
    const lane = lanes[number];
    const what = lane.name[at] < 0
      ? `${integer(lane.count[at])} events, each shorter than ${time(picture.resolution_ns / 1000)}`
      : picture.names[lane.name[at]];
    const text = [what, `${time(lane.length[at] / 1000)}, from ${time(lane.starts[at] / 1000)}, ${lane.label}`];
    if (step && lane.name[at] >= 0) {
      const shapes = step.shapes[lane.shape[at]];
      if (shapes) text.push(`inputs ${shapes}`);
      for (const other of linked({ number, at })) {
        const theirs = lanes[other.number];
        const later = time((theirs.starts[other.at] - lane.starts[at]) / 1000);
        text.push(theirs.kind === "stream"
          ? `launches ${step.names[theirs.name[other.at]] ?? "several events"}, which starts ${later} later`
          : `launched by ${step.names[theirs.name[other.at]] ?? "one of several events"}, ${later.replace("-", "")} earlier`);
      }
    }
    return text.join("\n");
  }

  function choose(found) {
    chosen = found;
    said.textContent = found ? describe(found) : "";
    redraw();
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  let grip = null;
  canvas.addEventListener("pointerdown", (event) => {
    grip = { x: event.clientX, from, to, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (grip && event.buttons) {
      const shift = ((grip.x - event.clientX) * (grip.to - grip.from)) / canvas.clientWidth;
      if (!grip.moved && Math.abs(grip.x - event.clientX) > 3) {
        grip.moved = true;
        canvas.setPointerCapture(event.pointerId);
      }
      hideTip();
      if (grip.moved) show(grip.from + shift, grip.to + shift);
      return;
    }
    const found = hit(...place(event));
    if (found) showTip(event, describe(found));
    else hideTip();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (grip && !grip.moved) choose(hit(...place(event)));
    grip = null;
  });
  canvas.addEventListener("pointercancel", () => { grip = null; });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("dblclick", (event) => zoom(0.25, from + (place(event)[0] / canvas.clientWidth) * (to - from)));
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200))), from + (place(event)[0] / canvas.clientWidth) * (to - from));
    } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      event.preventDefault();
      pan(sideways / canvas.clientWidth);
    }
  }, { passive: false });
  const middle = () => (from + to) / 2;
  const keys = {
    ArrowLeft: () => pan(-0.15), a: () => pan(-0.15), ArrowRight: () => pan(0.15), d: () => pan(0.15),
    "+": () => zoom(0.6, middle()), "=": () => zoom(0.6, middle()), w: () => zoom(0.6, middle()),
    "-": () => zoom(1 / 0.6, middle()), s: () => zoom(1 / 0.6, middle()),
    0: () => show(low, high), Home: () => show(low, high),
    Enter: () => choose(hit(canvas.clientWidth / 2, tops[0] + HEAD + 1)),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  const button = (label, act) => element("button", { type: "button", onclick: act }, label);
  const steps = element("select", { "aria-label": "Show a step", onchange: () => {
    const one = entry.steps[Number(steps.value)];
    if (one) show((one.start_us - one.duration_us * 0.02) * 1000, (one.start_us + one.duration_us * 1.02) * 1000);
    else show(low, high);
  } }, element("option", { value: "" }, "all steps"),
  ...entry.steps.slice(0, CHARTED).map((one, at) => element("option", { value: String(at) }, `step ${one.index}`)));
  const search = element("input", { type: "search", placeholder: "find", "aria-label": "Find in the step", oninput: () => {
    remember("step find", search.value);
    wanted = search.value.toLowerCase();
    redraw();
  } });
  search.value = wanted;
  redraws.push(redraw);
  const out = [];
  if (picture.resolution_ns) out.push(`Neighbours shorter than ${time(picture.resolution_ns / 1000)} are drawn as one grey rectangle.`);
  if (picture.lanes_left_out) out.push(`${integer(picture.lanes_left_out)} threads or streams that took least are left out.`);
  if (picture.events_left_out) out.push(`${integer(picture.events_left_out)} events are left out, on those or nested too deep.`);
  if (step) out.push("This is the median step. A click on a launch or a kernel draws a line to its other end.");
  else out.push("Every event of the trace: open its file at ui.perfetto.dev.");
  return card(step ? `Step ${step.index} in full` : "Timeline", {},
    element("div", { class: "row" }, button("Zoom in", () => zoom(0.5, middle())), button("Zoom out", () => zoom(2, middle())),
      button("Left", () => pan(-0.3)), button("Right", () => pan(0.3)), button("All", () => show(low, high)),
      !step && entry.steps.length > 1 ? steps : null, step ? search : null),
    element("div", { class: "timeline" }, canvas), said,
    note("Drag to move, Ctrl and wheel or double click to zoom; with the keyboard: arrows, + and −, 0. ", out.join(" ")));
}
