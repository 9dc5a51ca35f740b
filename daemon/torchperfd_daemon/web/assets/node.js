// The node: GPUs, CPU, memory, pressure, disks, network, collectors and what doctor found.

import { card, chip, element, facts, table, withCode } from "./elements.js";
import { partsBar } from "./legend.js";
import { bytes, isNumber, percent } from "./numbers.js";
import { Part } from "./parts.js";

const NEARLY_FULL = 0.9;

export class NodeView {
  constructor(feed) {
    this._feed = feed;
    const div = () => new Part(element("div", {}));
    this._parts = { doctor: div(), gpus: div(), host: div(), pressure: div(), disks: div(), network: div(), collectors: div() };
    const { doctor, gpus, host, pressure, disks, network, collectors } = this._parts;
    this._problem = new Part(element("div", {}));
    this._build = new Part(element("p", { class: "soft" }));
    this.box = element(
      "div",
      {},
      element("h1", {}, "Node"),
      this._build.box,
      this._problem.box,
      doctor.box,
      gpus.box,
      element("div", { class: "grid two" }, host.box, pressure.box, disks.box, network.box),
      collectors.box,
    );
  }

  get title() {
    return "Node";
  }

  scope() {
    const { node, runs } = this._feed.documents;
    return {
      scope: node ? `node ${node.node}` : null,
      window: node?.view?.window_seconds ? `last ${Math.round(node.view.window_seconds)} s` : "now",
      at: node?.view?.at_unix_seconds,
      runs: runs?.runs ?? [],
    };
  }

  update() {
    const { node } = this._feed.documents;
    const problem = this._feed.failures.node?.message;
    this._problem.update(problem ?? null, () => (problem ? [element("p", { class: "notice bad" }, `${problem}.`)] : []));
    if (!node) return;
    this._build.update([node.version, node.revision], () => [`torchperfd ${node.version}${node.revision ? `, commit ${node.revision}` : ""}`]);
    const { doctor, gpus, host, pressure, disks, network, collectors } = this._parts;
    doctor.update([node.doctor, node.view?.access], () => [doctorCard(node)]);
    gpus.update(node.gpus ?? [], () => [gpuCard(node.gpus ?? [])]);
    host.update([node.cpu, node.memory, node.captures_disk], () => [hostCard(node)]);
    pressure.update(node.pressure ?? [], () => [pressureCard(node.pressure ?? [])]);
    disks.update(node.disks ?? [], () => [diskCard(node.disks ?? [])]);
    network.update(node.network ?? [], () => [networkCard(node.network ?? [])]);
    collectors.update(node.collectors ?? [], () => [collectorCard(node.collectors ?? [])]);
  }
}

// `fills`: being nearly full is a problem, as of memory; a busy GPU is none.
function meter(share, words, fills = true) {
  const colour = fills && share > NEARLY_FULL ? "p95" : "p50";
  return element("div", { class: "metered" }, partsBar([{ name: words, colour, value: share }], 1, words), element("span", {}, words));
}

function doctorCard({ doctor, view }) {
  if (!doctor) {
    const words = view?.access === "stranger" ? "The doctor's findings need the token: run “torchperfd open” on the node." : "Being checked …";
    return card("Doctor", { wide: true }, element("p", { class: "soft" }, words));
  }
  const findings = doctor.findings ?? [];
  const list = findings.map((finding) =>
    element(
      "li",
      {},
      element("b", {}, `${finding.subject}: ${finding.problem}`),
      finding.why ? `: ${finding.why}.` : "",
      finding.fix ? element("div", {}, "Fix: ", withCode(finding.fix)) : null,
    ),
  );
  const skipped = (doctor.skipped ?? []).map((one) => `${one.check}: ${one.reason}`);
  return card(
    "Doctor",
    { wide: true },
    findings.length ? element("ul", { class: "findings" }, list) : element("p", {}, chip("✓ nothing found", "good")),
    skipped.length ? element("p", { class: "note" }, `Not looked at: ${skipped.join("; ")}.`) : null,
  );
}

function gpuCard(gpus) {
  if (gpus.length === 0) return card("GPUs", { wide: true }, element("p", { class: "soft" }, "No GPU is known on this node."));
  const columns = [
    { name: "GPU", cell: (gpu) => gpu.gpu },
    { name: "Model", cell: (gpu) => gpu.model ?? "–" },
    { name: "Busy", class: "bar-cell", cell: (gpu) => meter(gpu.utilization_ratio, percent(gpu.utilization_ratio), false) },
    { name: "Memory", class: "bar-cell", cell: (gpu) => meter(gpu.memory_used_bytes / gpu.memory_total_bytes, `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`) },
    { name: "Power", numeric: true, cell: (gpu) => (isNumber(gpu.power_watts) ? `${Math.round(gpu.power_watts)} W` : "–") },
    { name: "Temperature", numeric: true, cell: (gpu) => (isNumber(gpu.temperature_celsius) ? `${Math.round(gpu.temperature_celsius)} °C` : "–") },
    { name: "Runs", class: "name", cell: (gpu) => (gpu.runs ?? []).join(", ") || "–" },
  ];
  return card("GPUs", { wide: true }, table("GPUs of the node", columns, gpus));
}

function hostCard({ cpu, memory, captures_disk: disk }) {
  const rows = [
    ["CPU", cpu ? meter(cpu.utilization_ratio, `${percent(cpu.utilization_ratio)} of ${cpu.count} CPUs`) : "–"],
    ["Memory", memory ? meter(memory.used_bytes / memory.total_bytes, `${bytes(memory.used_bytes)} of ${bytes(memory.total_bytes)}`) : "–"],
    ["Disk of captures", disk ? meter(1 - disk.free_bytes / disk.total_bytes, `${bytes(disk.free_bytes)} free of ${bytes(disk.total_bytes)}`) : "–"],
  ];
  return card("Host", {}, facts(rows));
}

function pressureCard(pressure) {
  const columns = [
    { name: "Resource", cell: (one) => one.resource },
    { name: "Who waits", cell: (one) => (one.kind === "full" ? "all processes" : "some processes") },
    { name: "Share of time", numeric: true, cell: (one) => percent(one.ratio) },
  ];
  const note = "How much of the time processes waited for the resource, by the kernel's pressure stall information.";
  return card("Pressure", { note }, pressure.length ? table("Pressure", columns, pressure) : element("p", { class: "soft" }, "This kernel reports no pressure."));
}

function diskCard(disks) {
  const columns = [
    { name: "Disk", cell: (disk) => disk.disk },
    { name: "Read", numeric: true, cell: (disk) => perSecond(disk.read_bytes_per_second) },
    { name: "Written", numeric: true, cell: (disk) => perSecond(disk.written_bytes_per_second) },
    { name: "Busy", numeric: true, cell: (disk) => percent(disk.busy_ratio) },
  ];
  return card("Disks", {}, disks.length ? table("Disks", columns, disks) : element("p", { class: "soft" }, "No disk is known."));
}

function networkCard(network) {
  const columns = [
    { name: "Interface", cell: (one) => one.interface },
    { name: "Received", numeric: true, cell: (one) => perSecond(one.received_bytes_per_second) },
    { name: "Sent", numeric: true, cell: (one) => perSecond(one.sent_bytes_per_second) },
  ];
  return card("Network", {}, network.length ? table("Network interfaces", columns, network) : element("p", { class: "soft" }, "No interface is known."));
}

function collectorCard(collectors) {
  const failing = collectors.filter((one) => !one.healthy);
  const columns = [
    { name: "Collector", cell: (one) => one.collector },
    { name: "State", cell: (one) => (one.healthy ? chip("✓ healthy", "good") : chip("✗ failing", "bad")) },
    { name: "Reason", class: "name", cell: (one) => one.reason || "–" },
  ];
  return card("Collectors", { wide: true, note: `${collectors.length - failing.length} of ${collectors.length} collectors are healthy.` }, table("Collectors of the daemon", columns, collectors));
}

function perSecond(value) {
  return isNumber(value) ? `${bytes(value)}/s` : "–";
}
