// One turn on the page: what was said, what was answered, and what can be done with either.

import { copyFrom, el, iconButton } from "./dom.js";
import { Markdown, thoughtsIn } from "./markdown.js";
import { summary, timeline } from "./timeline.js";

const FRAME_MS = 60; // between two renderings of an answer that streams

const ENDS = {
  interrupted: "Stopped here.",
  length: "The longest answer that is allowed ends here.",
};

/** Whether somebody is answering it just now. */
export function isUnfinished(turn) {
  return turn.state === "pending" || turn.state === "streaming";
}

/** `actions`: edit, regenerate, goOn, fork and take(turn), each given a turn. */
export class TurnView {
  constructor(turn, actions, place = null) {
    this.turn = turn;
    this.actions = actions;
    this.reply = el("div", { class: "markdown" });
    this.markdown = new Markdown(this.reply);
    this.thoughts = el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Thoughts"), el("div", {}));
    this.foot = el("div", { class: "foot" });
    this.answer = el("div", { class: "answer" }, el("h2", { class: "hidden" }, "Answer"), this.thoughts, this.reply, this.foot);
    this.element = el("article", { class: "turn", "aria-label": `Turn ${turn.turn}` }, this.question(), this.answer);
    this.text = turn.reply;
    this.become(turn, place);
  }

  question() {
    const { turn, actions } = this;
    const buttons = el(
      "div",
      { class: "tools" },
      iconButton("copy", "Copy this message", (event) => copyFrom(event.currentTarget, turn.user)),
      iconButton("edit", "Edit this message and send it again", () => actions.edit(turn), { class: "icon edit" }),
    );
    const system = turn.system ? el("details", { class: "system" }, el("summary", {}, "System prompt"), el("p", {}, turn.system)) : null;
    return el(
      "div",
      { class: "question" },
      system,
      el("div", { class: "said" }, el("h2", { class: "hidden" }, "You said"), el("p", {}, turn.user)),
      buttons,
    );
  }

  /** Show what the turn is now; `place`: which it is of several (see `Tree.place`). */
  become(turn, place) {
    this.turn = turn;
    this.element.setAttribute("aria-busy", "false");
    this.element.classList.remove("streaming");
    this.show(turn.reply, true);
    const panel = el("div", { hidden: true });
    this.foot.replaceChildren(...[this.end(), this.tools(place, panel), panel].filter(Boolean));
  }

  /** Why the answer is not whole, null where it is. */
  end() {
    const { turn, actions } = this;
    if (turn.finish_reason === "stop") return null;
    if (isUnfinished(turn)) return el("p", { class: "end" }, "Being answered …");
    const again = el("button", { type: "button", class: "quiet go-on", onclick: () => actions.goOn(turn) }, "Go on");
    return el("p", { class: "end" }, ENDS[turn.finish_reason] ?? "Not answered yet.", " ", again);
  }

  tools(place, panel) {
    const { turn, actions } = this;
    const tools = el(
      "div",
      { class: "tools" },
      place && this.others(place),
      iconButton("copy", "Copy this answer", (event) => copyFrom(event.currentTarget, thoughtsIn(turn.reply).answer)),
      iconButton("again", "Have another answer", () => actions.regenerate(turn), { class: "icon regenerate" }),
      iconButton("fork", "Begin a new chat from here", () => actions.fork(turn), { class: "icon fork" }),
    );
    if (turn.stats?.tokens) tools.append(this.measured(panel));
    return tools;
  }

  /** What the turn took, in a line that opens `panel` with all of it. */
  measured(panel) {
    const { stats } = this.turn;
    const toggle = () => {
      if (!panel.childElementCount) panel.append(timeline(stats));
      panel.hidden = !panel.hidden;
      button.setAttribute("aria-expanded", String(!panel.hidden));
    };
    const about = { type: "button", class: "quiet measured", "aria-expanded": "false", title: "Where the time went" };
    const button = el("button", { ...about, onclick: toggle }, summary(stats));
    return button;
  }

  others({ index, beside }) {
    const step = (by) => this.actions.take(beside[index + by]);
    return el(
      "span",
      { class: "others" },
      iconButton("left", "The one before", () => step(-1), { disabled: index === 0 }),
      el("span", {}, `${index + 1} / ${beside.length}`),
      iconButton("right", "The next one", () => step(1), { disabled: index === beside.length - 1 }),
    );
  }

  // --- while it streams ---------------------------------------------------------------------------

  begin() {
    this.element.setAttribute("aria-busy", "true");
    this.element.classList.add("streaming");
    this.foot.replaceChildren();
  }

  add(text) {
    this.text += text;
    this.due ??= setTimeout(() => {
      this.due = null;
      this.show(this.text, false);
      this.onGrow?.();
    }, FRAME_MS);
  }

  show(text, isWhole) {
    clearTimeout(this.due);
    this.due = null;
    this.text = text;
    const { thoughts, answer } = thoughtsIn(text);
    this.thoughts.hidden = !thoughts;
    this.thoughts.lastChild.textContent = thoughts;
    if (isWhole) this.markdown.finish(answer);
    else this.markdown.update(answer);
  }
}

/** A line of the page's own between the turns. */
export function notice(text, ...more) {
  return el("p", { class: "notice" }, el("span", {}, text), ...more);
}

export function welcome() {
  return el(
    "div",
    { class: "welcome" },
    el("img", { src: "/page/icon.svg", alt: "", width: 56, height: 56 }),
    el("p", { class: "large" }, "Say something."),
    el("p", {}, "It is kept here, with what the model has read, and goes on at once whenever you come back."),
  );
}
