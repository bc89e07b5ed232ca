// One conversation as the server holds it: what is asked of it, and what it answers.

import { Refused, call, stream } from "./api.js";
import { Tree } from "./tree.js";

export class Session {
  /** `id` null: a chat in which nothing was said yet, and that no server knows of. */
  constructor(id = null) {
    this.id = id;
    this.title = "";
    this.model = "";
    this.tokens = 0;
    this.maxTokens = null;
    this.tree = new Tree([], null);
    this.isOpen = false; // its model is loaded
    this.abort = new AbortController(); // ends what this page still waits for in it
  }

  get turns() {
    return this.tree.path;
  }

  path(action) {
    return `/sessions/${encodeURIComponent(this.id)}/${action}`;
  }

  /** What was said, and beside it. Needs no model. */
  async load() {
    const found = await call("GET", `/sessions/${encodeURIComponent(this.id)}`);
    this.title = found.title;
    this.model = found.model;
    this.tokens = found.tokens;
    this.maxTokens = found.max_tokens ?? this.maxTokens;
    this.tree = new Tree(found.tree, found.head);
  }

  /** Have its model loaded; `model` "": the one that it was held with. Gives the server's notices. */
  async open(model, onProgress) {
    const body = { model, session: this.id };
    for await (const event of told("/sessions", body, this.abort.signal)) {
      if (event.event === "progress") onProgress(event);
      if (event.event !== "session") continue;
      this.id = event.data.session;
      this.model = event.data.model;
      this.maxTokens = event.data.max_tokens;
      this.tokens = event.data.num_tokens;
      this.isOpen = true;
      return event.data.notices;
    }
    return [];
  }

  /** The events of a turn: `body` as the server has it. */
  turn(body) {
    return told(this.path("turns"), body, this.abort.signal);
  }

  goOn(options) {
    return told(this.path("continue"), { options }, this.abort.signal);
  }

  /** Prefill what is being typed; "": what was said before. */
  draft(text, system, signal) {
    const body = text && !this.turns.length && system ? { text, system } : { text };
    return told(this.path("draft"), body, signal);
  }

  stop() {
    return call("POST", this.path("cancel"));
  }

  take(turn) {
    return call("POST", this.path("switch"), { turn: this.tree.endOf(turn).id });
  }

  async fork(at) {
    return (await call("POST", this.path("fork"), { at })).session;
  }

  /** Nothing is waited for any more: the server stops what this page has asked it for. */
  leave() {
    this.abort.abort();
  }
}

/** Events until the last one; an `error` is raised. */
async function* told(path, body, signal) {
  for await (const event of stream(path, body, signal)) {
    if (event.event === "error") throw new Refused(400, event.text ?? "", event.data?.kind);
    if (event.event !== "alive") yield event;
  }
}
