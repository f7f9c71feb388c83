// Sorting by a click on a column's head, and a filter, for each table of a page with the class mm-sortable.
for (const table of document.querySelectorAll("table.mm-sortable")) {
  const body = table.tBodies[0];
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const compare = (a, b) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1; // what is not known stands last
    return typeof a === "number" ? a - b : a.localeCompare(b);
  };
  for (const head of table.tHead.rows[0].cells) {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => {
        const order = compare(value(a, head.cellIndex), value(b, head.cellIndex));
        return down ? -order : order;
      });
      body.append(...rows);
    });
  }
  const filter = table.closest(".mm-compared").querySelector("input");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  });
}
