// Tables that sort and filter, and tables of whatever a document has.

import { element, scrolling, tiles } from "../web/assets/elements.js";
import { decimal, integer, quantity, words } from "./quantities.js";
import { remember, view } from "./report.js";

const SHOWN = 50;

/**
 * Return a table. A column is {label, of: row => value, show: value => text, share: row => 0 to 1, text: it is words,
 * key: row => what the rows are sorted by, kind: row => class of the cell}.
 */
export function sortingTable(caption, columns, rows, sortedBy) {
  const [kept, direction] = (view.get(`sort ${caption}`) ?? "").split(" ▸ ");
  const keptAt = columns.findIndex((column) => column.label === kept);
  let by = keptAt < 0 ? sortedBy : keptAt;
  let descending = keptAt < 0 || direction !== "up";
  let shown = SHOWN;
  const body = element("tbody", {});
  const count = element("span", { class: "soft", "aria-live": "polite" });
  const more = element("button", { type: "button", class: "more", onclick: () => { shown = Infinity; fill(); } });
  const filter = element("input", {
    type: "search", "aria-label": `Filter ${caption}`, placeholder: "filter",
    oninput: () => { remember(`filter ${caption}`, filter.value); fill(); },
  });
  filter.value = rows.length > 5 ? view.get(`filter ${caption}`) ?? "" : "";
  const texts = rows.map((row) => columns.filter((each) => each.text).map((each) => each.of(row)).join(" ").toLowerCase());
  const heads = columns.map((column, at) => {
    const sort = () => {
      descending = by === at ? !descending : !column.text;
      by = at;
      remember(`sort ${caption}`, `${column.label} ▸ ${descending ? "down" : "up"}`);
      fill();
    };
    return element("th", { scope: "col", class: column.text ? null : "number" },
      element("button", { type: "button", onclick: sort }, column.label));
  });

  function fill() {
    const wanted = filter.value.toLowerCase();
    const order = rows.map((_, at) => at).filter((at) => texts[at].includes(wanted));
    const value = columns[by].key ?? columns[by].of;
    const sign = descending ? -1 : 1;
    order.sort((a, b) => {
      const [left, right] = [value(rows[a]), value(rows[b])];
      return left < right ? -sign : left > right ? sign : a - b;
    });
    heads.forEach((head, at) => {
      head.setAttribute("aria-sort", at !== by ? "none" : descending ? "descending" : "ascending");
    });
    body.replaceChildren(...order.slice(0, shown).map((at) => line(rows[at])));
    count.textContent = order.length === rows.length ? `${integer(rows.length)} rows`
      : `${integer(order.length)} of ${integer(rows.length)} rows`;
    more.hidden = order.length <= shown;
    more.textContent = `Show all ${integer(order.length)}`;
  }

  function line(row) {
    return element("tr", {}, columns.map((column) => {
      const value = column.of(row);
      if (column.text) return element("td", { class: "name" }, element("span", { class: "symbol", title: value }, value));
      const cell = element("td", { class: `number ${column.kind?.(row) ?? ""}` }, column.show(value));
      return column.share ? shaded(cell, column.share(row)) : cell;
    }));
  }

  fill();
  return element("div", {},
    rows.length > 5 ? element("div", { class: "row" }, filter, count) : null,
    scrolling(caption, heads, body), more);
}

/** Give a cell a bar behind its number, and return it. */
export function shaded(cell, share) {
  cell.classList.add("share");
  cell.style.backgroundSize = `${100 * Math.min(1, Math.max(0, share))}% 100%`;
  return cell;
}

/** Return a column of times in microseconds; `whole` is the time of a full bar. */
export function milliseconds(label, key, whole) {
  const column = { label: `${label} ms`, of: (row) => row[key], show: (us) => decimal(us / 1000, 3) };
  return whole ? { ...column, share: (row) => row[key] / whole } : column;
}

function plain(value) {
  return value === null || typeof value !== "object";
}

/** Return tiles and tables of whatever a part of the document has. */
export function anything(title, value) {
  if (Array.isArray(value)) return value.length ? listed(title, value) : null;
  const known = [];
  const parts = [];
  for (const [key, inner] of Object.entries(value)) {
    if (!plain(inner)) {
      const part = anything(words(key), inner);
      if (part) parts.push(element("h3", {}, words(key)), part);
    } else known.push([words(key), quantity(key, inner)]);
  }
  return element("div", {}, known.length ? tiles(known) : null, ...parts);
}

function listed(title, rows) {
  if (rows.every(plain)) return element("p", {}, rows.join(", "));
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const empty = (key) => rows.every((row) => (row[key] ?? "") === "");
  const cell = (value) => plain(value ?? null) || (Array.isArray(value) && value.every(plain));
  const flat = keys.filter((key) => rows.every((row) => cell(row[key])) && !empty(key));
  const columns = flat.map((key) => {
    const text = rows.some((row) => typeof row[key] === "string" || Array.isArray(row[key]));
    const of = text ? (row) => [row[key] ?? ""].flat().join(", ") : (row) => row[key] ?? null;
    return { label: words(key), of, text, show: (value) => quantity(key, value) };
  });
  const first = flat.findIndex((key) => /_us(_|$)/.test(key));
  const nested = keys.filter((key) => !flat.includes(key) && !empty(key));
  const parts = nested.flatMap((key) => rows.filter((row) => row[key] && Object.keys(row[key]).length).map((row) =>
    element("details", {},
      element("summary", {}, `${words(key)}: ${flat.map((each) => row[each]).find((each) => typeof each === "string") ?? ""}`),
      anything(words(key), row[key]))));
  return element("div", {}, columns.length ? sortingTable(title, columns, rows, Math.max(0, first)) : null, ...parts);
}
