// "Save this page": one file with the data, the style and the scripts, which opens from disk without a request.

const ENTRY = "app.js";

/** Return what a saved page shows: all that is loaded now. */
export function snapshot(feed, place) {
  return {
    saved_unix_seconds: feed.now(),
    place: `${location.hash}`,
    view: place.view,
    documents: feed.documents,
    history: feed.history?.toDocument() ?? null,
  };
}

/** Return the text of the file. */
export async function savedPage(saved) {
  const modules = new Map();
  await gather(ENTRY, modules);
  const style = (await text("kit.css")) + (await text("page.css"));
  // A less-than sign inside a script element could end it; in JSON and in strings its escape means the same.
  const data = JSON.stringify(saved, short).replaceAll("<", "\\u003c");
  const [head, body] = (await text("index.html")).replace(/<(link|script)[^>]*>(<\/script>)?\n/g, "").split("</head>");
  const policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'";
  return [
    `${head}<meta http-equiv="Content-Security-Policy" content="${policy}">\n<style>${style}</style>\n</head>`,
    body.split("</body>")[0],
    `<script type="application/json" id="saved">${data}</script>`,
    `<script>${bundle(modules)}</script>\n</body>\n</html>\n`,
  ].join("");
}

// Five digits are more than the page shows; ten minutes of 64 ranks would take 9 MB with all of them.
function short(_key, value) {
  if (typeof value !== "number" || Number.isInteger(value)) return value;
  return Math.abs(value) > 1e6 ? Math.round(value * 1000) / 1000 : Number(value.toPrecision(5));
}

/** Offer a text as a file to save. */
export function download(name, content) {
  const url = URL.createObjectURL(new Blob([content], { type: "text/html" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const IMPORT = /^import \{([^}]*)\} from "\.\/([\w.]+)";$/gm;
const EXPORT = /^export (async function|function|class|const) (\w+)/gm;

// The modules in the order in which they run: each after those that it imports.
async function gather(name, modules) {
  if (modules.has(name)) return;
  modules.set(name, null);
  const source = await text(name);
  for (const [, , imported] of source.matchAll(IMPORT)) await gather(imported, modules);
  modules.delete(name);
  modules.set(name, source);
}

// Browsers load no module from a file: each becomes a function that returns what it exports.
function bundle(modules) {
  const parts = [...modules].map(([name, source]) => {
    const exported = [...source.matchAll(EXPORT)].map(([, , what]) => what);
    const body = source
      .replaceAll(IMPORT, (_, names, from) => `const {${names.replaceAll(" as ", ": ")}} = modules["${from}"];`)
      .replaceAll(EXPORT, "$1 $2");
    return `modules["${name}"] = (() => {\n${body}\nreturn { ${exported.join(", ")} };\n})();`;
  });
  return `"use strict";\nconst modules = {};\n${parts.join("\n")}`.replaceAll("</", "<\\/");
}

async function text(name) {
  const response = await fetch(`/assets/${name}`);
  if (!response.ok) throw new Error(`${name}: ${response.status}`);
  return response.text();
}
