// Parts of the page as addresses (#curves, #trajectories/17), keys, and light or dark.
const PARTS = ["overview", "curves", "time", "trajectories", "experts"];
const drawn = new Set(), old = new Set(); // parts that are drawn, and those among them that show old data
const DRAW = { overview: drawOverview, curves: startCurves, time: startTimes, trajectories: () => { startTable(); arrange(); }, experts: startExperts };
const UPDATE = { overview: drawOverview, curves: layPanels, time: updateTimes, trajectories: updateTable, experts: updateExperts };

function route() {
  const [asked, row] = location.hash.slice(1).split("/");
  const part = PARTS.includes(asked) ? asked : "overview";
  for (const name of PARTS) byId("part-" + name).hidden = name !== part;
  document.querySelectorAll("#tabs a").forEach((tab) => tab.setAttribute("aria-selected", String(tab.hash === "#" + part)));
  if (!drawn.has(part)) { drawn.add(part); DRAW[part](); }
  else if (old.delete(part)) UPDATE[part]();
  if (part === "trajectories" && row !== undefined && Number(row) < NUM_ROWS && Number(row) !== table.chosen) choose(Number(row), true);
  if (part !== "overview") byId("part-" + part).querySelectorAll(".js-plotly-plot").forEach((plot) => Plotly.Plots.resize(plot));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const place = ["1", "2", "3", "4", "5"].indexOf(event.key);
  if (place >= 0 && !document.querySelector('#tabs a[href="#' + PARTS[place] + '"]').hidden) location.hash = "#" + PARTS[place];
  if (byId("part-trajectories").hidden) return;
  if (event.key === "/") byId("search").focus();
  else if (["j", "ArrowDown", "ArrowRight"].includes(event.key)) chooseNext(1);
  else if (["k", "ArrowUp", "ArrowLeft"].includes(event.key)) chooseNext(-1);
  else return;
  event.preventDefault();
});

function showTabs() {
  const tab = (name) => document.querySelector('#tabs a[href="#' + name + '"]');
  tab("trajectories").hidden = !NUM_ROWS;
  tab("experts").hidden = !DATA.expert_runs.length;
}

// Draw newer data in place of older: the part that is open now, the others when they are opened.
function update(data) {
  const first = firstInView();
  readData(data);
  showTabs();
  drawn.forEach((part) => {
    if (byId("part-" + part).hidden) old.add(part);
    else UPDATE[part](first);
  });
}

readData(JSON.parse(byId("data").textContent));
byId("title").textContent = visible(DATA.title);
byId("theme").addEventListener("click", () => setTheme(!isDark()));
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
showTabs();
addEventListener("hashchange", route);
route();
