// Elements, numbers and charts. Texts of models and data become text nodes here, never markup.
"use strict";

const panels = [];
/** Registers a panel: id, title, has(runs) → whether it has something to show, show(element, runs, page). */
const panel = definition => panels.push(definition);

function make(name, attributes = {}, ...children) {
  const svg = make.svg.has(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== undefined && value !== null) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false).map(child => child instanceof Node ? child : visible(String(child))));
  return element;
}
make.svg = new Set(["svg", "path", "line", "text", "g", "rect", "circle"]);

/** Control characters as their pictures, and halves of characters as the sign for none. */
const visible = text => text.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, sign => String.fromCharCode(sign === "\x7f" ? 0x2421 : 0x2400 + sign.charCodeAt(0))).replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");

// Eight hues of Okabe and Ito that color-blind people tell apart; dashes tell them apart once more.
const HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#7f7f7f"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const hue = index => HUES[index % HUES.length];
const dash = index => DASHES[index % DASHES.length];

const number = value => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en-US");
  return Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
};

/** Round steps between lo and hi for an axis: 1, 2 or 5 times a power of ten. */
function ticks(lo, hi, count) {
  const raw = (hi - lo) / count || 1, power = 10 ** Math.floor(Math.log10(raw)), unit = [1, 2, 5, 10].find(step => step * power >= raw) * power;
  const found = [];
  for (let value = Math.ceil(lo / unit) * unit; value <= hi + unit * 1e-9; value += unit) found.push(Math.abs(value) < unit * 1e-9 ? 0 : value);
  return found;
}

/** Exponential moving average of points [x, y], corrected for its beginning. */
function smooth(points, share) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => { sum = share * sum + (1 - share) * y; weight = share * weight + (1 - share); return [x, sum / weight]; });
}

/** A line chart with axes; series are {name, color, dash, points, faint}. */
function chart(title, series, { log = false } = {}) {
  const W = 480, H = 210, L = 56, B = 26, T = 8, R = 10;
  const drawn = series.map(one => ({ ...one, points: one.points.filter(([, y]) => Number.isFinite(y) && (!log || y > 0)) })).filter(one => one.points.length);
  const figure = make("figure", { class: "card" });
  const last = drawn.filter(one => !one.faint).map(one => `${one.name ? one.name + " " : ""}${number(one.points.at(-1)[1])}`).join(", ");
  figure.append(make("figcaption", {}, make("b", {}, title), " ", last));
  if (!drawn.length) return figure;
  const map = log ? Math.log10 : value => value;
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const { points } of drawn) for (const [x, y] of points) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, map(y)); y1 = Math.max(y1, map(y)); }
  if (y1 - y0 < 1e-12) { y0 -= Math.abs(y0) * .05 || .5; y1 += Math.abs(y1) * .05 || .5; }
  const px = x => L + (x1 > x0 ? (x - x0) / (x1 - x0) : .5) * (W - L - R), py = y => H - B - (map(y) - y0) / (y1 - y0) * (H - B - T);
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}: ${last}` });
  for (const y of ticks(y0, y1, 4)) {
    const value = log ? 10 ** y : y, at = py(value);
    svg.append(make("line", { x1: L, x2: W - R, y1: at, y2: at, stroke: "var(--line)" }), make("text", { x: L - 6, y: at + 4, "text-anchor": "end" }, number(+value.toPrecision(6))));
  }
  for (const x of ticks(x0, x1, 5)) svg.append(make("text", { x: px(x), y: H - 8, "text-anchor": "middle" }, number(x)));
  for (const { points, color, dash, faint } of drawn) {
    const path = points.map(([x, y], index) => `${index ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    svg.append(make("path", { d: path, fill: "none", stroke: color, "stroke-width": faint ? 1 : 1.8, opacity: faint ? .28 : 1, "stroke-dasharray": dash || null }));
    if (points.length === 1) svg.append(make("circle", { cx: px(points[0][0]), cy: py(points[0][1]), r: 3, fill: color }));
  }
  const mark = make("line", { y1: T, y2: H - B, stroke: "var(--dim)", visibility: "hidden" }), caption = figure.firstChild, shown = [...caption.childNodes].at(-1);
  svg.append(mark);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = x0 + ((event.clientX - box.left) / box.width * W - L) / (W - L - R) * (x1 - x0);
    const near = drawn.filter(one => !one.faint).map(one => [one.name, one.points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)]);
    shown.textContent = `step ${number(near[0][1][0])}: ${near.map(([name, point]) => `${name ? name + " " : ""}${number(point[1])}`).join(", ")}`;
    mark.setAttribute("x1", px(near[0][1][0])); mark.setAttribute("x2", px(near[0][1][0])); mark.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => { shown.textContent = last; mark.setAttribute("visibility", "hidden"); });
  figure.append(svg);
  return figure;
}

/** Bars for [name, count] pairs, the longest first. */
function bars(pairs, most = 12) {
  const sorted = [...pairs].sort((a, b) => b[1] - a[1]), top = sorted[0]?.[1] || 1;
  const rows = sorted.slice(0, most).map(([name, count]) => {
    const bar = make("i"); bar.style.width = `${Math.max(2, 100 * count / top)}%`;
    return make("div", { class: "bar" }, make("code", {}, name), make("div", {}, bar), make("span", { class: "dim" }, number(count)));
  });
  if (sorted.length > most) rows.push(make("p", { class: "note" }, `and ${sorted.length - most} others`));
  return make("div", {}, rows);
}

const table = rows => make("table", {}, make("tbody", {}, rows.map(([name, ...cells]) => make("tr", {}, make("th", { scope: "row" }, name), cells.map(cell => make("td", {}, cell))))));
const card = (...children) => make("section", { class: "card" }, children);
/** The text of a message's content; images of its parts are named. */
const said = value => typeof value === "string" ? value : Array.isArray(value) ? value.map(part => typeof part?.text === "string" ? part.text : `[${part?.type}]`).join("\n") : JSON.stringify(value);
const content = prompt => typeof prompt === "string" ? prompt : Array.isArray(prompt) ? prompt.map(turn => `${turn.role}: ${said(turn.content)}`).join("\n") : JSON.stringify(prompt);

/** A conversation as a thread, of messages or of one text. */
function thread(prompt, answer) {
  const turns = Array.isArray(prompt) ? prompt : [{ role: "prompt", content: content(prompt) }];
  const rows = answer === undefined ? turns : [...turns, { role: "assistant", content: answer }];
  return make("div", {}, rows.map(turn => make("div", { class: `turn ${turn.role === "assistant" ? "assistant" : ""}` }, make("div", { class: "dim" }, turn.role), make("pre", {}, said(turn.content)))));
}
