"use strict";

// What all pages share: the document, the view in the address, words and numbers, tables. All that a page shows is in
// the document block; names from a trace or a job become text nodes and never markup.
const shared = (() => {
  const report = JSON.parse(document.getElementById("document").textContent);
  const root = document.getElementById("report");

  // --- the view, in the page's address ---------------------------------------------------------------

  // What was chosen (rank, order, filters, part of the timeline), so that a link shows another reader the same.
  const view = new URLSearchParams(location.hash.slice(1));

  function remember(key, value) {
    if (value === "" || value === null) view.delete(key);
    else view.set(key, value);
    const page = location.href.split("#")[0];
    try {
      history.replaceState(null, "", view.size ? `${page}#${view}` : page);
    } catch {
      // A page inside a sandboxed frame has no address of its own to change; it works without.
    }
  }

  // --- words and numbers ---------------------------------------------------------------------------

  function integer(value) {
    return Math.round(value).toLocaleString("en-US");
  }

  function decimal(value, digits) {
    const shown = Math.abs(value) < 0.5 / 10 ** digits ? 0 : value;
    return shown.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  function time(us) {
    const size = Math.abs(us);
    const [scaled, unit] = size >= 1e6 ? [us / 1e6, "s"] : size >= 1e3 ? [us / 1e3, "ms"] : [us, "µs"];
    const digits = scaled === 0 || Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
    return `${decimal(scaled, digits)} ${unit}`;
  }

  function bytes(count) {
    const size = Math.abs(count);
    if (size < 1000) return `${integer(count)} B`;
    const [scaled, unit] = size >= 1e9 ? [count / 1e9, "GB"] : size >= 1e6 ? [count / 1e6, "MB"] : [count / 1e3, "kB"];
    return `${decimal(scaled, 1)} ${unit}`;
  }

  function percent(share) {
    return `${decimal(100 * share, 1)} %`;
  }

  function words(key) {
    return key.replace(/_(us|bytes|pct|ns)$/, "").replaceAll("_", " ");
  }

  // --- building blocks -----------------------------------------------------------------------------

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  function section(title, ...children) {
    return element("section", { "aria-label": title }, element("h2", {}, title), ...children);
  }

  const tip = element("div", { class: "tip", hidden: "" });

  function showTip(event, text) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const above = event.clientY + 18 + box.height > innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above ? event.clientY - box.height - 12 : event.clientY + 18}px`;
  }

  function hideTip() {
    tip.hidden = true;
  }

  // --- tables that sort and filter -----------------------------------------------------------------

  const SHOWN = 50;

  // A column is {label, of: row => value, show: value => text, share: row => 0 to 1, text: it is words,
  // key: row => what the rows are sorted by, kind: row => class of the cell}.
  function sortingTable(caption, columns, rows, sortedBy) {
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
      return element("th", { scope: "col", class: column.text ? "text" : "number" },
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
      return element("tr", {}, ...columns.map((column) => {
        const value = column.of(row);
        if (column.text) return element("td", { class: "text" }, element("span", { class: "name", title: value }, value));
        const classes = [column.share ? "share" : "", column.kind?.(row) ?? ""].filter(Boolean).join(" ");
        const cell = element("td", classes ? { class: classes } : {}, column.show(value));
        if (column.share) cell.style.backgroundSize = `${100 * Math.min(1, Math.max(0, column.share(row)))}% 100%`;
        return cell;
      }));
    }

    fill();
    return element("div", {},
      rows.length > 5 ? element("div", { class: "bar" }, filter, count) : null,
      element("div", { class: "scroll" },
        element("table", { class: "wide", "aria-label": caption }, element("thead", {}, element("tr", {}, ...heads)), body)),
      more);
  }

  function milliseconds(label, key, whole) {
    const column = { label: `${label} ms`, of: (row) => row[key], show: (us) => decimal(us / 1000, 3) };
    return whole ? { ...column, share: (row) => row[key] / whole } : column;
  }

  function sum(rows, key) {
    return rows.reduce((total, row) => total + row[key], 0);
  }

  // --- sections that show whatever the document has -------------------------------------------------

  function quantity(key, value) {
    if (value === null) return "–";
    if (typeof value !== "number") return String(value);
    if (/_us(_|$)/.test(key)) return time(value);
    if (/bytes_per_second$/.test(key)) return `${bytes(value)}/s`;
    if (/(^|_)bytes$/.test(key)) return bytes(value);
    if (/_pct$/.test(key)) return `${decimal(value, 1)} %`;
    if (/(^|_)share(_|$)/.test(key)) return percent(value);
    return Number.isInteger(value) ? integer(value) : decimal(value, 3);
  }

  function plain(value) {
    return value === null || typeof value !== "object";
  }

  function anything(title, value) {
    if (Array.isArray(value)) return value.length ? listed(title, value) : null;
    const facts = [];
    const parts = [];
    for (const [key, inner] of Object.entries(value)) {
      if (!plain(inner)) {
        const part = anything(words(key), inner);
        if (part) parts.push(element("h3", {}, words(key)), part);
      } else facts.push([key, inner]);
    }
    const list = element("dl", { class: "tiles" }, ...facts.map(([key, inner]) =>
      element("div", {}, element("dt", {}, words(key)), element("dd", {}, quantity(key, inner)))));
    return element("div", {}, facts.length ? list : null, ...parts);
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

  // --- two sides ------------------------------------------------------------------------------------

  const SIDES = [["A", "side-a"], ["B", "side-b"]];

  // A number with its sign; what is rounded to zero has none.
  function signed(value, shown) {
    if (!/[1-9]/.test(shown)) return shown;
    return value > 0 ? `+${shown}` : `−${shown}`;
  }

  // Slower is bad, and only what is beyond noise has a colour.
  function direction(differs, difference) {
    return differs && difference ? (difference > 0 ? "worse" : "better") : "soft";
  }

  function chip(words, kind) {
    return element("span", { class: `chip ${kind}` }, words);
  }

  function sidesLegend() {
    return element("ul", { class: "legend" }, ...SIDES.map(([name, fill]) =>
      element("li", {}, element("span", { class: `swatch ${fill}` }), name)));
  }

  // What each side is, in rows of [name, of A, of B]; rows that are empty on both are left out.
  function sidesTable(rows) {
    const cell = (value) => element("td", { class: "text" }, value || "–");
    return element("table", { class: "sides", "aria-label": "What is compared" },
      element("thead", {}, element("tr", {}, element("td", {}),
        ...SIDES.map(([name, fill]) => element("th", { scope: "col", class: "text" }, element("span", { class: `swatch ${fill}` }), name)))),
      element("tbody", {}, ...rows.filter(([, one, other]) => one || other).map(([name, one, other]) =>
        element("tr", one === other ? {} : { class: "differs" }, element("th", { scope: "row", class: "text" }, name), cell(one), cell(other)))));
  }

  // A row is {name, before, after}, both with one scale; a column is {label, cell: row => text or element, kind: row => class}.
  function pairsTable(caption, head, rows, columns) {
    const most = Math.max(...rows.map((row) => Math.max(row.before, row.after)), 1e-12);
    const bar = (value, fill) => {
      const made = element("div", { class: `bar-of ${fill}` });
      made.style.width = `${(100 * Math.max(0, value)) / most}%`;
      return made;
    };
    return element("div", {}, sidesLegend(), element("div", { class: "scroll" }, element("table", { class: "wide pairs", "aria-label": caption },
      element("thead", {}, element("tr", {}, element("th", { scope: "col", class: "text" }, head),
        ...columns.map((column) => element("th", { scope: "col" }, column.label)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {},
        element("th", { scope: "row", class: "text" }, element("span", { class: "name" }, row.name), bar(row.before, "side-a"), bar(row.after, "side-b")),
        ...columns.map((column) => element("td", column.kind ? { class: column.kind(row) } : {}, column.cell(row))))))),
    ));
  }

  function day(seconds) {
    const when = seconds ? new Date(seconds * 1000).toISOString() : "";
    return when && `${when.slice(0, 10)} ${when.slice(11, 19)} UTC`;
  }

  // --- the head ---------------------------------------------------------------------------------------

  function facts(rows) {
    const known = rows.filter(([, value]) => value);
    return known.length ? element("dl", { class: "identity" }, ...known.map(([label, value]) =>
      element("div", {}, element("dt", {}, label), element("dd", {}, value)))) : null;
  }

  function sentence(text) {
    return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
  }

  // Fill the page. Another fragment in its address is another view of it, as in a link that was followed.
  function show(...parts) {
    root.append(element("h1", {}, document.title), ...parts.filter(Boolean), tip);
    addEventListener("hashchange", () => location.reload());
    addEventListener("scroll", hideTip, { passive: true });
  }

  return {
    report, view, remember, integer, decimal, time, bytes, percent, words, element, section,
    showTip, hideTip, sortingTable, milliseconds, sum, anything, signed, direction, chip, sidesTable,
    pairsTable, day, facts, sentence, show,
  };
})();
