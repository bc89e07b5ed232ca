// Elements by code. Whatever a user or a model has written becomes text, never markup.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  down: "M12 5v14M6 13l6 6 6-6",
  copy: "M9 9h10v11H9zM15 9V5H5v11h4",
  done: "M5 12.5l4.5 4.5L19 7.5",
  again: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  fork: "M7 5v14M7 12c8 0 10-2 10-7M17 5l-2.5 2.5M17 5l2.5 2.5",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10.5 11v5M13.5 11v5",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  go: "M7 5l11 7-11 7z",
};

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

export function iconButton(name, label, onclick, attributes = {}) {
  return el("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

/** Take `text` to the clipboard, and show on the button that it is there. */
export async function copyFrom(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const before = [...button.childNodes];
  button.replaceChildren(icon("done"));
  announce("Copied");
  setTimeout(() => button.replaceChildren(...before), 1500);
}

/** Have a screen reader say something. */
export function announce(text) {
  byId("said").textContent = text;
}
