// Answers to the sample prompts, before, during and after training, beside each other.
panel({
  id: "samples", title: "Samples", has: runs => runs.some(run => run.samples.length),
  show(element, runs) {
    for (const run of runs.filter(one => one.samples.length)) {
      const byPrompt = Map.groupBy ? Map.groupBy(run.samples, sample => content(sample.prompt)) : run.samples.reduce((map, sample) => map.set(content(sample.prompt), [...(map.get(content(sample.prompt)) ?? []), sample]), new Map());
      element.append(make("h2", {}, run.name));
      for (const [prompt, answers] of byPrompt) element.append(card(make("h3", {}, prompt), String(answers[0].image ?? "").startsWith("data:image/") && make("img", { src: answers[0].image, alt: "the prompt's image" }), make("div", { class: "pair" }, [...new Set([answers[0], answers.at(-1)])].map(sample => make("div", {}, make("div", { class: "dim" }, sample.step ? `after step ${number(sample.step)}` : "before training"), make("pre", {}, sample.answer)))),
        answers.length > 2 && make("details", {}, make("summary", {}, `${answers.length - 2} between`), answers.slice(1, -1).map(sample => make("div", {}, make("div", { class: "dim" }, `step ${number(sample.step)}`), make("pre", {}, sample.answer))))));
    }
  },
});
