// The flame graph of a rank: host time by call path.

import { card, element } from "../web/assets/elements.js";
import { isPhase } from "../web/assets/phases.js";
import { hideTip, showTip } from "../web/assets/tip.js";
import { coloursOf } from "./names.js";
import { integer, percent, time } from "./quantities.js";
import { note, remember, view } from "./report.js";

const FLAME_ROW = 20;
const THINNEST_PX = 2.5;

/** Return the flame graph; its function that draws is added to `redraws`. */
export function flameSection(entry, redraws) {
  const { names, left_out: leftOut } = entry.picture.flame;
  if (!entry.picture.flame.parent.length) return null;
  const library = new Set(entry.picture.flame.library ?? []);
  const withLibrary = element("input", { type: "checkbox", id: "library", onchange: () => {
    remember("library", withLibrary.checked ? "shown" : "");
    load();
    zoom(-1, false);
  } });
  withLibrary.checked = view.get("library") === "shown";
  let parent, name, total, calls, children, own, threads;

  // A frame that is not shown passes its calls on to the frame above it, where those of one name are one box.
  function load() {
    const flame = entry.picture.flame;
    const hidden = withLibrary.checked ? new Set() : library;
    const place = [];
    const known = new Map();
    [parent, name, total, calls] = [[], [], [], []];
    flame.parent.forEach((given, node) => {
      const above = given < 0 ? -1 : place[given];
      if (given >= 0 && hidden.has(flame.name[node])) {
        place[node] = above;
        return;
      }
      const key = given < 0 ? `thread ${node}` : `${above} ${flame.name[node]}`;
      let at = known.get(key);
      if (at === undefined) {
        at = parent.push(above) - 1;
        name.push(flame.name[node]);
        total.push(0);
        calls.push(0);
        known.set(key, at);
      }
      place[node] = at;
      total[at] += flame.total_ns[node];
      calls[at] += flame.calls[node];
    });
    children = parent.map(() => []);
    own = total.slice();
    threads = [];
    parent.forEach((above, node) => {
      if (above < 0) threads.push(node);
      else {
        children[above].push(node);
        own[above] -= total[node];
      }
    });
    children.forEach((each) => each.sort((a, b) => total[b] - total[a]));
    threads.sort((a, b) => total[b] - total[a]);
  }

  load();
  const span = (each) => each.reduce((all, node) => all + total[node], 0);
  let zoomed = -1;
  let wanted = "";
  const graph = element("div", { class: "flame", role: "group", "aria-label": "Flame graph; arrow keys move, Enter zooms, Escape shows all" });
  const said = element("p", { class: "said soft" }, "");
  const matches = element("span", { class: "soft", "aria-live": "polite" });
  const buttons = new Map();

  function describe(node) {
    const text = [names[name[node]], `${time(total[node] / 1000)}, itself ${time(Math.max(0, own[node]) / 1000)}`];
    if (parent[node] >= 0) text.push(calls[node] === 1 ? "1 call" : `${integer(calls[node])} calls, ${time(total[node] / 1000 / calls[node])} each`);
    const whole = total[node] / Math.max(1, span(threads));
    return `${text.join("\n")}\n${percent(whole)} of all threads' time`;
  }

  function draw() {
    const width = graph.clientWidth;
    if (!width) return;
    buttons.clear();
    const above = [];
    for (let node = zoomed < 0 ? -1 : parent[zoomed]; node >= 0; node = parent[node]) above.unshift(node);
    const boxes = above.map((node, row) => box(node, 0, 1, row, true));
    const start = zoomed < 0 ? threads : [zoomed];
    const waiting = [[start, 0, 1, above.length, Math.max(1, span(start))]];
    let rows = above.length;
    while (waiting.length) {
      const [nodes, left, share, row, whole] = waiting.pop();
      let at = left;
      for (const node of nodes) {
        const part = (share * total[node]) / whole;
        if (part * width < THINNEST_PX) break;
        boxes.push(box(node, at, part, row, false));
        rows = Math.max(rows, row + 1);
        waiting.push([children[node], at, part, row + 1, Math.max(1, total[node], span(children[node]))]);
        at += part;
      }
    }
    graph.style.height = `${Math.max(3, rows) * FLAME_ROW + 2}px`;
    graph.replaceChildren(element("div", {}), ...boxes);
    graph.firstChild.style.height = `${rows * FLAME_ROW}px`;
    buttons.get(zoomed < 0 ? threads[0] : zoomed)?.setAttribute("tabindex", "0");
    mark();
  }

  function box(node, left, part, row, isAbove) {
    const made = element("button", { type: "button", tabindex: "-1", class: `${isAbove ? "above" : ""} ${isPhase(names[name[node]]) ? "phase" : ""}`,
      onclick: () => zoom(node === zoomed ? -1 : node, true),
      onmousemove: (event) => showTip(event, describe(node)), onmouseleave: hideTip,
      onfocus: () => { said.textContent = describe(node); } }, part * graph.clientWidth > 26 ? names[name[node]] : "");
    made.setAttribute("aria-label", `${names[name[node]]}, ${time(total[node] / 1000)}`);
    made.style.left = `${100 * left}%`;
    made.style.width = `${100 * part}%`;
    made.style.top = `${row * FLAME_ROW + 1}px`;
    const { box: ground, words } = coloursOf(names[name[node]]);
    made.style.setProperty("--fill", ground);
    made.style.setProperty("--words", words);
    buttons.set(node, made);
    return made;
  }

  function zoom(node, focus) {
    zoomed = node;
    hideTip();
    draw();
    const now = buttons.get(node < 0 ? threads[0] : node);
    if (focus) now?.focus({ preventScroll: true });
    graph.scrollTop = Math.max(0, (now?.offsetTop ?? 0) - 3 * FLAME_ROW);
  }

  function mark() {
    let found = 0;
    name.forEach((each, node) => {
      const good = wanted !== "" && names[each].toLowerCase().includes(wanted);
      found += good;
      buttons.get(node)?.classList.toggle("found", good);
    });
    matches.textContent = wanted ? `${integer(found)} call paths` : "";
  }

  graph.addEventListener("keydown", (event) => {
    const node = [...buttons].find(([, made]) => made === document.activeElement)?.[0];
    if (node === undefined) return;
    const beside = parent[node] < 0 ? threads : children[parent[node]];
    const next = {
      ArrowUp: parent[node], ArrowDown: children[node][0],
      ArrowLeft: beside[beside.indexOf(node) - 1], ArrowRight: beside[beside.indexOf(node) + 1],
    };
    if (event.key === "Escape") zoom(-1, true);
    else if (event.key in next) {
      event.preventDefault();
      const target = buttons.get(next[event.key]);
      if (!target) return;
      graph.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
      target.setAttribute("tabindex", "0");
      target.focus();
    }
  });
  const filter = element("input", { type: "search", placeholder: "find", "aria-label": "Find in the flame graph",
    oninput: () => { remember("find", filter.value); wanted = filter.value.toLowerCase(); mark(); } });
  filter.value = view.get("find") ?? "";
  wanted = filter.value.toLowerCase();
  redraws.push(draw);
  return card("Flame graph", {},
    element("div", { class: "row" }, element("button", { type: "button", onclick: () => zoom(-1, false) }, "All"), filter,
      library.size ? element("label", { for: "library" }, withLibrary, " library frames") : null, matches),
    graph, said,
    note("Host time by call path, outermost on top, over all steps; a wide box took long. Click one to zoom to it, once more for all.",
      library.size ? " Frames of libraries and of Python itself are hidden at first; their time counts in the frame above." : "",
      leftOut ? ` ${integer(leftOut)} call paths that took least are left out.` : ""));
}
