// What a run left, and the command that makes each other form of it.
panel({
  id: "exports", title: "Exports", has: runs => runs.some(run => run.results.length),
  show(element, runs) {
    for (const run of runs.filter(one => one.results.length)) {
      const adapter = run.results.includes("adapter"), from = adapter ? `--adapter ${quoted(`${run.folder}/adapter`)}` : `--base ${quoted(`${run.folder}/model`)}`;
      const rows = [["talk", `jaxglue chat ${adapter ? from : `--model ${quoted(`${run.folder}/model`)}`}`], ["serve", `jaxglue serve ${adapter ? from : `--model ${quoted(`${run.folder}/model`)}`}`],
        adapter && ["merged model folder", `jaxglue export ${from} --output ${quoted(`${run.name}-merged`)}`], ["llama.cpp, Ollama", `jaxglue export --gguf q4_k_m ${from} --output ${quoted(`${run.name}-gguf`)}`],
        adapter && ["adapter for llama.cpp", `jaxglue export --gguf-lora ${from} --output ${quoted(`${run.name}-gguf-lora`)}`], ["the hub", `jaxglue export ${from} --push OWNER/NAME`]];
      element.append(card(make("h2", {}, run.name), make("p", { class: "note" }, `in ${run.folder}: ${run.results.join(", ")}`), make("div", { class: "wide" }, table(rows.filter(Boolean).map(([name, command]) => [name, make("code", {}, command)])))));
    }
  },
});

const quoted = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
