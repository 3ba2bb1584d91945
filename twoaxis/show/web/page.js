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
