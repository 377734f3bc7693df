// What the loss sees: documents' tokens by their mask, and the documents packed beside each other in a row.
panel({
  id: "rows", title: "Rows", has: (runs, page) => page.live,
  show(element, runs, page) {
    for (const run of runs) {
      const out = make("div", {}, make("p", { class: "note" }, "reading …"));
      element.append(card(make("h2", {}, `${run.name}: rows as the model sees them`), make("p", { class: "note" }, make("span", { class: "token trained" }, "tokens with loss"), " ", make("span", { class: "token plain" }, "context"), "; a bar begins a document."), out));
      page.ask("rows", { run: run.folder }).then(found => out.replaceChildren(...(found.error ? [make("p", { class: "bad" }, found.error)] : found.rows.map(row))));
    }
  },
});

const row = (documents, index) => make("details", { open: index === 0 }, make("summary", {}, `row ${index + 1}: ${documents.length} documents, ${number(documents.reduce((sum, one) => sum + one.tokens, 0))} tokens, ${number(documents.reduce((sum, one) => sum + one.targets, 0))} with loss`),
  make("pre", {}, documents.flatMap(one => one.parts.map(([text, trained], part) => make("span", { class: `token ${trained ? "trained" : "plain"}${part ? "" : " boundary"}` }, text)))));
