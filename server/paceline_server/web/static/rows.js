// Elements whose text and order are changed in place: nothing is written that shows the same already.

export function setText(element, text) {
  if (element.shown !== text) element.textContent = element.shown = text;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

export function setLabel(element, text) {
  if (element.ariaLabel !== text) element.ariaLabel = text;
}

/** Returns the longest part of some numbers that rises, as a set. */
function rising(numbers) {
  const ends = []; // ends[n]: place of the smallest number that ends a rising part of n + 1 numbers
  const before = [];
  numbers.forEach((number, place) => {
    let [low, high] = [0, ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[ends[middle]] < number) low = middle + 1;
      else high = middle;
    }
    before[place] = ends[low - 1];
    ends[low] = place;
  });
  const found = new Set();
  for (let place = ends.at(-1); place !== undefined; place = before[place]) found.add(numbers[place]);
  return found;
}

/** Keeps the children of an element, one for each item, in the order of the items. Few rows move: the rest stays. */
export class Rows {
  constructor(body, { key, make, fill }) {
    Object.assign(this, { body, key, make, fill, rows: new Map() });
  }

  update(items) {
    const wanted = new Map(items.map((item) => [this.key(item), item]));
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
    [...this.body.children].forEach((row, place) => (row.place = place));
    const stay = rising([...wanted.keys()].map((key) => this.rows.get(key)?.place).filter((place) => place !== undefined));
    const focused = document.activeElement;
    let at = this.body.firstElementChild;
    for (const [key, item] of wanted) {
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.make(item)));
      if (stay.has(row.place)) at = row.nextElementSibling;
      else this.body.insertBefore(row, at);
      this.fill(row, item);
    }
    if (focused !== document.activeElement && this.body.contains(focused)) focused.focus({ preventScroll: true }); // its row moved
  }
}

// Said again, because some browsers take a table whose rows are a grid for no table.
const ROLES = [["thead, tbody", "rowgroup"], ["tr", "row"], ["th", "columnheader"]];

/** A table: `columns` are pairs of a class and a function from an item to its text. */
export function table(body, key, columns, { finish = () => {}, last = null } = {}) {
  for (const [selector, role] of ROLES) for (const part of body.parentElement.querySelectorAll(selector)) part.role = role;
  body.parentElement.role = "table";
  return new Rows(body, {
    key,
    make(item) {
      const row = document.createElement("tr");
      row.role = "row";
      row.cells_ = columns.map(([name]) => {
        const cell = row.insertCell();
        cell.className = name;
        cell.role = "cell";
        return cell;
      });
      if (last) last(row, item);
      return row;
    },
    fill(row, item) {
      columns.forEach(([, text], number) => setText(row.cells_[number].target ?? row.cells_[number], text(item)));
      finish(row, item);
    },
  });
}

export function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) setText(made, text);
  return made;
}

/** A button that does something. */
export function button(name, text, does) {
  const made = element("button", name, text);
  made.type = "button";
  made.addEventListener("click", does);
  return made;
}
