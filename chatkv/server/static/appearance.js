// Dark, light, or as the system has it: what the user chose last is kept in this browser.

const CHOICES = ["auto", "light", "dark"];
const KEY = "chatkv-theme";

export function chosen() {
  return document.documentElement.dataset.theme ?? "auto";
}

export function choose(theme) {
  if (theme === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(KEY);
  } else {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(KEY, theme);
  }
}

export function next() {
  choose(CHOICES[(CHOICES.indexOf(chosen()) + 1) % CHOICES.length]);
}
