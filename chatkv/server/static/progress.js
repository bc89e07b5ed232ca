// How far a start, a restore or a prefill has come. The part that the cache has saved is filled in
// another colour from the beginning.

import { el } from "./dom.js";
import { count } from "./words.js";

const NAMES = { restore: "Loading from disk", prefill: "Reading" };

export class Progress {
  constructor(element) {
    this.element = element;
    this.words = el("span", { class: "progress-words" });
    this.kept = el("span", { class: "kept" });
    this.made = el("span", { class: "made" });
    this.bar = el("div", { class: "bar", role: "progressbar", "aria-label": "Progress", "aria-valuemin": 0, "aria-valuemax": 100 }, this.kept, this.made);
    element.replaceChildren(this.words, this.bar);
    this.hide();
  }

  hide() {
    this.element.hidden = true;
    this.stage = "";
    this.saved = 0;
  }

  /** The next news. Prefill first tells how many tokens have their KV before it begins. */
  follow({ stage = "", done = 0, total = 0 }) {
    if (!total) return;
    if (stage !== this.stage || total !== this.total) this.saved = stage === "prefill" ? done : 0;
    Object.assign(this, { stage, total });
    const saved = share(this.saved, total);
    const whole = share(done, total);
    this.kept.style.width = `${saved}%`;
    this.made.style.width = `${whole - saved}%`;
    this.words.textContent = this.said(done, total);
    this.bar.setAttribute("aria-valuenow", Math.round(whole));
    this.bar.setAttribute("aria-valuetext", this.words.textContent);
    this.element.hidden = false;
  }

  said(done, total) {
    const name = NAMES[this.stage] ?? this.stage[0].toUpperCase() + this.stage.slice(1);
    if (this.stage !== "prefill") return `${name}: ${Math.round(share(done, total))} %`;
    const kept = this.saved ? `, ${count(this.saved)} of them kept` : "";
    return `${name}: ${count(done)} of ${count(total)} tokens${kept}`;
  }
}

function share(part, whole) {
  return Math.min(100, (100 * part) / whole);
}
