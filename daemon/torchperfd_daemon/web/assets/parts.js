// A part of a view that is built again only when what it shows has changed, and keeps the keyboard's place.

/** Replace the content of a box by what `build` returns, if `shown` differs from the last time. */
export class Part {
  constructor(box) {
    this.box = box;
    this._shown = null;
  }

  /** `shown` is plain data: all that the content depends on. */
  update(shown, build) {
    const key = JSON.stringify(shown);
    if (key === this._shown) return;
    this._shown = key;
    const active = document.activeElement;
    const kept = this.box.contains(active) ? active.dataset.key : undefined;
    const scrolled = [...this.box.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
    const built = build();
    this.box.replaceChildren(...(Array.isArray(built) ? built : [built]).filter(Boolean));
    this.box.querySelectorAll(".scroll").forEach((part, at) => {
      part.scrollLeft = scrolled[at] ?? 0;
    });
    if (kept !== undefined) this.box.querySelector(`[data-key="${CSS.escape(kept)}"]`)?.focus({ preventScroll: true });
  }
}

/** Let the arrow keys move the focus among links or buttons of a box; only one of them takes part in Tab. */
export function rove(box, selector) {
  const all = () => [...box.querySelectorAll(selector)];
  const settle = (chosen) => {
    for (const item of all()) item.tabIndex = item === chosen ? 0 : -1;
  };
  box.addEventListener("keydown", (event) => {
    const items = all();
    const at = items.indexOf(document.activeElement);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 };
    const next = items[moves[event.key]];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    settle(next);
    next.focus();
  });
  box.addEventListener("focusin", (event) => {
    if (event.target.matches(selector)) settle(event.target);
  });
  return () => {
    const items = all();
    settle(items.find((item) => item === document.activeElement) ?? items.find((item) => item.tabIndex === 0) ?? items[0]);
  };
}
