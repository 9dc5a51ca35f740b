// The view and its selection in the address, so that a link shows what its sender saw.

const VIEWS = ["overview", "run", "rank", "captures", "capture", "node"];

/**
 * Read an address such as "#/run/bert-17?window=60" into {view, run, rank, capture, options}. An address that is
 * unknown is the overview.
 */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view, ...names] = path.split("/").map(decode);
  const options = Object.fromEntries(new URLSearchParams(query));
  const place = { view: VIEWS.includes(view) ? view : "overview", run: null, rank: null, capture: null, options };
  if (place.view === "run" || place.view === "rank") place.run = names[0] ?? null;
  if (place.view === "rank") place.rank = Number.parseInt(names[1], 10);
  if (place.view === "capture") place.capture = names[0] ?? null;
  const broken = (["run", "rank"].includes(place.view) && !place.run) || (place.view === "rank" && !(place.rank >= 0));
  return broken || (place.view === "capture" && !place.capture) ? { ...place, view: "overview" } : place;
}

/** Return the address of a place; parts that are missing keep out of it. */
export function address({ view, run, rank, capture, options = {} }) {
  const names = { overview: [], run: [run], rank: [run, rank], captures: [], capture: [capture], node: [] }[view];
  const path = view === "overview" ? "" : [view, ...names].map((name) => encodeURIComponent(name)).join("/");
  const given = Object.entries(options).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}

/** Return what links to another view keep of a place's options: whether it is of the fleet. */
export function keptOptions({ options }) {
  return options.fleet === "1" ? { fleet: "1" } : {};
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
