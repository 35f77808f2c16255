// The table of a job's workers, and the strip of hosts above it: order, filters, columns. Only what changed is written.

import { Rows, button, element, setClass, setLabel, setText, table } from "./rows.js";
import { DASH, many, moodOf, nameOf, percent, short, sum, whatItDoes } from "./words.js";

const $ = (id) => document.getElementById(id);

const LEVEL = { bad: 0, warn: 1 }; // problems come first

let job = null;
let front = 0; // the step of the most advanced worker
let shown = []; // the workers, as they are given
let host = null; // the only host that is shown
let sorted = { by: null, down: false };
let openMenu = () => {};

/** Steps behind the most advanced worker, but for those that the age of its last heartbeat explains. */
function behind(member) {
  if (!member.step) return 0;
  const explained = 1 + 2 * job.totals.steps_per_second * (member.silent_s + 0.1); // the speed is a mean of 10 s
  return front - member.step > explained ? front - member.step : 0;
}

/** The mood of a worker among others: one that is late needs a look. */
function mood(member) {
  const own = moodOf(member);
  return own !== "bad" && behind(member) ? "warn" : own;
}

/** The rank of a worker, "1.0" for rank 0 of replica 1. */
function rankOf({ rank }) {
  const size = job.replica_size;
  if (rank === null || size === 1) return rank ?? DASH;
  return `${Math.floor(rank / size)}.${rank % size}`;
}

const known = (value, text) => (value ? text(value) : DASH);

// The class, the text, what sorts it, and the width in a wide window. A column without a value in any row is hidden.
const COLUMNS = [
  ["rank", (member) => rankOf(member), (member) => member.rank, "64px"],
  ["host", (member) => member.host, (member) => member.host, "minmax(84px, 1fr)"],
  ["number wide pid", (member) => member.pid, (member) => member.pid, "70px"],
  ["number step", (member) => member.step || DASH, (member) => member.step || null, "80px", true],
  ["number behind", (member) => (member.step ? behind(member) : DASH), (member) => (member.step ? behind(member) : null), "76px", true],
  ["standing wide", (member) => member.standing || DASH, (member) => member.standing, "110px"],
  ["text", whatItDoes, whatItDoes, "minmax(112px, 1.6fr)"],
  ["number wide speed", (member) => known(member.speed, short), (member) => member.speed || null, "88px", true],
  ["number wide share", (member) => known(member.share, percent), (member) => member.share || null, "74px", true],
  ["number wide cpu", (member) => (member.cpu ?? null) === null ? DASH : `${member.cpu.toFixed(member.cpu < 10 ? 1 : 0)} cores`, (member) => member.cpu, "92px", true],
  ["number wide memory", (member) => known(member.memory_bytes, (bytes) => short(bytes, "B")), (member) => member.memory_bytes, "84px", true],
  ["number wide sent", (member) => short(sum(member.sent_bytes), "B"), (member) => sum(member.sent_bytes), "82px"],
];

const TEXT = COLUMNS.findIndex(([name]) => name === "text");

const nameOfColumn = ([name]) => name.split(" ").at(-1);

const rows = table(
  $("workers").tBodies[0],
  (member) => member.member_id,
  COLUMNS.map(([name, text]) => [name, text]),
  {
    last(row, member) {
      const cell = row.insertCell();
      cell.className = "act";
      cell.role = "cell";
      row.button = button("small", "⋯", () => openMenu(member.member_id, row.button));
      row.button.ariaHasPopup = "true";
      cell.append(row.button);
    },
    finish(row, member) {
      setClass(row, `${mood(member)}${behind(member) ? " late" : ""}`);
      setLabel(row.button, `Actions for ${nameOf(member)}`);
      const text = whatItDoes(member);
      if (row.cells_[TEXT].title !== text) row.cells_[TEXT].title = text; // it may be cut off
      row.hidden = !matches(member);
    },
  },
);

let words = [];

function matches(member) {
  if (host !== null && member.host !== host) return false;
  if (words.length === 0) return true;
  const text = `rank ${member.rank ?? ""} ${member.host} ${member.pid} ${member.standing} ${whatItDoes(member)}`.toLowerCase();
  return words.every((word) => (/^\d+$/.test(word) ? text.split(" ").includes(word) : text.includes(word)));
}

// ---- order -------------------------------------------------------------------------------------------------------

const byRank = (a, b) => (a.rank ?? Infinity) - (b.rank ?? Infinity) || 0;
const level = (member) => LEVEL[mood(member)] ?? 2;

function inOrder(members) {
  const problemsFirst = members.map((member) => [level(member), member]).sort(([a, one], [b, other]) => a - b || byRank(one, other));
  const found = problemsFirst.map(([, member]) => member);
  const column = COLUMNS.find((one) => nameOfColumn(one) === sorted.by);
  if (!column) return found;
  const value = new Map(found.map((member) => [member, column[2](member) ?? null]));
  return found.sort((one, other) => {
    const [a, b] = [value.get(one), value.get(other)];
    if (a === null || b === null) return (a === null) - (b === null); // those without a value are last, both ways
    const order = a < b ? -1 : a > b ? 1 : 0;
    return (sorted.down ? -order : order) || byRank(one, other);
  });
}

const heads = [...$("workers").tHead.rows[0].cells].slice(0, COLUMNS.length);

heads.forEach((head, number) => {
  const name = nameOfColumn(COLUMNS[number]);
  head.firstElementChild.addEventListener("click", () => {
    if (sorted.by !== name) sorted = { by: name, down: false };
    else sorted = sorted.down ? { by: null, down: false } : { by: name, down: true };
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    if (sorted.by) head.ariaSort = sorted.down ? "descending" : "ascending";
    redraw();
  });
});

/** Hides the columns in which no worker has a value. */
function chooseColumns(members, mayAct) {
  const hidden = COLUMNS.filter(([, , value, , optional]) => optional && !members.some((member) => (value(member) ?? null) !== null));
  const widths = COLUMNS.filter((column) => !hidden.includes(column)).map((column) => column[3]);
  const wanted = [...widths, ...(mayAct ? ["54px"] : [])].join(" ");
  setClass($("workers"), [...hidden.map((column) => `no-${nameOfColumn(column)}`), ...(mayAct ? [] : ["no-act"])].join(" "));
  if ($("workers").columns !== wanted) $("workers").style.setProperty("--columns", ($("workers").columns = wanted));
}

// ---- filters -----------------------------------------------------------------------------------------------------

const standingRows = new Rows($("standings"), {
  key: ([standing]) => standing,
  make: ([standing]) =>
    button("chip", "", () => {
      $("filter").value = $("filter").value === standing ? "" : standing;
      redraw();
    }),
  fill: (chip, [standing, count]) => setText(chip, `${count} ${standing}`),
});

$("filter").addEventListener("input", redraw);

const hostRows = new Rows($("hosts"), {
  key: ([name]) => name,
  make([name]) {
    const chip = button("host", "", () => {
      host = host === name ? null : name;
      redraw();
    });
    chip.title = name;
    chip.append(element("span", "name", name), element("span", "count"), element("span", "dots"));
    const [, count, dots] = chip.children;
    dots.ariaHidden = "true";
    chip.count = count;
    chip.dots = new Rows(dots, {
      key: (member) => member.member_id,
      make: () => document.createElement("i"),
      fill: (dot, member) => setClass(dot, mood(member)),
    });
    return chip;
  },
  fill(chip, [name, members]) {
    setText(chip.count, `${members.length}`);
    chip.dots.update(members);
    const [bad, warn] = ["bad", "warn"].map((one) => members.filter((member) => mood(member) === one).length);
    setClass(chip, bad ? "host bad" : warn ? "host warn" : "host");
    const trouble = bad || warn ? `, ${many(bad + warn, "problem")}` : "";
    setLabel(chip, `Only ${name}: ${many(members.length, "worker")}${trouble}`);
    const pressed = `${host === name}`;
    if (chip.ariaPressed !== pressed) chip.ariaPressed = pressed;
  },
});

/** The workers of each host, hosts with problems first. */
function byHost(members) {
  const found = new Map();
  for (const member of [...members].sort(byRank)) {
    if (!found.has(member.host)) found.set(member.host, []);
    found.get(member.host).push(member);
  }
  const worst = new Map([...found].map(([name, there]) => [name, Math.min(...there.map(level))]));
  return [...found].sort(([a], [b]) => worst.get(a) - worst.get(b) || a.localeCompare(b, "en", { numeric: true }));
}

// ---- all of it ---------------------------------------------------------------------------------------------------

let mayActNow = false;

/** Shows the workers of a job; `open` shows the menu of one. */
export function showWorkers(itsJob, members, mayAct, open) {
  job = itsJob;
  shown = [...members];
  mayActNow = mayAct;
  openMenu = open;
  redraw();
}

function redraw() {
  if (job === null) return;
  front = shown.reduce((most, member) => Math.max(most, member.step), 0);
  words = $("filter").value.toLowerCase().split(" ").filter(Boolean);
  const hosts = byHost(shown);
  if (host !== null && !hosts.some(([name]) => name === host)) host = null;
  $("hosts").hidden = hosts.length < 2;
  hostRows.update(hosts.length < 2 ? [] : hosts);
  const counts = new Map();
  for (const { standing } of shown) counts.set(standing || "unknown", (counts.get(standing || "unknown") ?? 0) + 1);
  standingRows.update([...counts].sort(([a], [b]) => (a < b ? -1 : 1)));
  chooseColumns(shown, mayActNow);
  rows.update(inOrder(shown));
  $("no-match").hidden = shown.length === 0 || shown.some(matches);
  setText($("no-match"), `no worker${host === null ? "" : ` on ${host}`} matches '${$("filter").value.trim()}'`);
}
