// Requests to the daemon that served this page, and to no other.

import { keep, token } from "./token.js";

/** The daemon refused or failed a request. `status` is 0 where nothing answered. */
export class RequestError extends Error {
  constructor(status, problem, remedy) {
    super(remedy ? `${problem}; ${remedy}` : problem);
    this.status = status;
  }
}

/** Send a request; returns the response or throws RequestError. A refused token is forgotten. */
export async function send(path, { method = "GET", body = null, signal = undefined } = {}) {
  const used = token();
  const headers = used ? { "X-Torchperfd-Token": used } : {};
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(`/api/v1/${path}`, {
      method,
      headers,
      body: body === null ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch {
    throw new RequestError(0, "the daemon does not answer");
  }
  if (response.ok) return response;
  if (response.status === 401 && used) {
    keep(null);
    dispatchEvent(new Event("token-refused"));
    if (method === "GET") return send(path, { method, body, signal });
    throw new RequestError(401, "the daemon refused the token; it makes a new one each time it starts");
  }
  let problem = `the daemon answered ${response.status}`;
  let remedy = "";
  try {
    const answer = await response.json();
    problem = answer.error?.problem ?? problem;
    // The remedy for a read is for scripts: another path.
    if (method !== "GET") remedy = answer.error?.remedy ?? "";
  } catch {
    // A proxy's answer is not ours; the status has to do.
  }
  throw new RequestError(response.status, problem, remedy);
}

/** Return the document at a path. */
export async function read(path) {
  return documentOf(await send(path));
}

/** Send a command; returns its answer. */
export async function command(path, body = {}) {
  return documentOf(await send(path, { method: "POST", body }));
}

async function documentOf(response) {
  try {
    return await response.json();
  } catch {
    // The daemon ended while it answered.
    throw new RequestError(0, "the daemon does not answer");
  }
}

/** Call `handle(event, data)` for each server-sent event; resolves when the stream ends. `beat` is called for each piece. */
export async function events(path, handle, beat, signal) {
  const response = await send(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    beat();
    unread = (unread + value).replaceAll("\r\n", "\n");
    let end = unread.indexOf("\n\n");
    while (end >= 0) {
      dispatch(unread.slice(0, end), handle);
      unread = unread.slice(end + 2);
      end = unread.indexOf("\n\n");
    }
  }
}

function dispatch(block, handle) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (data.length > 0) handle(name, JSON.parse(data.join("\n")));
}
