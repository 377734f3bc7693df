// Every metric of the chosen runs over each other: those that move first, flat ones folded away.
const FIRST = ["reward", "loss", "eval_loss", "learning_rate", "rewards/", "eval_", "grad_norm", "tokens_per_second", "completions/", "kl", "entropy"];
const rank = name => { const found = FIRST.findIndex(first => name === first || (/[/_]$/.test(first) && name.startsWith(first))); return found < 0 ? FIRST.length : found; };

panel({
  id: "curves", title: "Curves", has: runs => runs.some(run => run.metrics.length),
  show(element, runs, page) {
    const smoothing = make("input", { type: "range", min: 0, max: .98, step: .01, value: page.memory.smoothing ?? 0, "aria-label": "smoothing" });
    const log = make("input", { type: "checkbox", checked: page.memory.log }), filter = make("input", { type: "search", placeholder: "metric", "aria-label": "metric", value: page.memory.metric ?? "" });
    const out = make("div");
    const series = runs.map((run, index) => ({ run, index: page.index(run), points: byMetric(run.metrics) }));
    const names = [...new Set(series.flatMap(one => [...one.points.keys()]))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
    const flat = name => series.every(({ points }) => { const ys = (points.get(name) ?? []).map(point => point[1]); return ys.every(y => y === ys[0]); });
    const draw = () => {
      Object.assign(page.memory, { smoothing: +smoothing.value, log: log.checked, metric: filter.value });
      const shown = names.filter(name => name.toLowerCase().includes(filter.value.toLowerCase()));
      const figure = name => chart(name, series.flatMap(({ run, index, points }) => {
        const raw = points.get(name) ?? [], style = { name: runs.length > 1 ? run.name : "", color: hue(index), dash: runs.length > 1 ? dash(index) : "" };
        return +smoothing.value ? [{ ...style, points: raw, faint: true }, { ...style, points: smooth(raw, +smoothing.value) }] : [{ ...style, points: raw }];
      }), { log: log.checked });
      const moving = shown.filter(name => !flat(name)), still = shown.filter(flat);
      out.replaceChildren(make("div", { class: "grid" }, moving.map(figure)));
      if (still.length) out.append(make("details", { class: "card" }, make("summary", {}, `${still.length} that never change`), table(still.map(name => [name, ...series.map(({ points }) => number(points.get(name)?.[0]?.[1]))]))));
      if (runs.some(run => run.sampled.metrics)) out.append(make("p", { class: "note" }, "A long file: evenly spaced lines of it are drawn, and all evaluations."));
    };
    for (const control of [smoothing, log, filter]) control.addEventListener("input", draw);
    element.append(make("div", { class: "tools" }, make("label", {}, "smoothing ", smoothing), make("label", {}, log, "logarithmic"), filter), out);
    draw();
  },
});

function byMetric(lines) {
  const found = new Map();
  for (const line of lines) for (const [name, value] of Object.entries(line)) if (name !== "step" && typeof value === "number") {
    if (!found.has(name)) found.set(name, []);
    found.get(name).push([line.step, value]);
  }
  return found;
}
