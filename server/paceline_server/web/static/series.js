// What is known of a job over time: the coordinator's history, then what the stream says. Pure, but for its list.

const RATE_WINDOW_S = 3; // rates are differences over this time, or between neighbours that are further apart
const FINE_S = 180; // points of the last so many seconds are not thinned out
const MOST = 2000;

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const orZero = (value) => value ?? 0;

/** One list of points, oldest first, each {at, step, operations, goodput, sent, logged}. */
export class Series {
  points = [];

  /** Takes a message of the stream. */
  add(at, { step, operations, goodput, sent_bytes, logged }) {
    const last = this.points.at(-1);
    if (last && at <= last.at) return; // a clock that was set back, or a message that says nothing new
    this.points.push({ at, step, operations: orZero(operations), goodput: number(goodput), sent: sent_bytes ?? {}, logged: logged ?? {} });
    this.thin();
  }

  /** Takes the coordinator's history: points where there are none yet, as before the page was opened. */
  merge(columns) {
    const own = this.points;
    const pick = (lists, index) => Object.fromEntries(Object.entries(lists ?? {}).map(([name, list]) => [name, list[index]]));
    const found = [];
    let next = 0;
    columns.at.forEach((at, index) => {
      while (next < own.length && own[next].at < at - 1) next++;
      if (next < own.length && own[next].at <= at + 1) return; // this moment is known already, by at most a second
      found.push({
        at,
        step: orZero(columns.step[index]),
        operations: orZero(columns.operations?.[index]),
        goodput: number(columns.goodput?.[index]),
        sent: pick(columns.sent_bytes, index),
        logged: pick(columns.logged, index),
      });
    });
    this.points = [...own, ...found].sort((a, b) => a.at - b.at);
    this.thin();
  }

  /** Thins out older points so that those which stay have equal distances in time, however long the run. */
  thin() {
    if (this.points.length <= MOST) return;
    const recent = this.points.at(-1).at - FINE_S;
    const gap = (recent - this.points[0].at) / (MOST / 2);
    let kept = -Infinity;
    this.points = this.points.filter(({ at }) => {
      if (at < recent && at - kept < gap) return false;
      kept = at;
      return true;
    });
    if (this.points.length > MOST) this.points.splice(0, this.points.length - MOST);
  }

  names(field) {
    return [...new Set(this.points.flatMap((point) => Object.keys(point[field])))];
  }

  times() {
    return this.points.map(({ at }) => at);
  }

  /** A value at each point; null where it is unknown or no number. */
  values(read) {
    return this.points.map((point) => number(read(point)));
  }

  /** How fast a count grows at each point; null where it is unknown, or where the job began anew. */
  rates(read) {
    let then = 0; // the point that this one is compared with
    return this.points.map((point, index) => {
      if (index === 0) return null;
      if (orZero(read(point)) < orZero(read(this.points[index - 1]))) then = index; // the job, or its coordinator, began anew
      while (then + 1 < index && this.points[then + 1].at <= point.at - RATE_WINDOW_S) then++;
      if (then === index) return null;
      const [from, to] = [this.points[then], point];
      return read(to) === undefined || read(to) === null ? null : (read(to) - orZero(read(from))) / (to.at - from.at);
    });
  }
}
