// Two sides: what they are, and their times beside each other.

import { element, table } from "../web/assets/elements.js";
import { legend, partsBar } from "../web/assets/legend.js";

const SIDES = [["A", "side-a"], ["B", "side-b"]];

/** Return the kind of a difference: slower is bad, and only what is beyond noise has a colour. */
export function direction(differs, difference) {
  return differs && difference ? (difference > 0 ? "bad" : "good") : "soft";
}

/** Return what each side is, of rows of [name, of A, of B]; rows that are empty on both are left out. */
export function sidesTable(rows) {
  const columns = SIDES.map(([name, kind], at) => (
    { name: [element("i", { class: `swatch ${kind}` }), name], class: "name", cell: (row) => row[1 + at] || "–" }));
  const known = rows.filter(([, one, other]) => one || other);
  const isDifferent = ([, one, other]) => ({ class: one === other ? null : "differs" });
  return table("What is compared", [{ name: "", cell: ([name]) => name }, ...columns], known, isDifferent);
}

/** Return a table of rows {name, before, after}, both with one scale. Columns are as of `table`. */
export function pairsTable(caption, head, rows, columns) {
  const most = Math.max(...rows.map((row) => Math.max(row.before, row.after)), 1e-12);
  const bar = (name, className, value) => partsBar([{ name, className, value }], most, `${name} of ${caption}`);
  const first = { name: head, class: "pair", cell: (row) => [
    element("span", { class: "symbol" }, row.name), bar("A", "side-a", row.before), bar("B", "side-b", row.after)] };
  return element("div", {}, legend(SIDES, "Colours of the sides"), table(caption, [first, ...columns], rows));
}
