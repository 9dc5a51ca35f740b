// The document of a saved page, the view of it in the address, and the parts that each page begins with.
// All that a page shows is in the document block; names from a trace or a job become text nodes and never markup.

import { element, facts } from "../web/assets/elements.js";
import { hideTip } from "../web/assets/tip.js";

export const report = JSON.parse(document.getElementById("document").textContent);

// What was chosen (rank, order, filters, part of the timeline), so that a link shows another reader the same.
export const view = new URLSearchParams(location.hash.slice(1));

/** Keep a choice in the address; an empty one is left out. */
export function remember(key, value) {
  if (value === "" || value === null) view.delete(key);
  else view.set(key, value);
  const page = location.href.split("#")[0];
  try {
    history.replaceState(null, "", view.size ? `${page}#${view}` : page);
  } catch {
    // A page inside a sandboxed frame has no address of its own to change; it works without.
  }
}

/** Return a time in UTC, empty if unknown. */
export function day(seconds) {
  const when = seconds ? new Date(seconds * 1000).toISOString() : "";
  return when && `${when.slice(0, 10)} ${when.slice(11, 19)} UTC`;
}

/** Return words as a sentence. */
export function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}

/** Return the sentence that the page begins with; `kind` colours its edge. */
export function verdict(words, kind) {
  return element("p", { class: `verdict edge-${kind}` }, sentence(words));
}

/** Return a list of [name, value] of what is known. */
export function identity(rows) {
  const known = rows.filter(([, value]) => value);
  return known.length ? facts(known) : null;
}

/** Return a paragraph that explains. */
export function note(...words) {
  return element("p", { class: "soft" }, ...words);
}

/** Return a paragraph that warns. */
export function warning(words) {
  return element("p", { class: "notice warn" }, words);
}

/** Fill the page. Another fragment in its address is another view of it, as in a link that was followed. */
export function show(...parts) {
  document.getElementById("report").append(element("h1", {}, document.title), ...parts.filter(Boolean));
  addEventListener("hashchange", () => location.reload());
  addEventListener("scroll", hideTip, { passive: true });
}
