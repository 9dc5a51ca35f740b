// The account of a step: a bar of its parts, and a table of them with the time beside the step.

import { card, table } from "./elements.js";
import { partsBar, swatch } from "./legend.js";
import { duration, percent } from "./numbers.js";
import { partColour } from "./phases.js";

/** Return the account of a verdict's step as a card. */
export function accountCard({ account, card: { account_rows: rows } }) {
  const whole = account.step_seconds;
  const parts = rows.filter((row) => !row.is_hidden);
  const named = parts.map((row) => ({ name: `${row.words}: ${percent(row.share)}`, colour: partColour(row), value: row.seconds }));
  const hidden = parts.length < rows.length ? " What is hidden is beside the step and costs nothing." : "";
  const columns = [
    { name: "Part", class: "name", cell: (row) => [row.is_hidden ? null : swatch(partColour(row)), row.words] },
    { name: "Per step", numeric: true, cell: (row) => duration(row.seconds) },
    { name: "Share", numeric: true, cell: (row) => (row.is_hidden ? "hidden" : percent(row.share)) },
  ];
  return card(
    "Where a step goes",
    { wide: true, note: `The parts sum to the mean step of the verdict's window, ${duration(whole)}.${hidden}` },
    partsBar(named, whole, `Parts of a step: ${named.map((part) => part.name).join(", ")}`),
    table("Parts of a step", columns, rows),
  );
}
