// Where one types: it grows with the text, gives back what was refused, and edits what was said.

import { announce, byId, icon } from "./dom.js";

const MAX_HEIGHT_PX = 260;

/** `actions`: send(text, turn or null), stop(), typed(text), last(): the last turn. */
export class Composer {
  constructor(actions) {
    this.actions = actions;
    this.text = byId("composer-text");
    this.edited = null;
    byId("send").append(icon("send"));
    byId("stop").append(icon("stop"));
    byId("stop").addEventListener("click", () => actions.stop());
    byId("editing").querySelector("button").addEventListener("click", () => this.leaveEdit());
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.text.addEventListener("input", () => this.changed());
    this.text.addEventListener("keydown", (event) => this.pressed(event));
    this.fit();
  }

  get isEditing() {
    return this.edited !== null;
  }

  pressed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.text.value && this.actions.last()) {
      event.preventDefault();
      this.edit(this.actions.last());
    }
  }

  submit() {
    const text = this.text.value;
    if (!text.trim() || this.isAnswering) return;
    const { edited } = this;
    this.rest();
    this.put("");
    this.actions.send(text, edited);
  }

  fit() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(MAX_HEIGHT_PX, this.text.scrollHeight)}px`;
    byId("send").disabled = !this.text.value.trim();
  }

  changed() {
    this.fit();
    if (!this.isEditing) this.actions.typed(this.text.value);
  }

  put(text) {
    this.text.value = text;
    this.changed();
  }

  edit(turn) {
    if (this.isAnswering) return;
    this.edited = turn;
    byId("editing").hidden = false;
    byId("editing").firstElementChild.textContent = `Editing message ${turn.turn}. What came after it stays as a branch.`;
    this.put(turn.user);
    this.text.focus();
    announce(`Editing message ${turn.turn}`);
  }

  leaveEdit() {
    if (!this.isEditing) return false;
    this.rest();
    this.put("");
    this.text.focus();
    return true;
  }

  /** No edit is under way any more. */
  rest() {
    this.edited = null;
    byId("editing").hidden = true;
    this.answering(false);
  }

  /** What was refused, unless something else stands here already. */
  giveBack(text) {
    if (!this.text.value) this.put(text);
  }

  answering(is) {
    this.isAnswering = is;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("send").hidden = is;
    byId("stop").hidden = !is;
    if (hadFocus) this.text.focus();
  }

  focus() {
    this.text.focus();
  }
}
