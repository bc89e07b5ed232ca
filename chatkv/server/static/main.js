// The page: its parts, how they hear of each other, and the keys.

import { Refused, call, isThere, onReached, onToken } from "./api.js";
import * as appearance from "./appearance.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import * as dialogs from "./dialogs.js";
import { byId, icon } from "./dom.js";
import { Drafts } from "./drafts.js";
import { Models, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { plural } from "./words.js";

const RETRY_MS = 1500;

const settings = new Settings();
const models = new Models();
const drafts = new Drafts();
const sidebar = new Sidebar({ rename, remove });
const composer = new Composer({
  send(text, edited) {
    drafts.end();
    chat.send(text, edited ? { after: edited.turn - 1, system: edited.system } : {});
  },
  stop: () => chat.stop(),
  typed: (text) => drafts.typed(chat, text, settings.system),
  last: () => chat?.session.turns.at(-1),
});
const chat = new Chat({ composer, sidebar, models, settings, drafts, went });

// --- which conversation: the address says -------------------------------------------------------

const wanted = () => decodeURIComponent(location.hash.slice(1));

/** The conversation in the middle is now this one. */
function went(session) {
  if (wanted() === session) return;
  if (chat.session.id === session) history.replaceState(null, "", `#${session}`);
  else location.hash = session;
}

function follow() {
  if (wanted() && wanted() === chat.session.id) return;
  drafts.end();
  if (wanted()) chat.open(wanted());
  else chat.begin();
}

function newChat() {
  if (location.hash) history.pushState(null, "", location.pathname);
  drafts.end();
  chat.begin();
  sidebar.close();
  composer.focus();
}

async function rename(row) {
  const title = await dialogs.asked("Rename", "Title", row.title);
  if (title === null) return;
  await saying(() => call("POST", `/sessions/${row.session}/rename`, { title }));
  if (row.session === chat.session.id) {
    chat.session.title = title;
    chat.showFacts();
  }
}

async function remove(row) {
  const what = `“${row.title || "Untitled"}” with ${plural(row.turns, "turn")} is deleted for good.`;
  if (!(await dialogs.agreed("Delete this conversation?", what, "Delete"))) return;
  if (row.session === chat.session.id) newChat();
  await saying(() => call("DELETE", `/sessions/${row.session}`));
}

/** Do it, say what is refused, and show the list as it is then. */
async function saying(work) {
  try {
    await work();
    banner("");
  } catch (error) {
    banner(error.message);
  }
  await sidebar.refresh().catch(() => {});
}

// --- the server ---------------------------------------------------------------------------------

function banner(text) {
  byId("banner").textContent = text;
  byId("banner").hidden = !text;
}

let isAway = false;

onReached(async (isReached) => {
  if (isReached || isAway) return;
  isAway = true;
  banner("The server cannot be reached. Trying again …");
  while (!(await isThere())) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  isAway = false;
  await begin();
  banner("");
});

onToken(dialogs.token);

async function begin() {
  try {
    await Promise.all([models.load(), sidebar.refresh()]);
    await chat.reload();
    follow();
    composer.changed(); // what was typed meanwhile was for nobody
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (error.status) banner(error.message);
  }
}

// --- buttons and keys ---------------------------------------------------------------------------

function showTheme() {
  const theme = appearance.chosen();
  byId("theme").textContent = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[theme];
}

byId("theme").addEventListener("click", () => {
  appearance.next();
  showTheme();
});
byId("help").addEventListener("click", () => dialogs.keys());
byId("new-chat").addEventListener("click", newChat);
byId("settings").append(icon("settings"));
byId("settings").addEventListener("click", () => settings.change(!chat.session.turns.length));
byId("to-end").append(icon("down"));
byId("model").addEventListener("change", () => {
  chat.session.isOpen = false;
  chat.guarded(() => chat.ready());
});

const isTyping = (event) => event.target.matches("input, textarea, select");

document.addEventListener("keydown", (event) => {
  const key = event.key.toLowerCase();
  const isCommand = event.ctrlKey || event.metaKey;
  if (document.querySelector("dialog[open]")) return;
  if (isCommand && key === "k") sidebar.find();
  else if (isCommand && event.shiftKey && key === "o") newChat();
  else if (key === "escape") escape();
  else if (key === "/" && !isTyping(event) && !isCommand) composer.focus();
  else if (key === "?" && !isTyping(event)) dialogs.keys();
  else return;
  event.preventDefault();
});

function escape() {
  if (sidebar.isOver) sidebar.close();
  else if (chat.isAnswering) chat.stop();
  else composer.leaveEdit();
}

window.addEventListener("hashchange", follow);
window.addEventListener("popstate", follow);
window.addEventListener("focus", () => sidebar.refresh().catch(() => {}));
showTheme();
composer.focus();
begin();
