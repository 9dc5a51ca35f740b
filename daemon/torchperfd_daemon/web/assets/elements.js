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

/** Return a table in a box that scrolls by itself. Columns: {name, numeric, cell(row) -> text or element}. */
export function table(caption, columns, rows, rowAttributes) {
  const head = columns.map((column) => element("th", { scope: "col", class: column.numeric ? "number" : null }, column.name));
  const body = rows.map((row) =>
    element(
      "tr",
      rowAttributes ? rowAttributes(row) : {},
      columns.map((column, index) => {
        const attributes = { class: column.numeric ? "number" : column.class ?? null };
        return index === 0
          ? element("th", { scope: "row", ...attributes }, column.cell(row))
          : element("td", attributes, column.cell(row));
      }),
    ),
  );
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    element(
      "table",
      {},
      element("caption", { class: "unseen" }, caption),
      element("thead", {}, element("tr", {}, head)),
      element("tbody", {}, body),
    ),
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

/** Return one figure with its name. */
export function tile(name, value, detail) {
  return element(
    "div",
    { class: "tile" },
    element("dt", {}, name),
    element("dd", {}, value, detail ? element("small", {}, detail) : null),
  );
}

/** Return a coloured word for a state: its colour repeats what the word says. */
export function chip(word, kind) {
  return element("span", { class: `chip ${kind}` }, word);
}
