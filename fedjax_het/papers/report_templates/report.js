for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], first = [...body.rows];
  const number = (text) => {
    const found = text.replaceAll(",", "").replaceAll("\u2212", "-").match(/^[<+]?(-?[\d.]+)/);
    return found ? parseFloat(found[1]) : NaN;
  };
  table.querySelectorAll("th").forEach((head, place) => {
    head.querySelector("button").addEventListener("click", () => {
      const next = {none: "ascending", ascending: "descending", descending: "none"};
      const way = next[head.getAttribute("aria-sort") || "none"];
      table.querySelectorAll("th").forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", way);
      const sign = way === "descending" ? -1 : 1;
      const rows = first.map((row) => [row, row.cells[place].textContent.trim()]);
      if (way !== "none") rows.sort(([, a], [, b]) => {
        const [x, y] = [number(a), number(b)];
        if (isNaN(x) && isNaN(y)) return sign * a.localeCompare(b);
        if (isNaN(x) || isNaN(y)) return isNaN(x) ? 1 : -1;
        return sign * (x - y);
      });
      body.append(...rows.map(([row]) => row));
    });
  });
}
