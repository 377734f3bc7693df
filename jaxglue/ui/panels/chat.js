// The base and the trained model answer the same message beside each other.
panel({
  id: "chat", title: "Chat", has: (runs, page) => page.live && runs.some(run => run.results.includes("adapter") || run.results.includes("model")),
  show(element, runs, page) {
    for (const run of runs.filter(one => one.results.includes("adapter") || one.results.includes("model"))) {
      const text = make("textarea", { rows: 2, "aria-label": "message", placeholder: "a message to both" }), send = make("button", { type: "submit" }, "ask"), out = make("div");
      const form = make("form", { class: "tools", onsubmit: async event => {
        event.preventDefault();
        const message = text.value.trim();
        if (!message) return;
        const answers = run.results.includes("adapter") ? [["base", false], ["with the adapter", true]] : [["trained", true]];
        const sides = answers.map(([name]) => make("div", {}, make("div", { class: "dim" }, name), make("pre", {}, "…")));
        out.prepend(card(make("div", { class: "dim" }, message), make("div", { class: "pair" }, sides)));
        send.disabled = true;
        for (const [index, [, adapted]] of answers.entries()) {
          const found = await page.ask("answer", { run: run.folder, message, adapted });
          sides[index].lastChild.textContent = found.error ?? found.answer;
        }
        send.disabled = false;
      } }, text, send);
      element.append(card(make("h2", {}, `${run.name}: base and trained`), form), out);
    }
  },
});
