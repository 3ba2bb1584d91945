"use strict";

const make = (name, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
};

// Light or dark: the reader's system decides until the button is pressed.
const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const { dataset } = document.body;
  const now = dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  dataset.theme = now === "dark" ? "light" : "dark";
});

// Tables: a click on a head sorts, within each section. Cells without a number go by their text, empty ones go last.
const key = (row, place) => {
  const { dataset, textContent } = row.cells[place];
  if (dataset.value !== undefined) return Number(dataset.value);
  return textContent === "-" || textContent === "" ? null : textContent;
};
const order = (a, b) => {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
};
const sort = (table, place, sign) => {
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter((row) => !row.matches(".section"));
    rows.sort((first, second) => {
      const [a, b] = [key(first, place), key(second, place)];
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * order(a, b);
    });
    body.append(...rows);
  }
};
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    const button = make("button", { type: "button" }, ...head.childNodes);
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      sort(table, place, down ? -1 : 1);
    });
    head.append(button);
  });
}

// Charts: panels that show one thing in several forms get a selector per choice, lines get a switch in the legend.
const addSelectors = (chart) => {
  const figures = [...chart.querySelectorAll("figure[data-choice]")];
  if (figures.length < 2) return;
  const choices = figures.map((figure) => JSON.parse(figure.dataset.choice));
  const selectors = new Map();
  const choose = () => {
    figures.forEach((figure, number) => {
      const chosen = [...selectors].every(([name, selector]) => choices[number][name] === selector.value);
      figure.hidden = !chosen;
    });
  };
  const bar = make("div", { className: "controls" });
  for (const name of new Set(choices.flatMap(Object.keys))) {
    const values = [...new Set(choices.map((choice) => choice[name]))];
    const selector = make("select", { name }, ...values.map((value) => make("option", { value }, value)));
    selector.addEventListener("change", choose);
    selectors.set(name, selector);
    bar.append(make("label", {}, name, selector));
  }
  const panels = chart.querySelector(".panels");
  chart.classList.toggle("one", figures.length === panels.children.length);
  panels.before(bar);
  choose();
};
const addSwitches = (chart) => {
  for (const item of chart.querySelectorAll(".legend li")) {
    const box = make("input", { type: "checkbox", checked: true });
    item.replaceChildren(make("label", {}, box, ...item.childNodes));
    box.addEventListener("change", () => {
      item.classList.toggle("off", !box.checked);
      for (const line of chart.querySelectorAll(`svg [data-series="${item.dataset.series}"]`)) {
        line.style.display = box.checked ? "" : "none";
      }
    });
  }
};
for (const chart of document.querySelectorAll(".chart")) {
  addSelectors(chart);
  addSwitches(chart);
}

// Grids: tables of coloured cells, filled for what is chosen. Selectors of one name move together in the whole page.
const COLOURS = "colours by";
const current = new Map();
const digits = (value) => {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-4 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
};
const most = (values) => values.reduce((found, value) => Math.max(found, Math.abs(value ?? 0)), 0) || 1;
const makeGrid = (section) => {
  const { columns, rows, choices, within, corner } = JSON.parse(section.querySelector("script").textContent);
  const wide = columns.length > 16;
  const heads = columns.map((name) => make("th", {}, make("span", {}, name)));
  const lines = rows.map(([label]) => make("tr", {}, make("th", {}, label), ...columns.map(() => make("td"))));
  const head = make("thead", {}, make("tr", {}, make("th", {}, corner), ...heads));
  const table = make("table", { className: wide ? "cells wide" : "cells" }, head, make("tbody", {}, ...lines));
  section.querySelector(".scroll").append(table);
  const pick = ([, values, places]) => {
    const choose = (found, name) => found?.[found.length === 1 ? 0 : current.get(name)];
    const cells = Object.keys(choices).reduce(choose, values) ?? [];
    return columns.map((_, column) => cells[places === null ? column : places.indexOf(column)] ?? null);
  };
  const fill = () => {
    const cells = rows.map(pick);
    const all = most(cells.flat());
    const byRow = within === "table" && current.get(COLOURS) === 1;
    const largest = cells.map((row) => (byRow ? most(row) : all));
    const tops = columns.map((_, column) => (within === "column" ? most(cells.map((row) => row[column])) : null));
    lines.forEach((line, row) => cells[row].forEach((value, column) => {
      const cell = line.cells[column + 1];
      const part = Math.sqrt(Math.abs(value ?? 0) / (tops[column] ?? largest[row]));
      cell.className = value === null ? "none" : value < 0 ? "cold" : "";
      cell.style.setProperty("--part", `${(100 * part).toFixed(1)}%`);
      cell.textContent = value === null ? "-" : digits(value);
      cell.title = `${rows[row][0]}, ${columns[column]}: ${cell.textContent}`;
    }));
  };
  const offered = within === "table" && columns.length > 1 ? { ...choices, [COLOURS]: ["the whole table", "each row"] } : choices;
  return { section, offered, fill };
};
const grids = [...document.querySelectorAll(".grid")].map(makeGrid);
const fillAll = () => grids.forEach(({ fill }) => fill());
for (const { section, offered } of grids) {
  const bar = make("div", { className: "controls" });
  for (const [name, values] of Object.entries(offered)) {
    current.set(name, 0);
    const options = values.map((value, number) => make("option", { value: number }, value));
    const selector = make("select", { name }, ...options);
    selector.addEventListener("change", () => {
      current.set(name, Number(selector.value));
      for (const other of document.querySelectorAll(".grid select")) if (other.name === name) other.value = selector.value;
      fillAll();
    });
    bar.append(make("label", {}, name, selector));
  }
  section.querySelector(".scroll").before(bar);
}
fillAll();

// A table that is wider than the page fades out on the side where it goes on.
for (const box of document.querySelectorAll(".scroll")) {
  const mark = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  box.addEventListener("scroll", mark, { passive: true });
  new ResizeObserver(mark).observe(box);
}
