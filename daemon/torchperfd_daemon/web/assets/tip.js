// The box beside the pointer that gives the numbers under it. Screen readers have the tables instead.

import { element } from "./elements.js";

const box = element("div", { class: "tip", "aria-hidden": "true", hidden: true });

/** Show a text of lines beside the pointer. */
export function showTip(event, text) {
  if (!box.isConnected) document.body.append(box);
  box.textContent = text;
  box.hidden = false;
  const size = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - size.width - 8))}px`;
  const below = event.clientY + 16;
  box.style.top = `${below + size.height > innerHeight ? Math.max(4, event.clientY - size.height - 10) : below}px`;
}

/** Hide the box. */
export function hideTip() {
  box.hidden = true;
}

/** Show a text beside the pointer while it is over an element; `read(event)` returns lines of text or null. */
export function attachTip(target, read) {
  target.addEventListener("mousemove", (event) => {
    const lines = read(event);
    if (lines) showTip(event, lines.join("\n"));
    else hideTip();
  });
  target.addEventListener("mouseleave", hideTip);
}
