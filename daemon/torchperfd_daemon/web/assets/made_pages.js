// Pages that the daemon makes of captures: begun here, waited for, and linked to.

import { commanded, showOutcome } from "./actions.js";
import { element } from "./elements.js";

const EVERY_MS = 1000;

/**
 * Have the daemon make a page at a path below "captures/", and link to it. `line` is an element that has a word
 * on the progress; when it has left the document, the page is given up. `name` is what the page is called.
 */
export async function openMadePage(path, line, name) {
  line.textContent = `The daemon is making the ${name} …`;
  try {
    for (;;) {
      const answer = await commanded(`captures/${path}`, {}, `make the ${name}`);
      if (answer === null) return;
      if (answer.state === "ready") {
        const link = element("a", { href: answer.url, target: "_blank", rel: "noopener", id: "report-link" }, "open it in a new tab");
        showOutcome("good", `The ${name} is ready: `, link, ". The link works for a minute.");
        return;
      }
      if (answer.state === "failed") {
        showOutcome("bad", `No ${name}: ${answer.reason}.`);
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
      if (!line.isConnected) return;
    }
  } finally {
    line.textContent = "";
  }
}
