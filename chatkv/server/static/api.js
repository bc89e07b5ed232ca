// The server's API: JSON, and answers as streams of one object a line.

const KEY = "chatkv-token"; // kept until the window is closed

/** What the server refuses, or why it cannot be reached (status 0). */
export class Refused extends Error {
  constructor(status, message, kind = "") {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

let askForToken = async () => null;
let asking = null;

/** `ask(isWrong)` gives a token, where the server wants one. */
export function onToken(ask) {
  askForToken = ask;
}

let onReach = () => {};

/** `listener(isReached)` hears whether the server answers. */
export function onReached(listener) {
  onReach = listener;
}

export async function call(method, path, body) {
  const response = await request(method, path, body);
  return response.json();
}

/** The events of one request; `signal` ends it, and the work behind it. */
export async function* stream(path, body, signal) {
  const response = await request("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await read(reader, signal);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line) yield JSON.parse(line);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    throw signal?.aborted ? error : gone();
  }
}

async function request(method, path, body, signal) {
  while (true) {
    const token = sessionStorage.getItem(KEY);
    const response = await sent(method, path, body, signal, token);
    if (response.status === 401) {
      if (token !== sessionStorage.getItem(KEY)) continue; // another request was given one meanwhile
      asking ??= askForToken(token !== null).finally(() => (asking = null));
      sessionStorage.setItem(KEY, await asking);
      continue;
    }
    if (response.ok) return response;
    throw await refusal(response);
  }
}

async function sent(method, path, body, signal, token) {
  const headers = { "Content-Type": "application/json", Accept: "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const data = body === undefined ? undefined : JSON.stringify(body);
  try {
    const response = await fetch(path, { method, headers, body: data, signal, cache: "no-store" });
    onReach(true);
    return response;
  } catch (error) {
    if (signal?.aborted) throw error;
    onReach(false);
    throw gone();
  }
}

async function refusal(response) {
  const said = await response.json().catch(() => ({}));
  const text = said.text ?? said.error?.message ?? `the server answered ${response.status}`;
  return new Refused(response.status, text, said.data?.kind);
}

function gone() {
  return new Refused(0, "The server cannot be reached. What was said is saved.");
}

export async function isThere() {
  try {
    return (await fetch("/health", { cache: "no-store" })).ok;
  } catch {
    return false;
  }
}
