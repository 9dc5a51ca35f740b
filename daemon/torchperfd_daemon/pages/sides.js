// Two sides: what they are, and their times beside each other.

import { element, table } from "../web/assets/elements.js";
import { legend, partsBar, swatch } from "../web/assets/legend.js";

const SIDES = [["A", "hatch"], ["B", "p50"]];

/** Return the kind of a difference: slower is bad, and only what is beyond noise has a colour. */
export function direction(differs, difference) {
  return differs && difference ? (difference > 0 ? "bad" : "good") : "soft";
}

/** Return what each side is, of rows of [name, of A, of B]; rows that are empty on both are left out. */
export function sidesTable(rows) {
  const columns = SIDES.map(([name, colour], at) => (
    { name: [swatch(colour), name], class: "name", cell: (row) => row[1 + at] || "–" }));
  const known = rows.filter(([, one, other]) => one || other);
  const isDifferent = ([, one, other]) => ({ class: one === other ? null : "differs" });
  return table("What is compared", [{ name: "", cell: ([name]) => name }, ...columns], known, isDifferent);
}

/** Return a table of rows {name, before, after}, both with one scale. Columns are as of `table`. */
export function pairsTable(caption, head, rows, columns) {
  const most = Math.max(...rows.map((row) => Math.max(row.before, row.after)), 1e-12);
  const bar = ([name, colour], value) => partsBar([{ name, colour, value }], most, `${name} of ${caption}`);
  const first = { name: head, class: "pair", cell: (row) => [
    element("span", { class: "symbol" }, row.name), bar(SIDES[0], row.before), bar(SIDES[1], row.after)] };
  return element("div", {}, legend(SIDES, "Colours of the sides"), table(caption, [first, ...columns], rows));
}
