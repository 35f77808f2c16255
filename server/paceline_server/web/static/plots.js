// Steps, goodput and bytes of a job over the last minutes, computed from what the stream sends. uPlot draws them.

import { element, setText } from "./rows.js";
import { DASH, clock, short } from "./words.js";

const RATE_WINDOW_S = 3; // rates are differences over this time
const PLOT_S = 180; // a plot shows the last of these seconds,
const LEAST_PLOT_S = 20; // and at first this many

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A plot over the last minutes. `lines` are [name, color] pairs; a value that is not there is null. */
class Plot {
  constructor(figure, title, lines, text, range) {
    const caption = element("figcaption", "", title);
    this.values = lines.map(([name, paint]) => {
      const value = element("b", name);
      value.style.color = `var(${paint})`;
      caption.append(value);
      return value;
    });
    figure.append(caption);
    Object.assign(this, { figure, lines, text, data: [[], ...lines.map(() => [])], marks: [], at: null });
    const axis = { stroke: () => color("--muted"), ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const grid = { stroke: () => color("--line"), width: 1 };
    this.chart = new uPlot(
      {
        ...this.size(),
        legend: { show: false },
        padding: [8, 8, 0, 0],
        cursor: { y: false, points: { size: 5 }, drag: { x: false, y: false }, sync: { key: "paceline" } },
        scales: { x: { range: (_, low, high) => [Math.max(high - PLOT_S, Math.min(low, high - LEAST_PLOT_S)), high] }, y: { range } },
        axes: [
          { ...axis, grid: { show: false }, size: 26, space: 80, values: (_, ticks) => ticks.map(clock) },
          { ...axis, grid, size: 58, space: 28, values: (_, ticks) => ticks.map((tick) => text(tick)) },
        ],
        series: [{}, ...lines.map(([, paint]) => ({ stroke: () => color(paint), width: 2, points: { show: false } }))],
        hooks: { drawClear: [(chart) => this.drawMarks(chart)], setCursor: [(chart) => this.caption(chart.cursor.idx)] },
      },
      this.data,
      figure,
    );
    new ResizeObserver(() => this.chart.setSize(this.size())).observe(figure);
  }

  size() {
    return { width: Math.max(200, this.figure.clientWidth - 16), height: 150 };
  }

  add(at, values) {
    this.data[0].push(at);
    values.forEach((value, number) => this.data[number + 1].push(value));
    while (this.data[0][0] < at - PLOT_S) for (const column of this.data) column.shift();
  }

  caption(index) {
    const last = this.data[0].length - 1;
    this.values.forEach((value, number) => {
      const [name] = this.lines[number];
      value.hidden = name !== "" && !this.data[number + 1].some(Number.isFinite);
      setText(value, `${name} ${this.text(this.data[number + 1][index ?? last])}`.trim());
    });
  }

  drawMarks({ ctx, bbox, valToPos }) {
    ctx.save();
    ctx.strokeStyle = color("--mark");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const at of this.marks) {
      const x = valToPos(at, "x", true);
      if (!(x >= bbox.left)) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  show() {
    this.chart.setData(this.data);
    this.caption(this.chart.cursor.idx);
  }
}

const KINDS = [["shm", "--line-1"], ["tcp", "--line-2"], ["grpc", "--line-3"]];

export const plots = {
  all: null,
  seen: [], // [time, step, bytes by kind] of the last seconds
  generation: 0,

  make() {
    const fromZero = (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.1];
    this.all = [
      new Plot(document.getElementById("plot-steps"), "steps/s", [["", "--line-1"]], (value) => short(value), fromZero),
      new Plot(document.getElementById("plot-goodput"), "goodput", [["", "--line-2"]], (value) => (value === null ? DASH : `${(100 * value).toFixed(0)} %`), [0, 1.02]),
      new Plot(document.getElementById("plot-bytes"), "sent", KINDS, (value) => short(value, "B/s"), fromZero),
    ];
  },

  take({ totals, generation }) {
    if (!this.all) this.make();
    const now = Date.now() / 1000;
    const last = this.seen.at(-1);
    if (last && (totals.step < last[1] || KINDS.some(([kind]) => (totals.sent_bytes[kind] ?? 0) < (last[2][kind] ?? 0)))) {
      this.seen = []; // the job, or its coordinator, began anew
    }
    this.seen.push([now, totals.step, totals.sent_bytes]);
    while (this.seen.length > 2 && this.seen[1][0] <= now - RATE_WINDOW_S) this.seen.shift();
    const [then, step, bytes] = this.seen[0];
    const rate = (more) => (now > then ? more / (now - then) : null);
    const [steps, goodput, sent] = this.all;
    steps.add(now, [rate(totals.step - step)]);
    goodput.add(now, [totals.goodput ?? null]);
    sent.add(now, KINDS.map(([kind]) => (kind in totals.sent_bytes ? rate(totals.sent_bytes[kind] - (bytes[kind] ?? 0)) : null)));
    if (this.generation && generation !== this.generation) for (const plot of this.all) plot.marks = [...plot.marks.filter((at) => at > now - PLOT_S), now];
    this.generation = generation;
  },

  show() {
    for (const plot of this.all ?? []) plot.show();
  },
};
