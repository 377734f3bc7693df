// What was planned, why, and what came of it; live, what else would fit in other memory.
panel({
  id: "plan", title: "Plan", has: () => true,
  show(element, runs, page) {
    for (const run of runs) {
      const rows = [...(run.plan?.rows ?? settings(run))], result = run.summary && outcome(run.summary);
      element.append(make("div", { class: "pair" },
        card(make("h2", {}, `${run.name}: plan`), table(rows)),
        make("div", {},
          result && card(make("h2", {}, "result"), table(result)),
          run.plan?.choices?.length && card(make("h2", {}, "choices, and why"), table(run.plan.choices)),
          page.live && fitting(run, page))));
    }
  },
});

const settings = run => Object.entries(run.settings).flatMap(([group, values]) => Object.entries(values).filter(([, value]) => !["none", "", false].includes(value) && !(Array.isArray(value) && !value.length)).map(([name, value]) => [`${group}.${name}`, content(Array.isArray(value) ? value.join(" ") : String(value))]));

const outcome = summary => [["steps", number(summary.steps)], ["loss, first → last", `${number(summary.first_loss)} → ${number(summary.last_loss)}`],
  ["best eval loss", summary.best_eval_loss === null || summary.best_eval_loss === undefined ? "–" : `${number(summary.best_eval_loss)} at step ${number(summary.best_eval_step)}`],
  ["tokens a second", number(summary.tokens_per_second)], ["MFU", summary.mfu === null || summary.mfu === undefined ? "–" : `${(100 * summary.mfu).toFixed(1)}%`],
  ["peak memory", `${number(summary.peak_memory_gb)} GB`], ["time", `${number(summary.seconds)} s`],
  ["start-up", Object.entries(summary.startup_seconds ?? {}).map(([stage, seconds]) => `${stage} ${seconds.toFixed(1)}`).join(", ")]];

function fitting(run, page) {
  const out = make("div", { class: "wide" }), label = make("output"), slider = make("input", { type: "range", min: 4, max: 192, step: 1, value: 24, "aria-label": "GPU memory in GiB" });
  const ask = async () => {
    label.textContent = `${slider.value} GiB`;
    out.replaceChildren(make("p", { class: "note" }, "predicting …"));
    const found = await page.ask("estimate", { run: run.folder, memory: +slider.value });
    out.replaceChildren(found.error ? make("p", { class: "bad" }, found.error) : table(found.plans.map(plan => [plan.policy, `${number(plan.milliseconds)} ms a step`, `${number(plan.gib)} GiB`, plan.fits ? "fits" : "too large"])));
  };
  slider.addEventListener("input", () => { label.textContent = `${slider.value} GiB`; });
  slider.addEventListener("change", ask);
  label.textContent = "move to ask";
  return card(make("h2", {}, "what else would fit"), make("div", { class: "tools" }, make("label", {}, "GPU memory ", slider), label), out);
}
