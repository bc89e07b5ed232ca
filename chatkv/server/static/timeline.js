// A turn's way from the disk to its last word: what moved, how fast, and what had been expected.

import { el } from "./dom.js";
import { count, duration, plural, size } from "./words.js";

const NAMES = {
  memory: "In memory",
  disk: "Disk to memory",
  prefill: "Prefill",
  other: "Around it",
  decode: "Decode",
};

/** What a turn went through, in its order; phases in which nothing happened are left out. */
export function phases(stats) {
  const { tokens, timing } = stats;
  const bytes = stats.loaded_bytes ?? 0;
  const speed = timing.decode_tokens_per_s;
  const found = [];
  const add = (name, ms, ...what) => found.push({ name, ms, what: what.filter(Boolean).join(" · ") });
  if (tokens.reused) add("memory", 0, plural(tokens.reused, "token"), "already there");
  if (tokens.loaded) add("disk", timing.restore_ms, plural(tokens.loaded, "token"), bytes && size(bytes), rate(bytes, timing.restore_ms, size));
  else if (timing.restore_ms >= 0.5) add("disk", timing.restore_ms, "looked up, nothing loaded");
  if (tokens.computed) add("prefill", timing.prefill_ms, plural(tokens.computed, "token"), rate(tokens.computed, timing.prefill_ms, (n) => `${count(n)} tokens`));
  const other = timing.ttft_ms - timing.restore_ms - timing.prefill_ms;
  if (other >= 0.5) add("other", other, "template, plan, commit");
  if (tokens.generated && speed) add("decode", ((tokens.generated - 1) / speed) * 1000, plural(tokens.generated, "token"), `${speed.toFixed(0)} tokens/s`);
  return found;
}

/** One line: where the history came from, and how long it took. */
export function summary(stats) {
  const { tokens, timing } = stats;
  const parts = [];
  if (tokens.reused) parts.push(`${count(tokens.reused)} kept`);
  if (tokens.loaded) parts.push(`${count(tokens.loaded)} from disk`);
  if (tokens.computed) parts.push(`${count(tokens.computed)} read`);
  if (timing.ttft_ms) parts.push(`first word ${duration(timing.ttft_ms)}`);
  if (timing.decode_tokens_per_s) parts.push(`${timing.decode_tokens_per_s.toFixed(0)} tokens/s`);
  return parts.join(" · ");
}

export function timeline(stats) {
  const found = phases(stats);
  const strip = el("div", { class: "strip", "aria-hidden": "true" });
  for (const phase of found.filter((one) => one.ms > 0)) {
    const piece = el("span", { class: phase.name });
    piece.style.flexGrow = phase.ms;
    strip.append(piece);
  }
  const rows = found.map((phase) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, el("span", { class: `dot ${phase.name}`, "aria-hidden": "true" }), NAMES[phase.name]),
      el("td", { class: "ms" }, duration(phase.ms)),
      el("td", {}, phase.what),
    ),
  );
  return el(
    "div",
    { class: "timeline" },
    strip,
    el("table", {}, el("caption", { class: "hidden" }, "Where the time of this turn went"), el("tbody", {}, ...rows)),
    plans(stats),
    ...(stats.notices ?? []).map((line) => el("p", { class: "note" }, line)),
  );
}

/** Every plan that was possible: what it was expected to take, and what the chosen one took. */
function plans({ plan, regret_ms: regret }) {
  if (plan.chosen === "none") return el("p", { class: "note" }, "Nothing had to be restored.");
  const expected = Object.entries(plan.alternatives_ms ?? {});
  if (!expected.length) expected.push([plan.chosen, plan.predicted_ms]);
  expected.sort(([, one], [, other]) => one - other);
  const longest = Math.max(plan.actual_ms, ...expected.map(([, ms]) => ms), 1e-9);
  const rows = [];
  for (const [way, ms] of expected) {
    const isChosen = way === plan.chosen;
    rows.push(row(isChosen ? `${way}, chosen` : way, "expected", ms, longest, isChosen ? "chosen" : ""));
    if (isChosen) rows.push(row("", "took", plan.actual_ms, longest, "took"));
  }
  const late = regret > 20 ? el("p", { class: "note" }, `${duration(regret)} more than the fastest plan was expected to take.`) : null;
  return el("div", {}, el("table", { class: "plans" }, el("caption", {}, "How the history came back"), el("tbody", {}, ...rows)), late);
}

function row(name, what, ms, longest, kind) {
  const bar = el("span", { class: "length" });
  bar.style.width = `${Math.max(1, (100 * ms) / longest)}%`;
  return el(
    "tr",
    { class: kind },
    el("th", { scope: "row" }, name),
    el("td", {}, what),
    el("td", { class: "ms" }, duration(ms)),
    el("td", { class: "lengths", "aria-hidden": "true" }, bar),
  );
}

function rate(amount, ms, shown) {
  return amount && ms >= 0.05 ? `${shown(Math.round((amount / ms) * 1000))}/s` : "";
}
