// Builds elements. Every string becomes a text node: a name from a job is never markup.

/** Return an element; attributes that start with "on" are listeners, null and false are left out. */
export function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Return what a view shows before it has read anything; null if the banner says that no daemon answers. */
export function loading(feed) {
  return feed.connection === "lost" ? null : element("p", { class: "soft" }, "Loading …");
}

/** Return a titled part of a view. A note explains how its numbers are made. */
export function card(title, options, ...children) {
  const { note = null, wide = false, id = null, extra = null } = options ?? {};
  return element(
    "section",
    { class: wide ? "card wide" : "card", "aria-label": title, id },
    element("div", { class: "card-head" }, element("h2", {}, title), extra),
    note === null ? null : element("p", { class: "note" }, note),
    ...children,
  );
}

/**
 * Return a table in a box that scrolls by itself. Columns: {name, numeric, class, kind(row) -> class, cell(row) ->
 * text, element or a list of these}.
 */
export function table(caption, columns, rows, rowAttributes) {
  const head = columns.map((column) => element("th", { scope: "col", class: column.numeric ? "number" : null }, column.name));
  const body = rows.map((row) =>
    element(
      "tr",
      rowAttributes ? rowAttributes(row) : {},
      columns.map((column, index) => {
        const kind = `${column.numeric ? "number " : ""}${column.kind?.(row) ?? column.class ?? ""}` || null;
        return index === 0 ? element("th", { scope: "row", class: kind }, column.cell(row)) : element("td", { class: kind }, column.cell(row));
      }),
    ),
  );
  return scrolling(caption, head, element("tbody", {}, body));
}

/** Return a box that scrolls by itself, with a table of these cells of its head and this body. */
export function scrolling(caption, head, body) {
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    element("table", { "aria-label": caption }, element("thead", {}, element("tr", {}, head)), body),
  );
}

/** Return a disclosure whose content is built whenever it is opened. */
export function disclosure(title, build) {
  const made = element("details", {}, element("summary", {}, title));
  made.addEventListener("toggle", () => {
    // Each time anew, of what is known then; a table that changes while one reads it helps no reader.
    made.replaceChildren(made.firstChild, ...(made.open ? [build()] : []));
  });
  return made;
}

/** Return words in which what stands between backticks is code. */
export function withCode(words) {
  return words.split("`").map((part, at) => (at % 2 ? element("code", {}, part) : part));
}

function tile(name, value, detail, kind = null) {
  return element(
    "div",
    { class: "tile" },
    element("dt", {}, name),
    element("dd", { class: kind }, value, detail ? [" ", element("small", {}, detail)] : null),
  );
}

/** Return a list of figures, [name, value, detail, kind]. */
export function tiles(rows) {
  return element("dl", { class: "tiles" }, rows.map((row) => tile(...row)));
}

/** Return a list of [name, value]. */
export function facts(rows, kind = "") {
  return element("dl", { class: `facts ${kind}` }, rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

/** Return a coloured word for a state: its colour repeats what the word says. */
export function chip(word, kind) {
  return element("span", { class: `chip ${kind}` }, word);
}
