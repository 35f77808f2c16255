// What an operator may do with a job and its workers: read their output and stacks, take a trace, drain.

import { call, get, reason } from "./connection.js";
import { element, setClass, setText } from "./rows.js";
import { nameOf, many, ranges } from "./words.js";

const $ = (id) => document.getElementById(id);

const ASK_S = 15; // workers are asked, and answer by themselves; the coordinator's limits are lower (web_limits.py)
const TRACE_S = 60;

const jobName = new URLSearchParams(location.search).get("job");
const path = (what, member) =>
  `api/jobs/${encodeURIComponent(jobName)}/${what}${member ? `?member=${encodeURIComponent(member.member_id)}` : ""}`;

// ---- toast -------------------------------------------------------------------------------------------------------

let toastEnd = null;

export function toast(mood, text) {
  const where = document.querySelector("dialog[open]") ?? document.body; // a dialog is above all that is outside it
  if ($("toast").parentElement !== where) where.append($("toast"));
  setClass($("toast"), mood);
  setText($("toast"), text);
  $("toast").hidden = false;
  clearTimeout(toastEnd);
  toastEnd = setTimeout(() => ($("toast").hidden = true), 8000);
}

// ---- drain -------------------------------------------------------------------------------------------------------

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
    const { member_ids: told } = await get(path("drain"), { method: "POST", headers, body });
    toast("good", told.length === 1 ? "1 worker was told to leave." : `${told.length} workers were told to leave.`);
  } catch (error) {
    toast("bad", `not drained: ${reason(error)}`);
  }
}

// ---- output and stacks ---------------------------------------------------------------------------------------------

let looks = { what: "", member: null, number: 0 };

/** Opens the dialog with what a worker printed ("output"), or where it is ("stacks"); without a member: all stacks. */
function look(what, member, title) {
  looks = { what, member, number: looks.number + 1 };
  setText($("look-title"), title);
  setText($("look-note"), "");
  setText($("look-text"), "");
  $("look").showModal();
  refresh();
}

async function refresh() {
  const number = ++looks.number; // answers to earlier questions are no longer wanted
  const { what, member } = looks;
  $("look-refresh").disabled = true;
  setText($("look-note"), "asking…");
  let [note, text] = ["", null];
  try {
    const answer = await get(path(what, member), { seconds: ASK_S });
    [note, text] = what === "output" ? [answer.trouble, answer.lines.join("\n")] : asText(answer.processes);
    if (!text && !note) note = what === "output" ? "It has printed nothing yet." : "No worker has answered.";
  } catch (error) {
    note = reason(error);
  }
  if (number !== looks.number) return;
  $("look-refresh").disabled = false;
  setText($("look-note"), note);
  if (text === null) return;
  setText($("look-text"), text);
  if (what === "output") $("look-text").scrollTop = $("look-text").scrollHeight; // the last lines matter
}

/** Stacks as a note and a text; processes that are at the same places are told once. */
function asText(processes) {
  const same = new Map();
  for (const each of processes) {
    if (each.trouble) continue;
    const key = threadsText(each.threads).join("\n");
    same.set(key, [...(same.get(key) ?? []), each]);
  }
  // Those that stand elsewhere than most come first: mostly they hold the others up.
  const groups = [...same.values()].sort((a, b) => a.length - b.length);
  const parts = groups.map((group) => [whoIs(group), ...threadsText(group[0].threads)].join("\n"));
  const note = processes.filter((each) => each.trouble).map((each) => `${nameOf(each)}: ${each.trouble}`);
  return [note.join("\n"), parts.join("\n\n")];
}

function whoIs(group) {
  if (group.length === 1) return `${nameOf(group[0])}:`;
  const ranks = group.map(({ rank }) => rank).filter((rank) => rank !== null);
  const waiting = group.length - ranks.length;
  const names = [...(ranks.length ? [`rank${ranks.length > 1 ? "s" : ""} ${ranges(ranks)}`] : []), ...(waiting ? [many(waiting, "waiting worker")] : [])];
  return `${names.join(" and ")}, all the same:`;
}

/** The main thread first; threads of libraries alone are only counted. */
function threadsText(threads) {
  const own = threads.filter(({ main, library }) => main || !library).sort((a, b) => b.main - a.main);
  const hidden = threads.length - own.length;
  return [...own.map(threadText), ...(hidden ? [`  and ${many(hidden, "thread")} of Paceline and grpc`] : [])];
}

const threadText = ({ main, frames, short }) =>
  [main ? "  main thread, newest call first" : "  another thread", ...(short ?? frames).map((frame) => `    ${frame}`)].join("\n");

$("look-refresh").addEventListener("click", refresh);
$("look").addEventListener("close", () => looks.number++);

$("look-copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("look-text").textContent);
    toast("good", "Copied.");
  } catch {
    getSelection().selectAllChildren($("look-text")); // a page without TLS may not write to the clipboard by itself
    if (document.execCommand("copy")) toast("good", "Copied.");
    else toast("warn", "The text is selected: copy it with Ctrl+C.");
  }
});

// ---- trace -------------------------------------------------------------------------------------------------------

async function trace() {
  toast("good", "Asking the workers for their last operations…");
  try {
    const answer = await call(path("trace"), { seconds: TRACE_S });
    const leftOut = answer.headers.get("X-Paceline-Left-Out"); // a sentence, if not all workers are in it
    const blob = await answer.blob();
    const link = element("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${jobName}.trace.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    const saved = `${link.download} is saved: open it at https://ui.perfetto.dev`;
    toast(leftOut ? "warn" : "good", leftOut ? `${saved}. ${leftOut}.` : saved);
  } catch (error) {
    toast("bad", `no trace: ${reason(error)}`);
  }
}

// ---- buttons -----------------------------------------------------------------------------------------------------

let chosen = null; // the worker whose menu is open

/** Opens the menu of a worker at its button. */
export function openMenu(member, at) {
  chosen = member;
  setText($("menu-of"), nameOf(member));
  $("menu-drain").hidden = member.standing === "leaving";
  const menu = $("menu");
  menu.showPopover();
  const [box, size] = [at.getBoundingClientRect(), menu.getBoundingClientRect()];
  const top = box.bottom + 4 + size.height > innerHeight ? box.top - 4 - size.height : box.bottom + 4;
  Object.assign(menu.style, { left: `${Math.max(8, box.right - size.width)}px`, top: `${Math.max(8, top)}px` });
  menu.querySelector("button").focus();
}

function fromMenu(id, does) {
  $(id).addEventListener("click", () => {
    $("menu").hidePopover(); // the focus goes back to the row, and a dialog returns it there
    does(chosen);
  });
}

fromMenu("menu-output", (member) => look("output", member, `Output of ${nameOf(member)}`));
fromMenu("menu-stacks", (member) => look("stacks", member, `Where ${nameOf(member)} is`));
fromMenu("menu-drain", (member) =>
  askToDrain(
    [member.member_id],
    `Drain ${nameOf(member)}? It leaves after its current step; the others train on. A worker that hangs does not come so far: end its process.`,
  ),
);

$("job-stacks").addEventListener("click", () => look("stacks", null, `Where the workers of ${jobName} are`));
$("job-trace").addEventListener("click", trace);
$("drain-job").addEventListener("click", () =>
  askToDrain([], `Drain all workers of ${jobName}? Each leaves after its current step, and the job stops.`),
);
