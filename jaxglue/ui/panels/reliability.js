// Held-out decisions: accuracy by confidence beside the line of calibrated ones, and their measures.
panel({
  id: "reliability", title: "Reliability", has: runs => runs.some(run => run.reliability),
  show(element, runs, page) {
    const found = runs.filter(run => run.reliability);
    const series = found.map(run => ({ name: runs.length > 1 ? run.name : "", color: hue(page.index(run)), points: run.reliability.bins.filter(([answers]) => answers).map(([, confidence, accuracy]) => [confidence, accuracy]) }));
    const calibrated = { name: "", color: "#7f7f7f", dash: "2 3", faint: true, points: [[0, 0], [1, 1]] };
    element.append(make("div", { class: "grid" }, chart("accuracy by confidence", [calibrated, ...series])));
    for (const { name, reliability } of found) {
      const { bins, ...measures } = reliability;
      element.append(card(make("h3", {}, name), table(Object.entries(measures).map(([key, value]) => [key, number(value)])),
        make("details", {}, make("summary", {}, "Bins"), table([["confidence", "accuracy", "answers"], ...bins.map(([answers, confidence, accuracy]) => [number(confidence), number(accuracy), number(answers)])]))));
    }
  },
});
