// What numbers, and the state of a worker, are called. Pure.

export const DASH = "–";

export function short(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const [divisor, letter] = value >= 1e9 ? [1e9, "G"] : value >= 1e6 ? [1e6, "M"] : value >= 1e4 ? [1e3, "k"] : [1, ""];
  const scaled = value / divisor;
  const digits = Number.isInteger(scaled) || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)}${unit ? " " : ""}${letter}${unit}`;
}

export const percent = (ratio) => (Number.isFinite(ratio ?? NaN) ? `${(100 * ratio).toFixed(1)} %` : DASH);
export const sum = (numbers) => Object.values(numbers ?? {}).reduce((total, each) => total + each, 0);
export const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour12: false });

export function lasted(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export const isSilent = (member) => member.standing === "silent" || (!member.attached && member.silent_s >= 1);

export function whatItDoes(member) {
  if (isSilent(member)) return `silent for ${member.silent_s.toFixed(1)} s`;
  if (!member.attached) return "connection lost";
  if (member.straggler) return member.straggler;
  if (member.inside && member.doing) return `waits in ${member.doing}`;
  if (member.doing) return `in ${member.doing}`;
  if (member.standing === "leaving") return "leaves after its step";
  return member.standing === "training" ? "computes" : "waits";
}

export function moodOf(member) {
  if (isSilent(member) || !member.attached) return "bad";
  if (member.straggler || member.standing === "leaving") return "warn";
  return member.standing === "training" ? "good" : "calm";
}

export const MOOD_OF_PHASE = { running: "good", waiting: "warn", void: "bad", finished: "calm" };
export const MOOD_OF_EVENT = { verdict: "bad", lost: "bad", view: "good", joined: "good", left: "warn", drained: "warn" };

export function nameOf(member) {
  return `${member.rank === null ? "a waiting worker" : `rank ${member.rank}`} (${member.host}, pid ${member.pid})`;
}
