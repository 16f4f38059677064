"""How the report of all tables and figures looks, and how its tables are sorted."""

CSS = """
:root{color-scheme:light dark;--ink:#1f2328;--paper:#fff;--soft:#5c6470;--line:#d8dde3;
--shade:#f4f6f8;--link:#0b57b0;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--paper:#15181c;--soft:#9ea7b3;--line:#353b43;
--shade:#1f242a;--link:#7db7ff;--bad:#ff8a80}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{font:16px/1.5 system-ui,sans-serif;max-width:1100px;margin:0 auto;padding:1.5rem 1rem 4rem;
color:var(--ink);background:var(--paper);overflow-wrap:anywhere}
a{color:var(--link);text-underline-offset:.15em}
h1{font-size:1.6rem;line-height:1.25;margin:.3em 0}
h2{font-size:1.3rem;margin:2.2em 0 .6em;padding-top:.7em;border-top:2px solid var(--line)}
h3{font-size:1.1rem;margin:2em 0 .3em}
h4{font-size:1rem;margin:1.6em 0 .3em}
.made,.same,.top,figcaption,.state{color:var(--soft);font-size:.85rem}
.failed{color:var(--bad);font-weight:600}
.same{margin:.3em 0}.same span{display:inline-block;margin-right:1.1em}
code,pre{font:.85em ui-monospace,monospace}
pre{background:var(--shade);padding:.8em;overflow-x:auto;overflow-wrap:normal;border-radius:6px}
.scroll{overflow-x:auto;margin:.8em 0;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;font-size:.82rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.3em .7em;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
th{background:var(--shade)}
.n{text-align:right}
th button{all:unset;cursor:pointer;font-weight:600}
th button:focus-visible{outline:2px solid var(--link)}
th button::after{content:"";display:inline-block;width:.9em;text-align:right}
th[aria-sort=ascending] button::after{content:"\\2191"}
th[aria-sort=descending] button::after{content:"\\2193"}
ul.notes{font-size:.85rem;color:var(--soft);padding-left:1.2em}
ul.notes li{margin:.25em 0}
.contents ul{list-style:none;padding:0;margin:.2em 0 1em}
.contents li{margin:.3em 0}
.kept{border-left:3px solid var(--line);padding-left:1rem;margin-top:1.5em}
figure{margin:1.2em 0}figcaption{margin-top:.4em}
img{max-width:100%;height:auto;display:block;background:#fff;border-radius:6px}
figure .view{overflow-x:auto}
@media(max-width:600px){img.wide{max-width:none;width:46rem}
body{padding:1rem .75rem 3rem;font-size:15px}.kept{padding-left:.6rem}}
@media print{.scroll{overflow:visible}th button::after{content:none}}
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], first = [...body.rows];
  const number = (text) => {
    const found = text.replaceAll(",", "").replaceAll("\\u2212", "-").match(/^[<+]?(-?[\\d.]+)/);
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
"""
