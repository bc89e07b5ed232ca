// How answers are made, kept in this browser; and which of the offered models answers.

import { call } from "./api.js";
import * as dialogs from "./dialogs.js";
import { byId, el } from "./dom.js";

const KEY = "chatkv-settings";
const DEFAULTS = { system: "", temperature: 0.7, maxTokens: 1024, overflow: "refuse" };

export class Settings {
  constructor() {
    this.values = { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEY) ?? "{}") };
  }

  get system() {
    return this.values.system.trim();
  }

  options() {
    const { temperature, maxTokens, overflow } = this.values;
    return { sampling: { temperature }, max_tokens: maxTokens, overflow };
  }

  async change(canSetSystem) {
    const changed = await dialogs.settings(this.values, canSetSystem);
    if (!changed) return;
    this.values = changed;
    localStorage.setItem(KEY, JSON.stringify(changed));
  }
}

export class Models {
  constructor() {
    this.select = byId("model");
  }

  async load() {
    const { data } = await call("GET", "/v1/models");
    this.names = data.map((model) => model.id);
    this.select.replaceChildren(...this.names.map((name) => el("option", { value: name }, name)));
    this.select.parentElement.hidden = this.names.length === 0;
  }

  /** "" where the session's own model is not among those that are offered. */
  get chosen() {
    return this.names?.includes(this.select.value) ? this.select.value : "";
  }

  /** Show the model of a session; one that is not offered can answer it, and nothing else. */
  show(model, isFixed) {
    for (const other of this.select.querySelectorAll(".other")) other.remove();
    if (!model) return;
    if (!this.names?.includes(model)) this.select.append(el("option", { value: model, class: "other" }, model));
    this.select.value = model;
    this.select.title = isFixed ? "A conversation goes on with models that read its tokens alike" : "";
  }
}
