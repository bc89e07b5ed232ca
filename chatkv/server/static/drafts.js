// Work before Enter: what is being typed is prefilled once the typing rests for a moment.

import { byId } from "./dom.js";
import { count } from "./words.js";

const REST_MS = 350;

export class Drafts {
  constructor() {
    this.abort = new AbortController();
    this.hint = byId("hint");
  }

  /** For the next one; the one before ends. */
  signal() {
    this.abort.abort();
    this.abort = new AbortController();
    return this.abort.signal;
  }

  end() {
    clearTimeout(this.due);
    this.abort.abort();
    this.hint.textContent = "";
  }

  /** Prefill `text` soon, in what `chat` has open then. */
  typed(chat, text, system) {
    this.end();
    if (!text.trim() || chat.isAnswering) return;
    this.due = setTimeout(() => this.prefill(chat, text, system).catch(() => {}), REST_MS);
  }

  async prefill(chat, text, system) {
    const { session } = chat;
    const signal = this.signal();
    await chat.ready();
    if (signal.aborted || session !== chat.session || chat.isAnswering) return;
    for await (const event of session.draft(text, system, signal)) {
      if (event.event !== "result" || signal.aborted) continue;
      this.hint.textContent = event.data.cached ? `${count(event.data.cached)} tokens are ready` : "";
    }
  }
}
