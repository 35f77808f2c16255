// The page to watch jobs. It follows /api/stream and shows what changed; docs/decisions/25 says why it is made so.
// What comes from the coordinator becomes text by `textContent` alone: a job may be named "<script>".

import { plots } from "./plots.js";
import { Rows, element, setClass, setLabel, setText, table } from "./rows.js";
import { DASH, MOOD_OF_EVENT, MOOD_OF_PHASE, clock, lasted, moodOf, nameOf, percent, short, sum, whatItDoes } from "./words.js";

const SILENCE_S = 5; // without a byte for so long, the stream counts as lost
const RETRY_MS = [300, 1000, 2000, 4000];
const MOST_EVENTS = 500;
const MOST_GENERATIONS = 60;

const $ = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const jobName = query.get("job");

// ---- talking to the coordinator ----------------------------------------------------------------------------------

const TOKEN = "paceline-token";

const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has("token")) {
  sessionStorage.setItem(TOKEN, fragment.get("token"));
  history.replaceState(null, "", location.pathname + location.search); // neither history nor a copied address has it
}

class Refused extends Error {
  constructor(status, text, waitS = 0) {
    super(text);
    this.status = status;
    this.waitS = waitS; // seconds after which the coordinator may be asked again
  }
}

async function call(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  const wait = Number(answer.headers.get("Retry-After")) || 0;
  throw new Refused(answer.status, error ?? `the coordinator answered ${answer.status}`, wait);
}

/** Reads one stream of server-sent events to its end. */
async function read(path, signal, alive, take) {
  const reader = (await call(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [event, data] = block.split("\n"); // a comment has no data: it says that the connection is alive
      if (!data) continue;
      const message = JSON.parse(data.slice("data:".length));
      if (event === "event: end") throw new Refused(404, message.error); // the job has gone
      take(message);
    }
  }
}

/** Follows a stream for ever, over lost connections; returns when a token is missing. */
async function follow(path, take) {
  let lostAt = null;
  let failures = 0;
  for (;;) {
    const stop = new AbortController();
    let watch = null;
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(() => stop.abort(), 1000 * SILENCE_S);
      lostAt = null;
      failures = 0;
      connection("good", "live");
    };
    watch = setTimeout(() => stop.abort(), 2000 * SILENCE_S);
    let why = "connection lost";
    let waitS = 0;
    try {
      await read(path, stop.signal, alive, take);
    } catch (error) {
      if (error instanceof Refused && error.status === 401) return askForToken(error.message);
      if (error instanceof Refused) ({ message: why, waitS } = error);
    }
    clearTimeout(watch);
    lostAt ??= Date.now();
    if (detail?.job.phase === "finished") connection("calm", "the job is done, and its coordinator has gone");
    else connection("bad", `${why}; trying again for ${lasted((Date.now() - lostAt) / 1000)}`);
    const wait = Math.max(1000 * waitS, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
    await new Promise((resolve) => {
      setTimeout(resolve, wait);
      addEventListener("online", resolve, { once: true });
    });
  }
}

function connection(mood, text) {
  setClass($("connection"), mood);
  setText($("connection"), text);
  document.body.classList.toggle("stale", mood === "bad");
}

let mayDrain = false;

async function start() {
  const session = await (await call("api/session")).json();
  mayDrain = session.may_drain;
  setText($("version"), session.version);
  $("forget-token").hidden = !sessionStorage.getItem(TOKEN);
  $("token-form").hidden = true;
  if (session.needs_token && !sessionStorage.getItem(TOKEN)) return askForToken();
  $(jobName === null ? "jobs-view" : "job-view").hidden = false;
  if (jobName === null) return follow("api/stream", showJobs);
  return follow(`api/stream?job=${encodeURIComponent(jobName)}`, takeJob);
}

function begin() {
  start().catch((error) => {
    if (error instanceof Refused && error.status === 401) return askForToken(error.message);
    connection("bad", `${error instanceof Refused ? error.message : "no answer"}; trying again`);
    setTimeout(begin, RETRY_MS[2]);
  });
}

function askForToken(note) {
  connection("warn", "token needed");
  if (note) setText($("token-note"), note);
  for (const id of ["jobs-view", "job-view"]) $(id).hidden = true;
  $("token-form").hidden = false;
  $("token").focus();
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, $("token").value.trim());
  $("token").value = "";
  begin();
});

$("forget-token").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN);
  location.reload();
});

let asked = []; // the members that the open question is about

function askToDrain(members, text) {
  asked = members;
  setText($("ask-text"), text);
  $("ask").showModal();
}

$("ask").addEventListener("submit", (event) => {
  // Not on `close`, which comes later: by then the dialog may have been open again, with another question.
  if (event.submitter.value === "yes") drain(asked);
});

async function drain(members) {
  try {
    const body = JSON.stringify({ members });
    const headers = { "Content-Type": "application/json" };
    const path = `api/jobs/${encodeURIComponent(jobName)}/drain`;
    const { member_ids: told } = await (await call(path, { method: "POST", headers, body })).json();
    toast("good", told.length === 1 ? "1 worker was told to leave." : `${told.length} workers were told to leave.`);
  } catch (error) {
    toast("bad", error.message);
  }
}

let toastEnd = null;

function toast(mood, text) {
  setClass($("toast"), mood);
  setText($("toast"), text);
  $("toast").hidden = false;
  clearTimeout(toastEnd);
  toastEnd = setTimeout(() => ($("toast").hidden = true), 8000);
}

// ---- all jobs ----------------------------------------------------------------------------------------------------

const whyOf = (job) => (job.waited_s === null ? job.reason : `${job.reason}; for ${lasted(job.waited_s)} now`);

const jobRows = table(
  $("jobs").tBodies[0],
  (job) => job.name,
  [
    ["name", (job) => job.name],
    ["phase", (job) => job.phase],
    ["number", (job) => `${job.world_size} of ${job.max_workers * job.replica_size}`],
    ["number wide", (job) => job.waiting],
    ["number wide", (job) => job.generation],
    ["number step", (job) => job.totals.step],
    ["number wide", (job) => short(job.totals.steps_per_second)],
    ["number wide", (job) => percent(job.totals.goodput)],
    ["text", whyOf],
  ],
  {
    last(row, job) {
      const link = element("a");
      link.href = `?job=${encodeURIComponent(job.name)}`;
      row.cells_[0].append(link);
      row.cells_[0].target = link;
      row.cells_[1].target = row.cells_[1].appendChild(element("span"));
    },
    finish: (row, job) => setClass(row.cells_[1].target, `phase ${MOOD_OF_PHASE[job.phase] ?? ""}`),
  },
);

function showJobs({ jobs }) {
  if (jobs.length === 1 && !query.has("jobs")) location.replace(`?job=${encodeURIComponent(jobs[0].name)}`);
  $("no-jobs").hidden = jobs.length > 0;
  $("jobs").hidden = jobs.length === 0;
  jobRows.update(jobs);
}

// ---- one job -----------------------------------------------------------------------------------------------------

const members = new Map();
const events = new Map();
let detail = null;
let askingForEvents = false;
let completeTo = 0; // no event up to this number is missing
let frame = 0;

function takeJob(message) {
  if (message.members) {
    members.clear();
    for (const member of message.members) members.set(member.member_id, member);
  }
  for (const member of message.members_changed ?? []) members.set(member.member_id, member);
  for (const id of message.members_gone ?? []) members.delete(id);
  takeEvents(message.events ?? []);
  detail = message;
  plots.take(message.job);
  showSoon();
}

function showSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    showJob();
  });
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
      const answer = await (await call(`api/jobs/${encodeURIComponent(jobName)}/events?after=${completeTo}`)).json();
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

/** One entry for each generation, newest first: since when, how long, and why it ended. */
function generations() {
  const found = new Map();
  const inOrder = [...events.values()].sort((a, b) => a.number - b.number);
  for (const event of inOrder) {
    if (event.kind !== "view" && event.kind !== "verdict") continue;
    const entry = found.get(event.generation) ?? { generation: event.generation, from: event.at, text: "", verdict: "" };
    if (event.kind === "view") Object.assign(entry, { from: event.at, text: event.text });
    else Object.assign(entry, { to: event.at, verdict: event.text });
    found.set(event.generation, entry);
  }
  const entries = [...found.values()].sort((a, b) => a.generation - b.generation);
  entries.forEach((entry, number) => (entry.to ??= entries[number + 1]?.from ?? null));
  return entries.reverse().slice(0, MOST_GENERATIONS);
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
    row.append(element("time", "", clock(event.at)), element("span", `kind ${MOOD_OF_EVENT[event.kind] ?? ""}`, event.kind));
    row.append(element("span", "text", event.text));
    return row;
  },
  fill() {},
});

const goneRows = new Rows($("gone").querySelector("ol"), {
  key: (gone) => gone.member_id,
  make: () => {
    const row = element("li");
    row.append(element("b"), " ", element("span", "how"), " ", element("span", "muted"));
    return row;
  },
  fill(row, gone) {
    const [who, how, ago] = row.children;
    setText(who, nameOf(gone));
    setText(how, gone.how);
    setText(ago, `${lasted(gone.ago_s)} ago`);
  },
});

let front = 0; // the step of the most advanced worker

/** Steps behind the most advanced worker, but for those that the age of its last heartbeat explains. */
function behind(member) {
  const explained = 1 + detail.job.totals.steps_per_second * (member.silent_s + 0.1);
  return front - member.step > explained ? front - member.step : 0;
}

/** The rank of a worker, "1.0" for rank 0 of replica 1. */
function rankOf({ rank }) {
  const size = detail.job.replica_size;
  if (rank === null || size === 1) return rank ?? DASH;
  return `${Math.floor(rank / size)}.${rank % size}`;
}

const workerRows = table(
  $("workers").tBodies[0],
  (member) => member.member_id,
  [
    ["rank", (member) => rankOf(member)],
    ["host", (member) => member.host],
    ["number wide", (member) => member.pid],
    ["number step", (member) => member.step || DASH],
    ["number behind", (member) => (member.step ? behind(member) : DASH)],
    ["standing wide", (member) => member.standing || DASH],
    ["text", whatItDoes],
    ["number wide", (member) => (member.speed ? short(member.speed) : DASH)],
    ["number wide", (member) => (member.share ? percent(member.share) : DASH)],
    ["number wide", (member) => short(sum(member.sent_bytes), "B")],
  ],
  {
    last(row, member) {
      const button = element("button", "small", "Drain");
      button.type = "button";
      row.insertCell().append(button);
      row.lastElementChild.className = "act";
      row.lastElementChild.role = "cell";
      row.button = button;
      button.addEventListener("click", () => {
        const now = members.get(member.member_id) ?? member;
        askToDrain([member.member_id], `Drain ${nameOf(now)}? It leaves after its current step; the others train on.`);
      });
    },
    finish(row, member) {
      setClass(row, `${moodOf(member)}${member.step && behind(member) ? " late" : ""}`);
      row.button.hidden = !mayDrain || member.standing === "leaving";
      setLabel(row.button, `Drain ${nameOf(member)}`);
      row.hidden = !matches(member);
    },
  },
);

function matches(member) {
  const words = $("filter").value.toLowerCase().split(" ").filter(Boolean);
  const text = `${member.rank ?? ""} ${member.host} ${member.pid} ${member.standing} ${whatItDoes(member)}`.toLowerCase();
  return words.every((word) => (/^\d+$/.test(word) ? text.split(" ").includes(word) : text.includes(word)));
}

$("filter").addEventListener("input", () => detail && showJob());

const standingRows = new Rows($("standings"), {
  key: ([standing]) => standing,
  make([standing]) {
    const chip = element("button", "chip");
    chip.type = "button";
    chip.addEventListener("click", () => {
      $("filter").value = $("filter").value === standing ? "" : standing;
      showJob();
    });
    return chip;
  },
  fill: (chip, [standing, count]) => setText(chip, `${count} ${standing}`),
});

const tiles = new Rows($("tiles"), {
  key: ([name]) => name,
  make([name]) {
    const tile = element("div");
    tile.append(element("dt", "", name), element("dd"));
    return tile;
  },
  fill: (tile, [, text]) => setText(tile.lastElementChild, text),
});

function showJob() {
  const { job } = detail;
  document.title = `${job.name}: ${job.phase} ${DASH} Paceline`;
  setText($("name"), job.name);
  setText($("phase"), job.phase);
  setClass($("phase"), `phase ${MOOD_OF_PHASE[job.phase] ?? ""}`);
  setText($("why"), job.reason);
  $("verdict").hidden = !detail.verdict;
  setText($("verdict"), detail.verdict ?? "");
  tiles.update([
    [job.min_workers < job.max_workers ? `workers, ${job.min_workers * job.replica_size} at least` : "workers", `${job.world_size} of ${job.max_workers * job.replica_size}`],
    ...(job.replica_size > 1 ? [["ranks of a replica", `${job.replica_size}`]] : []),
    ...(job.waiting ? [["waiting", `${job.waiting}`]] : []),
    ...(job.waited_s === null ? [] : [["has waited", lasted(job.waited_s)]]),
    ["generation", `${job.generation}`],
    ["step", job.totals.step.toLocaleString("en")],
    ["samples", short(job.totals.samples)],
    ["workers lost", `${job.totals.members_lost}`],
    ["steps undone", `${job.totals.undone}`],
  ]);
  const inOrder = [...members.values()].sort((a, b) => (a.rank ?? Infinity) - (b.rank ?? Infinity) || 0);
  front = Math.max(0, ...inOrder.map((member) => member.step));
  const counts = new Map();
  for (const { standing } of inOrder) counts.set(standing || "unknown", (counts.get(standing || "unknown") ?? 0) + 1);
  standingRows.update([...counts].sort(([a], [b]) => (a < b ? -1 : 1)));
  workerRows.update(inOrder);
  $("gone").hidden = !detail.gone?.length;
  goneRows.update(detail.gone ?? []);
  $("drain-job").hidden = !mayDrain || members.size === 0;
  const newestFirst = [...events.values()].sort((a, b) => b.number - a.number);
  let changes = 0; // older views and verdicts stay for the strip of generations, so many of them
  for (const event of newestFirst.splice(MOST_EVENTS)) {
    if ((event.kind !== "view" && event.kind !== "verdict") || ++changes > MOST_EVENTS) events.delete(event.number);
  }
  eventRows.update(newestFirst);
  generationRows.update(generations());
  plots.show();
}

$("drain-job").addEventListener("click", () =>
  askToDrain([], `Drain all workers of ${jobName}? Each leaves after its current step, and the job stops.`),
);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => detail && plots.show());

begin();
