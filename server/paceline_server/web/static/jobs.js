// The list of all jobs.

import { element, setClass, table } from "./rows.js";
import { hasSteps, headline, lasted, pace, percent, phaseOf, progress } from "./words.js";

const $ = (id) => document.getElementById(id);

const staysHere = new URLSearchParams(location.search).has("jobs");

let known = [];

function why(job) {
  const isWaiting = typeof job.waited_s === "number" && !["finished", "stalled"].includes(phaseOf(job)[0]);
  return isWaiting ? `${job.reason}; for ${lasted(job.waited_s)} now` : headline(job);
}

const rows = table(
  $("jobs").tBodies[0],
  (job) => job.name,
  [
    ["name", (job) => job.name],
    ["phase", (job) => phaseOf(job)[0]],
    ["number workers", (job) => `${job.world_size} of ${job.max_workers * job.replica_size}`],
    ["number wide", (job) => job.waiting],
    ["number wide generation", (job) => job.generation],
    ["number progress", progress],
    ["number wide pace", pace],
    ["number wide", (job) => percent(hasSteps(job) ? job.totals.goodput : null)],
    ["text", why],
  ],
  {
    last(row, job) {
      const link = element("a");
      link.href = `?job=${encodeURIComponent(job.name)}`;
      row.cells_[0].append(link);
      row.cells_[0].target = link;
      row.cells_[1].target = row.cells_[1].appendChild(element("span"));
    },
    finish(row, job) {
      const [phase, mood] = phaseOf(job);
      setClass(row.cells_[1].target, `phase ${mood}`);
      setClass(row, phase === "stalled" ? "warn" : "");
    },
  },
);

export function showJobs({ jobs }) {
  known = jobs;
  if (jobs.length === 1 && !staysHere) location.replace(`?job=${encodeURIComponent(jobs[0].name)}`);
  $("no-jobs").hidden = jobs.length > 0;
  $("jobs").hidden = jobs.length === 0;
  rows.update(jobs);
}

/** Says that all jobs are done, or nothing. */
export const doneJobs = () =>
  known.length > 0 && known.every((job) => job.phase === "finished") ? "the jobs are done, and their coordinator has ended" : "";
