// Questions in the middle of the page. The browser's own dialogs hold the focus and close on Esc.

import { el } from "./dom.js";

/** Show a form; what its button's value was, "" where it was closed otherwise. */
function show(title, content, buttons) {
  const heading = el("h2", {}, title);
  const form = el("form", { method: "dialog" }, heading, ...content, el("div", { class: "buttons" }, ...buttons));
  const dialog = el("dialog", { "aria-label": title }, form);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close(""));
  document.body.append(dialog);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

const button = (value, words, more = {}) => el("button", { value, ...more }, words);
// Not one that submits: Enter in a field is to save.
const cancel = (more = {}) => el("button", { type: "button", onclick: (event) => event.target.closest("dialog").close(""), ...more }, "Cancel");

export async function agreed(title, text, words) {
  return (await show(title, [el("p", {}, text)], [cancel({ autofocus: true }), button("yes", words, { class: "danger" })])) === "yes";
}

/** The text that was typed, null where nothing is to be changed. */
export async function asked(title, label, text) {
  const input = el("input", { required: true, maxlength: 500, autocomplete: "off", autofocus: true });
  input.value = text;
  queueMicrotask(() => input.select());
  const answer = await show(title, [el("label", {}, label, input)], [cancel(), button("yes", "Save", { class: "main" })]);
  return answer === "yes" && input.value.trim() ? input.value.trim() : null;
}

/** The token that this server asks for. It is asked again until there is one. */
export async function token(isWrong) {
  const input = el("input", { type: "password", required: true, pattern: "[ -~\\u00a0-\\u00ff]+", autocomplete: "current-password", autofocus: true });
  const words = isWrong ? "This token does not fit. Try again:" : "This server asks for a token. It is kept until this window is closed.";
  while (true) {
    const answer = await show("Sign in", [el("p", {}, words), el("label", {}, "Token", input)], [button("yes", "Go on", { class: "main" })]);
    if (answer === "yes" && input.value) return input.value;
  }
}

/** `values` with what was changed, null where nothing is to be. */
export async function settings(values, canSetSystem) {
  const system = el("textarea", { rows: 4, disabled: !canSetSystem, placeholder: "None" });
  const temperature = el("input", { type: "number", min: 0, max: 2, step: 0.1, required: true });
  const longest = el("input", { type: "number", min: 1, max: 100000, step: 1, required: true });
  const overflow = el(
    "select",
    {},
    el("option", { value: "refuse" }, "refuse the message"),
    el("option", { value: "shift" }, "drop the oldest turns (fast, approximate)"),
    el("option", { value: "recompute" }, "drop the oldest turns (exact, slower)"),
  );
  system.value = values.system;
  temperature.value = values.temperature;
  longest.value = values.maxTokens;
  overflow.value = values.overflow;
  const hint = canSetSystem ? "" : "It belongs to the beginning: a new chat can have another one.";
  const answer = await show(
    "Settings",
    [
      el("label", {}, "System prompt", system, hint && el("small", {}, hint)),
      el("label", {}, "Temperature", temperature),
      el("label", {}, "Longest answer, in tokens", longest),
      el("label", {}, "When the context is full", overflow),
    ],
    [cancel(), button("yes", "Save", { class: "main" })],
  );
  if (answer !== "yes") return null;
  return {
    system: canSetSystem ? system.value : values.system,
    temperature: Number(temperature.value),
    maxTokens: Number(longest.value),
    overflow: overflow.value,
  };
}

const KEYS = [
  ["Enter", "send"],
  ["Shift + Enter", "a new line"],
  ["Esc", "stop the answer, or leave an edit"],
  ["↑ in an empty box", "edit your last message"],
  ["Ctrl + K", "search all conversations"],
  ["Ctrl + Shift + O", "a new chat"],
  ["/", "go to the message box"],
  ["?", "this list"],
];

export function keys() {
  const rows = KEYS.map(([key, what]) => el("tr", {}, el("th", { scope: "row" }, el("kbd", {}, key)), el("td", {}, what)));
  return show("Keys", [el("table", { class: "keys" }, el("tbody", {}, ...rows))], [button("", "Close", { class: "main", autofocus: true })]);
}
