// What numbers, and the states of a job and of a worker, are called. Pure.

export const DASH = "–";

export function short(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const [divisor, letter] = value >= 1e9 ? [1e9, "G"] : value >= 1e6 ? [1e6, "M"] : value >= 1e4 ? [1e3, "k"] : [1, ""];
  const scaled = value / divisor;
  const digits = Number.isInteger(scaled) || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)}${unit ? " " : ""}${letter}${unit}`;
}

/** A value that a script has logged, with four digits; JSON has the names of those that are no numbers. */
export function logged(value) {
  if (typeof value !== "number") return value ?? DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2);
  return Number.isInteger(value) ? whole(value) : `${Number(value.toPrecision(4))}`;
}

export const whole = (value) => value.toLocaleString("en");
export const percent = (ratio) => (Number.isFinite(ratio ?? NaN) ? `${(100 * ratio).toFixed(1)} %` : DASH);
export const sum = (numbers) => Object.values(numbers ?? {}).reduce((total, each) => total + each, 0);
export const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour12: false });
export const many = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A moment, with the date if it was not today. */
export const day = (at, now) => (new Date(1000 * at).toDateString() === new Date(1000 * now).toDateString() ? clock(at) : `${new Date(1000 * at).toLocaleDateString()} ${clock(at)}`);

/** A time span; with tenths of a second if it is short. */
export function lasted(seconds) {
  return seconds < 10 ? `${seconds.toFixed(1)} s` : about(seconds);
}

/** The same in whole seconds. */
export function about(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

/** Ranks in order, as "0–3, 5". */
export function ranges(numbers) {
  const found = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (found.at(-1)?.[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : to === from + 1 ? `${from}, ${to}` : `${from}–${to}`)).join(", ");
}

// ---- jobs --------------------------------------------------------------------------------------------------------

/** False for a job that runs collectives and has no loop over steps. */
export const hasSteps = ({ total, totals }) => !!total || totals.step > 0 || !totals.operations;

/** What a job's state is called, and its mood. */
export function phaseOf(job) {
  if (job.phase === "finished") return ["finished", "calm"];
  if (job.end && job.world_size === 0) return job.end.lost ? ["stopped", "bad"] : ["ended", "calm"];
  if (typeof job.stalled_s === "number") return ["stalled", "warn"];
  if (job.phase === "void") return ["reforming", "bad"]; // its workers form the next generation
  return [job.phase, { running: "good", waiting: "warn" }[job.phase] ?? ""];
}

/** The sentence about a job. */
export function headline(job) {
  const [phase] = phaseOf(job);
  if (phase === "finished") return job.totals.step > 0 ? `done, ${many(job.totals.step, "step")}` : "done";
  if (phase === "ended") return "all workers have left";
  if (phase === "stopped") return `no worker is left: ${job.end.lost}`;
  if (phase === "stalled") return `stalled for ${about(job.stalled_s)}: ${job.stall}`;
  return job.reason;
}

/** How far a job is. */
export function progress(job) {
  if (!hasSteps(job)) return job.totals.operations < 1e6 ? many(job.totals.operations, "operation") : `${short(job.totals.operations)} operations`;
  return `step ${whole(job.totals.step)}${job.total ? ` of ${whole(job.total)}` : ""}`;
}

/** How fast a job is. */
export function pace(job) {
  const [speed, unit] = hasSteps(job) ? [job.totals.steps_per_second, "steps/s"] : [job.totals.operations_per_second, "operations/s"];
  return Number.isFinite(speed) ? `${short(speed)} ${unit}` : DASH;
}

// ---- workers -----------------------------------------------------------------------------------------------------

export const isSilent = (member) => member.standing === "silent" || (!member.attached && member.silent_s >= 1);

export function whatItDoes(member) {
  if (isSilent(member)) return `silent for ${member.silent_s.toFixed(1)} s`;
  if (!member.attached) return "connection lost";
  if (member.straggler) return member.straggler;
  if (member.inside && member.doing) return `waits in ${member.doing} ${member.operation}`;
  if (member.doing) return `in ${member.doing}`;
  if (member.standing === "leaving") return "leaves after its step";
  if (member.standing === "not stopped") return "has not stopped its last step: it may hang";
  return member.standing === "training" ? "computes" : "waits";
}

export function moodOf(member) {
  if (isSilent(member) || !member.attached) return "bad";
  if (member.straggler || ["leaving", "not stopped"].includes(member.standing)) return "warn";
  return member.standing === "training" ? "good" : "calm";
}

export function nameOf(member) {
  return `${member.rank === null ? "a waiting worker" : `rank ${member.rank}`} (${member.host}, pid ${member.pid})`;
}

// ---- events ------------------------------------------------------------------------------------------------------

/** How a kind of event is called here, and its mood. */
const KINDS = {
  view: ["generation", "good"],
  verdict: ["failure", "bad"],
  lost: ["lost", "bad"],
  reason: ["state", ""],
  joined: ["joined", "good"],
  left: ["left", "warn"],
  drained: ["drained", "warn"],
  stalled: ["stalled", "warn"],
  resumed: ["goes on", "good"],
};

export const kindOf = (kind) => (Object.hasOwn(KINDS, kind) ? KINDS[kind] : [kind, ""]);

const SOON_S = 10; // news of a loss that come later are of another one

/**
 * Events, newest first, with one entry for each loss: in place of the first news of it, with the words of the last.
 *
 * A link tells that a worker has gone before its launcher tells how, and the verdict on the generation says it again.
 */
export function withoutDoubles(newestFirst) {
  const losses = new Map(); // by generation and worker
  const said = new Set();
  for (const event of newestFirst.filter(({ kind }) => kind === "lost")) {
    const key = `${event.generation} ${/^.*?\(.*?, pid \d+\)/.exec(event.text)?.[0] ?? event.text}`;
    const later = losses.get(key);
    if (later && later.told - event.at > SOON_S) losses.set(`${key} ${later.number}`, later); // it had lived on
    const again = later && later.told - event.at <= SOON_S;
    losses.set(key, again ? { ...event, text: later.text, told: later.told } : { ...event, told: event.at });
    said.add(`${event.generation} ${event.text}`);
  }
  const first = new Map([...losses.values()].map((event) => [event.number, event]));
  const isDouble = ({ kind, number, generation, text }) => (kind === "lost" ? !first.has(number) : kind === "verdict" && said.has(`${generation} ${text}`));
  return newestFirst.filter((event) => !isDouble(event)).map((event) => first.get(event.number) ?? event);
}
