// The start: runs to choose, panels to open, and with a server a look for news every two seconds.
const page = {
  live: !document.getElementById("data"),
  runs: [], shown: new Set(), memory: {}, panel: "", query: "",
  token: new URLSearchParams(location.search).get("token") ?? "",
  index: run => page.runs.indexOf(run),
  async ask(name, body) {
    try {
      const response = await fetch(`/${name}`, { method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${page.token}` }, body: JSON.stringify(body) });
      return response.ok ? await response.json() : { error: await response.text() };
    } catch (error) {
      return { error: `no answer from jaxglue ui: ${error.message}` };
    }
  },
};

/** Reads the address: a panel, and after a slash what its rollouts are searched for. */
function enter() {
  const [panel, ...rest] = location.hash.slice(1).split("/");
  page.panel = panel;
  try { page.query = decodeURIComponent(rest.join("/")); } catch { page.query = ""; }
}

function draw() {
  const chosen = page.runs.filter(run => page.shown.has(run.folder)), main = document.getElementById("main");
  const open = panels.filter(one => one.has(chosen, page)), current = open.find(one => one.id === page.panel) ?? open[0];
  document.getElementById("panels").replaceChildren(...open.map(one => make("a", { href: `#${one.id}`, "aria-current": one === current ? "page" : null }, one.title)));
  document.title = chosen.map(run => run.name).join(", ") || "jaxglue";
  main.replaceChildren();
  if (current) current.show(main, chosen, page);
}

function choose() {
  const boxes = page.runs.map((run, index) => {
    const swatch = make("span", { class: "swatch" }); swatch.style.background = hue(index);
    return make("label", {}, make("input", { type: "checkbox", checked: page.shown.has(run.folder), onchange: event => { page.shown[event.target.checked ? "add" : "delete"](run.folder); draw(); } }), swatch, run.name);
  });
  document.getElementById("runs").replaceChildren(make("legend", {}, "Runs"), ...boxes);
}

function take(runs) {
  const known = new Set(page.runs.map(run => run.folder));
  page.runs = runs;
  for (const run of runs) if (!known.has(run.folder)) page.shown.add(run.folder);
  choose();
  draw();
}

async function look() {
  const found = await page.ask("runs", { versions: Object.fromEntries(page.runs.map(run => [run.folder, run.version])) });
  document.getElementById("state").textContent = found.error ?? "";
  const busy = document.activeElement && document.getElementById("main").contains(document.activeElement) && document.activeElement !== document.getElementById("main");
  // A panel that is being used is not drawn anew under the pointer: news wait until it is left.
  if (!found.error && found.runs && !(busy && page.runs.length)) take(found.runs);
  setTimeout(look, 2000);
}

addEventListener("hashchange", () => { enter(); draw(); document.getElementById("main").focus({ preventScroll: true }); scrollTo(0, 0); });
addEventListener("DOMContentLoaded", () => { enter(); page.live = !document.getElementById("data"); if (page.live) look(); else take(JSON.parse(document.getElementById("data").textContent)); });
