// One job: its headline, tiles, generations, losses and events. Its workers and its plots have files of their own.

import { get } from "./connection.js";
import { openMenu } from "./dialogs.js";
import { inOrder, plots } from "./plots.js";
import { Rows, element, setClass, setText } from "./rows.js";
import { DASH, about, clock, day, hasSteps, headline, kindOf, lasted, logged, many, nameOf, pace, phaseOf, progress, short, whole, withoutDoubles } from "./words.js";
import { showWorkers } from "./workers.js";

const MOST_EVENTS = 500;
const MOST_GENERATIONS = 60;
const MOST_LEAVERS = 4;

const $ = (id) => document.getElementById(id);

export const jobName = new URLSearchParams(location.search).get("job");

const path = (what) => `api/jobs/${encodeURIComponent(jobName)}/${what}`;

const members = new Map();
const events = new Map();
let detail = null;
let mayAct = false;
let askingForEvents = false;
let completeTo = 0; // no event up to this number is missing
let wantsHistory = true;
let isOver = false; // the coordinator has stopped in good order
let frame = 0;

export function allowActions(may) {
  mayAct = may;
  if (detail) showSoon();
}

/** Says that the job has ended, or nothing. */
export function doneJob(forgotten) {
  const [phase] = detail ? phaseOf(detail.job) : [""];
  if (phase === "finished") return `the job is done, and its coordinator has ${forgotten ? "forgotten it" : "ended"}`;
  return isOver && ["ended", "stopped"].includes(phase) ? "the coordinator has ended" : "";
}

/** Takes note of a new connection: something may have happened before it. */
export function beganJob() {
  wantsHistory = true;
}

export function takeJob(message) {
  if (message.members) {
    members.clear();
    for (const member of message.members) members.set(member.member_id, member);
  }
  for (const member of message.members_changed ?? []) members.set(member.member_id, member);
  for (const id of message.members_gone ?? []) members.delete(id);
  takeEvents(message.events ?? []);
  detail = message;
  message.job.end = message.job.phase === "waiting" && members.size === 0 ? howItEnded() : null;
  isOver = message.over ?? false;
  if (message.job.world_size > 0) plots.series.add(message.at, message.job.totals); // else the curves end
  if (wantsHistory) askForHistory();
  showSoon();
}

/** How a job without workers came to be without: who was lost in its last generation, "" if all have left; or null. */
function howItEnded() {
  const latest = [...events.values()].sort((a, b) => b.number - a.number);
  const since = latest.slice(0, latest.findIndex(({ kind }) => kind === "view") + 1);
  const lost = since.filter(({ kind }) => kind === "lost").at(-1); // the first of them: others follow it
  return lost || since.some(({ kind }) => kind === "left") ? { lost: lost?.text ?? "" } : null;
}

function showSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    showJob();
  });
}

/** Reads what was before the page was opened, or while its connection was lost. */
async function askForHistory() {
  wantsHistory = false;
  try {
    plots.series.merge(await get(path("history")));
    showSoon();
  } catch {
    wantsHistory = true; // the next message asks again
  }
}

/** Keeps new events; asks for those between, if the message may have left some out. */
function takeEvents(latest) {
  for (const event of latest) events.set(event.number, event);
  if (latest.length === 0) return;
  if (latest[0].number <= completeTo) completeTo = Math.max(completeTo, latest.at(-1).number);
  else if (!askingForEvents) askForEvents();
}

/** Reads events until none is missing; the coordinator keeps 10,000, and answers with 1,000 at most. */
async function askForEvents() {
  askingForEvents = true;
  try {
    // An answer may be older than a message that has come since: then it ends before the newest event.
    for (let asked = 0; asked < 11 && completeTo < Math.max(...events.keys()); asked++) {
      const answer = await get(path(`events?after=${completeTo}`));
      for (const event of answer.events) events.set(event.number, event);
      completeTo = Math.max(completeTo, answer.next);
      showSoon();
    }
  } catch {
    // The stream says that the connection is lost. The next message asks again.
  } finally {
    askingForEvents = false;
  }
}

// ---- generations, events, losses ---------------------------------------------------------------------------------

/** One entry for each generation, newest first: since when, how long, and why it ended. */
function generations() {
  const found = new Map();
  const inTime = [...events.values()].sort((a, b) => a.number - b.number);
  for (const event of inTime) {
    if (event.kind !== "view" && event.kind !== "verdict") continue;
    const entry = found.get(event.generation) ?? { generation: event.generation, from: event.at, text: "", verdict: "" };
    if (event.kind === "view") Object.assign(entry, { from: event.at, text: event.text });
    else Object.assign(entry, { to: event.at, verdict: event.text });
    found.set(event.generation, entry);
  }
  const entries = [...found.values()].sort((a, b) => a.generation - b.generation);
  entries.forEach((entry, number) => (entry.to ??= entries[number + 1]?.from ?? null));
  return entries.reverse();
}

/** The times at which generations began that are not the first, and why: what ended the one before, or who has come. */
function marks(entries) {
  const began = entries.filter(({ generation, text }) => generation > 1 && text);
  return began.reverse().map(({ generation, from, text }) => {
    const before = entries.find((entry) => entry.generation < generation);
    return { at: from, text: before?.verdict ? `generation ${generation} has begun: ${before.verdict}` : text };
  });
}

const generationRows = new Rows($("generations"), {
  key: (entry) => entry.generation,
  make() {
    const row = element("li");
    row.parts = ["number", "time", "text", "verdict"].map((name) => row.appendChild(element("span", name)));
    return row;
  },
  fill(row, entry) {
    const [number, time, text, verdict] = row.parts;
    const live = entry.to === null && detail.job.generation === entry.generation && detail.job.phase === "running";
    setClass(row, entry.verdict ? "bad" : live ? "good" : "calm");
    setText(number, `${entry.generation}`);
    setText(time, entry.to === null ? (live ? `since ${clock(entry.from)}` : clock(entry.from)) : lasted(entry.to - entry.from));
    setText(text, entry.text);
    setText(verdict, entry.verdict);
  },
});

const eventRows = new Rows($("events"), {
  key: (event) => event.number,
  make(event) {
    const row = element("li");
    const [name, mood] = kindOf(event.kind);
    row.append(element("time", "", clock(event.at)), element("span", `kind ${mood}`, name), element("span", "text", event.text));
    return row;
  },
  fill: (row, event) => setText(row.lastElementChild, event.text),
});

const inGoodOrder = ({ how }) => how.startsWith("left ");

const goneRows = new Rows($("gone").querySelector("ol"), {
  key: (gone) => gone.member_id,
  make() {
    const row = element("li");
    row.append(element("b"), " ", element("span", "how"), element("span", "muted"), element("details"));
    row.lastElementChild.append(element("summary", "", "its last lines"), element("pre"));
    return row;
  },
  fill(row, gone) {
    const [who, how, ago, last] = row.children;
    setText(who, gone.many ? many(gone.many, "worker") : nameOf(gone));
    setText(how, gone.how);
    setClass(row, inGoodOrder(gone) ? "calm" : "bad");
    setText(ago, `, ${lasted(gone.ago_s)} ago`);
    last.hidden = !gone.output;
    setText(last.lastElementChild, gone.output ?? "");
  },
});

/** Those that were lost, and those that left in good order, as one entry if they are many. */
function withoutCrowd(gone) {
  const left = gone.filter((each) => inGoodOrder(each));
  if (left.length <= MOST_LEAVERS) return gone;
  const crowd = { member_id: "left", many: left.length, how: "left the job", ago_s: left.at(-1).ago_s, output: "" };
  return [...gone.filter((each) => !inGoodOrder(each)), crowd];
}

// ---- tiles -------------------------------------------------------------------------------------------------------

const tileRows = new Rows($("tiles"), {
  key: ([name, , , key = name]) => key,
  make([name]) {
    const tile = element("div");
    tile.append(element("dt", "", name), element("dd"));
    return tile;
  },
  fill(tile, [, text, mood = ""]) {
    setText(tile.lastElementChild, text);
    setClass(tile.lastElementChild, mood);
  },
});

function tiles({ totals, ...job }) {
  const ofSteps = hasSteps({ totals, ...job });
  const [phase] = phaseOf(job);
  const finished = ["finished", "ended", "stopped"].includes(phase);
  const ago = totals.checkpoint_ago_s ?? null;
  return [
    ["progress", progress({ totals, ...job })],
    ...(phase === "running" ? [["speed", pace({ totals, ...job })]] : []),
    ...(phase !== "running" || (job.left_s ?? null) === null ? [] : [["time left", `about ${about(Math.max(1, job.left_s))}`]]),
    ...inOrder(Object.keys(totals.logged ?? {})).map((name) => {
      const value = totals.logged[name];
      return [name, logged(value), typeof value === "number" ? "" : "bad", `logged ${name}`];
    }),
    ...(totals.checkpoint_step ? [["last checkpoint", `step ${whole(totals.checkpoint_step)}${ago === null ? "" : `, ${about(ago)} ago`}`]] : []),
    [job.min_workers < job.max_workers ? `workers, ${job.min_workers * job.replica_size} at least` : "workers", `${job.world_size} of ${job.max_workers * job.replica_size}`],
    ...(job.replica_size > 1 ? [["ranks of a replica", `${job.replica_size}`]] : []),
    ...(job.waiting ? [["waiting", `${job.waiting}`]] : []),
    ...(finished || job.waited_s === null ? [] : [["has waited", lasted(job.waited_s)]]),
    ["generation", `${job.generation}`],
    ...(typeof detail.started === "number" ? [["started", `${day(detail.started, detail.at)}, ${about(Math.max(0, detail.at - detail.started))} ago`]] : []),
    ...(totals.samples ? [["samples", short(totals.samples)]] : []),
    ["workers lost", `${totals.members_lost}`],
    ...(ofSteps ? [["steps undone", `${totals.undone}`]] : []),
  ];
}

// ---- all of it ---------------------------------------------------------------------------------------------------

function showHeadline(job) {
  const [phase, mood] = phaseOf(job);
  const stalled = phase === "stalled";
  document.title = `${job.name}: ${phase} ${DASH} Paceline`;
  setText($("name"), job.name);
  setText($("phase"), phase);
  setClass($("phase"), `phase ${mood}`);
  $("stall").hidden = !stalled;
  $("plots").classList.toggle("stalled", stalled);
  setText($("stall"), stalled ? headline(job) : "");
  $("why").hidden = stalled;
  setText($("why"), headline(job));
  setText($("said"), stalled ? `stalled: ${job.stall}` : headline(job)); // without seconds, which a reader would say each time
  $("verdict").hidden = !detail.verdict;
  setText($("verdict"), detail.verdict ?? "");
}

function showJob() {
  const { job } = detail;
  showHeadline(job);
  tileRows.update(tiles(job));
  showWorkers(job, members.values(), mayAct, (id, at) => members.has(id) && openMenu(members.get(id), at));
  $("gone").hidden = !detail.gone?.length;
  goneRows.update(withoutCrowd(detail.gone ?? []));
  $("actions").hidden = !mayAct || members.size === 0;
  const newestFirst = [...events.values()].sort((a, b) => b.number - a.number);
  let changes = 0; // older ones that began or ended a generation stay for the strip of generations, so many of them
  for (const event of newestFirst.splice(MOST_EVENTS)) {
    if ((event.kind !== "view" && event.kind !== "verdict") || ++changes > MOST_EVENTS) events.delete(event.number);
  }
  eventRows.update(withoutDoubles(newestFirst));
  const entries = generations();
  generationRows.update(entries.slice(0, MOST_GENERATIONS));
  plots.show(job, marks(entries));
}
