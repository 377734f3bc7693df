// Answers written in training, by prompt: how often each answer came, and how the first and last steps differ.
panel({
  id: "rollouts", title: "Rollouts", has: runs => runs.some(run => run.rollouts.length),
  show(element, runs, page) {
    for (const run of runs.filter(one => one.rollouts.length)) show(element, run, page);
  },
});

const total = answer => Object.values(answer.rewards ?? {}).reduce((sum, value) => sum + (value ?? 0), 0);
const mean = values => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

function show(element, run, page) {
  const key = `rollouts ${run.folder}`, chosen = page.memory[key] ??= { query: page.query, step: "", order: "" };
  const groups = new Map();
  for (const answer of run.rollouts) {
    const name = `${answer.step} ${answer.origin} ${content(answer.prompt)}`;
    if (!groups.has(name)) groups.set(name, { step: answer.step, origin: answer.origin, prompt: answer.prompt, answers: [] });
    groups.get(name).answers.push(answer);
  }
  const all = [...groups.values()], steps = [...new Set(all.map(group => group.step))];
  const query = make("input", { type: "search", placeholder: "search prompts and answers", "aria-label": "search", value: chosen.query });
  const step = make("select", { "aria-label": "step" }, make("option", { value: "" }, "every step"), steps.map(value => make("option", { value, selected: String(value) === chosen.step }, `step ${value}`)));
  const order = make("select", { "aria-label": "order" }, [["", "as sampled"], ["-", "best first"], ["+", "worst first"]].map(([value, text]) => make("option", { value, selected: value === chosen.order }, text)));
  const count = make("span", { class: "note" }), out = make("div");
  const draw = () => {
    Object.assign(chosen, { query: query.value, step: step.value, order: order.value });
    const wanted = query.value.toLowerCase();
    let found = all.filter(group => (!step.value || String(group.step) === step.value) && (!wanted || content(group.prompt).toLowerCase().includes(wanted) || group.answers.some(answer => answer.answer.toLowerCase().includes(wanted))));
    if (order.value) found = [...found].sort((a, b) => (order.value === "+" ? 1 : -1) * (mean(a.answers.map(total)) - mean(b.answers.map(total))));
    count.textContent = `${number(found.length)} prompts${found.length > 40 ? ", the first 40 shown" : ""}${run.sampled.rollouts ? "; a long file: whole steps, evenly spaced" : ""}`;
    out.replaceChildren(...found.slice(0, 40).map((one, index) => group(one, index < 3)));
  };
  for (const control of [query, step, order]) control.addEventListener("input", draw);
  const first = steps[0], last = steps.at(-1), of = value => all.filter(group => group.step === value).flatMap(group => group.answers);
  element.append(card(make("h2", {}, `${run.name}: first and last step`), make("div", { class: "pair" }, [first, last].map(value => side(value, of(value))))),
    make("h3", {}, "By prompt"), make("div", { class: "tools" }, query, step, order, count), out);
  draw();
}

function side(step, answers) {
  const counts = new Map();
  for (const { answer } of answers) counts.set(answer.slice(0, 60) || "(empty)", (counts.get(answer.slice(0, 60) || "(empty)") ?? 0) + 1);
  const rewards = answers.map(total), ended = answers.filter(answer => answer.ended).length;
  return make("div", {}, make("h3", {}, `step ${step}: mean reward ${number(mean(rewards))}, ${number(mean(answers.map(answer => answer.tokens)))} tokens, ${answers.length - ended} of ${answers.length} cut off`), bars(counts, 6));
}

function group(one, open) {
  const equal = new Map();
  for (const answer of one.answers) {
    if (!equal.has(answer.answer)) equal.set(answer.answer, []);
    equal.get(answer.answer).push(answer);
  }
  const rows = [...equal.entries()].sort((a, b) => b[1].length - a[1].length).map(([text, same]) => {
    const { rewards, advantage, tokens, ended, died } = same[0];
    const facts = [`${same.length} ×`, ...Object.entries(rewards ?? {}).map(([name, value]) => `${name} ${number(value)}`), `${tokens} tokens${died ? `, its environment ${died}` : ended ? "" : ", cut off"}`];
    return make("div", { class: "turn assistant" }, make("div", { class: "dim" }, facts.join(" · "), " · ", make("span", { class: advantage > 0 ? "good" : advantage < 0 ? "bad" : "" }, `advantage ${advantage > 0 ? "+" : ""}${number(advantage)}`)),
      same[0].turns ? thread(same[0].turns) : make("pre", {}, text || "(empty)"));
  });
  const rewards = one.answers.map(total);
  return make("details", { class: "card", open }, make("summary", {}, `step ${one.step} · ${one.origin ?? ""} · ${one.answers.length} answers, ${equal.size} different, reward ${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}`), thread(one.prompt), rows.slice(0, 8), rows.length > 8 && make("p", { class: "note" }, `and ${rows.length - 8} others`));
}
