"""Style and script of the report's page; both are put into it, so that it needs nothing from anywhere."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; }
body { --ink: #1d2430; --soft: #5c6675; --line: #dde2e9; --paper: #ffffff; --card: #f7f8fa;
  --better: #00723a; --worse: #b3261e; --warn: #8a5a00; --base: #444444; --head: #eef1f5;
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
body.dark { --ink: #e4e8ee; --soft: #9aa5b4; --line: #323a46; --paper: #14181e; --card: #1b2028;
  --better: #4cc38a; --worse: #ff8a80; --warn: #e3b341; --base: #c3cad4; --head: #232a34; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
header { display: flex; gap: 16px; align-items: baseline; justify-content: space-between; }
h1 { font-size: 24px; margin: 0 0 6px; } h2 { font-size: 19px; margin: 36px 0 8px; }
h3 { font-size: 15px; margin: 22px 0 6px; }
p { margin: 6px 0; overflow-wrap: anywhere; } .soft, .note { color: var(--soft); } .note { font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 210px; overflow-wrap: anywhere; }
th { background: var(--head); font-weight: 600; position: sticky; top: 0; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--soft); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
tr.base td { background: var(--card); }
.better { color: var(--better); font-weight: 600; } .worse { color: var(--worse); font-weight: 600; }
.warn { color: var(--warn); }
.panel { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 14px; margin: 10px 0; }
.bar { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; font-size: 13.5px; }
.bar select, .plain { font: inherit; color: var(--ink); background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: 2px 8px; cursor: pointer; }
.bar label { display: inline-flex; gap: 5px; align-items: center; cursor: pointer; overflow-wrap: anywhere; }
.swatch { width: 14px; height: 3px; border-radius: 2px; display: inline-block; }
svg { display: block; width: 100%; min-width: 760px; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
svg text.name { fill: var(--ink); } svg .grid { stroke: var(--line); }
svg .zero { stroke: var(--base); stroke-dasharray: 5 4; }
svg .ci { stroke-width: 2.5; stroke: var(--soft); }
svg .dot { fill: var(--soft); stroke: var(--soft); stroke-width: 2; }
svg .ci.better, svg .dot.better { stroke: var(--better); } svg .dot.better { fill: var(--better); }
svg .ci.worse, svg .dot.worse { stroke: var(--worse); } svg .dot.worse { fill: var(--worse); }
svg .dot.open { fill: var(--card); }
.chart { position: relative; overflow-x: auto; }
.tip { position: absolute; pointer-events: none; background: var(--paper); color: var(--ink);
  border: 1px solid var(--line); border-radius: 6px; padding: 6px 9px; font-size: 12.5px; white-space: nowrap;
  box-shadow: 0 2px 10px #0003; display: none; font-variant-numeric: tabular-nums; z-index: 2; }
.facts { font-size: 13px; color: var(--soft); overflow-wrap: anywhere; } .facts code { color: var(--ink); }
"""

SCRIPT = """
"use strict";
const NS = "http://www.w3.org/2000/svg";
const node = (name, attributes, parent, text) => {
  const made = document.createElementNS(NS, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
};
const short = value => {
  const units = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, name] of units) if (Math.abs(value) >= size * 0.9995) return +(value / size).toPrecision(3) + name;
  return String(+value.toPrecision(3));
};

const digits = value => value === 0 || Math.abs(value) >= 0.00095 ? value.toFixed(4) : value.toExponential(1);

// dark and light
const dark = on => document.body.classList.toggle("dark", on);
dark(matchMedia("(prefers-color-scheme: dark)").matches);
document.getElementById("shade").onclick = () => dark(!document.body.classList.contains("dark"));

// sorting
for (const table of document.querySelectorAll("table")) {
  table.querySelectorAll("th").forEach((head, place) => {
    head.querySelector("button").onclick = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = row => row.cells[place].dataset.order;
      const compare = (a, b) => {
        const x = value(a), y = value(b);
        if (place === 0) return (up ? 1 : -1) * a.cells[0].textContent.localeCompare(b.cells[0].textContent);
        if (x === "" || y === "") return (x === "") - (y === "");
        return (up ? 1 : -1) * (x - y);
      };
      [...table.tBodies[0].rows].sort(compare).forEach(row => table.tBodies[0].appendChild(row));
    };
  });
}

// curves
const NAMES = { tokens: "training tokens", flops: "training FLOPs", time: "training time (s)" };
const W = 1100, H = 400, LEFT = 64, RIGHT = 16, TOP = 12, BOTTOM = 44;
const ticks = (low, high, count) => {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(+t.toPrecision(12));
  return found;
};
const decades = (low, high) => {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++)
    for (const m of [1, 2, 5]) if (m * 10 ** p >= low && m * 10 ** p <= high) found.push(m * 10 ** p);
  return found;
};
function chart(box, data) {
  const axis = box.querySelector("[name=axis]"), kind = box.querySelector("[name=kind]");
  const svg = box.querySelector("svg"), tip = box.querySelector(".tip");
  const shown = () => data.filter((_, i) => box.querySelectorAll("input")[i].checked);
  let state = null;
  const draw = () => {
    svg.replaceChildren(); tip.style.display = "none"; state = null;
    const lines = shown().map(d => ({ ...d, band: d[kind.value][axis.value] })).filter(d => d.band && d.band.x.length);
    if (!lines.length) {
      node("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, svg, "nothing to show");
      return;
    }
    const loss = kind.value === "loss";
    // The first fall of the curves would flatten the rest: the frame begins a fifth into the runs.
    const from = d => Math.floor(d.band.x.length / 5), xs = lines.flatMap(d => d.band.x.slice(from(d)));
    const x0 = Math.min(...xs) * 0.97, x1 = Math.max(...xs) * 1.03;
    const ends = lines.flatMap(d => d.band.mean.slice(from(d)).flatMap((m, i) =>
      [m - d.band.spread[i + from(d)], m + d.band.spread[i + from(d)]])).concat(loss ? [] : [0]);
    let y0 = Math.min(...ends), y1 = Math.max(...ends);
    const room = (y1 - y0 || 1) * 0.06; y0 -= room; y1 += room;
    const X = v => LEFT + (W - LEFT - RIGHT) * Math.log(v / x0) / Math.log(x1 / x0);
    const Y = v => TOP + (H - TOP - BOTTOM) * (y1 - v) / (y1 - y0);
    const clip = "clip" + Math.random().toString(36).slice(2);
    node("rect", { x: LEFT, y: TOP, width: W - LEFT - RIGHT, height: H - TOP - BOTTOM },
      node("clipPath", { id: clip }, node("defs", {}, svg)));
    for (const t of ticks(y0, y1, 6)) {
      node("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: Y(t), y2: Y(t) }, svg);
      node("text", { x: LEFT - 8, y: Y(t) + 4, "text-anchor": "end" }, svg, +t.toPrecision(6));
    }
    for (const t of decades(x0, x1)) {
      node("line", { class: "grid", x1: X(t), x2: X(t), y1: TOP, y2: H - BOTTOM }, svg);
      node("text", { x: X(t), y: H - BOTTOM + 18, "text-anchor": "middle" }, svg, short(t));
    }
    node("text", { x: (LEFT + W - RIGHT) / 2, y: H - 6, "text-anchor": "middle" }, svg, NAMES[axis.value]);
    const area = node("g", { "clip-path": `url(#${clip})` }, svg);
    if (!loss) node("line", { class: "zero", x1: LEFT, x2: W - RIGHT, y1: Y(0), y2: Y(0) }, area);
    for (const d of lines) {
      const colour = d.baseline ? "var(--base)" : d.colour, b = d.band;
      const up = b.x.map((x, i) => `${X(x)},${Y(b.mean[i] + b.spread[i])}`);
      const down = b.x.map((x, i) => `${X(x)},${Y(b.mean[i] - b.spread[i])}`).reverse();
      node("polygon", { points: up.concat(down).join(" "), style: `fill:${colour};opacity:.14` }, area);
      node("polyline", { points: b.x.map((x, i) => `${X(x)},${Y(b.mean[i])}`).join(" "), fill: "none",
        style: `stroke:${colour};stroke-width:2`, "stroke-dasharray": d.baseline ? "6 4" : "none" }, area);
      b.x.forEach((x, i) => node("circle", { cx: X(x), cy: Y(b.mean[i]), r: 2.6, style: `fill:${colour}` }, area));
    }
    const rule = node("line", { class: "grid", y1: TOP, y2: H - BOTTOM, visibility: "hidden" }, svg);
    state = { lines, X, rule, x0, x1 };
  };
  const hover = event => {
    if (!state) return;
    const frame = svg.getBoundingClientRect(), at = (event.clientX - frame.left) / frame.width * W;
    if (at < LEFT || at > W - RIGHT) { leave(); return; }
    const here = state.x0 * (state.x1 / state.x0) ** ((at - LEFT) / (W - LEFT - RIGHT));
    const rows = state.lines.map(d => {
      const far = i => Math.abs(Math.log(d.band.x[i] / here));
      const best = d.band.x.reduce((nearest, _, i) => far(i) < far(nearest) ? i : nearest, 0);
      return { d, x: d.band.x[best], mean: d.band.mean[best], spread: d.band.spread[best] };
    }).sort((a, b) => a.mean - b.mean);
    tip.replaceChildren();
    for (const r of rows) {
      const made = tip.appendChild(document.createElement("div"));
      made.append(`${digits(r.mean)} ± ${digits(r.spread)}  ${r.d.label}, at ${short(r.x)}`);
      const mark = document.createElement("span");
      mark.className = "swatch"; mark.style.background = r.d.baseline ? "var(--base)" : r.d.colour;
      mark.style.marginRight = "6px"; made.prepend(mark);
    }
    const rule = { x1: at, x2: at, visibility: "visible" };
    for (const name in rule) state.rule.setAttribute(name, rule[name]);
    tip.style.display = "block";
    const left = event.clientX - frame.left, over = left + tip.offsetWidth + 24 > frame.width;
    tip.style.left = (over ? Math.max(0, left - tip.offsetWidth - 14) : left + 14) + "px"; tip.style.top = "16px";
  };
  const leave = () => { tip.style.display = "none"; if (state) state.rule.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointermove", hover); svg.addEventListener("pointerleave", leave);
  box.addEventListener("change", draw);
  draw();
}
const data = JSON.parse(document.getElementById("curves").textContent);
document.querySelectorAll(".curves").forEach((box, i) => chart(box, data[i]));
"""
