// The token that acting needs: from the address's fragment, or typed. It stays in this tab.

import { element } from "./elements.js";

const KEY = "torchperfd-token";

/** Take the token out of the address, so that it is in no bookmark and no screenshot. */
export function takeFromAddress() {
  const found = /^#token=([A-Za-z0-9._~-]+)$/.exec(location.hash);
  if (!found) return;
  keep(found[1]);
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
}

/** Return the token, or null. */
export function token() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** Keep a token, or forget it with null. */
export function keep(value) {
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // A browser without storage asks again after a reload.
  }
}

/** Ask for the token; resolves to whether one was given. */
export function askForToken(reason) {
  return new Promise((resolve) => {
    const field = element("input", {
      id: "token-field",
      type: "password",
      autocomplete: "off",
      spellcheck: "false",
      required: true,
    });
    const dialog = element(
      "dialog",
      { "aria-labelledby": "token-title" },
      element(
        "form",
        { method: "dialog", onsubmit: () => keep(field.value.trim()) },
        element("h2", { id: "token-title" }, "Token needed"),
        element("p", {}, reason),
        element(
          "p",
          {},
          "Run ",
          element("code", {}, "torchperfd open"),
          " on the node: it opens this page with the token. Or paste the token here; the daemon's log has the path of its file.",
        ),
        element("label", { for: "token-field" }, "Token"),
        field,
        element(
          "div",
          { class: "row" },
          element("button", { type: "submit", class: "primary", value: "use" }, "Use the token"),
          element("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "use" && token() !== null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
