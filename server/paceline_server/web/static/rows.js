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

/** Keeps the children of an element, one for each item, in the order of the items. */
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
    let at = this.body.firstElementChild;
    for (const [key, item] of wanted) {
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.make(item)));
      if (row === at) at = at.nextElementSibling;
      else this.body.insertBefore(row, at);
      this.fill(row, item);
    }
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
