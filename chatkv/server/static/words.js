// Numbers as people read them.

export function count(number) {
  return number.toLocaleString("en");
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function duration(ms) {
  if (ms < 1) return "0 ms";
  return ms < 995 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit += 1) bytes /= 1024;
  return `${unit && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

export function ago(seconds, now = Date.now() / 1000) {
  const past = Math.max(0, now - seconds);
  if (past < 60) return "just now";
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  if (past < 86400 * 14) return plural(Math.floor(past / 86400), "day") + " ago";
  return new Date(seconds * 1000).toLocaleDateString();
}
