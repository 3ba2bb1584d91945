"use strict";
// The page of one inspection. What is drawn is chosen by three things: a token (or the average), a way and a site.
// Text of the prompt is only ever put in with textContent.

const data = JSON.parse(document.getElementById("inspection").textContent);
const AVERAGE = -1;
const ROOT = 0.5; // the map's colours follow a root: a read spread over sixty sources is seen beside one that is not
const chosen = { token: AVERAGE, way: AVERAGE, colours: "all", site: data.sites.findIndex((site) => site.weights) };
if (chosen.site < 0) chosen.site = 0;
const at = (id) => document.getElementById(id);

// Elements.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Numbers.

function format(value) {
  if (value === null || value === undefined) return "not a number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(3);
  return size >= 1000 ? value.toFixed(1) : size >= 100 ? value.toFixed(2) : value.toFixed(4);
}

function pick(series, token = chosen.token) {
  if (!series) return null;
  return token === AVERAGE || series.tokens === null ? series.mean : series.tokens[token];
}

function weightsOf(site, token = chosen.token) {
  const ways = pick(site.weights, token);
  if (!ways) return null;
  if (chosen.way !== AVERAGE) return ways[chosen.way] || null;
  return meanOf(ways);
}

// The mean of rows, column by column; what is no number in one of them is none in the mean.
function meanOf(rows) {
  return rows[0].map((_, i) => {
    return rows.some((row) => row[i] === null) ? null : rows.reduce((sum, row) => sum + row[i], 0) / rows.length;
  });
}

function visible(text) {
  return text.replace(/ /g, "\u00b7").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/\r/g, "\u240d");
}

function tokenName(position) {
  const token = data.tokens[position];
  return token.text === "" ? `[${token.id}]` : visible(token.text);
}

function siteName(site) {
  return site.kind === "out" ? "out, the head's read" : `block ${site.block}, ${site.kind}`;
}

// Colours of numbers: from the card's own tone to a strong one; another hue below zero.

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function blendOf(stops, part) {
  const place = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const [a, b] = [channels(stops[low]), channels(stops[low + 1])];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * (place - low))).join(",")})`;
}

function ramp(largest, power = 1) {
  const plus = ["heat-0", "heat-1", "heat-2"].map(colour);
  const minus = ["heat-0", "minus-1", "minus-2"].map(colour);
  return (value) => {
    if (value === null || value === undefined) return colour("none");
    return blendOf(value < 0 ? minus : plus, (Math.abs(value) / (largest || 1)) ** power);
  };
}

function largestOf(numbers) {
  return numbers.reduce((most, v) => (v === null ? most : Math.max(most, Math.abs(v))), 0);
}

// The tooltip.

function hint(node, text) {
  const show = (event) => {
    const tip = at("tooltip");
    tip.textContent = typeof text === "function" ? text(event) : text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
  };
  node.addEventListener("mousemove", show);
  node.addEventListener("mouseenter", show);
  node.addEventListener("mouseleave", () => { at("tooltip").hidden = true; });
}

// The head of the page and the prompt.

function spelling(name, options) {
  const given = Object.entries(options || {}).map(([key, value]) => `${key}=${value}`);
  return name + (given.length ? `:${given.join(",")}` : "");
}

function showHead() {
  at("title").textContent = data.model || "A two-axis model";
  const parts = [spelling(data.stream, data.stream_options) + (data.blend ? " (blend)" : "")];
  if (data.placement) parts.push(`placed at ${data.placement}`);
  if (data.mixer) parts.push(`mixer ${spelling(data.mixer, data.mixer_options)}`);
  at("stream").textContent = parts.join("  \u2022  ");
  const facts = {
    blocks: data.blocks, width: data.width, parameters: data.parameters, "of the stream": data.stream_parameters,
    sites: data.sites.length, "tokens of the prompt": data.tokens.length,
  };
  for (const [name, value] of Object.entries(facts)) {
    const number = value.toLocaleString("en-US");
    at("facts").append(element("div", {}, element("dt", {}, name), element("dd", {}, number)));
  }
  at("footer").textContent = `Made by twoaxis ${data.twoaxis} with torch ${data.torch}. Tokens: ${data.tokenizer}.`;
}

function showTokens() {
  const some = data.shown.length < data.tokens.length;
  at("prompt-hint").textContent = "Choose a token to see its own numbers in place of the average over all tokens."
    + (some ? ` Of this long prompt ${data.shown.length} evenly spaced tokens have numbers of their own.` : "");
  const all = element("button", { type: "button", class: "token all", "data-token": AVERAGE }, "average");
  all.addEventListener("click", () => choose({ token: AVERAGE }));
  at("tokens").append(all);
  data.tokens.forEach((token, position) => {
    const number = data.shown.indexOf(position);
    const chip = element("button", { type: "button", class: "token", "data-position": position }, tokenName(position));
    if (number < 0) chip.disabled = true;
    else {
      chip.dataset.token = number;
      chip.addEventListener("click", () => choose({ token: number }));
    }
    hint(chip, `token ${position}, number ${token.id} of the vocabulary`);
    at("tokens").append(chip);
  });
}

function markToken() {
  for (const chip of document.querySelectorAll(".token[data-token]")) {
    chip.setAttribute("aria-pressed", String(Number(chip.dataset.token) === chosen.token));
  }
}

function whose() {
  return chosen.token === AVERAGE ? "average over tokens" : `token ${data.shown[chosen.token]}, ${tokenName(data.shown[chosen.token])}`;
}

// The heat map of sites and sources, and smaller ones of any matrix.

function showWays() {
  const most = Math.max(1, ...data.sites.map((site) => (site.weights ? site.weights.mean.length : 1)));
  at("ways-label").hidden = most === 1;
  at("ways").append(element("option", { value: AVERAGE }, "mean of all"));
  for (let way = 0; way < most; way += 1) at("ways").append(element("option", { value: way }, String(way)));
  at("ways").addEventListener("change", (event) => choose({ way: Number(event.target.value) }));
  at("colours").append(element("option", { value: "all" }, "one scale for all"), element("option", { value: "row" }, "each row its own"));
  at("colours").addEventListener("change", (event) => choose({ colours: event.target.value }));
}

function showMap() {
  const rows = data.sites.filter((site) => site.weights);
  at("legend").hidden = at("map").hidden = at("map-tools").hidden = rows.length === 0;
  if (rows.length === 0) {
    at("map-hint").textContent = "This stream has no weights over sources: every site reads the one running state.";
    return;
  }
  at("map-hint").textContent = `Rows are sites, columns are sources, oldest first; ${whose()}. Choose a row for its details.`;
  const values = rows.map((site) => weightsOf(site));
  const largest = largestOf(values.flatMap((v) => v || []));
  const paint = values.map((row) => ramp(chosen.colours === "row" ? largestOf(row || []) : largest, ROOT));
  const longest = Math.max(...data.columns.map((name) => name.length));
  const left = 96, top = Math.min(150, 10 + longest * 6.3);
  const width = Math.min(60, Math.max(7, (at("map").clientWidth - left - 12) / data.columns.length));
  const height = Math.min(24, Math.max(12, 640 / rows.length));
  const made = drawn("svg", { width: left + width * data.columns.length + 12, height: top + height * rows.length + 6 });
  const every = Math.ceil(11 / width);
  data.columns.forEach((name, c) => {
    if (c % every && c !== data.columns.length - 1) return;
    const x = left + width * (c + 0.5) + 4;
    made.append(drawn("text", { x, y: top - 6, transform: `rotate(-90 ${x} ${top - 6})`, class: "column" }, name));
  });
  rows.forEach((site, r) => {
    const y = top + height * r;
    const name = drawn("text", {
      x: left - 8, y: y + height / 2 + 4, "text-anchor": "end", class: `name${site.index === chosen.site ? " chosen" : ""}`,
      "data-site": site.index,
    }, site.label);
    name.addEventListener("click", () => choose({ site: site.index }));
    made.append(name);
    site.sources.forEach((column, s) => {
      const value = values[r] ? values[r][s] : null;
      const cell = drawn("rect", {
        x: left + width * column, y, width, height, class: "cell", fill: paint[r](value), "data-site": site.index,
        "data-column": column,
      });
      const said = values[r] ? `read ${format(value)} of ${data.columns[column]}` : `has no way ${chosen.way}`;
      hint(cell, `${siteName(site)} ${said}\n${whose()}`);
      cell.addEventListener("click", () => choose({ site: site.index }));
      made.append(cell);
    });
    if (site.index === chosen.site) {
      made.append(drawn("rect", { x: left - 1, y, width: width * data.columns.length + 2, height, class: "frame" }));
    }
  });
  at("map").replaceChildren(made);
  showLegend(largest, values.some((v) => v && v.some((w) => w < 0)));
}

function showLegend(largest, signed) {
  const perRow = chosen.colours === "row", paint = ramp(largest, ROOT), end = perRow ? "largest of the row" : format(largest);
  const strip = element("canvas", { width: 180, height: 10 });
  const brush = strip.getContext("2d");
  for (let x = 0; x < 180; x += 1) {
    brush.fillStyle = paint(signed ? (x / 179 * 2 - 1) * largest : x / 179 * largest);
    brush.fillRect(x, 0, 1, 10);
  }
  at("legend").replaceChildren(signed ? `-${end}` : "0", strip, end);
}

function matrix(values, rowNames, columnNames, says) {
  const flat = values.flat(), paint = ramp(largestOf(flat)), columns = columnNames.length;
  const room = 250, width = Math.min(46, Math.max(4, room / columns)), written = width >= 40;
  const height = values.length > 12 ? 12 : 20, left = 58, top = 16;
  const made = drawn("svg", { width: left + width * columns + 8, height: top + height * values.length + 4 });
  const every = Math.ceil(18 / width);
  columnNames.forEach((name, c) => {
    if (c % every === 0) {
      made.append(drawn("text", { x: left + width * (c + 0.5), y: 11, "text-anchor": "middle" }, name));
    }
  });
  values.forEach((row, r) => {
    const y = top + height * r;
    made.append(drawn("text", { x: left - 6, y: y + height / 2 + 4, "text-anchor": "end" }, rowNames[r]));
    row.forEach((value, c) => {
      const cell = drawn("rect", { x: left + width * c, y, width, height, class: "cell", fill: paint(value) });
      hint(cell, `${says(r, c)}: ${format(value)}`);
      made.append(cell);
      if (written) {
        const strong = Math.abs(value || 0) > 0.55 * largestOf(flat);
        const text = drawn("text", {
          x: left + width * (c + 0.5), y: y + height / 2 + 4, "text-anchor": "middle", "pointer-events": "none",
        }, value === null ? "-" : value.toFixed(2));
        text.style.fill = colour(strong ? "card" : "text");
        made.append(text);
      }
    });
  });
  return made;
}

function probeDrawing(probe) {
  const value = pick(probe);
  if (probe.axes.length === 1) {
    const names = value.map((_, i) => String(i));
    return matrix([value], [probe.axes[0]], names, (_, c) => `${probe.axes[0]} ${c}`);
  }
  const [down, across] = probe.axes;
  const rows = value.map((_, i) => `${down} ${i}`), columns = value[0].map((_, i) => String(i));
  return element("div", {}, element("div", { class: "hint" }, `rows ${down}, columns ${across}`),
    matrix(value, rows, columns, (r, c) => `${down} ${r}, ${across} ${c}`));
}

// The details of one site.

function showDetails() {
  const site = data.sites[chosen.site];
  at("site").value = String(chosen.site);
  const rows = element("table");
  const scalars = [["length of the read", site.norm], ["length of the increment", site.increment],
    ["cosine of the two", site.cosine], ["effective sources", site.effective],
    ...site.probes.filter((p) => p.axes.length === 0).map((p) => [p.name, p])];
  for (const [name, series] of scalars) {
    if (!series) continue;
    const number = element("td", { class: "number", "data-name": name }, format(pick(series)));
    rows.append(element("tr", {}, element("td", {}, name), number));
  }
  const parts = [element("p", { class: "hint" }, `${siteName(site)}; ${whose()}`), rows];
  const weights = weightsOf(site);
  if (weights) parts.push(element("h3", {}, "Read from"), bars(site, weights));
  for (const probe of site.probes) {
    if (probe.axes.length === 1 || probe.axes.length === 2) {
      parts.push(element("h3", {}, probe.name), probeDrawing(probe));
    }
  }
  for (const inner of site.inner) {
    for (const probe of inner.probes) {
      if (probe.axes.length === 1 || probe.axes.length === 2) {
        parts.push(element("h3", {}, `${inner.name}: ${probe.name}`), probeDrawing(probe));
      }
    }
  }
  at("details").replaceChildren(...parts);
}

function bars(site, weights) {
  const largest = largestOf(weights) || 1, made = element("div", { class: "bars" });
  site.sources.forEach((column, s) => {
    const fill = element("div", { class: "fill" });
    fill.style.width = `${Math.abs(weights[s] || 0) / largest * 100}%`;
    fill.style.background = colour(weights[s] < 0 ? "second" : "first");
    const name = data.columns[column];
    made.append(element("div", { class: "bar", title: name }, element("span", { class: "label" }, name),
      element("div", { class: "track" }, fill), element("span", { class: "value" }, format(weights[s]))));
  });
  return made;
}

// Choosing.

function choose(change) {
  Object.assign(chosen, change);
  at("tooltip").hidden = true;
  show();
}

function show() {
  markToken();
  showMap();
  showDetails();
  showCharts();
}

function begin() {
  const root = document.documentElement;
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  at("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    show();
  });
  data.sites.forEach((site) => at("site").append(element("option", { value: site.index }, site.label)));
  at("site").addEventListener("change", (event) => choose({ site: Number(event.target.value) }));
  at("previous").addEventListener("click", () => choose({ site: Math.max(0, chosen.site - 1) }));
  at("next").addEventListener("click", () => choose({ site: Math.min(data.sites.length - 1, chosen.site + 1) }));
  showHead();
  showTokens();
  showWays();
  show();
  addEventListener("resize", show);
}
