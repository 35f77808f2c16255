// Plots of a job over time, in one grid. uPlot draws them; it is loaded when the rest of the page is there already.

import { pause } from "./connection.js";
import { Rows, button, element, setLabel, setText } from "./rows.js";
import { Series } from "./series.js";
import { DASH, clock, hasSteps, logged, short } from "./words.js";

const SHORT_S = 180; // the choice "last 3 min"
const LEAST_S = 20; // a plot shows at least so many seconds
const MOST_LOGGED = 4; // plots of what the script logs
const LOAD_S = 5;
const NEAR_PX = 8; // so close to a mark the mouse points at it

const TICKS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let uPlot = null;
let span = "whole run";

/** Loads uPlot; asks again, at another address, if it does not come: the browser may hold the first request for ever. */
async function load() {
  const sheet = document.head.appendChild(document.createElement("link"));
  Object.assign(sheet, { rel: "stylesheet", href: "static/uplot/uPlot.min.css" });
  for (let tries = 0; uPlot === null; tries++) {
    const late = new Promise((_, reject) => setTimeout(reject, 1000 * LOAD_S * (tries + 1)));
    try {
      uPlot = (await Promise.race([import(`./uplot/uPlot.esm.js${tries ? `?${tries}` : ""}`), late])).default;
    } catch {
      await pause(2000);
    }
  }
  plots.redraw();
}

/** Whether there is too little room for the time at the right end of the axis. */
const isCut = ({ bbox, scales }, tick) => ((scales.x.max - tick) / (scales.x.max - scales.x.min)) * bbox.width < 20 * devicePixelRatio;

/** A plot. `lines` are [name, color] pairs; a value that is not there is null. */
class Plot {
  data = null;
  marks = [];
  chart = null;

  constructor({ id, title, lines, text, range }) {
    const figure = element("figure");
    if (id) figure.id = id;
    const caption = element("figcaption", "", title);
    this.shown = lines.map(([name, paint]) => {
      const value = element("b", "", name);
      value.style.color = `var(${paint})`;
      caption.append(value);
      return value;
    });
    this.time = caption.appendChild(element("span", "time"));
    this.room = element("div", "chart");
    this.room.role = "img";
    this.mark = this.room.appendChild(element("p", "mark"));
    this.mark.hidden = true;
    figure.append(caption, this.room);
    Object.assign(this, { figure, title, lines, text, range });
    new ResizeObserver(() => this.chart?.setSize(this.size())).observe(this.room);
  }

  draw() {
    const axis = { stroke: () => color("--muted"), ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const grid = { stroke: () => color("--line"), width: 1 };
    this.chart = new uPlot(
      {
        ...this.size(),
        legend: { show: false },
        padding: [8, 8, 0, 0],
        cursor: { y: false, points: { size: 5 }, drag: { x: false, y: false }, sync: { key: "paceline" } },
        scales: { x: { range: (_, low, high) => this.times(low, high) }, y: { range: (_, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, grid: { show: false }, size: 26, space: 64, incrs: TICKS_S, values: (chart, ticks) => ticks.map((tick) => (isCut(chart, tick) ? "" : clock(tick))) },
          { ...axis, grid, size: 58, space: 28, values: (_, ticks) => ticks.map((tick) => this.text(tick)) },
        ],
        series: [{}, ...this.lines.map(([, paint]) => ({ stroke: () => color(paint), width: 2, points: { show: false } }))],
        hooks: { drawClear: [(chart) => this.drawMarks(chart)], setCursor: [() => this.caption()] },
      },
      this.data,
      this.room,
    );
  }

  size() {
    return { width: Math.max(200, this.room.clientWidth), height: this.room.clientHeight };
  }

  times(low, high) {
    const from = Math.min(low, high - LEAST_S);
    return [span === "whole run" ? from : Math.max(high - SHORT_S, from), high];
  }

  caption() {
    const last = this.data[0].length - 1;
    const pointed = this.chart?.cursor.idx ?? null;
    const index = pointed ?? last;
    setText(this.time, pointed === null ? "" : clock(this.data[0][pointed]));
    this.sayMark(pointed === null ? null : this.chart.cursor.left);
    this.shown.forEach((value, number) => {
      const [name] = this.lines[number];
      const column = this.data[number + 1];
      value.hidden = name !== "" && !column.some(Number.isFinite);
      setText(value, `${name} ${this.text(column[index] ?? null)}`.trim());
    });
  }

  /** Says what the mark is at which the mouse points, if it does. */
  sayMark(left) {
    const distance = ({ at }) => Math.abs(this.chart.valToPos(at, "x") - left);
    const [near] = left === null || !this.room.matches(":hover") ? [] : this.marks.filter((mark) => distance(mark) <= NEAR_PX).sort((a, b) => distance(a) - distance(b));
    this.mark.hidden = !near;
    setText(this.mark, near ? `${clock(near.at)}: ${near.text}` : "");
  }

  drawMarks({ ctx, bbox, valToPos }) {
    ctx.save();
    ctx.strokeStyle = color("--mark");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const { at } of this.marks) {
      const x = valToPos(at, "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  show(data, marks) {
    Object.assign(this, { data, marks });
    if (this.chart) this.chart.setData(data);
    else if (uPlot) this.draw();
    this.caption();
    const inside = marks.filter(({ at }) => at >= this.times(data[0][0], data[0].at(-1))[0]);
    const when = inside.slice(-10).map(({ at, text }) => `; at ${clock(at)}: ${text}`).join("");
    setLabel(this.room, `${this.title} since ${clock(Math.max(data[0][0], this.times(data[0][0], data[0].at(-1))[0]))}${when}`);
  }
}

const fromZero = (_, high) => [0, Math.max(high ?? 0, 1) * 1.1];

/** The range of a logged value: with some room, and from 0 if it comes near. */
function around(low, high) {
  if (!Number.isFinite(low)) return [0, 1];
  const room = 0.08 * (high - low || Math.abs(high) || 1);
  return [low >= 0 && low < 3 * room ? 0 : low - room, high + room];
}

const KINDS = [["shm", "--line-1"], ["tcp", "--line-2"], ["grpc", "--line-3"]];

const numeric = (text) => (value) => (value === null ? DASH : text(value));

/** The names that a script logs: first those called loss, then the rest by name. */
export function inOrder(names) {
  const order = (name) => (name === "loss" ? 0 : /loss/i.test(name) ? 1 : 2);
  return [...names].sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
}

/** What is plotted: how it looks, and how its values are found. */
function wanted(series, job) {
  const names = inOrder(series.names("logged")).slice(0, MOST_LOGGED);
  const ofSteps = hasSteps(job);
  const [id, title, count] = ofSteps ? ["plot-steps", "steps/s", "step"] : ["plot-operations", "operations/s", "operations"];
  const goodput = {
    ...{ key: "goodput", id: "plot-goodput", title: "goodput", lines: [["", "--line-2"]], range: () => [0, 1.02] },
    text: numeric((value) => `${(100 * value).toFixed(0)} %`),
    values: () => [series.values((point) => point.goodput)],
  };
  return [
    ...names.map((name) => ({
      ...{ key: `logged ${name}`, title: name, lines: [["", "--line-3"]], text: numeric(logged), range: around },
      values: () => [series.values((point) => point.logged[name])],
    })),
    {
      ...{ key: id, id, title, lines: [["", "--line-1"]], text: (value) => short(value), range: fromZero },
      values: () => [series.rates((point) => point[count])],
    },
    ...(ofSteps ? [goodput] : []),
    {
      ...{ key: "sent", id: "plot-bytes", title: "sent", lines: KINDS, text: (value) => short(value, "B/s"), range: fromZero },
      values: () => KINDS.map(([kind]) => series.rates((point) => point.sent[kind])),
    },
  ];
}

const rows = new Rows(document.getElementById("plots"), {
  key: ({ key }) => key,
  make(plot) {
    const made = new Plot(plot);
    made.figure.plot = made;
    return made.figure;
  },
  fill({ plot }, { times, values, marks }) {
    plot.show([times, ...values()], marks);
  },
});

const spans = ["whole run", "last 3 min"].map((name) =>
  button("small", name, () => {
    span = name;
    plots.redraw();
  }),
);
document.getElementById("span").append(...spans);

export const plots = {
  series: new Series(),
  last: null,

  /** Shows what is known of a job; `marks` are the times when generations began, oldest first, each with its text. */
  show(job, marks) {
    this.last ??= (load(), null); // when there is something to draw
    this.last = [job, marks];
    for (const one of spans) one.ariaPressed = `${one.textContent === span}`;
    document.getElementById("marks").hidden = marks.length === 0;
    if (this.series.points.length === 0) return;
    const times = this.series.times();
    rows.update(wanted(this.series, job).map((plot) => ({ ...plot, times, marks })));
  },

  redraw() {
    if (this.last) this.show(...this.last);
  },
};

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.redraw());
