// The page to watch jobs. It follows /api/stream and shows what changed; docs/decisions/25 says why it is made so.
// What comes from the coordinator becomes text by `textContent` alone: a job may be named "<script>".

import { Refused, connection, follow, get, reason, token } from "./connection.js";
import { allowActions, beganJob, doneJob, jobName, takeJob } from "./job.js";
import { doneJobs, showJobs } from "./jobs.js";
import { setText } from "./rows.js";

const RETRY_MS = 2000;

const $ = (id) => document.getElementById(id);

document.documentElement.dataset.runs = ""; // boot.js looks for it

async function start() {
  const session = await get("api/session");
  allowActions(session.may_drain);
  setText($("version"), session.version);
  $("forget-token").hidden = !token.get();
  $("token-form").hidden = true;
  if (session.needs_token && !token.get()) return askForToken();
  $(jobName === null ? "jobs-view" : "job-view").hidden = false;
  if (jobName === null) return follow("api/stream", { take: showJobs, done: doneJobs });
  return follow(`api/stream?job=${encodeURIComponent(jobName)}`, { take: takeJob, began, done: doneJob });
}

/** Takes note of a new connection to a job: the last one may have ended because the token got another role. */
function began() {
  beganJob();
  get("api/session").then(({ may_drain }) => allowActions(may_drain), () => {}); // without an answer, as before
}

function begin() {
  start().catch((error) => {
    if (error instanceof Refused && error.status === 401) return askForToken(error.message);
    connection("bad", `${reason(error)}; trying again`);
    setTimeout(begin, RETRY_MS);
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
  token.set($("token").value.trim());
  $("token").value = "";
  begin();
});

$("forget-token").addEventListener("click", () => {
  token.forget();
  location.reload();
});

begin();
