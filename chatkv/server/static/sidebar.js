// The list of conversations, with a search through everything that was said in them.

import { call } from "./api.js";
import { byId, el, icon, iconButton } from "./dom.js";
import { ago, plural } from "./words.js";

const SEARCH_MS = 150;
const NARROW = matchMedia("(max-width: 760px)");

/** `actions`: rename(row) and remove(row). */
export class Sidebar {
  constructor(actions) {
    this.actions = actions;
    this.element = byId("sidebar");
    this.list = byId("sessions");
    this.search = byId("search");
    this.current = null;
    this.search.addEventListener("input", () => {
      clearTimeout(this.due);
      this.due = setTimeout(() => this.refresh(), SEARCH_MS);
    });
    this.element.addEventListener("keydown", (event) => this.walk(event));
    this.list.addEventListener("click", (event) => event.target.closest("a") && this.close());
    byId("open-sidebar").append(icon("menu"));
    byId("open-sidebar").addEventListener("click", () => this.open());
    byId("close-sidebar").append(icon("close"));
    byId("close-sidebar").addEventListener("click", () => this.close());
    byId("shade").addEventListener("click", () => this.close());
    NARROW.addEventListener("change", () => this.show(!NARROW.matches));
    this.show(!NARROW.matches);
  }

  async refresh() {
    const words = this.search.value.trim();
    const query = new URLSearchParams(words ? { search: words } : {});
    const mine = (this.asked = Symbol());
    const { sessions } = await call("GET", `/sessions?${query}`);
    if (mine !== this.asked) return; // an older answer
    byId("found").textContent = words ? (sessions.length ? `Found in ${plural(sessions.length, "conversation")}` : "Nothing found") : "";
    this.list.replaceChildren(...sessions.map((row) => this.item(row, words)));
    this.mark(this.current);
  }

  item(row, words) {
    const about = row.snippet && row.turn !== null ? marked(row.snippet, words) : `${ago(row.updated_at)} · ${plural(row.turns, "turn")}`;
    const link = el(
      "a",
      { href: `#${row.session}`, "data-session": row.session, title: row.title },
      el("span", { class: "name" }, row.title || "Untitled"),
      el("span", { class: "about" }, about),
    );
    return el(
      "li",
      {},
      link,
      el(
        "span",
        { class: "tools" },
        iconButton("edit", `Rename ${row.title}`, () => this.actions.rename(row), { class: "icon rename" }),
        iconButton("remove", `Delete ${row.title}`, () => this.actions.remove(row), { class: "icon delete" }),
      ),
    );
  }

  /** Show which conversation is open. */
  mark(session) {
    this.current = session;
    for (const link of this.list.querySelectorAll("a")) {
      if (link.dataset.session === session) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  walk(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const stops = [this.search, ...this.list.querySelectorAll("a")];
    const next = stops[stops.indexOf(document.activeElement) + step];
    if (!next || !stops.includes(document.activeElement)) return;
    event.preventDefault();
    next.focus();
  }

  find() {
    this.open();
    this.search.focus();
    this.search.select();
  }

  // --- on a narrow screen it lies over the conversation ------------------------------------------

  open() {
    this.show(true);
    if (NARROW.matches) byId("close-sidebar").focus();
  }

  close() {
    if (!NARROW.matches) return;
    const hadFocus = this.element.contains(document.activeElement);
    this.show(false);
    if (hadFocus) byId("open-sidebar").focus();
  }

  get isOver() {
    return NARROW.matches && !this.element.inert;
  }

  show(isShown) {
    this.element.inert = !isShown;
    document.body.classList.toggle("sidebar-open", isShown);
    byId("shade").hidden = !(isShown && NARROW.matches);
    byId("open-sidebar").setAttribute("aria-expanded", String(isShown));
    document.querySelector("main").inert = isShown && NARROW.matches;
  }
}

/** `text` with the words that were searched marked, as nodes. */
function marked(text, words) {
  const pieces = words.split(/\s+/).filter(Boolean).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const found = el("span", {});
  for (const [index, piece] of text.split(new RegExp(`(${pieces.join("|")})`, "i")).entries()) {
    found.append(index % 2 ? el("mark", {}, piece) : piece);
  }
  return found;
}
