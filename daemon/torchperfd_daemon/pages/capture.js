"use strict";

// The page of one `torchperfd analyze --html`.
(() => {
  const {
    report, view, remember, integer, decimal, time, bytes, percent, words, element, section,
    showTip, hideTip, sortingTable, milliseconds, sum, anything, day, facts, sentence, show: showPage,
  } = shared;
  const HUES = [212, 28, 150, 268, 340, 90, 186, 48, 310, 4, 128, 236];
  const DEVICE = [
    ["compute_us", "compute", "fill-compute"],
    ["exposed_comm_us", "exposed communication", "fill-comm"],
    ["exposed_memcpy_us", "exposed copies", "fill-copy"],
    ["idle_us", "idle", "fill-idle"],
  ];

  function hue(name) {
    let hash = 7;
    // Steps and instances of a module differ by their numbers only, and look alike.
    for (const character of name.replace(/\d+/g, "")) hash = (hash * 31 + character.codePointAt(0)) | 0;
    return HUES[Math.abs(hash) % HUES.length];
  }

  // --- the head ---------------------------------------------------------------------------------------

  // What was recorded, where, with what and when: as much of it as is known.
  function identity() {
    const capture = report.capture ?? {};
    const devices = [...new Set(report.ranks.flatMap((entry) => entry.trace.device_names ?? []))];
    const versions = (name, key) => (capture[key]?.length ? `${name} ${capture[key].join(", ")}` : "");
    return facts([
      ["run", capture.run], ["script or job", capture.job], ["nodes", (capture.nodes ?? []).join(", ")],
      ["device", devices.join(", ")],
      ["versions", [versions("torch", "torch_versions"), versions("Python", "python_versions"),
        versions("torchperfd", "torchperfd_versions")].filter(Boolean).join(", ")],
      ["recorded", day(capture.requested_at)],
      ["asked for by", capture.trigger],
      ["ranks", capture.world_size ? `${report.ranks.length} of ${capture.world_size}` : ""],
    ]);
  }

  // --- the sections, top to bottom ------------------------------------------------------------------

  function advice(items) {
    return section("What to change", element("ol", { class: "advice" }, ...items.map((item) => {
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
    return section("Across ranks",
      ...(across.caveats ?? []).map((each) => element("p", { class: "soft" }, each)),
      element("p", { class: "soft" }, across.found ?? ""),
      ranks && element("h3", {}, "ranks"), ranks, collectives && element("h3", {}, "collectives"), collectives);
  }

  /** Return the median of sorted numbers: of an even count the mean of the two in the middle. */
  function middle(sorted) {
    return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
  }

  function headline(entry) {
    const whole = entry.steps.filter((step) => !step.is_stub);
    const durations = whole.map((step) => step.duration_us).sort((a, b) => a - b);
    const device = entry.breakdown.all;
    const part = (us) => [time(us), device.window_us ? percent(us / device.window_us) : ""];
    const tiles = [["events", integer(entry.trace.events), bytes(entry.trace.bytes)], ["recorded", time(entry.trace.duration_us), ""]];
    if (durations.length) {
      const longest = whole.reduce((a, b) => (b.duration_us > a.duration_us ? b : a));
      tiles.push(["steps", integer(entry.steps.length), `${entry.steps[0].index} to ${entry.steps.at(-1).index}`],
        ["median step", time(middle(durations)), ""],
        ["longest step", time(longest.duration_us), `step ${longest.index}`]);
    }
    if (device.n_gpu_events) {
      tiles.push(["device busy", ...part(device.busy_us)], ["device idle", ...part(device.idle_us)],
        ["exposed communication", ...part(device.exposed_comm_us)], ["exposed copies", ...part(device.exposed_memcpy_us)]);
    }
    const notes = [];
    notes.push(...entry.quality.notes.map((note) => `Data quality: ${note}.`));
    if (!durations.length) notes.push("There are no steps: the loop did not call profiler.step().");
    const onHost = device.n_gpu_events ? null : element("p", { class: "soft" }, "Nothing ran on a device.");
    return section("In short",
      element("dl", { class: "tiles" }, ...tiles.map(([label, value, small]) =>
        element("div", {}, element("dt", {}, label), element("dd", {}, `${value} `, element("small", {}, small))))),
      ...notes.map((note) => element("p", { class: "warning" }, note)), onHost);
  }

  function stackedBar(breakdown) {
    const bar = element("div", { class: "stack", "aria-hidden": "true" });
    for (const [key, label, fill] of DEVICE) {
      const part = element("div", {
        class: fill,
        onmousemove: (event) => showTip(event, `${label}: ${time(breakdown[key])}, ${percent(breakdown[key] / breakdown.window_us)}`),
        onmouseleave: hideTip,
      });
      part.style.width = `${(100 * breakdown[key]) / breakdown.window_us}%`;
      bar.append(part);
    }
    return bar;
  }

  function deviceTime(entry) {
    const scopes = [["all device events", entry.breakdown.all], ["launched in this trace", entry.breakdown.linked]]
      .filter(([, breakdown]) => breakdown.n_gpu_events && breakdown.window_us);
    if (!scopes.length) return null;
    const rows = [...DEVICE, ["overlap_us", "communication behind compute", null], ["window_us", "first start to last end", null]];
    const heads = scopes.map(([label]) => element("th", { scope: "col", colspan: "2" }, label));
    return section("Where device time goes",
      ...scopes.flatMap(([label, breakdown]) => [element("h3", {}, `${label}, ${integer(breakdown.n_gpu_events)}`), stackedBar(breakdown)]),
      element("div", { class: "scroll" }, element("table", { "aria-label": "Where device time goes" },
        element("thead", {}, element("tr", {}, element("td", {}), ...heads)),
        element("tbody", {}, ...rows.map(([key, label, fill]) => element("tr", {},
          element("th", { scope: "row", class: "text" }, fill ? element("span", { class: `swatch ${fill}` }) : null, label),
          ...scopes.flatMap(([, breakdown]) => [
            element("td", {}, time(breakdown[key])), element("td", {}, percent(breakdown[key] / breakdown.window_us))])))))));
  }

  // --- steps ----------------------------------------------------------------------------------------

  const CHARTED = 1000;

  function svg(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  // Each part is {key, label, fill: a class, hue: or a hue, of: step => µs}.
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
        const box = svg("rect", { x: at + 0.06, width: 0.88, y: top, height, class: part.fill ?? "" });
        if (part.hue !== undefined) box.style.fill = `hsl(${part.hue} 55% 55%)`;
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
    return [element("h3", {}, title), chart, element("p", { class: "soft" }, range + cut), legend(parts)];
  }

  function legend(parts) {
    return element("ul", { class: "legend" }, ...parts.map((part) => {
      const swatch = element("span", { class: `swatch ${part.fill ?? ""}` });
      if (part.hue !== undefined) swatch.style.background = `hsl(${part.hue} 55% 55%)`;
      return element("li", {}, swatch, part.label);
    }));
  }

  function stepsSection(entry) {
    const steps = entry.steps;
    if (!steps.length) return null;
    const charts = [];
    const columns = [{ label: "step", of: (step) => step.index, show: String }, milliseconds("duration", "duration_us")];
    const names = [...new Set(steps.flatMap((step) => Object.keys(step.phases ?? {})))];
    if (names.length) {
      const parts = names.map((key, at) => ({ key, label: words(key), of: (step) => step.phases?.[key] ?? 0,
        ...(key === "other_us" ? { fill: "fill-idle" } : { hue: HUES[at % HUES.length] }) }));
      charts.push(...stepChart("Host, by phase", steps, parts));
      columns.push(...parts.map((part) => ({ label: `${part.label} ms`, of: part.of, show: (us) => decimal(us / 1000, 3) })));
    }
    if (entry.breakdown.all.n_gpu_events) {
      const parts = DEVICE.map(([key, label, fill]) => ({ key, label, fill, of: (step) => step.breakdown[key] }));
      charts.push(...stepChart(entry.steps_from?.timed_by === "device" ? "Device, in its own steps" : "Device, during the host's step", steps, parts));
      columns.push(...parts.map((part) => ({ label: `${part.label} ms`, of: part.of, show: (us) => decimal(us / 1000, 3) })));
    }
    if (!charts.length) {
      const whole = { label: "host time", fill: "fill-compute", of: (step) => step.host_duration_us ?? step.duration_us };
      charts.push(...stepChart("Host time", steps, [whole]));
    }
    return section("Steps", ...charts,
      element("details", {}, element("summary", {}, "Table of steps"), sortingTable("Steps", columns, steps, 1)));
  }

  // --- timeline -------------------------------------------------------------------------------------

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

  function roundStep(span, about) {
    const raw = span / about;
    const power = 10 ** Math.floor(Math.log10(raw));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  }

  // The whole recording, or one step in full: with what its events were called with, and their launches.
  function timelineSection(entry, redraws, step = null) {
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
    const hues = picture.names.map(hue);

    function draw() {
      pending = false;
      const width = canvas.clientWidth;
      if (!width) return;
      const ratio = devicePixelRatio || 1;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.height = `${height}px`;
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(name).trim();
      const fills = hues.map((each) => `hsl(${each} ${colour("--hues-saturation")} ${colour("--hues-lightness")})`);
      const [ink, soft, line, idle, onHue, focus, mark] =
        ["--ink", "--soft", "--line", "--idle", "--on-hue", "--focus", "--mark"].map(colour);
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
            pen.fillStyle = wanted && name >= 0 && found[name] ? mark : name < 0 || wanted ? idle : fills[name];
            pen.fillRect(left, y, right - left > 3 ? right - left - 0.6 : right - left, ROW - 2);
            if (right - left > 34) {
              pen.fillStyle = name < 0 || wanted ? ink : onHue;
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
      const step = roundStep(to - from, Math.max(2, width / 110));
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
    return section(step ? `Step ${step.index} in full` : "Timeline",
      element("div", { class: "bar" }, button("Zoom in", () => zoom(0.5, middle())), button("Zoom out", () => zoom(2, middle())),
        button("Left", () => pan(-0.3)), button("Right", () => pan(0.3)), button("All", () => show(low, high)),
        !step && entry.steps.length > 1 ? steps : null, step ? search : null),
      element("div", { class: "timeline" }, canvas), said,
      element("p", { class: "soft" }, "Drag to move, Ctrl and wheel or double click to zoom; with the keyboard: arrows, + and −, 0. ", out.join(" ")));
  }

  // --- flame graph ----------------------------------------------------------------------------------

  const FLAME_ROW = 20;
  const THINNEST_PX = 2.5;

  function flameSection(entry, redraws) {
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
      const made = element("button", { type: "button", tabindex: "-1", class: isAbove ? "above" : "",
        onclick: () => zoom(node === zoomed ? -1 : node, true),
        onmousemove: (event) => showTip(event, describe(node)), onmouseleave: hideTip,
        onfocus: () => { said.textContent = describe(node); } }, part * graph.clientWidth > 26 ? names[name[node]] : "");
      made.setAttribute("aria-label", `${names[name[node]]}, ${time(total[node] / 1000)}`);
      made.style.left = `${100 * left}%`;
      made.style.width = `${100 * part}%`;
      made.style.top = `${row * FLAME_ROW + 1}px`;
      made.style.setProperty("--hue", hue(names[name[node]]));
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
    return section("Flame graph",
      element("div", { class: "bar" }, element("button", { type: "button", onclick: () => zoom(-1, false) }, "All"), filter,
        library.size ? element("label", { for: "library" }, withLibrary, " library frames") : null, matches),
      graph, said,
      element("p", { class: "soft" }, "Host time by call path, outermost on top, over all steps; a wide box took long. Click one to zoom to it, once more for all.",
        library.size ? " Frames of libraries and of Python itself are hidden at first; their time counts in the frame above." : "",
        leftOut ? ` ${integer(leftOut)} call paths that took least are left out.` : ""));
  }

  // --- operators and kernels ------------------------------------------------------------------------

  function cut(shown, all) {
    return shown < all ? element("p", { class: "soft" }, `The ${integer(shown)} largest of ${integer(all)}; --json has all.`) : null;
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
    return section("Operators", sortingTable("Operators", columns, rows, selfCpu), cut(rows.length, entry.n_operators));
  }

  function kernelsSection(entry) {
    if (!entry.kernels.length) return null;
    const columns = [{ label: "kernel", of: (row) => row.name, text: true }, { label: "calls", of: (row) => row.calls, show: integer },
      milliseconds("sum", "sum_us", entry.kernels[0].sum_us), milliseconds("mean", "mean_us")];
    return section("Kernels", sortingTable("Kernels", columns, entry.kernels, 2), cut(entry.kernels.length, entry.n_kernels));
  }

  // --- the page -------------------------------------------------------------------------------------

  let redraws = [];

  function rankSections(entry) {
    redraws = [];
    const idle = entry.idle ? anything("Why the device is idle", entry.idle) : null;
    return [
      headline(entry), deviceTime(entry), idle && section("Why the device is idle", idle), stepsSection(entry),
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
    const show = (entry) => {
      path.textContent = entry.trace.path;
      hideTip();
      body.replaceChildren(...rankSections(entry));
      redraws.forEach((each) => each());
    };
    const switcher = element("select", { id: "rank", onchange: () => {
      remember("rank", nameOf(report.ranks[Number(switcher.value)]));
      show(report.ranks[Number(switcher.value)]);
    } },
      ...report.ranks.map((entry, at) => element("option", { value: String(at) }, rankName(entry))));
    showPage(
      report.across?.verdict ? element("p", { class: "verdict" }, sentence(report.across.verdict)) : null,
      identity(),
      ...report.failed.map((each) => element("p", { class: "warning" }, `Rank ${each.rank ?? "?"} is missing: ${each.error}`)),
      report.advice?.length ? advice(report.advice) : null,
      report.across ? acrossSection(report.across) : null,
      report.ranks.length > 1 ? element("div", { class: "bar" }, element("label", { for: "rank" }, "Rank"), switcher) : null,
      path, body,
    );
    switcher.value = String(first);
    show(report.ranks[first]);
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
})();
