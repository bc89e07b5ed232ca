// The conversation in the middle: opening one, saying something, and all that can be done to a turn.

import { announce, byId, el } from "./dom.js";
import { Progress } from "./progress.js";
import { Session } from "./session.js";
import { TurnView, isUnfinished, notice, welcome } from "./turn.js";
import { thoughtsIn } from "./markdown.js";
import { count } from "./words.js";

const NEAR_END_PX = 80;
const LOOK_AGAIN_MS = 500;

/** `page`: what else there is. composer, sidebar, models, settings; and `went(session)`. */
export class Chat {
  constructor(page) {
    this.page = page;
    this.scroller = byId("scroller");
    this.list = byId("turns");
    this.progress = new Progress(byId("progress"));
    this.session = new Session();
    this.views = [];
    this.isAnswering = false;
    this.isAtEnd = true;
    this.scroller.addEventListener("scroll", () => this.noteEnd());
    byId("to-end").addEventListener("click", () => this.goToEnd());
    new ResizeObserver(() => this.isAtEnd && this.goToEnd()).observe(this.list);
    this.actions = {
      edit: (turn) => this.page.composer.edit(turn),
      regenerate: (turn) => this.send(turn.user, { after: turn.turn - 1, system: turn.system }),
      goOn: () => this.goOn(),
      fork: (turn) => this.guarded(async () => this.page.went(await this.session.fork(turn.turn))),
      take: (turn) => this.take(turn),
    };
  }

  // --- which conversation -------------------------------------------------------------------------

  /** Begin one that is nobody's yet. */
  begin() {
    this.leave();
    this.session = new Session();
    this.show();
    this.list.replaceChildren(welcome());
  }

  /** Show the one with this id, and bring its history into memory. */
  async open(id) {
    if (id === this.session.id) return;
    this.leave();
    const session = (this.session = new Session(id));
    this.list.replaceChildren();
    await this.guarded(async () => {
      await session.load();
      if (session !== this.session) return;
      this.show();
      this.goToEnd();
      await this.watch();
      if (session !== this.session) return;
      await this.ready("");
      await this.restore();
      if (session === this.session) this.page.composer.changed(); // it may hold something already
    });
  }

  /** Another window or program is answering in it: look again until that is done. */
  async watch() {
    const { session } = this;
    while (session === this.session && session.turns.length && isUnfinished(session.turns.at(-1))) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_AGAIN_MS));
      await session.load();
      if (session === this.session && !this.isAnswering) this.update();
    }
  }

  leave() {
    if (this.isAnswering) this.session.stop().catch(() => {});
    this.session.leave();
    this.isAnswering = false;
    this.progress.hide();
    this.page.composer.rest();
  }

  /** All of it, from what is known. */
  show() {
    const { session } = this;
    this.views = session.turns.map((turn) => new TurnView(turn, this.actions, session.tree.place(turn)));
    this.list.replaceChildren(...this.views.map((view) => view.element));
    const left = session.tree.leftBehind;
    if (left.length) {
      const back = el("button", { type: "button", class: "quiet", onclick: () => this.take(left.at(-1)) }, "Bring them back");
      this.list.append(notice("Turns that came after this were left behind.", back));
    }
    this.showFacts();
  }

  showFacts() {
    const { session } = this;
    const title = session.title || "New chat";
    byId("title").textContent = title;
    document.title = session.title ? `${title} · chatkv` : "chatkv";
    const context = byId("context");
    context.hidden = !session.tokens;
    context.textContent = session.maxTokens ? `${count(session.tokens)} / ${count(session.maxTokens)} tokens` : `${count(session.tokens)} tokens`;
    context.classList.toggle("full", session.tokens > 0.85 * (session.maxTokens ?? Infinity));
    this.page.sidebar.mark(session.id);
    this.page.models.show(session.model, session.turns.length > 0);
  }

  // --- a turn -------------------------------------------------------------------------------------

  /** Say something; `after`: behind the first so many turns, which edits or regenerates. */
  async send(text, { after = null, system = null } = {}) {
    if (this.isAnswering) return;
    const { session } = this;
    const num = after ?? session.turns.length;
    const body = { text, options: this.page.settings.options() };
    const first = after === null ? this.page.settings.system : system;
    if (num === 0 && first) body.system = first;
    if (after !== null) body.num_turns = after;
    const turn = { turn: num + 1, user: text, reply: "", system: body.system ?? null, finish_reason: null };
    const view = new TurnView(turn, this.actions);
    for (const old of this.views.splice(num)) old.element.remove();
    for (const other of this.list.querySelectorAll(".welcome, .notice")) other.remove();
    this.views.push(view);
    this.list.append(view.element);
    const isSaid = await this.answer(session, view, async () => {
      await this.ready();
      return session.turn(body);
    });
    if (!isSaid && session === this.session) this.page.composer.giveBack(text);
  }

  async goOn() {
    const view = this.views.at(-1);
    if (this.isAnswering || !view) return;
    await this.answer(this.session, view, async () => {
      await this.ready();
      return this.session.goOn(this.page.settings.options());
    });
  }

  /** Hear an answer. False where it was refused: then nothing has changed. */
  async answer(session, view, begin) {
    this.isAnswering = true;
    this.page.composer.answering(true);
    this.goToEnd();
    view.onGrow = () => this.isAtEnd && this.goToEnd();
    view.begin();
    announce("Answering");
    let result = null;
    const problem = await failing(async () => {
      for await (const event of await begin()) {
        if (session !== this.session) return;
        this.page.went(session.id); // it is saved, and is found again from now on
        if (event.event === "progress") this.progress.follow(event);
        else if (event.event === "text") this.grew(view, event.text);
        else if (event.event === "result") result = event.data;
      }
    });
    if (session !== this.session) return true;
    this.isAnswering = false;
    this.progress.hide();
    this.page.composer.answering(false);
    await this.answered(session, result);
    if (problem && session === this.session) this.complain(problem);
    return result !== null || session.turns.length >= view.turn.turn;
  }

  grew(view, text) {
    this.progress.hide();
    view.add(text);
  }

  async answered(session, result) {
    if (result) {
      session.tokens = result.tokens.prompt + result.tokens.generated;
      session.title = result.title;
      announce(result.text ? `Answer: ${thoughtsIn(result.text).answer}` : "There is no answer");
    }
    const isKnown = await session.load().then(
      () => true,
      () => false,
    );
    if (session !== this.session) return;
    const last = this.views.at(-1);
    if (isKnown) this.update();
    else if (result) last.become({ ...last.turn, reply: result.text, finish_reason: result.finish_reason, stats: result.stats }, null);
    else this.show();
    for (const line of result?.notices ?? []) this.list.append(notice(line));
    this.page.sidebar.refresh().catch(() => {});
  }

  /** Show what has changed, and leave what stands. */
  update() {
    const { turns, tree } = this.session;
    const last = this.views.at(-1);
    if (!last || turns.length !== this.views.length || turns.length !== last.turn.turn) return this.show();
    for (const [index, turn] of turns.entries()) {
      if (this.views[index].turn.id !== turn.id || index === turns.length - 1) this.views[index].become(turn, tree.place(turn));
    }
    this.showFacts();
  }

  stop() {
    if (this.isAnswering && this.session.id) this.session.stop().catch(() => {});
  }

  /** Go on from another turn beside one of these. */
  take(turn) {
    if (this.isAnswering) return null;
    return this.guarded(async () => {
      await this.session.take(turn);
      await this.session.load();
      this.show();
    });
  }

  // --- before anything is computed ----------------------------------------------------------------

  /** The session open at the server, with the model that is chosen. */
  async ready(model = this.page.models.chosen) {
    const { session } = this;
    if (session.isOpen && (!model || model === session.model)) return;
    const notices = await session.open(model, (event) => this.progress.follow(event));
    if (session !== this.session) return;
    this.progress.hide();
    for (const line of notices) this.list.append(notice(line));
    this.showFacts();
  }

  /** Bring the history into memory before the next turn needs it. */
  async restore() {
    const { session } = this;
    for await (const event of session.draft("", null, this.page.drafts.signal())) {
      if (session !== this.session || this.isAnswering) return;
      if (event.event === "progress") this.progress.follow(event);
    }
    this.progress.hide();
  }

  /** Do it, and say what is refused. */
  async guarded(work) {
    const { session } = this;
    const problem = await failing(work);
    if (problem && session === this.session) this.complain(problem);
  }

  complain(problem) {
    this.session.isOpen = false;
    this.progress.hide();
    const line = notice(problem.message);
    line.classList.add("error");
    line.setAttribute("role", "alert");
    this.list.append(line);
    this.goToEnd();
  }

  /** What is open as the server has it, after it was away. */
  async reload() {
    const { session } = this;
    if (!session.id || this.isAnswering) return;
    session.isOpen = false;
    await session.load();
    if (session === this.session && !this.isAnswering) this.show();
  }

  // --- where one looks ----------------------------------------------------------------------------

  noteEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    byId("to-end").hidden = this.isAtEnd;
  }

  goToEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.noteEnd();
  }
}

/** Do it; the error, null where there is none or nobody waits any more. */
async function failing(work) {
  try {
    await work();
    return null;
  } catch (error) {
    return error.name === "AbortError" ? null : error;
  }
}
