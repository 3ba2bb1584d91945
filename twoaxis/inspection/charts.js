// Drawings along depth: a quantity of every site from the first to the head's read. Used by page.js.

const FRAME = { height: 190, left: 52, right: 12, top: 8, bottom: 34 };
const LINES = ["first", "second", "third", "fourth"];

function showCharts() {
  const made = [
    chart("Length along depth", "Of the residual way each site reads, and of the increment its sub-layer gives.", [
      ["read", (site) => site.norm], ["increment", (site) => site.increment]]),
    chart("Cosine of read and increment", "Below zero the sub-layer takes something out of what it read.", [
      ["cosine", (site) => site.cosine]], false),
    chart("Effective sources", "exp of the entropy of |weights|: n equal weights count as n, one alone as 1.", [
      ["effective sources", (site) => site.effective]], false),
    ...quantities().map(([name, parts]) => chart(capital(name), "", parts)),
    ...regimeCharts(), ...windowCharts(),
  ];
  at("charts").replaceChildren(...made.filter((card) => card !== null));
  for (const card of at("charts").children) card.draw();
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function named(site, name) {
  return site.probes.find((probe) => probe.name === name) || null;
}

// Scalar probes by quantity: the parts of "quantity, part" share a drawing.
function quantities() {
  const found = new Map();
  for (const site of data.sites) {
    for (const probe of site.probes) {
      if (probe.axes.length) continue;
      const [quantity, part] = probe.name.split(", ", 2);
      if (!found.has(quantity)) found.set(quantity, new Map());
      found.get(quantity).set(part || quantity, (other) => named(other, probe.name));
    }
  }
  return [...found].map(([quantity, parts]) => [quantity, [...parts]]);
}

// Scales and axes.

function ticks(low, high, wanted = 4) {
  const rough = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

function tickText(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(0) : String(Number(value.toPrecision(3)));
}

function scaleOf(numbers, bottom, log) {
  const some = numbers.length ? numbers : [0];
  const low = Math.min(...some), high = Math.max(...some);
  if (log && low > 0 && high / low > 40) {
    const [a, b] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const step = Math.ceil((b - a) / 5), marks = [];
    for (let e = a; e <= b; e += step) marks.push(10 ** e);
    return { log: true, marks, place: (v) => bottom - (Math.log10(v) - a) / (b - a) * (bottom - FRAME.top) };
  }
  const from = Math.min(0, low), to = Math.max(0, high) || (from < 0 ? 0 : 1);
  const marks = ticks(from, to);
  const span = (to - from) * 1.04 || 1;
  return { log: false, marks, place: (v) => bottom - (v - from) / span * (bottom - FRAME.top) };
}

function card(title, about, keys, paint) {
  const made = element("section", { class: "card chart", "data-title": title }, element("h2", {}, title));
  const line = element("p", { class: "hint" }, about);
  if (about) made.append(line);
  if (keys.length > 1) {
    made.append(element("div", { class: "keys" }, ...keys.map(([name, tone, box]) => {
      const mark = element("i", box ? { class: "box" } : {});
      mark.style.background = colour(tone);
      return element("span", {}, mark, name);
    })));
  }
  const stage = element("div");
  made.append(stage);
  made.draw = () => stage.replaceChildren(paint(stage.clientWidth || 420, line));
  return made;
}

function horizontal(made, x, width, bottom) {
  const firsts = data.sites.filter((site, i) => i === 0 || data.sites[i - 1].block !== site.block);
  const end = x(data.sites.length - 1), room = (end - x(0)) / Math.max(1, firsts.length - 1);
  const every = [1, 2, 5, 10, 20, 50, 100].find((n) => n * room >= 22) || 200;
  for (const site of firsts) {
    const place = x(site.index), last = site.kind === "out";
    if (!last && (site.block % every || end - place < 24)) continue;
    made.append(drawn("line", { x1: place, x2: place, y1: bottom, y2: bottom + 4, class: "axis" }));
    made.append(drawn("text", { x: place, y: bottom + 16, "text-anchor": "middle" }, last ? "out" : String(site.block)));
  }
  made.append(drawn("line", { x1: FRAME.left, x2: width - FRAME.right, y1: bottom, y2: bottom, class: "axis" }));
  made.append(drawn("text", { x: (FRAME.left + width - FRAME.right) / 2, y: bottom + 30, "text-anchor": "middle" }, "block"));
}

function along(width) {
  const steps = Math.max(1, data.sites.length - 1);
  return (index) => FRAME.left + 6 + index / steps * (width - FRAME.left - FRAME.right - 12);
}

// A line drawing of one or several series; of a token, with the average behind it.
function chart(title, about, series, log = true) {
  const present = series.filter(([, of]) => data.sites.some((site) => of(site)));
  if (!present.length) return null;
  const keys = present.map(([name], i) => [name, LINES[i % LINES.length]]);
  return card(title, about, keys, (width, line) => {
    const bottom = FRAME.height - FRAME.bottom, x = along(width);
    const points = (of, token) => data.sites.filter((site) => of(site)).map((site) => [site.index, pick(of(site), token)]);
    const tokens = chosen.token === AVERAGE ? [AVERAGE] : [AVERAGE, chosen.token];
    const numbers = present.flatMap(([, of]) => tokens.flatMap((t) => points(of, t).map(([, v]) => v)));
    const scale = scaleOf(numbers.filter((v) => v !== null), bottom, log);
    if (scale.log && about && !line.textContent.endsWith("scale.")) line.textContent = `${about} Logarithmic scale.`;
    const made = drawn("svg", { width, height: FRAME.height });
    for (const mark of scale.marks) {
      const y = scale.place(mark);
      made.append(drawn("line", { x1: FRAME.left, x2: width - FRAME.right, y1: y, y2: y, class: "grid" }));
      made.append(drawn("text", { x: FRAME.left - 6, y: y + 4, "text-anchor": "end" }, tickText(mark)));
    }
    horizontal(made, x, width, bottom);
    const mark = x(chosen.site);
    made.append(drawn("line", { x1: mark, x2: mark, y1: FRAME.top, y2: bottom, class: "marker" }));
    present.forEach(([, of], i) => {
      for (const token of tokens) {
        const faint = token === AVERAGE && tokens.length > 1;
        path(made, points(of, token), x, scale.place, colour(LINES[i % LINES.length]), faint);
      }
    });
    hover(made, x, width, bottom, (site) => present.filter(([, of]) => of(site))
      .map(([name, of]) => `${name} ${format(pick(of(site)))}`));
    return made;
  });
}

function path(made, points, x, y, stroke, faint) {
  let d = "", pen = "M";
  for (const [index, value] of points) {
    if (value === null) pen = "M";
    else {
      d += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
      if (!faint && points.length <= 40) made.append(drawn("circle", { cx: x(index), cy: y(value), r: 2.4, fill: stroke }));
    }
  }
  made.append(drawn("path", { d, class: faint ? "line faint" : "line", stroke }));
}

function hover(made, x, width, bottom, says) {
  const hit = drawn("rect", { x: FRAME.left, y: FRAME.top, width: width - FRAME.left - FRAME.right, height: bottom - FRAME.top, class: "hit" });
  const nearest = (event) => {
    const place = event.clientX - made.getBoundingClientRect().left;
    const steps = Math.max(1, data.sites.length - 1);
    const index = Math.round((place - x(0)) / ((x(steps) - x(0)) / steps));
    return data.sites[Math.min(Math.max(index, 0), data.sites.length - 1)];
  };
  hint(hit, (event) => [siteName(nearest(event)), ...says(nearest(event)), whose()].join("\n"));
  hit.addEventListener("click", (event) => choose({ site: nearest(event).index }));
  made.append(hit);
}

// Which share of the tokens is in which regime of a probe, as stacked columns.
function regimeCharts() {
  const names = new Set(data.sites.flatMap((site) => site.probes.filter((p) => p.regimes).map((p) => p.name)));
  return [...names].map((name) => {
    const regimes = data.sites.map((site) => named(site, name)).find((probe) => probe).regimes;
    const tones = regimes.length === 4 ? ["skip", "under", "match", "over"] : LINES;
    const keys = regimes.map((r, i) => [`${r.name} (${r.range})`, tones[i % tones.length], true]);
    return card(`Regimes of the ${name}`, "Share of the prompt's tokens in each.", keys, (width) => {
      const bottom = FRAME.height - FRAME.bottom, x = along(width), made = drawn("svg", { width, height: FRAME.height });
      const thick = Math.max(2, Math.min(26, (width - FRAME.left - FRAME.right) / data.sites.length - 1.5));
      for (const part of [0, 0.5, 1]) {
        const y = bottom - part * (bottom - FRAME.top);
        made.append(drawn("line", { x1: FRAME.left, x2: width - FRAME.right, y1: y, y2: y, class: "grid" }));
        made.append(drawn("text", { x: FRAME.left - 6, y: y + 4, "text-anchor": "end" }, `${part * 100}%`));
      }
      for (const site of data.sites.filter((s) => named(s, name))) {
        let y = bottom;
        named(site, name).regimes.forEach((regime, i) => {
          const height = regime.share * (bottom - FRAME.top);
          y -= height;
          made.append(drawn("rect", { x: x(site.index) - thick / 2, y, width: thick, height, fill: colour(tones[i % tones.length]) }));
        });
      }
      horizontal(made, x, width, bottom);
      hover(made, x, width, bottom, (site) => (named(site, name) ? named(site, name).regimes : [])
        .map((regime) => `${regime.name} ${(regime.share * 100).toFixed(1)}%`));
      return made;
    });
  });
}

// What mixers see at which distance: one row per site that has one, heads averaged.
function windowCharts() {
  const found = new Map();
  for (const site of data.sites) {
    for (const inner of site.inner) {
      for (const probe of inner.probes) {
        if (probe.axes[probe.axes.length - 1] !== "distance") continue;
        const title = `${inner.name}: ${probe.name} by distance`;
        if (!found.has(title)) found.set(title, []);
        found.get(title).push([site, probe]);
      }
    }
  }
  return [...found].map(([title, rows]) => {
    const heads = rows[0][1].axes.length > 1 ? "Mean over heads. " : "";
    return card(title, `${heads}Distance 0 is the token itself.`, [], (width) => {
      const flat = rows.map(([, probe]) => {
        const value = pick(probe);
        return probe.axes.length === 1 ? value : meanOf(value);
      });
      return distances(rows.map(([site]) => site), flat, width);
    });
  });
}

function distances(sites, values, width) {
  const left = 92, top = 18, count = Math.max(...values.map((v) => v.length)), paint = ramp(largestOf(values.flat()));
  const w = Math.min(40, (width - left - 8) / count), h = Math.min(22, Math.max(11, 300 / sites.length));
  const made = drawn("svg", { width, height: top + h * sites.length + 4 }), every = Math.ceil(22 / w);
  for (let i = 0; i < count; i += every) {
    made.append(drawn("text", { x: left + w * (i + 0.5), y: 12, "text-anchor": "middle" }, String(i)));
  }
  sites.forEach((site, r) => {
    const mark = site.index === chosen.site ? " chosen" : "";
    const name = drawn("text", { x: left - 8, y: top + h * (r + 0.5) + 4, "text-anchor": "end", class: `name${mark}` }, site.label);
    name.addEventListener("click", () => choose({ site: site.index }));
    made.append(name);
    values[r].forEach((value, i) => {
      const cell = drawn("rect", { x: left + w * i, y: top + h * r, width: w, height: h, class: "cell", fill: paint(value) });
      hint(cell, `${siteName(site)}, distance ${i}: ${format(value)}\n${whose()}`);
      cell.addEventListener("click", () => choose({ site: site.index }));
      made.append(cell);
    });
  });
  return made;
}

begin();
