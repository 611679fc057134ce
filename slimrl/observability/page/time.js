// Where the time of steps went, and what a profile recorded.
const timeRun = () => RUNS[Number(byId("time-run").value) || 0];

function markLines(steps, text, tint, height) {
  return {
    shapes: steps.map((step) => ({ type: "line", x0: step - 0.5, x1: step - 0.5, y0: 0, y1: 1, yref: "paper", line: { color: tint, dash: "dash", width: 1.5 } })),
    annotations: steps.map((step) => ({ x: step - 0.5, y: height, yref: "paper", text, showarrow: false, font: { size: 10, color: tint }, xanchor: "left", yanchor: "top" })),
  };
}

function drawTimes() {
  const { step, phases, restarts, replaced } = timeRun().times;
  const share = byId("time-share").checked;
  const totals = step.map((_, place) => Object.values(phases).reduce((sum, values) => sum + values[place], 0) || 1);
  const traces = Object.entries(phases).map(([name, values], order) => ({
    type: "bar", name, x: step, y: share ? values.map((value, place) => value / totals[place]) : values, marker: { color: colour(order) },
    customdata: values, hovertemplate: "step %{x}, " + name + ": %{customdata:.3f} s<extra></extra>",
  }));
  const marks = markLines(restarts, "restart", cssColour("--bad"), 1), engines = markLines(replaced, "engine restarted", cssColour("--warn"), 0.95);
  Plotly.react(byId("time-plot"), traces, figureLayout({
    barmode: "stack", bargap: step.length > 100 ? 0 : 0.15, xaxis: { tickformat: "d", nticks: 20 },
    uirevision: byId("time-run").value, yaxis: { uirevision: byId("time-run").value + share, title: { text: share ? "share" : "s" }, tickformat: share ? ".0%" : "" },
    shapes: [...marks.shapes, ...engines.shapes], annotations: [...marks.annotations, ...engines.annotations],
  }), FIGURE);
  byId("time-note").textContent = step.length ? "An evaluation is no part of its step and stands on top of it. The first step warms up." : "No step has times yet.";
  drawPhases(step, phases);
  drawProfile();
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function drawPhases(step, phases) {
  const kept = step.map((one, place) => place).filter((place) => step[place] > 1);
  const inStep = Object.entries(phases).filter(([name]) => name !== "eval");
  const whole = inStep.reduce((sum, [, values]) => sum + kept.reduce((part, place) => part + values[place], 0), 0);
  byId("phases").replaceChildren(element("thead", {}, element("tr", {}, element("th", {}, "phase"),
    ["seconds, median", "mean", "of the steps"].map((title) => element("th", { class: "number" }, title)))),
  element("tbody", {}, kept.length ? Object.entries(phases).map(([name, values]) => {
    const own = kept.map((place) => values[place]).filter((value) => name !== "eval" || value > 0);
    const sum = own.reduce((a, b) => a + b, 0);
    const cells = own.length ? [median(own).toFixed(3), (sum / own.length).toFixed(3), name === "eval" ? own.length + " of them" : (100 * sum / whole).toFixed(1) + "%"] : ["–", "–", "–"];
    return element("tr", {}, element("td", {}, name === "eval" ? "evaluation" : name), cells.map((cell) => element("td", { class: "number" }, cell)));
  }) : []));
}

function drawProfile() {
  const profiles = timeRun().times.profiles;
  byId("profile-choice").hidden = byId("profile-card").hidden = !profiles.length;
  if (!profiles.length) return;
  const profile = profiles[Number(byId("profile-step").value)] || profiles[0];
  const rows = [{ name: "driver: phases", spans: profile.phases, tracks: 1 }, ...profile.processes];
  const title = (row) => plain(row.name) + (row.tracks > 1 ? ", mean of " + row.tracks + " tracks" : "");
  const spans = [...new Set(rows.flatMap((row) => Object.keys(row.spans)))];
  const traces = spans.map((span, order) => ({
    type: "bar", orientation: "h", name: plain(span), y: rows.map(title), x: rows.map((row) => (row.spans[span] || 0) / row.tracks), marker: { color: colour(order) },
    hovertemplate: "%{y}<br>" + plain(span) + ": %{x:.3f} s<extra></extra>",
  }));
  byId("profile-plot").style.height = 140 + 34 * rows.length + "px";
  Plotly.react(byId("profile-plot"), traces, figureLayout({ barmode: "stack", showlegend: false, uirevision: byId("time-run").value + "/" + profile.step, xaxis: { title: { text: "seconds of its own in step " + profile.step } }, yaxis: { autorange: "reversed" } }), FIGURE);
}

function fillProfiles() {
  fillSelect(byId("profile-step"), timeRun().times.profiles.map((profile, place) => [place, String(profile.step)]));
}

function updateTimes() {
  fillSelect(byId("time-run"), RUNS.map((run, place) => [place, visible(run.name)]));
  byId("time-run").parentElement.hidden = RUNS.length === 1;
  fillProfiles();
  drawTimes();
}

function startTimes() {
  updateTimes();
  byId("time-run").addEventListener("change", () => { fillProfiles(); drawTimes(); });
  repaints.push(drawTimes);
  byId("time-share").addEventListener("change", drawTimes);
  byId("profile-step").addEventListener("change", drawProfile);
}
